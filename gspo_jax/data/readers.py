"""Records of files, data sets, and factories by dotted name."""

import contextlib
import decimal
import functools
import glob
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from etils import epath

from gspo_jax.record import json_lines
from gspo_jax.record.run_files import in_bucket
from gspo_jax.runtime import spec as specs
from gspo_jax.runtime.errors import UserError, nearest, needs_extra

SPECS = (
  "chain, jsonl:FILE, parquet:FILE, hf:NAME[:SPLIT], tfds:NAME[:SPLIT] or "
  "package.module.factory"
)

STORED = ("jsonl:", "parquet:", "hf:", "tfds:")  # of `SPECS`
_FILE = re.compile(
  r"\.(csv|tsv|jsonl?|parquet)(\.gz)?(:[^/]+)?$", re.IGNORECASE
)
_HF = re.compile(r"((?:\w+://)?[^:]+)(?::(.+))?")  # NAME[:SPLIT]
# Formats that `datasets` would read from every file below the current folder.
_FORMATS = ("arrow", "csv", "json", "parquet", "text")


class Records(NamedTuple):
  rows: Sequence  # of dicts, or what a factory of the user returns
  place: Callable[[int], str]  # the name of a record by its index, for errors


def read(spec: str) -> Records:
  """The records of one of `SPECS`, but not `chain`."""
  kind, _, rest = spec.partition(":")
  if kind == "jsonl":
    lines = list(json_lines.read(rest))
    for line in lines:
      try:
        json.dumps(line.record, ensure_ascii=False).encode()
      except UnicodeEncodeError as error:
        raise UserError(
          f"{line.where}: expected text in UTF-8, got half a surrogate pair in "
          f"{str(line.record)[:60]!a}"
        ) from error
    names = [line.where for line in lines]
    return Records([line.record for line in lines], names.__getitem__)
  sets = {"parquet": parquet, "hf": hugging_face, "tfds": tfds}
  rows = sets[kind](rest) if kind in sets else from_factory(spec)
  # A lambda cannot be pickled.
  return Records(rows, functools.partial("{}[{}]".format, spec))


def spec_of(file: str | Path) -> str:
  """The spec of a file, by its extension, else jsonl; a spec is unchanged."""
  file = str(file)
  if re.match(r"\w+:(?!//)", file):
    return file
  return _by_name(file) or f"jsonl:{file}"


def _by_name(spec: str) -> str:
  """The spec of a file by its extension; "" if that says nothing."""
  file = re.sub(r"^\w+:(?!//)", "", spec)  # without a kind
  end = _FILE.search(file)
  if not end:
    return ""
  kind, packed, split = end.groups()
  alone = kind.lower() in ("jsonl", "parquet") and not (packed or split)
  return f"{kind.lower() if alone else 'hf'}:{file}"


def path_of(spec: str) -> str:
  """The file or folder that a spec names; "" if it names no file."""
  kind, _, rest = spec.partition(":")
  if kind == "hf":
    return _HF.fullmatch(rest)[1] if _HF.fullmatch(rest) else ""
  return rest if kind in ("jsonl", "parquet") else ""


def lines(file: str | Path) -> Iterator[json_lines.Line]:
  """The records of a file, or of a spec; see `spec_of`."""
  rows, place = read(spec_of(file))
  for i in range(len(rows)):
    yield json_lines.Line(place(i), rows[i])


def content(spec: str) -> str:
  """A hash of the files that a spec names; "" if it names no file."""
  kind, _, path = spec.partition(":")
  files = [epath.Path(path)] if kind == "jsonl" else []
  if kind == "parquet" and in_bucket(path):
    pattern = epath.Path(path)
    files = sorted(pattern.parent.glob(pattern.name))
  elif kind == "parquet":
    files = map(epath.Path, sorted(glob.glob(str(Path(path).expanduser()))))
  return " ".join(map(sha256, files))


def sha256(path: epath.PathLike) -> str:
  with epath.Path(path).open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def field(record: Mapping, name: str, place: str, key: str = ""):
  """The value of a column; `a.b` is the value of b in the column a.

  UserError without such a column. It names `place`, which is the record, and
  `key`, the config key that sets `name`.
  """
  if isinstance(record, Mapping) and name in record:
    return record[name]
  columns = fields(record, place)
  if name in columns:
    return columns[name]
  hint = nearest(name, columns) if columns else "it is empty"
  if hint.startswith("did you"):
    hint += f" It has {', '.join(sorted(columns))}"
  set_by = f" ({key})" if key else ""
  raise UserError(f"{place}: no field {name!r}{set_by}; {hint}"[:250])


def value(record: Mapping, name: str, place: str, key: str = ""):
  """`field` as `plain` gives it."""
  return plain(field(record, name, place, key), place)


def fields(record: Mapping, place: str) -> dict:
  """The columns of a record; b of an object in the column a is `a.b`."""
  if not isinstance(record, Mapping):
    raise UserError(f"{place}: expected an object, got {str(record)[:60]!r}")
  columns = {}
  for outer, value in record.items():
    if isinstance(value, Mapping):
      for name, inner in fields(value, place).items():
        columns[f"{outer}.{name}"] = inner
  return columns | dict(record)


def text(value) -> str:
  """The text of a JSON value, as rewards read a reference.

  A number has no exponent and no zeros after its last decimal: tables store 7
  as 7.0 if another row has no value. A list of texts and numbers is joined with
  commas. An object and any other list stay JSON.

  Returns:
    "" for a missing value: null, NaN, infinity, an empty list, a list with such
    an item, an object with nothing else, or an object or list with NaN inside.
  """
  if isinstance(value, list) and not any(
    isinstance(item, list | dict) for item in value
  ):
    items = [text(item).strip() for item in value]
    return ", ".join(items) if all(items) else ""
  if value is None or value in (math.inf, -math.inf) or value != value:
    return ""
  if isinstance(value, float):
    digits = format(decimal.Decimal(repr(value + 0.0)), "f")  # -0.0 is 0
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
  if isinstance(value, str):
    return value
  if isinstance(value, dict) and not any(
    v not in (None, "", [], {}) for v in value.values()
  ):
    return ""
  try:
    return json.dumps(value, allow_nan=False)
  except ValueError:
    return ""


def plain(value, place: str):
  """A value as JSON would give it; data sets have bytes, arrays and dates."""
  if getattr(value, "dtype", None) in ("float16", "float32"):
    # The shortest decimal: .1 and not 0.10000000149011612.
    value = np.asarray(value).astype(str).astype(float)
  if hasattr(value, "tolist"):
    value = value.tolist()
  if isinstance(value, list | tuple):
    return [plain(v, place) for v in value]
  if isinstance(value, Mapping):
    return {str(k): plain(v, place) for k, v in value.items()}
  if hasattr(value, "isoformat"):
    return value.isoformat()
  if isinstance(value, decimal.Decimal):
    whole = value.is_finite() and value == value.to_integral_value()
    return int(value) if whole else float(value)
  if value is None or isinstance(value, str | int | float):
    return value
  if not isinstance(value, bytes):
    raise UserError(f"{place}: JSON has no {type(value).__name__}")
  try:
    return value.decode()
  except ValueError as error:
    raise UserError(f"{place}: not in UTF-8: {value[:60]!r}") from error


def plain_columns(record: Mapping, without: Sequence[str]) -> dict:
  """The columns that JSON can hold, as JSON values, `without` some."""
  columns = {}
  for name in record:
    if name not in without:
      with contextlib.suppress(UserError):
        columns[name] = plain(record[name], name)
  return columns


def parquet(path: str) -> Sequence:
  """The rows of a Parquet file or a pattern as `data/train-*.parquet`."""
  if not path:
    raise UserError("parquet: expected parquet:FILE")
  file = path if in_bucket(path) else str(Path(path).expanduser())
  with _datasets(f"parquet:{path}") as datasets:
    return _of_text(
      datasets.load_dataset("parquet", data_files=file, split="train")
    )


def hugging_face(spec: str) -> Sequence:
  """A split of a data set that the package `datasets` reads, memory-mapped.

  `spec` is `NAME[:SPLIT]`, by default "train", or a slice as `train[:1000]`.
  NAME is `ORGANISATION/NAME[/CONFIG]` on the Hugging Face Hub, or a folder or
  file in a format of `datasets` (parquet, csv, json, ..., `save_to_disk`).
  """
  parts = _HF.fullmatch(spec)
  if not parts:
    raise UserError(f"hf:{spec}: expected hf:NAME[:SPLIT]")
  name, split = parts[1], parts[2] or "train"
  path = Path(name).expanduser().absolute()
  with _datasets(f"hf:{spec}") as datasets:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
      loaded = datasets.load_from_disk(str(path))
      splits = loaded if isinstance(loaded, dict) else {"train": loaded}
      return _of_text(_slice(datasets, splits, split))
    options = {"split": split}
    if path.is_file():
      name, options["data_files"] = str(path.parent), path.name
    elif path.is_dir():
      name = str(path)
    elif not in_bucket(name):
      on_hub = re.fullmatch(r"([\w-][\w.-]*(?:/[\w.-]+)?)(?:/([\w.-]+))?", name)
      if not on_hub:
        raise UserError(f"hf:{spec}: no such file or folder")
      name, options["name"] = on_hub.groups()
      if name in _FORMATS:
        file = f"hf:{split}" if parts[2] else "hf:FILE or hf:FOLDER"
        raise UserError(
          f"hf:{spec}: {name!r} is a format, no data set; expected {file}"
        )
    return _of_text(datasets.load_dataset(name, **options))


def _slice(datasets, splits: Mapping, split: str):
  """Rows of a split, or of slices such as `train[:10]+test[5%:]`."""
  sizes = {name: len(rows) for name, rows in splits.items()}
  parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
  return datasets.concatenate_datasets(
    [splits[p.splitname].select(range(p.from_, p.to)) for p in parts]
  )


@contextlib.contextmanager
def _datasets(spec: str):
  with needs_extra("datasets", spec):
    import datasets  # takes a second, and few runs need it
  datasets.disable_progress_bars()
  try:
    yield datasets
  except UserError:
    raise
  except ConnectionError as error:
    name = "/".join(spec.split(":")[1].split("/")[:2])  # without a config
    raise UserError(
      f"{spec}: no such file or folder, and the Hugging Face Hub cannot be "
      f"reached; where it can, `hf download {name} --repo-type=dataset "
      "--local-dir=DIR`, then use hf:DIR"
    ) from error
  except Exception as error:  # the type depends on the format
    cause = error.__cause__ or error
    reason = " ".join(str(cause).split())[:300]
    raise UserError(f"{spec}: {reason}") from error


def _of_text(dataset):
  """The rows, without media columns; float32 keeps its shortest decimals."""
  kinds = {k: getattr(f, "feature", f) for k, f in dataset.features.items()}
  media = [
    name for name, kind in kinds.items() if hasattr(kind, "embed_storage")
  ]
  dataset = dataset.remove_columns(media)
  dtypes = {name: getattr(kind, "dtype", "") for name, kind in kinds.items()}
  narrow = {k: d for k, d in dtypes.items() if d in ("float16", "float32")}
  shorten = functools.partial(_shorten, narrow)
  return dataset.with_transform(shorten) if narrow else dataset


def _shorten(narrow: Mapping[str, str], columns: dict) -> dict:
  def short(value, dtype):
    if isinstance(value, list):
      return [short(item, dtype) for item in value]
    return None if value is None else plain(np.array(value, dtype), "")

  names = narrow.keys() & columns.keys()
  return columns | {name: short(columns[name], narrow[name]) for name in names}


def tfds(spec: str) -> Sequence:
  """A split (default "train") of a TFDS set prepared in `TFDS_DATA_DIR`.

  `spec` is `NAME[/CONFIG][:VERSION][:SPLIT]`.
  """
  parts = re.fullmatch(r"([\w/.+-]+(?::\d+\.\d+\.\d+)?)(?::(.+))?", spec)
  if not parts:
    raise UserError(f"tfds:{spec}: expected tfds:NAME[:SPLIT]")
  name, split = parts[1], parts[2] or "train"
  # TFDS itself reads the variable when it is imported.
  data_dir = os.environ.get("TFDS_DATA_DIR")
  with needs_extra("tfds", f"tfds:{spec}"):
    import tensorflow_datasets  # takes a second, and few runs need it
  try:
    return tensorflow_datasets.data_source(
      name, split=split, data_dir=data_dir, download=False
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
  parts = re.fullmatch(r"([\w.]+)[.:](\w+)", spec)
  file = _by_name(spec)
  hint = f"did you mean {file!r}? " if file else ""
  if file or not parts:
    raise UserError(f"data source {spec!r}: {hint}expected {SPECS}")
  try:
    factory = specs.imported(".".join(parts.groups()), {}, "data source")
  except UserError as error:
    raise UserError(f"{error} (expected {SPECS})") from error
  records = factory()
  if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
    raise UserError(
      f"data source {spec!r}: it returned a {type(records).__name__}; expected "
      "something with a length and records by index"
    )
  return records
