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
  tokenizer: Tokenizer
  if spec == "bytes":
    tokenizer = Bytes()
  elif path.suffix == ".model":
    tokenizer = SentencePiece(path)
  else:
    with with_reason(f"tokenizer {spec!r}"):
      exists = path.is_dir()
    if not exists:
      raise UserError(
        f"tokenizer {spec!r}: no such folder; expected 'bytes', a .model file "
        f"of SentencePiece, or a folder{how_to_download(spec)}"
      )
    with needs_extra("hf", f"tokenizer {spec!r}"):
      from gspo_jax.data.tokenizers.hf import HFTokenizer
    tokenizer = HFTokenizer(path, template_args)
  if template_args and not tokenizer.chat_template:
    raise UserError(
      f"data.template_args={template_args!r}: expected '', since tokenizer "
      f"{spec!r} has no chat template"
    )
  return tokenizer
