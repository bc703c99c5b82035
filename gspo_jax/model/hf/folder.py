"""Writes a checkpoint's folder as a whole: on this machine or in a bucket.

On this machine the files go to FOLDER.partial, which is renamed at the end. A
bucket cannot rename a folder: there the file that readers open first, such as
the index of the weights, is written last.
"""

from etils import epath

from gspo_jax.model.config import DTYPES
from gspo_jax.model.hf.tensors import INDEX, SINGLE
from gspo_jax.record.run_files import in_bucket
from gspo_jax.runtime.errors import UserError, needs_extra, with_reason
from gspo_jax.runtime.key import Choice


def require_new(folder: epath.PathLike, dtype: str) -> None:
  """Raises UserError unless `save_hf` can write to `folder` in `dtype`."""
  with needs_extra("hf", "a Hugging Face checkpoint"):
    import safetensors.numpy  # noqa: F401
  Choice(DTYPES).check("dtype", dtype)
  with writing(folder):
    path = epath.Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
      has = lambda *names: any((path / name).exists() for name in names)
      # `save_hf` writes config.json first and the index last.
      is_cut_short = has("config.json") and not has(SINGLE, INDEX)
      end = ""
      if in_bucket(path) and is_cut_short:
        end = f"; it has no {INDEX}: remove what a killed export has left"
      raise UserError(
        f"{str(folder)!r} exists: expected a new or empty folder{end}"
      )


def begin(folder: epath.PathLike) -> epath.Path:
  """The empty folder to write into; `finish` renames it to `folder`."""
  path = epath.Path(folder)
  if not in_bucket(path):
    path = path.absolute()
    path = path.with_name(path.name + ".partial")
    if path.exists():
      path.rmtree()  # of a killed export
    path.mkdir(parents=True)
  return path


def finish(partial: epath.Path, folder: epath.PathLike) -> None:
  if not in_bucket(partial):
    partial.replace(folder)


def writing(folder: epath.PathLike):
  """A context: errors of the folder or bucket become UserError."""
  return with_reason(f"{str(folder)!r} cannot be written")
