"""Writes a TFDS set from local files, without network and TensorFlow.

  python -m gspo_jax.data.prepare_tfds --name=gsm8k --train=train.jsonl \\
    --test=test.jsonl --data_dir=runs/tfds

Then `data.source=tfds:gsm8k` with TFDS_DATA_DIR=runs/tfds reads the set, and so
does `tfds.data_source("gsm8k", data_dir=...)` in any program. An input is a
file of JSON lines, or parquet:FILE or another source. gsm8k gets the features
that TFDS gives it. Any other set gets the fields of its first record: text
stays text, every other value is written as JSON.

Exit codes: 0 done; 2 a mistake of the user, in one line.
"""

import itertools
import json
from pathlib import Path

from absl import flags

from gspo_jax.data import readers
from gspo_jax.record import json_lines
from gspo_jax.runtime import command
from gspo_jax.runtime.errors import UserError, needs_extra

_NAME = flags.DEFINE_string("name", None, "Of the set: gsm8k, or another name.")
_TRAIN = flags.DEFINE_string("train", None, "Split 'train', JSON lines.")
_TEST = flags.DEFINE_string("test", "", "Split 'test', if any.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TFDS sets.")


def main() -> None:
  command.run(
    _main,
    required=(_NAME, _TRAIN, _DATA_DIR),
    start=(
      "--name=gsm8k --train=train.jsonl --test=test.jsonl --data_dir=runs/tfds"
    ),
  )


def _main() -> None:
  files = {"train": _TRAIN.value, "test": _TEST.value}
  sizes = prepare(
    _NAME.value, {k: v for k, v in files.items() if v}, _DATA_DIR.value
  )
  print(f"{_NAME.value} in {_DATA_DIR.value}: {sizes}")


def prepare(name: str, files: dict[str, str], data_dir: str) -> dict[str, int]:
  """Writes the set; `files` and the numbers that it returns are by split."""
  if not (name.isidentifier() and name.islower() and name.isascii()):
    raise UserError(f"--name={name}: expected letters a-z, digits and _")
  if (Path(data_dir).expanduser() / name).exists():
    raise UserError(f"--data_dir={data_dir} holds {name!r} already")
  lines = {k: list(readers.lines(path)) for k, path in files.items()}
  for split, split_lines in lines.items():
    if not split_lines:
      raise UserError(f"--{split}={files[split]}: no record in it")
  first = next(iter(lines.values()))[0].record
  fields = ("question", "answer") if name == "gsm8k" else tuple(first)
  records = {
    split: [_as_text(line, fields) for line in split_lines]
    for split, split_lines in lines.items()
  }
  if name == "gsm8k":
    for record in itertools.chain.from_iterable(records.values()):
      annotation, _, short_answer = record["answer"].rpartition("#### ")
      record |= {"annotation": annotation, "short_answer": short_answer}
  builder_class = _builder_class(name, records)
  builder = builder_class(data_dir=data_dir, file_format="array_record")
  builder.download_and_prepare()
  return {k: split.num_examples for k, split in builder.info.splits.items()}


def _as_text(line: json_lines.Line, fields: tuple[str, ...]) -> dict[str, str]:
  place, record = line
  values = {name: readers.value(record, name, place) for name in fields}
  if nulls := [name for name, value in values.items() if value is None]:
    raise UserError(f"{place}: {nulls[0]!r} is null")
  return {
    k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()
  }


def _builder_class(name: str, records: dict[str, list[dict]]) -> type:
  """A TFDS builder of these records; TFDS's own function needs TensorFlow."""
  with needs_extra("tfds", "gspo_jax.data.prepare_tfds"):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import registered
  first = next(iter(records.values()))[0]
  text = {field: tfds.features.Text() for field in first}
  with registered.skip_registration():

    class LocalFiles(tfds.core.GeneratorBasedBuilder):
      """The lines of local files."""

      VERSION = tfds.core.Version("1.0.0")

      def _info(self):
        features = tfds.features.FeaturesDict(text)
        return tfds.core.DatasetInfo(
          builder=self, features=features, disable_shuffling=True
        )

      def _split_generators(self, dl_manager):
        return {split: enumerate(r) for split, r in records.items()}

      def _generate_examples(self):
        """Required by TFDS, and not used: the splits are generators."""

  LocalFiles.name = name
  return LocalFiles


if __name__ == "__main__":
  main()
