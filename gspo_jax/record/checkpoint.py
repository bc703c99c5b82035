"""Checkpoints: saved in the background, verified when restored.

Orbax (its v1 API) writes and reads the arrays, on any number of devices. It
does not detect flipped bits, silently casts a dtype that differs, and accepts
an empty folder as the latest checkpoint. Therefore each checkpoint stores the
shape, dtype and checksum of every leaf, and `restore` tries the checkpoints
from the newest to the oldest until one passes all checks.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from gspo_jax.record.progress import Progress
from gspo_jax.record.run_files import in_bucket
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import AT_LEAST_1, key
from gspo_jax.runtime.sharding import leaves_by_path


class Restored(NamedTuple):
  """A checkpoint that passed all checks."""

  step: int
  state: Any  # a pytree of arrays
  metadata: dict[str, Any]  # a JSON object


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  every: int = key(
    10, "iterations; also after the last, and on SIGTERM", AT_LEAST_1
  )
  keep: int = key(3, "newest checkpoints to keep", AT_LEAST_1)


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
  """A context manager for the checkpoints of one run, one folder per step.

  Call every method on every process. All processes skip a checkpoint that one
  cannot read. `directory` may be in a bucket. The newest `keep` checkpoints
  stay on disk; None opens a folder for reading only, while a run may be writing
  to it.

  If a save in the background fails, the next `save`, `wait` or end of the
  `with` block raises RuntimeError, once.
  """

  def __init__(self, directory: str | os.PathLike, *, keep: int | None = None):
    writes = keep is not None
    if not in_bucket(directory):
      directory = os.path.abspath(directory)  # Orbax refuses a relative path
    self._skipped: set[int] = set()
    self._last_save: int | None = None
    self._response: ocp.AsyncResponse | None = None  # of the last save
    multihost.run_on_all(lambda: _open_folder(directory, creates=writes))
    self._orbax = ocp.training.Checkpointer(
      directory,
      preservation_policy=ocp.training.preservation_policies.LatestN(keep),
      cleanup_tmp_directories=writes,
    )

  def __exit__(self, kind, error, trace) -> None:
    try:
      self.wait()
    except RuntimeError as failed_save:
      if error is None:
        raise
      logging.error("%s", failed_save)  # the first error propagates
    finally:
      self._orbax.close()

  def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
    """Copies `state` to the host, then writes it in the background.

    The buffers of `state`, a pytree of arrays, may be donated after the return.
    A readable checkpoint of the same step is kept, else replaced. `metadata` is
    a JSON object.
    """
    self.wait()
    exists = step in self._steps() and step not in self._skipped
    if exists and self._try(step, self._read) is not None:
      return
    # Skipped checkpoints are removed now: they would count among the newest.
    for skipped in sorted(self._skipped):
      self._orbax.delete(skipped)
    self._skipped.clear()
    self._last_save = step
    record = {"specs": _specs(state), "checksums": checksums(state)}
    self._response = self._orbax.save_checkpointables_async(
      step,
      {"state": state},
      force=True,
      custom_metadata={"user": metadata, **record},
    )

  def wait(self) -> None:
    """Waits until the last save is on disk; RuntimeError if it failed."""
    response, self._response = self._response, None
    try:
      with Progress(f"saving checkpoint {self._last_save}"):
        try:
          self._orbax.wait()
        finally:
          if response:  # else its thread and three descriptors stay open
            response.result()
    except Exception as error:
      raise RuntimeError(
        f"the checkpoint of step {self._last_save} was not saved in "
        f"{self._orbax.directory}: {_cause(error)}"
      ) from error

  def restore(
    self,
    abstract_state: Any,
    accept: Callable[[int, dict[str, Any]], None],
    *,
    only: int | None = None,
    part: bool = False,
  ) -> Restored | None:
    """The newest checkpoint that passes all checks; None without checkpoints.

    A checkpoint that is unreadable or has wrong checksums is skipped with one
    warning.

    Args:
      abstract_state: a pytree of `jax.ShapeDtypeStruct` with the shardings of
        the result; they may differ from the saved ones.
      accept: called with step and metadata before the arrays are read. If it
        raises, the search ends.
      only: the only step to try.
      part: `abstract_state` is a dict with some of the saved entries only.

    Raises:
      UserError: step `only` does not exist, a leaf differs from the saved one
        in shape or dtype, or checkpoints exist but none passes the checks.
    """
    self.wait()
    steps = self._steps()
    multihost.require_same({"the list of checkpoints": steps})
    if only is not None:
      if only not in steps:
        raise multihost.AgreedError(
          f"checkpoint {only}: not in {self._orbax.directory}, which has "
          f"{steps or 'none'}"
        )
      steps = [only]
    for step in reversed(steps):
      if restored := self._restore(step, abstract_state, accept, part):
        return restored
    if steps:
      raise multihost.AgreedError(
        f"none of the checkpoints {steps} in {self._orbax.directory} could be "
        "restored (the log says why); nothing was overwritten"
      )
    return None

  def _restore(
    self, step: int, abstract_state: Any, accept: Callable, part: bool
  ) -> Restored | None:
    """As `restore`, of one step; None if it does not pass the checks."""
    if (saved := self._try(step, self._read)) is None:
      return None
    multihost.run_on_all(functools.partial(accept, step, saved["user"]))
    specs, expected = saved["specs"], _specs(abstract_state)
    if part:
      prefixes = tuple(f"{name}/" for name in abstract_state)
      specs = {k: spec for k, spec in specs.items() if k.startswith(prefixes)}
    multihost.run_on_all(lambda: _require_same_leaves(step, specs, expected))
    # Orbax takes no placeholder where it loads some entries only.
    to_read = abstract_state if part else _to_read(abstract_state)
    state = self._try(step, self._load, to_read, part)
    if state is None:
      return None
    if not part:
      leaves, tree = jax.tree.flatten(state)
      del state
      for i, like in enumerate(jax.tree.leaves(abstract_state)):
        leaves[i] = _from_first_part(leaves[i], like)  # frees what was read
      state = jax.tree.unflatten(tree, leaves)
      del leaves
    if self._try(step, _require_checksums, state, saved["checksums"]):
      return Restored(step, state, saved["user"])
    return None

  def _steps(self) -> list[int]:
    return [checkpoint.step for checkpoint in self._orbax.checkpoints]

  def _try(self, step: int, read: Callable, *args) -> Any:
    """`read(step, *args)`; None if it fails on any process."""
    try:
      result, cause = read(step, *args), ""
    except Exception as error:
      result, cause = None, _cause(error)
    if not (causes := list(filter(None, multihost.allgather_json(cause)))):
      return result
    if multihost.is_primary():
      logging.warning("checkpoint %d skipped: %s", step, causes[0])
    self._skipped.add(step)
    return None

  def _read(self, step: int) -> dict[str, Any]:
    saved = self._orbax.checkpointables_metadata(step).custom_metadata or {}
    if missing := {"user", "specs", "checksums"} - saved.keys():
      raise ValueError(f"its metadata lacks {sorted(missing)}")
    return saved

  def _load(self, step: int, abstract_state: Any, part: bool) -> Any:
    # Each process loads by itself. Orbax's barrier after a load would let the
    # others wait five minutes for a process that failed.
    local = ocp.Context()
    local.pytree.loading.partial_load = part
    local.multiprocessing.primary_host = jax.process_index()
    local.multiprocessing.active_processes = {jax.process_index()}
    leaves = jax.tree.leaves(abstract_state)
    leaves = [leaf for leaf in leaves if leaf is not ocp.PLACEHOLDER]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e9
    with local, Progress(f"loading checkpoint {step} ({size:.1f} GB)"):
      return ocp.load(
        self._orbax.directory / str(step),
        abstract_state,
        checkpointable_name="state",
      )


def _to_read(abstract_state: Any) -> Any:
  """What this process reads: nothing that it can get from another.

  Processes along the mesh axis `data`, such as those of several slices, hold
  copies. Only the first of them read; see `_from_first_part`.
  """

  def leaf(x):
    if not _is_shared(x.sharding, x.dtype):
      return x
    mesh, spec = x.sharding.mesh, x.sharding.spec
    part = Mesh(mesh.devices[:1], mesh.axis_names, axis_types=mesh.axis_types)
    first = NamedSharding(part, spec)
    if not first.addressable_devices:
      return ocp.PLACEHOLDER
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=first)

  return jax.tree.map(leaf, abstract_state)


def _is_shared(sharding: jax.sharding.Sharding, dtype) -> bool:
  """Whether `data` replicates an array, each replica in other processes."""
  if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
    return False
  if not isinstance(sharding, NamedSharding) or "data" in str(sharding.spec):
    return False
  mesh = sharding.mesh
  if mesh.axis_names[0] != "data" or mesh.shape["data"] == 1:
    return False
  parts = [{d.process_index for d in part.flat} for part in mesh.devices]
  return len(set().union(*parts)) == sum(map(len, parts))


def _from_first_part(x: jax.Array, abstract: jax.ShapeDtypeStruct) -> jax.Array:
  """Sends what the first processes along `data` have read to the others.

  Bit for bit: it adds integers, zeros but for the first part. Orbax, which can
  broadcast, adds floats, and -0 + 0 is 0.
  """
  place = abstract.sharding
  if not _is_shared(place, abstract.dtype):
    return x
  zeros = np.zeros(place.shard_shape(abstract.shape), abstract.dtype)
  read = {}
  if x is not ocp.PLACEHOLDER:
    read = {shard.device: shard.data for shard in x.addressable_shards}
  # On the host: JAX computes on no single device while a mesh is set.
  parts = [
    jax.device_put(np.asarray(read.get(device, zeros))[None], device)
    for device in place.addressable_devices
  ]
  with jax.set_mesh(place.mesh):
    stacked = jax.make_array_from_single_device_arrays(
      (place.mesh.shape["data"], *abstract.shape),
      NamedSharding(place.mesh, PartitionSpec("data", *place.spec)),
      parts,
    )
    return jax.jit(_sum_of_bits, out_shardings=place)(stacked)


def _sum_of_bits(x: jax.Array) -> jax.Array:
  if x.dtype == jnp.bool_:
    return x.any(0)
  word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  words = jax.lax.bitcast_convert_type(x, word).sum(0, dtype=word)
  return jax.lax.bitcast_convert_type(words, x.dtype)


def _open_folder(directory: str | os.PathLike, creates: bool) -> None:
  folder = epath.Path(directory)
  try:
    if creates:  # an empty folder of a bucket does not exist even then
      folder.mkdir(parents=True, exist_ok=True)
    elif not folder.is_dir():
      raise UserError(f"checkpoints in {str(directory)!r}: no such folder")
  except OSError as error:
    raise UserError(f"checkpoints in {str(directory)!r}: {error}") from error


def _require_checksums(step: int, state: Any, saved: dict[str, int]) -> bool:
  computed = checksums(state)
  if wrong := [path for path in computed if computed[path] != saved[path]]:
    raise ValueError(
      f"the checksum of {wrong[0]!r} differs, as do {len(wrong) - 1} others"
    )
  return True


def checksums(tree: Any) -> dict[str, int]:
  """One number below 2^32 for each leaf, independent of its sharding.

  A leaf with words w_i has the checksum sum_i m(w_i xor p_i) mod 2^32, where
  p_i is the position i times an odd constant and m is a bijection of 32 bits. A
  change within one word is always detected. A change of several words, such as
  a swap, is missed with probability 2^-32.
  """
  sums = jax.device_get(_checksums(leaves_by_path(tree)))
  return {path: int(value) for path, value in sums.items()}


def _checksum(leaf: jax.Array) -> jax.Array:
  words = _words(leaf)
  position = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):  # a reshape would gather the shards
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position = position * jnp.uint32(size) + index
  mixed = words ^ (position * jnp.uint32(0x9E3779B1))
  # The finaliser of MurmurHash3. A weighted sum with odd weights would miss a
  # swap of x and -x: the sum changes by an even multiple of 2^31.
  mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
  return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


_checksums = jax.jit(functools.partial(jax.tree.map, _checksum))


def _words(leaf: jax.Array) -> jax.Array:
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  if leaf.dtype == jnp.bool_:
    return leaf.astype(jnp.uint32)
  narrow = {1: jnp.uint8, 2: jnp.uint16}
  word = narrow.get(leaf.dtype.itemsize, jnp.uint32)  # 64 bits: two words
  return jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)


def _specs(tree: Any) -> dict[str, str]:
  return {
    path: f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in leaves_by_path(tree).items()
  }


def _require_same_leaves(step: int, saved: dict, expected: dict) -> None:
  for path in sorted(saved.keys() | expected.keys()):
    actual, wanted = saved.get(path, "absent"), expected.get(path, "absent")
    if actual != wanted:
      raise UserError(
        f"checkpoint {step} is of another model: leaf {path!r} is {actual}, "
        f"expected {wanted}"
      )


def _cause(error: BaseException) -> str:
  while deeper := error.__cause__ or error.__context__:
    error = deeper
  return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
