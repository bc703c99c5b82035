"""The functions of a run, lowered for the shapes of its config.

Dimension key: P prompts, S prompt slots, B decode slots, N prompts of a
prefill, T their tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspo_jax.learner.packing import Packing
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.decode_params import decode_params_sharding
from gspo_jax.sampler.paged_decode import SegmentPlan
from gspo_jax.sampler.samples import Prompts

FUNCTIONS = (
  "update",
  "old_logprobs",
  "reference_and_values",
  "decode_params",
  "prefill",
  "generate",
)
# Those that loop over the micro-batches of packed rows.
LEARNING = ("update", "old_logprobs", "reference_and_values")


def functions(
  config: Config, program: Program
) -> dict[str, jax.stages.Lowered]:
  """The functions that a run has, by name.

  With `continuous_batching.slots`, `generate` is a segment of decode steps,
  `decode_params` prepares the weights of a batch, and `prefill` stores the
  longest prompts.
  """
  rows = functools.partial(_with_batch_sharding, program.mesh)
  sampled = functools.partial(_with_batch_sharding, program.sampler.mesh)
  P, S = config.data.prompts, config.data.max_prompt_length
  shape = jax.ShapeDtypeStruct
  prompts = Prompts(shape((P, S), jnp.int32), shape((P,), jnp.int32))
  key = jax.eval_shape(lambda: jax.random.key(0))
  if isinstance(program.sampler.generate, ContinuousSampler):
    lowered, samples = lower_continuous_sampler(config, program, key)
  else:
    lowered = {
      "generate": program.sampler.generate.lower(
        sampler_weights(program), sampled(prompts), key
      )
    }
    samples = lowered["generate"].out_info
  if config.rollout.environment:
    turns = shape(samples.tokens.shape, jnp.int16)
    samples = dataclasses.replace(samples, turns=turns)
  ints = lambda size: shape((size,), jnp.int32)
  rows_of_batch = ints(P * config.rollout.group_size)
  packing = Packing(
    rows_of_batch, rows_of_batch, ints(program.learner.packing.minibatches)
  )
  batch = jax.tree.map(
    lambda x: shape(x.shape, x.dtype),
    program.learner.make_train_batch.lower(
      rows(prompts), rows(samples), packing
    ).out_info,
  )
  if program.learner.add_reference_and_values:
    lowered["reference_and_values"] = (
      program.learner.add_reference_and_values.lower(
        program.learner.abstract, batch
      )
    )
  apply_updates = shape((), jnp.bool_)
  lowered["update"] = program.learner.step.lower(
    program.learner.abstract, batch, apply_updates
  )
  if program.learner.needs_old_logprobs:
    lowered["old_logprobs"] = lowered["update"]  # the same program
  return lowered


def sampler_mesh(program: Program) -> jax.sharding.Mesh:
  """The mesh that responses are sampled on."""
  paged = isinstance(program.sampler.generate, ContinuousSampler)
  return (
    program.sampler.generate.jitted.decode
    if paged
    else program.sampler.generate
  ).mesh


def sampler_devices(program: Program) -> list[jax.Device]:
  """The sampler's own devices; none, if it shares those of the trainer."""
  sampler = program.sampler
  return [*sampler.mesh.devices.flat] if sampler.separate else []


def has_pages(name: str, program: Program) -> bool:
  """Whether a function reads or writes the pages of a continuous sampler."""
  continuous = isinstance(program.sampler.generate, ContinuousSampler)
  return continuous and name in ("prefill", "generate")


def cached_tokens(config: Config, program: Program) -> int:
  """All tokens that the sampler's cache has room for, over all devices."""
  generate = program.sampler.generate
  if isinstance(generate, ContinuousSampler):
    sizes = generate.sizes
    return sizes.num_pages * sizes.page_size * generate.shards
  prompts, new_tokens = config.data.prompts, config.sampler.max_new_tokens
  responses = prompts * config.rollout.group_size
  return prompts * config.data.max_prompt_length + responses * (new_tokens - 1)


def sampler_weights(program: Program):
  """The policy as the sampler is given it."""
  separate = program.sampler.separate
  return separate.weights if separate else program.abstract_policy


def lower_continuous_sampler(config, program, key, compute_slots=None):
  """The parts of a continuous sampler, and the shapes of its samples.

  With `compute_slots`, int32 [b], a segment computes only those slots.
  """
  sampler = program.sampler.generate
  decode_params = sampler.jitted.decode_params.lower(sampler_weights(program))
  params = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    decode_params.out_info,
    decode_params_sharding(program.cfg, sampler.jitted.decode.mesh),
  )
  batch_prompts = config.data.prompts
  extra = config.rollout.extra_prompts_in_flight
  empty = sampler.jitted.empty_samples.lower(batch_prompts + extra).out_info
  state, samples = sampler.jitted.begin.lower(empty, None).out_info
  T = longest(config, sampler)
  N = sampler.prefill_batch(T) * sampler.shards
  ints = lambda *dims: jax.ShapeDtypeStruct(
    dims, jnp.int32, sharding=sampler.batch_sharding
  )
  prompts = ints(N, T), ints(N), ints(N, T // sampler.sizes.page_size)
  min_active = jax.ShapeDtypeStruct((), jnp.int32)
  # Every field of a SegmentPlan has one row a slot.
  table, active = state.pages.table, state.pages.active
  fields = dict.fromkeys(SegmentPlan.__dataclass_fields__, state.pages.lengths)
  segment_plan = SegmentPlan(
    **fields | {"table": table, "active": active, "new": active}
  )
  lowered = {
    "decode_params": decode_params,
    "prefill": sampler.jitted.prefill.lower(params, state, *prompts, None),
    "generate": sampler.jitted.decode.lower(
      params, state, samples, segment_plan, compute_slots, min_active, key
    ),
  }
  return lowered, sampler.jitted.empty_samples.lower(batch_prompts).out_info


def longest(config, sampler: ContinuousSampler) -> int:
  """T of the longest prompts, or of responses that continue."""
  return sampler.buckets(continues=config.rollout.continues)[-1]


def _with_batch_sharding(mesh, tree):
  batch, single = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=batch if x.shape else single
    ),
    tree,
  )
