"""Many hosts as one: the start, arrays laid over all, rows read by each.

Every process runs the same program on its own devices. It may not raise, wait
or branch on what it alone knows: the others would wait for it in a collective.
With one process the functions here do nothing, or copy an array.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from gspo_jax.runtime.errors import UserError

T = TypeVar("T")

# Seconds after which a silent process counts as dead, and for which one that
# ends waits for the others. Then the job ends everywhere. JAX's own are 100 and
# 300: minutes of a pod that waits for nothing.
PATIENCE = 30
_LONGEST = 1000  # bytes of what a process can tell the others
# Where libtpu is installed and no TPU is: no question to a metadata server,
# whose silence costs five lines of errors as JAX looks for its devices.
NO_TPU = {
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_WORKER_ID": "0",
}


class AgreedError(UserError):
  """One that is raised alike on every process: for one of them to tell."""


def start(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Joins the other processes; before any use of a device.

  Without arguments it does so on a Cloud TPU slice of several hosts, and
  nothing elsewhere.

  Args:
    coordinator: HOST:PORT at which process 0 listens.
    num_processes: of the job.
    process_id: of this one, from 0.

  Raises:
    UserError: process 0 cannot listen there, or the hosts of a slice do not
      find one another. JAX itself ends the process when it finds no
      coordinator within five minutes.
  """
  if not _expects_tpu():
    for name, value in NO_TPU.items():
      os.environ.setdefault(name, value)
  if coordinator is None and tpu_hosts() == 1:
    return
  # It would swallow SIGTERM, which preemption.py listens to.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      # What was said is not to be mixed with what Slurm or Kubernetes say.
      cluster_detection_method="deactivate" if coordinator else None,
      heartbeat_timeout_seconds=PATIENCE,
      shutdown_timeout_seconds=PATIENCE,
    )
  except RuntimeError as error:
    where = f"--coordinator={coordinator}" if coordinator else "TPU slice"
    raise UserError(f"{where}: {error}") from error
  except ValueError:  # JAX knows of no cluster: `require_joined` has the rest
    if coordinator:
      raise


def require_joined() -> None:
  """UserError where JAX knows of processes that were not joined by `start`."""
  if jax.process_count() > 1 and not jax.distributed.is_initialized():
    raise UserError(
      f"{jax.process_count()} processes, but jax.distributed.initialize() was "
      "not called before the first use of a device: it is what saves "
      "checkpoints of several hosts, and stops them together"
    )


def tpu_hosts() -> int:
  """Hosts of the Cloud TPU slices that this process is on; 1 elsewhere.

  It asks what `jax.distributed.initialize` would ask, but first: that would
  wait five minutes for a coordinator named "local" on a notebook's TPU. 0 where
  only that can say.
  """
  if not _expects_tpu():
    return 1
  for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
    if name in os.environ:  # Kubernetes, notebooks
      slices = int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)
      return slices * len(os.environ[name].split(","))
  # A TPU VM learns it from Google's metadata server; only JAX knows how.
  try:
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster
  except ImportError:  # no public name, so another JAX may have another
    return 0
  if GceTpuCluster.is_env_present():
    return GceTpuCluster.get_process_count()
  return 1


def _expects_tpu() -> bool:
  # `import jax` puts "tpu" there where it sees chips, unless told otherwise.
  return "tpu" in (jax.config.jax_platforms or "")


def is_primary() -> bool:
  """Whether this is the process that prints and writes."""
  return jax.process_index() == 0


def print_once(*text) -> None:
  """Prints, once for all processes."""
  if is_primary():
    print(*text, flush=True)


def barrier() -> None:
  """Waits for all the processes."""
  multihost_utils.sync_global_devices("meet")


def any_process(flag: bool) -> bool:
  """Whether `flag` is true on any process."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.bool_(flag)).any())


def allgather_text(text: str) -> list[str]:
  """What each process has to tell, cut to 1000 bytes."""
  mine = text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
  everyones = multihost_utils.process_allgather(np.frombuffer(mine, np.uint8))
  return [bytes(b).rstrip(b"\0").decode(errors="ignore") for b in everyones]


def run_on_all(work: Callable[[], T]) -> T:
  """`work()`; a UserError on one process is `Agreed` on all.

  Nothing in `work` may wait for the other processes.
  """
  try:
    result, wrong = work(), ""
  except UserError as error:
    result, wrong = None, str(error) or "UserError"
  for number, text in enumerate(allgather_text(wrong)):
    if text:
      raise AgreedError(text if text == wrong else f"process {number}: {text}")
  return result


def require_same(settings: Mapping[str, Any]) -> None:
  """`Agreed` naming the first setting that differs between processes."""
  if (
    len(set(allgather_text(str(zlib.crc32(repr(list(settings)).encode()))))) > 1
  ):
    raise AgreedError("the processes were started with different config files")
  mine = [zlib.crc32(repr(value).encode()) for value in settings.values()]
  theirs = multihost_utils.process_allgather(np.array(mine, np.uint32))
  for name, column in zip(settings, theirs.T, strict=True):
    if other := np.flatnonzero(column != column[0]).tolist():
      raise AgreedError(
        f"{name} is not the same everywhere: process {other[0]} has another "
        "than process 0"
      )


def require_shared(workdir: epath.Path) -> None:
  """`Agreed` unless every process can write there, and sees the others."""
  probe = lambda process: workdir / f".writable.{process}"
  local_rows = probe(jax.process_index())

  def write():
    try:
      workdir.mkdir(parents=True, exist_ok=True)
      local_rows.write_text(".")  # a full disk takes an empty file
    except Exception as error:
      raise UserError(
        f"--workdir={str(workdir)!r} cannot be written: "
        f"{type(error).__name__}: {error}"
      ) from error

  def look():
    if not all(probe(i).exists() for i in range(jax.process_count())):
      raise UserError(
        f"--workdir={str(workdir)!r} is not one folder for all hosts: expected "
        "a bucket or a network disk"
      )

  try:
    run_on_all(write)
    run_on_all(look)
  finally:
    # It may be missing, and no process may raise on what it alone knows.
    with contextlib.suppress(Exception):
      local_rows.unlink()


def to_global(tree, sharding: jax.sharding.Sharding):
  """Global arrays, from numpy ones that every process has whole."""

  def put(x):
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  return jax.tree.map(put, tree)


def local_rows(array: jax.Array) -> dict[int, np.ndarray]:
  """The rows of a global array that are this process's, by their number.

  Along `tensor` a row lies on several devices, and perhaps on several hosts:
  one of them has it for its own.
  """
  is_primary = [s for s in array.addressable_shards if s.replica_id == 0]
  shards = {s.index[0].start or 0: s.data for s in is_primary}
  return {
    begin + i: row
    for begin, rows in sorted(jax.device_get(shards).items())
    for i, row in enumerate(rows)
  }


def allgather_rows(values: Mapping[int, float], like: jax.Array) -> np.ndarray:
  """All rows' values, on every process, from the own ones of each.

  Args:
    values: one for each row of `own(like)`.
    like: [B].

  Returns:
    [B] float32.
  """
  mine = np.zeros(like.shape[0], np.float32)
  for i, value in values.items():
    mine[i] = value
  # Every row has one owner, whose value no other may recompute: a verdict can
  # depend on the clock.
  return multihost_utils.process_allgather(mine[None], tiled=True).sum(0)


def to_host(tree):
  """Global arrays whole, as numpy, on every process."""
  return multihost_utils.process_allgather(tree, tiled=True)
