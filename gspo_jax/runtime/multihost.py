"""One program on many processes: start, global arrays, and agreement.

Every process runs the same program on its local devices. A process must not
raise, wait or branch on a value that only it has: the other processes would
wait for it in the next collective.
"""

import contextlib
import itertools
import json
import math
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax.runtime.errors import UserError, with_reason

T = TypeVar("T")

# After this many seconds without a heartbeat a process counts as dead, and a
# process that ends waits this long for the others. Then all processes end.
# JAX's defaults are 100 and 300, minutes in which a pod does nothing.
TIMEOUT_SECONDS = 30
_BEAT_SECONDS, _SILENT_SECONDS = 2.0, 8.0  # of `_beat`
_LAST_SECONDS = 3.0  # of process 0, after an error
_FAULT = "\x01"  # begins the text of an exception that is no UserError
_LONGEST = 1000  # letters of an error that another process gets
# Set where libtpu is installed but there is no TPU. Without them libtpu queries
# a metadata server that does not answer, and prints five lines of errors.
NO_TPU = {
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_WORKER_ID": "0",
}


class AgreedError(UserError):
  """A UserError that every process raises alike; only one prints it."""


def start(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Joins the other processes of the job; call it before any use of a device.

  Without arguments it joins the hosts of a Cloud TPU slice, and does nothing on
  a single machine. `coordinator` is the HOST:PORT at which process 0 listens.
  UserError: it cannot listen there, or the hosts do not find one another. If
  the coordinator is silent for five minutes, JAX ends the process.
  """
  if not _expects_tpu():
    for name, value in NO_TPU.items():
      os.environ.setdefault(name, value)
  if coordinator is None and tpu_hosts() == 1:
    return
  # This service would catch the SIGTERM that preemption.py handles.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      # The flags alone count, not the variables of Slurm or Kubernetes.
      cluster_detection_method="deactivate" if coordinator else None,
      heartbeat_timeout_seconds=TIMEOUT_SECONDS,
      shutdown_timeout_seconds=TIMEOUT_SECONDS,
    )
  except RuntimeError as error:
    name = f"--coordinator={coordinator}" if coordinator else "TPU slice"
    raise UserError(f"{name}: {error}") from error
  except ValueError:  # JAX detects no cluster; see `require_joined`
    if coordinator:
      raise
    return
  threading.Thread(target=_beat, daemon=True).start()


def _beat() -> None:
  """Shows that this process is alive; process 0 prints which one is silent.

  If one process dies, JAX ends all with a page of C++, and no Python runs.
  """
  try:
    from jax._src.distributed import global_state
  except ImportError:  # a private name, which another JAX version may not have
    return
  folder, process, heard = "gspo_jax/beats", global_state.process_id, {}
  for n in itertools.count():
    try:
      store = global_state.client
      store.key_value_set(f"{folder}/{process}", str(n), allow_overwrite=True)
      counts = store.key_value_dir_get(folder) if process == 0 else ()
    except Exception:  # the job ends
      return
    for name in _silent(heard, dict(counts), time.monotonic()):
      print(
        f"process {name.rpartition('/')[2]} has been silent for "
        f"{_SILENT_SECONDS:.0f} s: if it has died, JAX ends all processes "
        f"within {TIMEOUT_SECONDS} s; the same commands resume",
        flush=True,
      )
    time.sleep(_BEAT_SECONDS)


def _silent(heard: dict, counts: Mapping[str, str], now: float) -> list[str]:
  """The processes that have become silent; each is listed once.

  `heard` gets the count of each, and the time of its last change.
  """
  silent = []
  for name, count in counts.items():
    before, since = heard.get(name, ("", now))
    if count != before:
      heard[name] = count, now
    elif now - since >= _SILENT_SECONDS:
      heard[name] = count, math.inf
      silent.append(name)
  return silent


def end_job(error: Exception) -> None:
  """Ends this process with 1 after an error, if there are other processes.

  JAX would wait until all processes end, or half a minute if one is dead.
  """
  if jax.process_count() == 1:
    return
  cause = " ".join(f"{type(error).__name__}: {error}".split())
  print(
    f"process {jax.process_index()} ends: {cause[:200]}; if another process "
    "has died, its log says why",
    file=sys.stderr,
    flush=True,
  )
  traceback.print_exception(error)
  if is_primary():
    time.sleep(_LAST_SECONDS)  # else JAX ends the others before they print
  sys.stdout.flush()
  os._exit(1)


def require_joined() -> None:
  """UserError if JAX has several processes that `start` did not join."""
  if jax.process_count() > 1 and not jax.distributed.is_initialized():
    raise UserError(
      f"{jax.process_count()} processes, but jax.distributed.initialize() was "
      "not called before the first use of a device: it is needed to save "
      "checkpoints of several hosts and to stop them together"
    )


def tpu_hosts() -> int:
  """The number of hosts of this Cloud TPU slice; 1 on any other machine.

  0 if only `jax.distributed.initialize` can find it. On a notebook's TPU that
  function would wait five minutes for a coordinator named "local".
  """
  if not _expects_tpu():
    return 1
  for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
    if name in os.environ:  # Kubernetes, notebooks
      slices = int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)
      return slices * len(os.environ[name].split(","))
  # On a TPU VM the number comes from Google's metadata server, through JAX.
  try:
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster
  except ImportError:  # a private name, which another JAX version may not have
    return 0
  if GceTpuCluster.is_env_present():
    return GceTpuCluster.get_process_count()
  return 1


def _expects_tpu() -> bool:
  # `import jax` adds "tpu" where it finds chips, unless JAX_PLATFORMS is set.
  return "tpu" in (jax.config.jax_platforms or "")


def is_primary() -> bool:
  """Whether this is process 0, the only one that prints and writes files."""
  return jax.process_index() == 0


def by_process(devices: Iterable[jax.Device]) -> list[list[jax.Device]]:
  """The devices of each process, in the order of their ids."""
  processes = {}
  for device in sorted(devices, key=lambda d: d.id):
    processes.setdefault(device.process_index, []).append(device)
  return [processes[index] for index in sorted(processes)]


def print_once(*text) -> None:
  if is_primary():
    print(*text, flush=True)


def barrier() -> None:
  multihost_utils.sync_global_devices("barrier")


def any_process(flag: bool) -> bool:
  return bool(_allgather(np.bool_(flag)).any())


def allgather_json(value) -> list:
  """The JSON value of each process, in process order."""
  local = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = _allgather(np.int32(local.size))
  gathered = _allgather(np.pad(local, (0, sizes.max() - local.size)))
  return [
    json.loads(bytes(text[:size]))
    for text, size in zip(gathered, sizes, strict=True)
  ]


def run_on_all(work: Callable[[], T]) -> T:
  """Calls `work()` on every process, and raises on all if it fails on one.

  `work` must not wait for the other processes.

  Raises:
    AgreedError: `work` raised a UserError on some process.
    Exception: `work` raised another exception. It is raised on that process,
      and RuntimeError elsewhere. It goes before any UserError, so that all
      processes end with the exit code of a fault.
  """
  result, fault = None, None
  try:
    result, message = work(), ""
  except UserError as error:
    message = str(error) or "UserError"
  except Exception as error:
    fault, message = error, f"{_FAULT}{type(error).__name__}: {error}"
  texts = allgather_json(message[:_LONGEST])
  if fault:
    raise fault
  for process, text in enumerate(texts):
    if text.startswith(_FAULT):
      raise RuntimeError(f"process {process}: {text.removeprefix(_FAULT)}")
  for process, text in enumerate(texts):
    if text:
      raise AgreedError(
        message if text == message[:_LONGEST] else f"process {process}: {text}"
      )
  return result


def require_same(settings: Mapping[str, Any]) -> None:
  """AgreedError with the name of the first setting that differs somewhere."""
  first, *others = allgather_json([*settings])
  if any(names != first for names in others):
    raise AgreedError("the processes were started with different config files")
  local = [zlib.crc32(repr(value).encode()) for value in settings.values()]
  gathered = _allgather(np.array(local, np.uint32))
  for name, column in zip(settings, gathered.T, strict=True):
    if other := np.flatnonzero(column != column[0]).tolist():
      raise AgreedError(
        f"{name} is not the same everywhere: process {other[0]} has another "
        "value than process 0"
      )


def require_shared(workdir: epath.Path) -> None:
  """AgreedError unless all processes share `workdir` and can write to it."""
  probe = lambda process: workdir / f".writable.{process}"
  local_probe = probe(jax.process_index())

  def write():
    with with_reason(f"--workdir={str(workdir)!r} cannot be written"):
      workdir.mkdir(parents=True, exist_ok=True)
      local_probe.write_text(".")  # not empty: a full disk takes an empty file

  def see_all():
    if not all(probe(i).exists() for i in range(jax.process_count())):
      raise UserError(
        f"--workdir={str(workdir)!r} is not one folder for all hosts: expected "
        "a bucket or a network disk"
      )

  try:
    run_on_all(write)
    run_on_all(see_all)
  finally:
    # The file may be missing, and a process must not raise alone.
    with contextlib.suppress(Exception):
      local_probe.unlink()


def to_global(tree, sharding: jax.sharding.Sharding):
  """Global arrays from numpy arrays that every process holds whole."""

  def put(x):
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  return jax.tree.map(put, tree)


def local_rows(array: jax.Array) -> dict[int, np.ndarray]:
  """The rows of a global [B, ...] array that this process owns, by row number.

  Several devices along `tensor`, perhaps of several processes, hold the same
  row. The process with its first replica owns it.
  """
  return _rows([s for s in array.addressable_shards if s.replica_id == 0])


def addressable_rows(array: jax.Array) -> dict[int, np.ndarray]:
  """The rows on this process's devices; other processes may have them, too."""
  return _rows(array.addressable_shards)


def _rows(shards) -> dict[int, np.ndarray]:
  begins = {s.index[0].start or 0: s.data for s in shards}
  return {
    begin + i: row
    for begin, rows in sorted(jax.device_get(begins).items())
    for i, row in enumerate(rows)
  }


def allgather_rows(values: Mapping[int, float], size: int) -> np.ndarray:
  """[size] float32, the values of all processes by row; 0 for other rows."""
  local = np.zeros(size, np.float32)
  for i, value in values.items():
    local[i] = value
  # A row's value comes from its owner alone: a reward with a time limit may
  # differ if another process computes it again.
  return sum_of_all(local)


def sum_of_all(local: np.ndarray) -> np.ndarray:
  """The sum of the arrays of all processes; no process holds all of them."""
  return _allgather(local, _sum)


def _identity(x):
  return x


def _allgather(local, join: Callable = _identity) -> np.ndarray:
  """`join` of the arrays of all processes, of one shape: [processes, ...].

  It runs on all devices of the context's mesh, or on all. On a CPU, programs of
  one device of each process would not wait for an earlier program on all of
  them, and Gloo would mix up their collectives. Two threads can call it at once
  if their meshes have no device in common: JAX does not order the collectives
  of two threads.
  """
  local = np.asarray(local)
  if jax.process_count() == 1:
    return np.array(join(local[None]))
  mesh = jax.sharding.get_mesh()
  devices = jax.devices() if mesh.empty else mesh.devices.flat
  mesh = Mesh(by_process(devices), ("process", "device"))
  split, whole = (
    NamedSharding(mesh, spec)
    for spec in (PartitionSpec("process"), PartitionSpec())
  )
  with jax.set_mesh(mesh):
    gathered = jax.make_array_from_callback(
      (len(mesh.devices), *local.shape), split, lambda _: local[None]
    )
    joined = jax.jit(join, out_shardings=whole)(gathered)
  return np.array(joined.addressable_data(0))


def _sum(x):
  return x.sum(0, dtype=x.dtype)


def to_host(tree):
  """Whole numpy arrays on every process of the arrays' mesh."""

  def whole(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
      return np.asarray(x)
    replicated = NamedSharding(x.sharding.mesh, PartitionSpec())
    with jax.set_mesh(x.sharding.mesh):
      x = jax.jit(_identity, out_shardings=replicated)(x)
    return np.asarray(x.addressable_data(0))

  return jax.tree.map(whole, tree)
