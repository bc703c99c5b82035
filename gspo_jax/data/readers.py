"""Rows of data as they lie: JSON lines, TFDS, and a factory by dotted name."""

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from gspo_jax.runtime.errors import UserError, nearest

SPECS = "chain, jsonl:FILE, tfds:NAME[:SPLIT] or package.module.factory"


def json_lines(path: str) -> Iterator[tuple[str, dict]]:
  """(`file:line`, object) for each line of a file that is not blank."""
  try:
    with open(path, "rb") as file:
      for number, line in enumerate(file, 1):
        if line.strip():
          yield f"{path}:{number}", _object(line, f"{path}:{number}")
  except OSError as error:
    raise UserError(f"data file {path!r}: {error.strerror}") from error


def field(row: Mapping, name: str, where: str):
  """The value of a row; UserError with the nearest name if it has none."""
  if not isinstance(row, Mapping):
    raise UserError(f"{where}: expected an object, got {str(row)[:60]!r}")
  if name not in row:
    raise UserError(f"{where}: no field {name!r}; {nearest(name, row)}"[:250])
  return row[name]


def _object(line: bytes, where: str) -> dict:
  try:
    row = json.loads(line)
    # JSON can spell half a surrogate pair, which no UTF-8 text can hold.
    json.dumps(row, ensure_ascii=False).encode()
  except (ValueError, RecursionError) as error:
    row = line.decode(errors="replace").strip()
    raise UserError(
      f"{where}: expected an object in JSON and UTF-8, got {row[:60]!r}"
    ) from error
  if not isinstance(row, dict):
    raise UserError(f"{where}: expected an object, got {str(row)[:60]!r}")
  return row


def plain(value, where: str):
  """A value as JSON would give it: TFDS has bytes and arrays."""
  if hasattr(value, "tolist"):
    value = value.tolist()
  if isinstance(value, list):
    return [plain(v, where) for v in value]
  if isinstance(value, Mapping):
    return {k: plain(v, where) for k, v in value.items()}
  if not isinstance(value, bytes):
    return value
  try:
    return value.decode()
  except ValueError as error:
    raise UserError(f"{where}: not in UTF-8: {value[:60]!r}") from error


def tfds(rest: str, data_dir: str) -> Sequence:
  """A split of a prepared set: `NAME[/CONFIG][:VERSION][:SPLIT]`."""
  found = re.fullmatch(r"([\w/.+-]+(?::\d+\.\d+\.\d+)?)(?::(.+))?", rest)
  if not found:
    raise UserError(f"tfds:{rest}: expected tfds:NAME[:SPLIT]")
  name, split = found[1], found[2] or "train"
  import tensorflow_datasets  # a second, and few need it

  try:
    return tensorflow_datasets.data_source(
      name, split=split, data_dir=data_dir or None, download=False
    )
  except (
    tensorflow_datasets.core.DatasetNotFoundError,
    AssertionError,  # known by name, and its files are not there
  ) as error:
    raise UserError(
      f"tfds:{name} is not prepared in {data_dir or 'the folder of TFDS'!r}: "
      f"python -m gspo_jax.data.prepare_tfds --name={name} --train=FILE "
      f"--data_dir={data_dir or 'DIR'}"
    ) from error
  except (ValueError, KeyError, NotImplementedError) as error:
    raise UserError(f"tfds:{rest}: {' '.join(str(error).split())[:200]}") from (
      error
    )


def called(spec: str) -> Sequence:
  """What the factory of that name returns."""
  found = re.fullmatch(r"([\w.]+)[.:](\w+)", spec)
  if not found or spec.endswith((".json", ".jsonl")):
    raise UserError(f"data source {spec!r}: expected {SPECS}")
  try:
    module = importlib.import_module(found[1])
  except ModuleNotFoundError as error:
    if error.name and not f"{found[1]}.".startswith(f"{error.name}."):
      raise  # the module is there, and misses another one
    raise UserError(
      f"data source {spec!r}: no module {error.name!r}; expected {SPECS}"
    ) from error
  if not callable(getattr(module, found[2], None)):
    names = [n for n, v in vars(module).items() if callable(v)]
    raise UserError(
      f"data source {spec!r}: {found[1]} has no such function; "
      f"{nearest(found[2], names)}"
    )
  rows = getattr(module, found[2])()
  if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
    raise UserError(
      f"data source {spec!r}: it gave a {type(rows).__name__}; expected "
      "something with a length and rows by index"
    )
  return rows
