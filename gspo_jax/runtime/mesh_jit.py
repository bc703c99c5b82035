"""Functions compiled for a mesh; a later process finds them on disk.

JAX's compilation cache spares XLA's work alone, and a start still traces and
lowers each function. An executable that was kept spares this, too.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import os
import pickle
import platform
import re
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "tokamax", "grain", "numpy")
_DIGEST_BYTES = hashlib.sha256().digest_size
_folder: Path | None = None  # of kept executables; None: none are kept
_cache_hits = 0  # programs that came from JAX's compilation cache


class MeshJit:
  """A jitted function on a mesh, compiled once for each set of shapes.

  A run that needs more than `most` sets would compile for ever. `options` are
  those of `jax.jit`; of arguments one can be static, the others are arrays. Of
  one set of shapes all arrays have the same shardings.
  """

  def __init__(
    self,
    function: Callable,
    mesh: Mesh,
    *,
    most: int = 1,
    static_argnums: int | None = None,
    **options,
  ):
    self.mesh, self.most = mesh, most
    self.function, self._options = function, options
    self._static = static_argnums
    self._jitted = jax.jit(function, static_argnums=static_argnums, **options)
    self._programs: dict[object, jax.stages.Compiled] = {}

  @property
  def num_programs(self) -> int:
    return len(self._programs)

  def __call__(self, *args):
    arrays, static = args, None
    if self._static is not None:
      static = args[self._static]
      arrays = args[: self._static] + args[self._static + 1 :]
    leaves, tree = jax.tree.flatten(arrays)
    weak = lambda x: getattr(x, "weak_type", False)
    arrays_of = tuple((x.shape, x.dtype, weak(x)) for x in leaves)
    shapes = static, tree, arrays_of
    with jax.set_mesh(self.mesh):
      if shapes not in self._programs:
        path = self._path(static, tree, leaves)
        program = path and _load(path, (arrays, {}), self.mesh)
        if program is None:
          hits = _cache_hits
          program = self._jitted.lower(*args).compile()
          # XLA cannot write what it has read from the compilation cache.
          if path and hits == _cache_hits:
            _store(path, program)
        self._programs[shapes] = program
      return self._programs[shapes](*arrays)

  def lower(self, *args) -> jax.stages.Lowered:
    """Lowers the function ahead of time; arguments may be shapes."""
    with jax.set_mesh(self.mesh):
      return self._jitted.lower(*args)

  def _path(self, static, tree, leaves) -> Path | None:
    """The file of a program; None if none is kept."""
    if _folder is None:
      return None
    # Text: a pickle depends on which equal strings are one object.
    shardings = [getattr(x, "sharding", None) for x in leaves]
    arguments = [str(x) for x in (*map(jax.typeof, leaves), *shardings)]
    weak = [getattr(x, "weak_type", False) for x in leaves]
    meshes = dict.fromkeys(getattr(x, "mesh", None) for x in shardings)
    of = self.function, self._options, self.mesh, static, str(tree)
    try:
      return _folder / _digest((process(), *of, arguments, weak, [*meshes]))
    except (TypeError, pickle.PicklingError) as error:
      print(f"an executable is not kept: {error}", file=sys.stderr)
      return None


def keep_executables(folder: Path) -> None:
  """Keeps executables in `folder`, from which code is loaded.

  Raises:
    OSError: others than this user can write to the folder or read it.
  """
  global _folder
  folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  status = folder.lstat()
  if status.st_uid != os.getuid() or status.st_mode & 0o077:
    raise OSError(f"{str(folder)!r} holds code: expected it yours, mode 0700")
  if _folder is None:
    jax.monitoring.register_event_listener(_count_hits)
  _folder = folder


def _count_hits(event: str, **_) -> None:
  global _cache_hits
  _cache_hits += event == "/jax/compilation_cache/cache_hits"


def keep_none() -> None:
  """For functions of a user's code: no executable is named by its source."""
  global _folder
  _folder = None


def _load(path: Path, args, mesh: Mesh) -> jax.stages.Compiled | None:
  """The executable in a file; None without one, or if it is damaged."""
  if not path.exists():
    return None
  try:
    if path.stat().st_uid != os.getuid():
      raise ValueError("it is another user's")
    data = path.read_bytes()
    digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
      raise ValueError("its checksum is wrong")
    executable, results = pickle.loads(zlib.decompress(data))
    devices = list(mesh.devices.flat)
    program = serialize_executable.deserialize_and_load(
      executable,
      jax.tree.structure(args),
      jax.tree.structure(results),
      backend=devices[0].client,
      execution_devices=devices,
    )
    os.utime(path)  # the files that were unused the longest go first
  except Exception as error:  # whatever a library raises: compile it again
    print(f"{path} is ignored: {error}", file=sys.stderr)
    return None
  return program


def _store(path: Path, program: jax.stages.Compiled) -> None:
  try:
    executable, _, tree = serialize_executable.serialize(program)
    # Trees of our classes cannot be pickled, but their values can.
    results = jax.tree.unflatten(tree, range(tree.num_leaves))
    data = zlib.compress(pickle.dumps((executable, results)), 1)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
      whole = Path(folder, "whole")
      whole.write_bytes(hashlib.sha256(data).digest() + data)
      os.replace(whole, path)
  except Exception as error:  # a full disk, or a backend that cannot
    print(f"an executable is not kept: {error}", file=sys.stderr)


class _Pickler(cloudpickle.Pickler):
  """Pickles a function with what it closes over; devices and types by name."""

  def persistent_id(self, x):
    if isinstance(x, jax.Device):
      return f"{x!r} {x.device_kind}"
    return repr(x) if isinstance(x, type) else None


def _digest(value) -> str:
  """Equal for equal values in processes that run the same source."""
  with io.BytesIO() as file:
    _Pickler(file).dump(value)
    return hashlib.sha256(file.getvalue()).hexdigest()


def process():
  """What decides a program besides the function and its arguments."""
  # An attribute has the value in this context; some options have none.
  now = lambda name, value: str(getattr(jax.config, name, value))
  options = {name: now(name, x) for name, x in jax.config.values.items()}
  return _process(), sorted(options.items())


@functools.cache
def _process():
  source = hashlib.sha256()
  package = Path(__file__).parents[1]
  for path in sorted(package.rglob("*.py")):
    source.update(str(path.relative_to(package)).encode())
    source.update(path.read_bytes())
  versions = {}
  for name in _LIBRARIES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return (
    source.hexdigest(),
    versions,
    jax.devices()[0].client.platform_version,
    _processor(),
    (jax.process_index(), jax.process_count()),
    [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
  )


def _processor() -> str:
  """What XLA's code for a CPU depends on: its model and instruction sets."""
  try:
    text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
  except OSError:
    return platform.processor()
  return str(re.findall(r"^(?:model name|flags|Features)\s*: .*", text, re.M))
