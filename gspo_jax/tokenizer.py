"""Text to token ids and back: bytes, a transformers folder, SentencePiece.

Questions are data. No text of theirs becomes a control token, though it spell
one; those come from a chat template and from `stop_ids` alone.
"""

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import sentencepiece

from gspo_jax.runtime.errors import UserError

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


def load(spec: str) -> Tokenizer:
  """The tokenizer that a config names.

  Args:
    spec: "bytes", a SentencePiece file that ends in ".model", or a folder with
      a fast tokenizer of transformers.

  Raises:
    UserError: there is none, or none that can be used.
  """
  if spec == "bytes":
    return Bytes()
  path = Path(spec).expanduser()
  if path.suffix == ".model":
    return SentencePiece(path)
  from gspo_jax.tokenizer_folder import Folder

  if not path.is_dir():
    raise UserError(
      f"tokenizer {spec!r}: no such folder; expected 'bytes', a .model file "
      "of SentencePiece, or a folder (nothing is downloaded)"
    )
  return Folder(path)


class Bytes:
  """UTF-8 bytes; padding and stop lie outside what text can hold."""

  vocab_size, pad_id, stop_ids = 258, 256, (257,)
  fingerprint = "bytes"

  def encode(self, text: str) -> list[int]:
    return list(text.encode())

  def decode(self, ids: Iterable[int]) -> str:
    # No byte of UTF-8 is 0xFF: it shows as U+FFFD.
    known = [i if 0 <= i < 256 else 0xFF for i in ids]
    return bytes(known).decode(errors="replace")

  def prompt(self, question: str, system: str = "") -> list[int]:
    return self.encode(system + question)

  def save(self, folder: str | Path) -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    transformers = import_transformers()
    vocab = {letter: i for i, letter in enumerate(_byte_letters())}
    fast = Fast(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(
      add_prefix_space=False, use_regex=False
    )
    fast.add_special_tokens(["<pad>", "</s>"])  # 256 and 257
    fast.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
      tokenizer_object=fast,
      pad_token="<pad>",
      eos_token="</s>",
      split_special_tokens=True,
    ).save_pretrained(folder)


def _byte_letters() -> list[str]:
  """The letter that stands for each byte in byte-level vocabularies.

  Visible Latin-1 characters stand for themselves, the others for those from
  U+0100 on: the table of GPT-2's tokenizer.
  """
  visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
  rest = itertools.count(256)
  return [chr(i if i in visible else next(rest)) for i in range(256)]


class SentencePiece:
  """A SentencePiece model; it has no chat template."""

  def __init__(self, path: Path):
    try:
      self._proto = path.read_bytes()
      self._model = sentencepiece.SentencePieceProcessor(
        model_proto=self._proto
      )
    except (OSError, RuntimeError) as error:
      reason = getattr(error, "strerror", None) or "no SentencePiece model"
      raise UserError(f"tokenizer {str(path)!r}: {reason}") from error
    stop, pad = self._model.eos_id(), self._model.pad_id()
    if stop < 0:
      raise UserError(f"tokenizer {str(path)!r}: it has no end-of-text piece")
    self.vocab_size = self._model.get_piece_size()
    self.stop_ids = (stop,)
    self.pad_id = pad if pad >= 0 else stop
    self.fingerprint = digest([self._proto])

  def encode(self, text: str) -> list[int]:
    return self._model.encode(text)

  def decode(self, ids: Iterable[int]) -> str:
    model = self._model
    control = lambda i: model.id_to_piece(i) if model.is_control(i) else None
    return decode_runs(ids, model.decode, control, self.vocab_size)

  def prompt(self, question: str, system: str = "") -> list[int]:
    return self.encode(system + question)

  def save(self, folder: str | Path) -> None:
    """As in `Tokenizer`; UserError where transformers gives other ids."""
    transformers = import_transformers()
    piece = self._model.id_to_piece
    with tempfile.TemporaryDirectory() as scratch:
      (Path(scratch) / "tokenizer.model").write_bytes(self._proto)
      config = {
        "eos_token": piece(self.stop_ids[0]),
        "pad_token": piece(self.pad_id),
        "split_special_tokens": True,
      }
      (Path(scratch) / "tokenizer_config.json").write_text(json.dumps(config))
      fast = transformers.AutoTokenizer.from_pretrained(scratch)
    probe = " Two  spaces,\n\n3.14\tand <é中🙂>"
    if fast.encode(probe, add_special_tokens=False) != self.encode(probe):
      raise UserError(
        "transformers gives other ids than this SentencePiece model, as it "
        "does for those that normalise text or put a space before it: it "
        "cannot be written as a folder"
      )
    fast.save_pretrained(folder)


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
