"""What every tokenizer can do, and what they share.

Problems are data: no text of theirs becomes a control token, even if it spells
one. Control tokens come only from a chat template and from `stop_ids`.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
  """What every tokenizer here can do.

  Attributes:
    vocab_size: one more than the largest id.
    pad_id: of the padding; may be a stop id.
    stop_ids: what ends an answer; the first ends demonstrations.
    fingerprint: a hash of what decides the ids.
  """

  vocab_size: int
  pad_id: int
  stop_ids: tuple[int, ...]
  fingerprint: str

  def encode(self, text: str) -> list[int]:
    """The ids of plain text, none of them a control token."""

  def decode(self, ids: Iterable[int]) -> str:
    """The text of any ids; control tokens show, "1<pad>2" is not "12"."""

  def prompt(self, question: str, system: str = "") -> list[int]:
    """The ids after which the answer begins: the chat template's, if any."""

  def save(self, folder: str | Path) -> None:
    """Writes files that transformers' AutoTokenizer loads."""


def decode_runs(
  ids: Iterable[int],
  decode: Callable[[list[int]], str],
  shown: Callable[[int], str | None],
  size: int,
) -> str:
  """The text of ids, some of which are no text.

  Args:
    ids: any; one outside 0..size-1 shows as U+FFFD.
    decode: of a run of ids that are text.
    shown: what stands for an id; None if it is text.
    size: of the vocabulary.
  """
  known = lambda i: shown(i) if 0 <= i < size else _UNKNOWN
  runs = itertools.groupby(map(int, ids), key=known)
  return "".join(
    decode(list(run)) if text is None else text * len(list(run))
    for text, run in runs
  )


def digest(parts: Iterable[bytes]) -> str:
  """A short hash of several byte strings, each told from the next."""
  sizes = ((len(part).to_bytes(8), part) for part in parts)
  whole = b"".join(itertools.chain.from_iterable(sizes))
  return hashlib.sha256(whole).hexdigest()[:16]


def import_transformers():
  """The library; here, and not above, for it takes more than a second."""
  # Else it says that it misses PyTorch.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers

  return transformers
