"""A problem, the type that all of `data` is about."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class Problem(NamedTuple):
  text: str  # before the instruction and the chat template
  reference: str  # the target, with which the reward compares the response
  demonstration: str  # a response to imitate in the cold start; "" for none
  columns: Mapping[str, Any] = {}  # the record's other columns, as JSON
  # The messages before `text`, each as `Tokenizer.chat` takes it or as (role,
  # content); the first one may have the role "system".
  history: tuple[Mapping[str, Any] | tuple[str, ...], ...] = ()
  # Messages (role, content) of the demonstration after its first response; the
  # last one is of the assistant.
  turns: tuple[tuple[str, str], ...] = ()


def held_out(text: str) -> bool:
  """Whether a problem is for evaluation only: one in eight, by its hash."""
  return hashlib.sha256(text.encode()).digest()[0] < 32
