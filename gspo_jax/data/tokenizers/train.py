"""Trains a SentencePiece tokenizer on the text of JSON lines or a data set.

  python -m gspo_jax.data.tokenizers.train --input=train.jsonl \\
    --vocab_size=2048 --fields=question,answer --output=runs/tokenizer.model

An input may also be a source such as parquet:train.parquet or hf:NAME.

The tokenizer is a byte-pair encoding without normalisation and prefix space:
decoding restores every text, except U+2581, SentencePiece's sign for a space.
Each digit is a token; a newline and rare characters are bytes. The same text
gives the same file. If `--output` does not end in .model, it becomes a folder
for AutoTokenizer of transformers.

Exit codes: 0 done; 2 a mistake of the user, in one line.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece
from absl import flags

from gspo_jax.data import readers, tokenizers
from gspo_jax.runtime import command
from gspo_jax.runtime.errors import UserError, with_reason

_INPUT = flags.DEFINE_list(
  "input", [], "Files of JSON lines, or parquet:FILE and so on."
)
_FIELDS = flags.DEFINE_list(
  "fields", ["question", "answer"], "Fields of a line, each with text."
)
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 2048, "Pieces, 260 or more.")
_OUTPUT = flags.DEFINE_string("output", None, "A .model file, or a folder.")

# Padding, stop, unknown, and the bytes.
_SMALLEST = 3 + 256 + 1
_MAX_LINE = 1 << 20  # bytes; SentencePiece ignores longer lines


def main() -> None:
  command.run(
    _main,
    required=(_INPUT, _FIELDS, _OUTPUT),
    start="--input=train.jsonl --output=tokenizer.model",
  )


def _main() -> None:
  proto = train(read_texts(_INPUT.value, _FIELDS.value), _VOCAB_SIZE.value)
  write(proto, Path(_OUTPUT.value))
  print(f"{_OUTPUT.value}: {_VOCAB_SIZE.value} pieces")


def read_texts(files: Sequence[str], fields: Sequence[str]) -> Iterator[str]:
  for file in files:
    for place, record in readers.lines(file):
      for field in fields:
        value = readers.value(record, field, place)
        if not isinstance(value, str):
          raise UserError(f"{place}: {field!r} is not text")
        yield value


def train(source: Iterator[str], vocab_size: int) -> bytes:
  """A SentencePiece model, serialized; each line of a text is a sentence.

  The `vocab_size` ids are padding 0, stop 1, unknown 2, 256 bytes, pieces.
  """
  if vocab_size < _SMALLEST:
    raise UserError(f"{vocab_size=}: expected at least {_SMALLEST}")
  lines = (line for text in source for line in text.split("\n") if line)
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=lines,
      model_writer=model,
      model_type="bpe",
      vocab_size=vocab_size,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      byte_fallback=True,
      split_digits=True,
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      max_sentence_length=_MAX_LINE,
      num_threads=1,
      minloglevel=2,
    )
  except RuntimeError as error:
    raise UserError(
      f"--vocab_size={vocab_size} does not suit this text: "
      f"{str(error).rsplit('] ', 1)[-1] or 'there is none'}"
    ) from error
  return model.getvalue()


def write(proto: bytes, out: Path) -> None:
  """Writes a model as a file, or as a folder for transformers."""
  with with_reason(f"--output={out}"):
    if out.suffix == ".model":
      out.parent.mkdir(parents=True, exist_ok=True)
      out.write_bytes(proto)
      return
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.model").write_bytes(proto)
    tokenizers.load(str(out / "tokenizer.model")).save(out)


if __name__ == "__main__":
  main()
