"""Checkpoints: saved behind the training step, trusted only when verified.

Orbax (its v1 API) writes and reads the arrays, on any number of devices. It
does not notice flipped bits, casts a dtype that differs without a word, and
counts an empty folder as the latest checkpoint. So each checkpoint carries the
shape, dtype and checksum of every leaf, and `restore` walks from the newest to
the oldest until one of them is whole.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Restored:
  """A checkpoint that passed every check, and the step it was saved at."""

  step: int
  state: Any
  metadata: dict[str, Any]


class Checkpoints:
  """The checkpoints of one run, a numbered folder each: a context manager.

  Args:
    directory: a path or a `gs://` address; created if it is missing.
    every: `due` is true at multiples of this many steps.
    keep: how many checkpoints stay on disk, the latest ones; None only reads,
      and leaves a run that is still going on alone.

  Raises:
    UserError: `every` or `keep` is below 1, or the directory is none.
    RuntimeError: from `save`, `wait` and the end of the `with` block, once, if
      the save before it failed in the background.

  All methods are to be called on every process, and a checkpoint that one of
  them cannot read is none to the others. What a killed save left behind is
  removed by the next run.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    every: int = 1,
    keep: int | None = None,
  ):
    writes = keep is not None
    if every < 1 or (writes and keep < 1):
      raise UserError(f"checkpoints: {every=}, {keep=}: expected 1 or more")
    if "://" not in str(directory):
      directory = os.path.abspath(directory)  # Orbax refuses a relative path
    self._every = every
    self._bad: set[int] = set()
    self._last_save: int | None = None
    multihost.run_on_all(lambda: (_make if writes else _require)(directory))
    self._orbax = ocp.training.Checkpointer(
      directory,
      preservation_policy=ocp.training.preservation_policies.LatestN(keep),
      cleanup_tmp_directories=writes,
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind, error, trace) -> None:
    try:
      self.wait()
    except RuntimeError as failed_save:
      if error is None:
        raise
      logging.error("%s", failed_save)  # the error on its way out came first
    finally:
      self._orbax.close()

  def due(self, step: int) -> bool:
    """Whether the loop should save after this step."""
    return step % self._every == 0

  def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
    """Copies `state` to the host and returns; the writing goes on behind.

    The buffers of `state` may be donated as soon as this returns. A readable
    checkpoint of the same step is left as it is, an unreadable one replaced.
    The folders that `restore` had to skip are deleted here, not before: the run
    goes on from an older step, and they would count among the `keep` latest.

    Args:
      step: the number of finished steps.
      state: any pytree of arrays, typed PRNG keys among them.
      metadata: JSON; `restore` gives it back.
    """
    self.wait()
    if self._has(step):
      return
    for bad in sorted(self._bad):
      self._orbax.delete(bad)
    self._bad.clear()
    self._last_save = step
    record = {"specs": _specs(state), "checksums": checksums(state)}
    self._orbax.save_checkpointables_async(
      step,
      {"state": state},
      force=True,
      custom_metadata={"user": metadata, **record},
    )

  def wait(self) -> None:
    """Returns when the last save is on disk; raises if it never will be."""
    try:
      self._orbax.wait()
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
    """The newest checkpoint that is whole, or None if there are no folders.

    A step that cannot be read, or whose checksums differ, costs one warning
    and the next older one is tried.

    Args:
      abstract_state: `jax.ShapeDtypeStruct`s that carry the shardings wanted
        now; those at the time of the save do not matter.
      accept: called with step and metadata before the arrays are read; what it
        raises ends the search.
      only: this step and no other.
      part: `abstract_state` is a dict of some parts of what was saved.

    Raises:
      UserError: step `only` is not there, a leaf has another shape or dtype
        than was saved, or there are folders and none of them is whole.
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
      if (saved := self._try(step, self._read)) is None:
        continue
      multihost.run_on_all(functools.partial(accept, step, saved["user"]))
      specs = saved["specs"], _specs(abstract_state)
      if part:
        wanted = tuple(f"{name}/" for name in abstract_state)
        kept = {k: v for k, v in specs[0].items() if k.startswith(wanted)}
        specs = kept, specs[1]
      multihost.run_on_all(
        functools.partial(_require_same_leaves, step, *specs)
      )
      if (state := self._try(step, self._load, abstract_state)) is None:
        continue
      if self._try(step, _require_sums, state, saved["checksums"]):
        return Restored(step, state, saved["user"])
      del state  # else it stays on the device during the next load
    if steps:
      raise multihost.AgreedError(
        f"none of the checkpoints {steps} in {self._orbax.directory} could be "
        "restored (the log says why); nothing was overwritten"
      )
    return None

  def _steps(self) -> list[int]:
    return [checkpoint.step for checkpoint in self._orbax.checkpoints]

  def _has(self, step: int) -> bool:
    if step not in self._steps() or step in self._bad:
      return False
    return self._try(step, self._read) is not None

  def _try(self, step: int, read: Callable, *args) -> Any:
    """What `read` returns; None if it fails on any process."""
    try:
      found, wrong = read(step, *args), ""
    except Exception as error:
      found, wrong = None, _cause(error)
    if not (causes := list(filter(None, multihost.allgather_text(wrong)))):
      return found
    if multihost.is_primary():
      logging.warning("checkpoint %d skipped: %s", step, causes[0])
    self._bad.add(step)
    return None

  def _read(self, step: int) -> dict[str, Any]:
    saved = self._orbax.checkpointables_metadata(step).custom_metadata or {}
    if missing := {"user", "specs", "checksums"} - saved.keys():
      raise ValueError(f"its metadata lacks {sorted(missing)}")
    return saved

  def _load(self, step: int, abstract_state: Any) -> Any:
    # Each process by itself: one that fails would leave the others waiting at
    # Orbax's barrier after a load, for five minutes.
    alone = ocp.Context()
    # A state of an earlier version lacks the fields that are None; which leaves
    # must be there is asked before.
    alone.pytree.loading.partial_load = True
    alone.multiprocessing.primary_host = jax.process_index()
    alone.multiprocessing.active_processes = {jax.process_index()}
    with alone:
      return ocp.load(
        self._orbax.directory / str(step),
        abstract_state,
        checkpointable_name="state",
      )


def _require(directory: str | os.PathLike) -> None:
  if not epath.Path(directory).is_dir():
    raise UserError(f"checkpoints in {str(directory)!r}: no such folder")


def _make(directory: str | os.PathLike) -> None:
  try:
    epath.Path(directory).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f"checkpoints in {str(directory)!r}: {error}") from error


def _require_sums(step: int, state: Any, wanted: dict[str, int]) -> bool:
  """True; ValueError naming a leaf of another checksum than `wanted`."""
  found = checksums(state)
  if wrong := [path for path in found if found[path] != wanted[path]]:
    raise ValueError(f"the checksum of {wrong[0]!r} differs, {len(wrong)=}")
  return True


def checksums(tree: Any) -> dict[str, int]:
  """One number below 2^32 for each leaf, the same under every sharding.

  sum_i m(w_i xor p_i) mod 2^32 over the words w_i of a leaf, where p_i is the
  position times an odd constant and m a bijection of 32 bits. Hence a change
  within one word is always seen, and one of several words, such as a swap,
  is missed once in 2^32.
  """
  sums = jax.device_get(_checksums(_leaves(tree)))
  return {path: int(value) for path, value in sums.items()}


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return {path: _checksum(leaf) for path, leaf in leaves.items()}


def _checksum(leaf: jax.Array) -> jax.Array:
  words = _words(leaf)
  position = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):  # a reshape would gather the shards
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position = position * jnp.uint32(size) + index
  mixed = words ^ (position * jnp.uint32(0x9E3779B1))
  # The finaliser of MurmurHash3. A plain weighted sum will not do: with odd
  # weights it cannot see x and -x trade places, 2^31 times an even number.
  mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
  return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(leaf: jax.Array) -> jax.Array:
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  if leaf.dtype == jnp.bool_:
    return leaf.astype(jnp.uint32)
  narrow = {1: jnp.uint8, 2: jnp.uint16}
  word = narrow.get(leaf.dtype.itemsize, jnp.uint32)  # 64 bits: two words
  return jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)


def _leaves(tree: Any) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def _specs(tree: Any) -> dict[str, str]:
  return {
    path: f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in _leaves(tree).items()
  }


def _require_same_leaves(step: int, found: dict, expected: dict) -> None:
  for path in sorted(found.keys() | expected.keys()):
    is_, should = found.get(path, "absent"), expected.get(path, "absent")
    if is_ != should:
      raise UserError(
        f"checkpoint {step} is of another model: leaf {path!r} is {is_}, "
        f"expected {should}"
      )


def _cause(error: BaseException) -> str:
  while deeper := error.__cause__ or error.__context__:
    error = deeper
  return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
