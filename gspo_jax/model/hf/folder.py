"""Writes a checkpoint's folder whole: on this machine or in a bucket.

On this machine the files are written to FOLDER.partial, which is renamed at the
end. A bucket cannot rename a folder: the file that a reader needs first, such
as the index of the weights, is written last.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from gspo_jax.model.config import DTYPES
from gspo_jax.model.hf.tensors import import_safetensors
from gspo_jax.runtime.errors import UserError, nearest, with_reason


def require_new(folder: epath.PathLike, dtype: str) -> None:
  """Raises UserError unless `save_hf` can write to `folder` in `dtype`."""
  import_safetensors()
  if dtype not in DTYPES:
    raise UserError(f"{dtype=}: {nearest(dtype, DTYPES)}")
  with writing(folder):
    path = epath.Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
      raise UserError(f"{str(folder)!r} exists: expected a new or empty folder")


def begin(folder: epath.PathLike) -> epath.Path:
  """The folder to write into, empty; `finish` makes it `folder`."""
  path = epath.Path(folder)
  if not _in_bucket(path):
    path = path.absolute()
    path = path.with_name(path.name + ".partial")
    if path.exists():
      path.rmtree()  # of a killed export
    path.mkdir(parents=True)
  return path


def finish(partial: epath.Path, folder: epath.PathLike) -> None:
  """Renames what `begin` gave to `folder`, unless it is in a bucket."""
  if not _in_bucket(partial):
    partial.replace(folder)


def write_files(write: Callable[[Path], None], folder: epath.Path) -> None:
  """Copies to `folder` the files that `write` puts into a local folder."""
  with tempfile.TemporaryDirectory() as scratch:
    write(Path(scratch))
    for path in sorted(Path(scratch).iterdir()):
      (folder / path.name).write_bytes(path.read_bytes())


@contextmanager
def writing(folder: epath.PathLike) -> Iterator[None]:
  """Raises what a folder or bucket raises as UserError."""
  with with_reason(f"{str(folder)!r} cannot be written"):
    yield


def _in_bucket(path: epath.Path) -> bool:
  return "://" in str(path)
