"""Whether a function fits into HBM, and how many pages the rest can hold."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from gspo_jax.model import ModelConfig, paged_cache
from gspo_jax.model import cache as kv_cache
from gspo_jax.plan import lower_bounds
from gspo_jax.plan.chips import Topology
from gspo_jax.plan.compile import Memory
from gspo_jax.plan.lower import LEARNING, has_pages
from gspo_jax.program import abstract
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program
from gspo_jax.rollout import reward_model
from gspo_jax.runtime.errors import prefixed
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.continuous.config import PROMPT_ROWS

KEY = "continuous_batching.num_pages"
# Share of the HBM that stays free, for executables and fragmentation.
MARGIN = 0.08
_LANES = 128  # a TPU pads an array's last dimension to a multiple


def resident(
  name: str, program: Program, max_staleness: int = 0, scorer_bytes: int = 0
) -> int:
  """Bytes of state on a device that the function does not read.

  `scorer_bytes`: of a reward model on a device of the trainer.
  """
  separate = program.sampler.separate
  if separate and name not in LEARNING:
    # Each batch queued ahead holds its own copy of the sampler's weights.
    # prefill and generate take `decode_params` instead, so the copy of their
    # own batch is added.
    copies = max_staleness + has_pages(name, program)
    return copies * array_bytes(separate.weights)
  size = array_bytes(_unread(name, program.learner.abstract))
  if name != "reference_and_values":
    size += array_bytes(program.learner.teachers)
  if has_pages(name, program):
    size += array_bytes(program.abstract_policy)
  if separate:
    size += array_bytes(separate.in_transit)
  return size + scorer_bytes


def memory(
  name: str, compiled: Memory, resident: int, topology: Topology
) -> dict:
  """Report of a compiled function beside `resident` bytes of other state."""
  needed, hbm = compiled.needed + resident, topology.chip.hbm
  sizes = {"resident": resident, "needed": needed, "free": hbm - needed}
  report = {"memory": dataclasses.asdict(compiled) | sizes}
  if needed > hbm:
    report["fits"] = False
    report["reason"] = (
      f"{needed / 2**30:.2f} GiB needed, {resident / 2**30:.2f} of it for "
      f"state that {name} does not read, but {hbm / 2**30:.2f} GiB there"
    )
  return report


def _unread(name, state):
  """The state that stays in HBM although the function does not read it."""
  if name in ("update", "old_logps"):
    return None
  moments = state.opt_state, state.critic and state.critic.opt_state
  if name == "reference_and_values":
    return state.params, moments
  return moments, state.reference, state.critic and state.critic.params


def reward_model_bytes(config: Config, mesh: jax.sharding.Mesh) -> int:
  """Bytes on one device of the weights of the reward model, if there is one."""
  if not (folder := reward_model.folder_of(config.reward.names)):
    return 0
  dtype = config.model.dtype
  with prefixed(f"reward.names={config.reward.names}"):
    weights = abstract.params(reward_model.config(folder, dtype), mesh)
  return array_bytes(weights) * jnp.dtype(dtype).itemsize // 4  # of float32


def array_bytes(tree) -> int:
  """Bytes on one device of a tree of shapes with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def page_bytes(cfg: ModelConfig, sampler: ContinuousSampler) -> int:
  """Bytes of a page on a device; of a TPU at most, for heads under 128 wide."""
  mesh, sizes = sampler.mesh, sampler.sizes
  with jax.set_mesh(mesh):
    arrays = jax.eval_shape(
      lambda: paged_cache.empty(
        cfg,
        num_slots=sampler.shards,
        num_pages=sampler.shards,
        page_size=sizes.page_size,
        pages_per_slot=sizes.pages_per_slot,
      )
    )
  size = 0
  lanes = 1 if mesh.devices.flat[0].platform == "gpu" else _LANES
  for layer in arrays.kv:
    axis = kv_cache.heads_axis(layer)
    split = mesh.shape[axis] if axis else 1
    for x in layer:
      heads, _, tokens, width = x.shape
      width = -(-width // lanes) * lanes
      size += heads // split * tokens * width * x.dtype.itemsize
  return size


def state_bytes(cfg: ModelConfig, sampler: ContinuousSampler) -> int:
  """Bytes on one device of states: of its slots and of waiting prompts."""
  slots = sampler.sizes.slots + PROMPT_ROWS
  return slots * lower_bounds.state_bytes(cfg) // sampler.mesh.shape["tensor"]


def room(
  needed: float, hbm: float, cfg: ModelConfig, sampler: ContinuousSampler
) -> dict:
  """The largest pool of pages beside the rest of a function.

  `needed` of the `hbm` bytes of a device are in use, with the sampler's pages.
  The result counts over all devices: `num_pages` of the sampler; the `largest`
  pool that leaves `MARGIN` of the HBM free; `slots_of_longest`, how many of the
  longest responses it holds; and `tokens_a_slot`, an equal share of it.
  """
  sizes, shards = sampler.sizes, sampler.shards
  size = page_bytes(cfg, sampler)
  more = math.floor((hbm * (1 - MARGIN) - needed) / size)
  largest = max(sizes.num_pages + more, 0)
  return {
    "num_pages": sizes.num_pages * shards,
    "largest": largest * shards,
    "slots_of_longest": largest // (sizes.pages_per_slot + 1) * shards,
    "tokens_a_slot": largest * sizes.page_size // sizes.slots,
    "page_bytes": size,
    "state_bytes": state_bytes(cfg, sampler),
    "margin": MARGIN,
  }


def advice(room: dict) -> str:
  return (
    f"{KEY}={room['num_pages']}: expected at most {room['largest']}, which "
    f"leave {room['margin']:.0%} of the HBM free"
  )
