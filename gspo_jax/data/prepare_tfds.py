"""Writes a TFDS set from local JSON lines, with no network and no TensorFlow.

  python -m gspo_jax.data.prepare_tfds --name=gsm8k --train=train.jsonl \\
    --test=test.jsonl --data_dir=runs/tfds

`tfds:gsm8k` with `data.tfds_dir=runs/tfds`, or `tfds.data_source("gsm8k",
data_dir=...)` in any program, then reads it. gsm8k gets the features that TFDS
gives it; a set of any other name has the fields of its first line: text stays
text, and everything else is written as JSON.

Exit codes: 0 done; 2 a mistake of the caller's, in one line.
"""

import itertools
import json
import sys
from pathlib import Path

from absl import app, flags

from gspo_jax.data import readers
from gspo_jax.runtime.errors import UserError

_NAME = flags.DEFINE_string("name", None, "Of the set: gsm8k, or one's own.")
_TRAIN = flags.DEFINE_string("train", None, "JSON lines of split 'train'.")
_TEST = flags.DEFINE_string("test", "", "JSON lines of split 'test', if any.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TFDS sets lie.")


def command() -> None:
  """The console's entry."""
  try:
    app.run(_command, flags_parser=_parse)
  except UserError as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def _parse(argv):
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    raise UserError(str(error)) from error
  if len(rest) > 1:
    raise UserError(f"unexpected argument {rest[1]!r}: flags are --name=value")
  for flag in (_NAME, _TRAIN, _DATA_DIR):
    if not flag.value:
      raise UserError(
        f"--{flag.name} is missing; for a start: --name=gsm8k "
        "--train=train.jsonl --test=test.jsonl --data_dir=runs/tfds"
      )
  return rest


def _command(argv) -> None:
  files = {"train": _TRAIN.value, "test": _TEST.value}
  sizes = prepare(
    _NAME.value, {k: v for k, v in files.items() if v}, _DATA_DIR.value
  )
  print(f"{_NAME.value} in {_DATA_DIR.value}: {sizes}")


def prepare(name: str, files: dict[str, str], data_dir: str) -> dict[str, int]:
  """Writes the set and returns how many rows each split has.

  Args:
    name: "gsm8k", or lower case letters, digits and underscores.
    files: JSON lines by split.
    data_dir: a folder; the set must not be in it.

  Raises:
    UserError: a name or a file that cannot be, or a set that is there already.
  """
  if not (name.isidentifier() and name.islower() and name.isascii()):
    raise UserError(f"--name={name}: expected letters a-z, digits and _")
  if (Path(data_dir).expanduser() / name).exists():
    raise UserError(f"--data_dir={data_dir} holds {name!r} already")
  lines = {k: list(readers.json_lines(path)) for k, path in files.items()}
  for split, found in lines.items():
    if not found:
      raise UserError(f"--{split}={files[split]}: no line in it")
  first = next(iter(lines.values()))[0][1]
  fields = ("question", "answer") if name == "gsm8k" else tuple(first)
  read = {k: [_texts(*x, fields) for x in found] for k, found in lines.items()}
  if name == "gsm8k":
    for row in itertools.chain.from_iterable(read.values()):
      row["annotation"], _, row["short_answer"] = row["answer"].rpartition(
        "#### "
      )
  made = _builder(name, read)(data_dir=data_dir, file_format="array_record")
  made.download_and_prepare()
  return {k: split.num_examples for k, split in made.info.splits.items()}


def _texts(where: str, row: dict, fields: tuple[str, ...]) -> dict[str, str]:
  values = {name: readers.field(row, name, where) for name in fields}
  if nulls := [name for name, value in values.items() if value is None]:
    raise UserError(f"{where}: {nulls[0]!r} is null")
  return {
    k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()
  }


def _builder(name: str, read: dict[str, list[dict]]) -> type:
  """A TFDS builder of those rows, in their order.

  A subclass, for TFDS's own `store_as_tfds_dataset` needs TensorFlow.
  """
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core import registered

  text = {field: tfds.features.Text() for field in next(iter(read.values()))[0]}
  with registered.skip_registration():

    class Rows(tfds.core.GeneratorBasedBuilder):
      """The lines of local files."""

      VERSION = tfds.core.Version("1.0.0")

      def _info(self):
        features = tfds.features.FeaturesDict(text)
        return tfds.core.DatasetInfo(
          builder=self, features=features, disable_shuffling=True
        )

      def _split_generators(self, dl_manager):
        return {split: enumerate(found) for split, found in read.items()}

      def _generate_examples(self):
        """TFDS asks for it; the splits are generators already."""

  Rows.name = name
  return Rows


if __name__ == "__main__":
  command()
