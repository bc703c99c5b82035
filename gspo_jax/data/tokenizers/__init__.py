"""Text to token ids and back: bytes, SentencePiece, or a transformers folder.

Other modules take `load` and the protocol `Tokenizer` from here. `train` is a
command.
"""

from pathlib import Path

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.data.tokenizers.plain import Bytes, SentencePiece
from gspo_jax.runtime.errors import UserError, how_to_download, missing_package

__all__ = ("Tokenizer", "load", "train")


def load(spec: str) -> Tokenizer:
  """The tokenizer that a config names.

  Args:
    spec: "bytes", a SentencePiece file that ends in ".model", or a folder with
      a fast tokenizer of transformers.

  Raises:
    UserError: there is no such tokenizer, or it cannot be used.
  """
  if spec == "bytes":
    return Bytes()
  path = Path(spec).expanduser()
  if path.suffix == ".model":
    return SentencePiece(path)
  if not path.is_dir():
    raise UserError(
      f"tokenizer {spec!r}: no such folder; expected 'bytes', a .model file "
      f"of SentencePiece, or a folder{how_to_download(spec)}"
    )
  try:
    from gspo_jax.data.tokenizers.hf import HFTokenizer
  except ImportError as error:
    raise missing_package(error, "hf", f"tokenizer {spec!r}") from error
  return HFTokenizer(path)
