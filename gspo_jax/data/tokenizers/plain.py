"""Tokenizers without a chat template: bytes, and SentencePiece models."""

import itertools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
from etils import epath

from gspo_jax.data.tokenizers.base import (
  UNKNOWN,
  Tokenizer,
  decode_runs,
  digest,
  import_transformers,
)
from gspo_jax.runtime.errors import UserError, with_reason

SPACE = "\u2581"  # of SentencePiece's pieces


class Bytes(Tokenizer):
  """UTF-8 bytes; the ids of padding and stop are no bytes."""

  vocab_size, pad_id, stop_ids = 258, 256, (257,)
  fingerprint = "bytes"

  def encode(self, text: str) -> list[int]:
    return list(text.encode())

  def decode(self, ids: Iterable[int]) -> str:
    # 0xFF is never valid UTF-8: it becomes U+FFFD.
    values = [i if 0 <= i < 256 else 0xFF for i in ids]
    return bytes(values).decode(errors="replace")

  def token_bytes(self) -> list[bytes]:
    return [bytes([i]) for i in range(256)] + [UNKNOWN.encode()] * 2

  def save(self, folder: str | Path) -> None:
    transformers = import_transformers()
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate(byte_letters())}
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


def byte_letters() -> list[str]:
  """The letter of each byte in byte-level vocabularies, as in GPT-2."""
  visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
  rest = itertools.count(256)
  return [chr(i if i in visible else next(rest)) for i in range(256)]


class SentencePiece(Tokenizer):
  """A SentencePiece model; it has no chat template."""

  def __init__(self, path: epath.Path):
    with with_reason(f"tokenizer {str(path)!r}"):
      self._proto = path.read_bytes()
    try:
      self._model = sentencepiece.SentencePieceProcessor(
        model_proto=self._proto
      )
    except RuntimeError as error:
      raise UserError(
        f"tokenizer {str(path)!r}: no SentencePiece model"
      ) from error
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

  def token_bytes(self) -> list[bytes]:
    return [self._bytes_of(i) for i in range(self.vocab_size)]

  def _bytes_of(self, i: int) -> bytes:
    model, piece = self._model, self._model.id_to_piece(i)
    if model.is_byte(i):
      return bytes([int(piece[1:-1], 16)])  # <0x0A>
    if model.is_unknown(i):
      return model.decode([i]).encode()
    return piece.replace(SPACE, " ").encode()

  def save(self, folder: str | Path) -> None:
    """As `Tokenizer.save`; UserError if transformers gives other ids."""
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
