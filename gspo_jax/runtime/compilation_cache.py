"""Compiled programs on disk, for the next process that needs the same ones.

JAX's persistent compilation cache, in a folder of the user and bounded. JAX
names an entry by program, versions, XLA's flags and features of the processor,
so that different machines may share a folder; of several processes the first
alone writes. In it are the executables of `mesh_jit`, which each process
writes.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import jax

from gspo_jax.runtime import mesh_jit

MAX_BYTES = 2**30
_PROBE_BYTES = 2**20


def enable(folder: str | None) -> None:
  """Keeps compiled programs in `folder`; "": keeps none.

  None: as JAX's own options say, else in the user's cache folder. There, beyond
  `MAX_BYTES`, the files go that were unused the longest; a folder that the user
  names is not bounded. One that cannot be written costs a line, not the run.
  """
  if folder == "":
    jax.config.update("jax_enable_compilation_cache", False)
    return
  if folder is None and not jax.config.jax_enable_compilation_cache:
    return
  if folder is None and (own := jax.config.jax_compilation_cache_dir):
    _keep_executables(own)
    return
  if folder is None and _share_work():
    return
  try:
    if folder is None:
      folder = _writable(_of_user() / "compiled")
      _evict(Path(folder), MAX_BYTES)
    elif "://" not in folder:
      folder = _writable(Path(folder))
  except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
    print(f"compiled programs are not kept: {error}", file=sys.stderr)
    return
  _keep_executables(folder)
  jax.config.update("jax_compilation_cache_dir", folder)
  # All of them: the many small ones take seconds together.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def beside(name: str) -> Path | None:
  """A folder beside the compiled programs in the user's own cache folder.

  None if these are elsewhere, if none are kept, or if another user owns it.
  """
  used = jax.config.jax_compilation_cache_dir
  if jax.config.jax_enable_compilation_cache and used:
    with contextlib.suppress(OSError, RuntimeError):  # there is no home
      folder = _of_user().absolute()
      own = folder.stat().st_uid == os.getuid()
      if own and used == str(folder / "compiled"):
        return folder / name
  return None


def _of_user() -> Path:
  """Our folder in the one that the XDG specification has for caches."""
  caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
  return Path(caches) / "gspo_jax"


def _keep_executables(compiled: str) -> None:
  """Keeps them beside the compiled programs, unless these are in a bucket."""
  if "://" in compiled or _share_work():
    return
  folder = Path(compiled, "executables")
  try:
    mesh_jit.keep_executables(folder)
    _evict(folder, MAX_BYTES)
  except OSError as error:
    print(f"executables are not kept: {error}", file=sys.stderr)


def _share_work() -> bool:
  """Whether XLA shares out among processes what it tries on GPUs.

  One that read its program from a local folder would not take part.
  """
  return jax.distributed.is_initialized() and jax.default_backend() == "gpu"


def _writable(path: Path) -> str:
  """A local folder that is there and can be written."""
  path = path.absolute()
  path.mkdir(mode=0o700, parents=True, exist_ok=True)
  with tempfile.TemporaryFile(dir=path) as probe:
    probe.write(bytes(_PROBE_BYTES))
  return str(path)


def _evict(folder: Path, max_bytes: int) -> None:
  """Deletes the files that were unused the longest, until the rest fit.

  JAX's own bound, jax_compilation_cache_max_size, needs a lock of the folder
  for each read and write, and one entry that a killed process left incomplete
  ends it.
  """
  files = []
  for path in folder.rglob("*"):
    with contextlib.suppress(FileNotFoundError):  # another process deletes, too
      if path.is_file():
        files.append((path, path.stat()))
  # Many file systems note a read at most once a day, or never.
  last_used = lambda file: max(file[1].st_atime, file[1].st_mtime)
  used = 0
  for path, stat in sorted(files, key=last_used, reverse=True):
    used += stat.st_size
    if used > max_bytes:
      path.unlink(missing_ok=True)
