"""A problem, the type that all of `data` is about."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class Problem(NamedTuple):
  """One problem of any source.

  Attributes:
    text: the problem, before the instruction and the chat template.
    reference: the target, with which the reward compares the response.
    demonstration: a worked response to imitate in the cold start; "" for none.
    columns: the other columns of the record, for rewards: names with values
      that JSON has.
    history: the messages before `text`, which is the last one of the user: each
      (role, content), the first one perhaps of the role "system".
    turns: the demonstration behind its first response: each (role, content),
      the last one of the role "assistant".
  """

  text: str
  reference: str
  demonstration: str
  columns: Mapping[str, Any] = {}
  history: tuple[tuple[str, str], ...] = ()
  turns: tuple[tuple[str, str], ...] = ()


def held_out(text: str) -> bool:
  """Whether a problem is for evaluation only: one in eight, by its hash."""
  return hashlib.sha256(text.encode()).digest()[0] < 32
