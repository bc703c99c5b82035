"""The functions of a run, lowered for the shapes of its config.

Dimension key: P prompts, S prompt slots, B decode slots, N prompts of a
prefill, T their tokens.
"""

import functools

import jax
import jax.numpy as jnp

from gspo_jax.learner.packing import Packing
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.samples import Prompts

FUNCTIONS = (
  "update",
  "old_logps",
  "reference_and_values",
  "decode_params",
  "prefill",
  "generate",
)
# Those that loop over the micro-batches of packed rows.
LEARNING = ("update", "old_logps", "reference_and_values")


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
  shape, S = jax.ShapeDtypeStruct, config.data.max_prompt_length
  prompts = lambda P: Prompts(shape((P, S), jnp.int32), shape((P,), jnp.int32))
  P = config.data.prompts
  lowered = program.sampler.generate.lower(
    sampler_weights(program),
    sampled(prompts(config.prompts_in_flight)),
    jax.eval_shape(lambda: jax.random.key(0)),
    continues=config.rollout.continues,
  )
  samples = program.sampler.empty_samples.lower().out_info
  packing = _packing_shapes(config, program)
  batch = jax.tree.map(
    lambda x: shape(x.shape, x.dtype),
    program.learner.make_train_batch.lower(
      rows(prompts(P)), rows(samples), packing
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
  if program.learner.needs_old_logps:
    lowered["old_logps"] = lowered["update"]  # the same program
  return lowered


def _packing_shapes(config, program) -> Packing:
  B = config.data.prompts * config.rollout.group_size
  ints = lambda size: jax.ShapeDtypeStruct((size,), jnp.int32)
  return Packing(ints(B), ints(B), ints(program.learner.packing.minibatches))


def sampler_mesh(program: Program) -> jax.sharding.Mesh:
  """The mesh that responses are sampled on."""
  return program.sampler.generate.mesh


def sampler_devices(program: Program) -> list[jax.Device]:
  """The sampler's own devices; none, if it shares those of the trainer."""
  sampler = program.sampler
  return [*sampler.mesh.devices.flat] if sampler.separate else []


def has_pages(name: str, program: Program) -> bool:
  """Whether a function reads or writes the pages of a continuous sampler."""
  paged = program.sampler.generate.batching is not None
  return paged and name in ("prefill", "generate")


def cached_tokens(config: Config, program: Program) -> int:
  """All tokens that the sampler's cache has room for, over all devices."""
  generate = program.sampler.generate
  if generate.batching:
    sizes = generate.sizes
    return sizes.num_pages * sizes.page_size * generate.shards
  prompts, new_tokens = config.data.prompts, config.sampler.max_new_tokens
  responses = prompts * config.rollout.group_size
  return prompts * config.data.max_prompt_length + responses * (new_tokens - 1)


def sampler_weights(program: Program):
  """The policy as the sampler is given it."""
  separate = program.sampler.separate
  return separate.weights if separate else program.abstract_policy


def longest(config, sampler: ContinuousSampler) -> int:
  """T of the longest prompts, or of responses that continue."""
  return sampler.buckets(continues=config.rollout.continues)[-1]


def _with_batch_sharding(mesh, tree):
  """Shapes of a batch, with shardings."""
  batch, single = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=batch if x.shape else single
    ),
    tree,
  )
