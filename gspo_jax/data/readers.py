"""Records of JSON lines, of TFDS, and of factories by dotted name."""

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from gspo_jax.runtime import json_lines as json_lines_file
from gspo_jax.runtime.errors import UserError, missing_package, nearest

SPECS = "chain, jsonl:FILE, tfds:NAME[:SPLIT] or package.module.factory"


def json_lines(path: str) -> Iterator[json_lines_file.Line]:
  """The lines of a file of problems, each (`file:line`, record).

  Raises:
    UserError: the file cannot be read, or a line is not an object in JSON and
      UTF-8.
  """
  for line in json_lines_file.read(path):
    try:
      # JSON can spell half a surrogate pair, which no UTF-8 text can hold.
      json.dumps(line.record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
      raise UserError(
        f"{line.where}: expected text in UTF-8, got half a surrogate pair in "
        f"{str(line.record)[:60]!a}"
      ) from error
    yield line


def field(record: Mapping, name: str, where: str):
  """The value of a field; UserError with the nearest name if it is missing."""
  if not isinstance(record, Mapping):
    raise UserError(f"{where}: expected an object, got {str(record)[:60]!r}")
  if name not in record:
    hint = nearest(name, record) if record else "it is empty"
    raise UserError(f"{where}: no field {name!r}; {hint}"[:250])
  return record[name]


def plain(value, where: str):
  """A value as JSON would give it; TFDS has bytes and arrays."""
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


def tfds(spec: str, data_dir: str) -> Sequence:
  """A split of a prepared TFDS set.

  Args:
    spec: `NAME[/CONFIG][:VERSION][:SPLIT]`; the split is "train" if not given.
    data_dir: the folder of the sets; "" for the default of TFDS.

  Raises:
    UserError: the set is not prepared, or has no such split.
  """
  parts = re.fullmatch(r"([\w/.+-]+(?::\d+\.\d+\.\d+)?)(?::(.+))?", spec)
  if not parts:
    raise UserError(f"tfds:{spec}: expected tfds:NAME[:SPLIT]")
  name, split = parts[1], parts[2] or "train"
  try:
    import tensorflow_datasets  # takes a second, and few runs need it
  except ImportError as error:
    raise missing_package(error, "tfds", f"tfds:{spec}") from error
  try:
    return tensorflow_datasets.data_source(
      name, split=split, data_dir=data_dir or None, download=False
    )
  except (
    tensorflow_datasets.core.DatasetNotFoundError,
    AssertionError,  # TFDS knows the name, but its files are missing
  ) as error:
    raise UserError(
      f"tfds:{name} is not prepared in {data_dir or 'the folder of TFDS'!r}: "
      f"python -m gspo_jax.data.prepare_tfds --name={name} --train=FILE "
      f"--data_dir={data_dir or 'DIR'}"
    ) from error
  except (ValueError, KeyError, NotImplementedError) as error:
    reason = " ".join(str(error).split())[:200]
    raise UserError(f"tfds:{spec}: {reason}") from error


def from_factory(spec: str) -> Sequence:
  """The records that a factory of the user returns.

  Args:
    spec: `package.module.factory`; it is called without arguments.

  Raises:
    UserError: there is no such factory, or its result has no length or index.
  """
  parts = re.fullmatch(r"([\w.]+)[.:](\w+)", spec)
  if not parts or spec.endswith((".json", ".jsonl")):
    raise UserError(f"data source {spec!r}: expected {SPECS}")
  path, name = parts[1], parts[2]
  try:
    module = importlib.import_module(path)
  except ModuleNotFoundError as error:
    if error.name and not f"{path}.".startswith(f"{error.name}."):
      raise  # the module exists, and one of its own imports does not
    raise UserError(
      f"data source {spec!r}: no module {error.name!r}; expected {SPECS}"
    ) from error
  if not callable(getattr(module, name, None)):
    names = [n for n, v in vars(module).items() if callable(v)]
    raise UserError(
      f"data source {spec!r}: {path} has no such function; "
      f"{nearest(name, names)}"
    )
  records = getattr(module, name)()
  if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
    raise UserError(
      f"data source {spec!r}: it returned a {type(records).__name__}; expected "
      "something with a length and records by index"
    )
  return records
