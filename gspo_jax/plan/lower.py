"""The functions of a run, lowered with the shapes of its config."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.learner.packing import Packing
from gspo_jax.model import gpu
from gspo_jax.plan.chips import Topology
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import Prompts

# Functions that loop over the micro-batches of packed rows.
LEARNING = ("update", "old_logps", "reference_and_values")
FUNCTIONS = (*LEARNING, "decode_params", "prefill", "generate")


def functions(
  config: Config, program: Program, *, fewer_slots: bool = False
) -> dict[str, jax.stages.Lowered]:
  """The functions that a run has, by name.

  With a continuous sampler, `generate` is a segment of decode steps of all
  slots, `decode_params` prepares weights, and `prefill` takes the longest
  prompts. With `fewer_slots` there are also the segments `generate SLOTS`.
  """
  with gpu.for_absent(program.mesh.devices.flat[0]):
    rows = functools.partial(_with_batch_sharding, program.mesh)
    sampled = functools.partial(_with_batch_sharding, program.sampler.mesh)
    shape, S = jax.ShapeDtypeStruct, config.data.max_prompt_length
    prompts = lambda P: Prompts(
      shape((P, S), jnp.int32), shape((P,), jnp.int32)
    )
    P = config.data.prompts
    separate = program.sampler.separate
    lowered = program.sampler.generate.lower(
      separate.weights if separate else program.abstract_policy,
      # With partial responses, as many prompts more are in flight.
      sampled(prompts(2 * P if config.rollout.max_tokens_per_iteration else P)),
      jax.eval_shape(lambda: jax.random.key(0)),
      continues=config.rollout.continues,
      subsets=fewer_slots,
    )
    samples = program.sampler.empty_samples.lower().out_info
    B = P * program.learner.group_size
    trained_prompts = samples.prompts or prompts(P)
    ints = lambda size: shape((size,), jnp.int32)
    rows_of_batch = ints(B)
    packing = Packing(
      rows_of_batch, rows_of_batch, ints(program.learner.packing.minibatches)
    )
    batch = jax.tree.map(
      lambda x: shape(x.shape, x.dtype),
      program.learner.make_train_batch.lower(
        rows(trained_prompts), rows(samples), packing
      ).out_info,
    )
    learner = program.learner
    if learner.add_reference_and_values:
      teacher = rows(rows_of_batch) if len(learner.teachers) > 1 else None
      taught = (learner.teachers, teacher) if learner.teachers else ()
      lowered["reference_and_values"] = learner.add_reference_and_values.lower(
        learner.abstract, batch, *taught
      )
    lowered["update"] = learner.step.lower(
      learner.abstract, batch, shape((), jnp.bool_)
    )
    if learner.needs_old_logps:
      lowered["old_logps"] = lowered["update"]  # the same program
    return lowered


def has_pages(name: str, program: Program) -> bool:
  paged = program.sampler.generate.batching is not None
  return paged and name in ("prefill", "generate")


class Planned(NamedTuple):
  """A config, its program, and the devices to compile it for."""

  config: Config
  program: Program
  topology: Topology

  @property
  def responses(self) -> int:
    """The responses of an iteration."""
    return self.config.data.prompts * self.config.rollout.group_size

  @property
  def decode_rows(self) -> int:
    """The rows of a decode step that computes all, on all devices."""
    batching = self.program.sampler.generate.batching
    return batching.slots if batching else self.responses

  @property
  def cached_tokens(self) -> int:
    """The tokens that fit into the sampler's cache on all devices."""
    generate, config = self.program.sampler.generate, self.config
    if generate.batching:
      sizes = generate.sizes
      return sizes.num_pages * sizes.page_size * generate.shards
    prompts = config.data.prompts * config.data.max_prompt_length
    return prompts + self.responses * (config.sampler.max_new_tokens - 1)

  @property
  def longest(self) -> int:
    """The length T of the longest prefill: a prompt or a resumed response."""
    continues = self.config.rollout.continues
    return self.program.sampler.generate.buckets(continues=continues)[-1]


def _with_batch_sharding(mesh, tree):
  batch, single = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=batch if x.shape else single
    ),
    tree,
  )
