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
  """The functions that a run has, of `FUNCTIONS`, by name.

  With `continuous_batching.slots`, `generate` is a segment of decode steps,
  `decode_params` prepares the weights for all segments of a batch, and
  `prefill` stores the longest prompts.
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
  packing = _packing_shapes(config, program)
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


def _packing_shapes(config, program) -> Packing:
  B = config.data.prompts * config.rollout.group_size
  ints = lambda size: jax.ShapeDtypeStruct((size,), jnp.int32)
  return Packing(ints(B), ints(B), ints(program.learner.packing.minibatches))


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
  empty_samples = sampler.jitted.empty_samples
  empty = empty_samples.lower(config.prompts_in_flight).out_info
  state, samples = sampler.jitted.begin.lower(empty, None).out_info
  prompts = _prompts(config, sampler)
  min_active = jax.ShapeDtypeStruct((), jnp.int32)
  segment_plan = _segment_plan_shapes(state)
  lowered = {
    "decode_params": decode_params,
    "prefill": sampler.jitted.prefill.lower(params, state, *prompts, None),
    "generate": sampler.jitted.decode.lower(
      params, state, samples, segment_plan, compute_slots, min_active, key
    ),
  }
  return lowered, empty_samples.lower(config.data.prompts).out_info


def _prompts(config, sampler):
  """Tokens, lengths and pages of a prefill of the longest prompts."""
  T = longest(config, sampler)
  N = sampler.prefill_batch(T) * sampler.shards
  whole = lambda *dims: jax.ShapeDtypeStruct(
    dims, jnp.int32, sharding=sampler.batch_sharding
  )
  return whole(N, T), whole(N), whole(N, T // sampler.sizes.page_size)


def longest(config, sampler: ContinuousSampler) -> int:
  """T of the longest prompts, or of responses that continue."""
  return sampler.buckets(continues=config.rollout.continues)[-1]


def _segment_plan_shapes(state):
  """Shapes of a SegmentPlan; every field has one row a slot."""
  pages = state.pages
  per_slot = {"table": pages.table, "active": pages.active, "new": pages.active}
  names = SegmentPlan.__dataclass_fields__
  return SegmentPlan(
    **{name: per_slot.get(name, pages.lengths) for name in names}
  )


def _with_batch_sharding(mesh, tree):
  """Shapes of a batch, with shardings."""
  batch, single = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=batch if x.shape else single
    ),
    tree,
  )
