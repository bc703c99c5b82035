"""Text to token ids and back: bytes, SentencePiece, or transformers."""

from etils import epath

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.data.tokenizers.plain import Bytes, SentencePiece
from gspo_jax.runtime.errors import (
  UserError,
  how_to_download,
  needs_extra,
  with_reason,
)

__all__ = ("Tokenizer", "load", "train")


def load(spec: str, template_args: str = "") -> Tokenizer:
  """The tokenizer that a config names.

  `spec` is "bytes", a SentencePiece file that ends in ".model", or a folder
  with a fast tokenizer of transformers, on this machine or in a bucket. For
  `template_args` see `hf.HFTokenizer`.
  """
  path = epath.Path(spec).expanduser()
  if spec == "bytes" or path.suffix == ".model":
    if template_args:
      raise UserError(
        f"data.template_args={template_args!r}: expected '', since tokenizer "
        f"{spec!r} has no chat template"
      )
    return Bytes() if spec == "bytes" else SentencePiece(path)
  with with_reason(f"tokenizer {spec!r}"):
    exists = path.is_dir()
  if not exists:
    raise UserError(
      f"tokenizer {spec!r}: no such folder; expected 'bytes', a .model file "
      f"of SentencePiece, or a folder{how_to_download(spec)}"
    )
  with needs_extra("hf", f"tokenizer {spec!r}"):
    from gspo_jax.data.tokenizers.hf import HFTokenizer
  return HFTokenizer(path, template_args)
