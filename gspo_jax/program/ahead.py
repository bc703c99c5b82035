"""The programs of a run's first iteration, compiled beside each other.

A compilation takes one core for seconds. JAX keeps what is compiled here, and a
call with equal shapes, types and shardings finds it.
"""

import os
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.learner.packing import Packing
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import Prompts


def compile_first(
  config: Config, program: Program, key: jax.Array, *, resumed: bool
) -> None:
  """Compiles on all cores what the run calls next, and waits.

  `key` is any key of the run. Not for several processes, nor for a sampler that
  is continuous or has its own devices: their calls compile.
  """
  if jax.process_count() > 1:
    return
  lowered = learning(config, program)
  sampler = program.sampler
  if not (sampler.generate.batching or sampler.separate):
    lowered += _sampling(config, program, key, resumed=resumed)
  if not resumed:
    lowered += _cold_start(config, program, key)
  with futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    for compiled in [threads.submit(one.compile) for one in lowered]:
      compiled.result()


def learning(config: Config, program: Program) -> list[jax.stages.Lowered]:
  """What turns samples into an update, in the order of the calls."""
  learner, P = program.learner, config.data.prompts
  samples = rows(program.mesh, program.sampler.empty_samples.lower().out_info)
  ints = _ints(P * config.rollout.group_size)
  packing = Packing(ints, ints, _ints(learner.packing.minibatches))
  made = learner.make_train_batch.lower(
    _prompts(config, program, P), samples, packing
  )
  lowered, batch = [made], made.out_info
  if learner.add_reference_and_values:
    lowered.append(
      learner.add_reference_and_values.lower(learner.abstract, batch)
    )
  return [*lowered, learner.step.lower(learner.abstract, batch, np.bool_(True))]


def rows(mesh: jax.sharding.Mesh, tree):
  """Shapes with the rows split over the devices, as samples and batches are."""
  split, single = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  place = lambda x: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=split if x.shape else single
  )
  return jax.tree.map(place, tree)


def _sampling(config, program, key, *, resumed):
  sampler = program.sampler
  # By identity: one sampler may serve for training and evaluation.
  sizes = {id(sampler.generate): (sampler.generate, config.data.prompts)}
  evaluations = []
  if not resumed and config.eval.every:
    evaluations = [sampler.generate_eval, sampler.generate_greedy]
  elif not resumed and config.cold_start.steps:
    evaluations = [sampler.generate_greedy]
  for generate in evaluations:
    sizes[id(generate)] = generate, sampler.eval_prompts
  return [
    lowered
    for generate, P in sizes.values()
    for lowered in generate.lower(
      program.abstract_policy, _prompts(config, program, P), key
    ).values()
  ]


def _cold_start(config, program, key):
  """The first weights, and an update of their cold start if there is one."""
  lowered = []
  if not config.model.checkpoint:
    lowered.append(program.init_params.lower(key))
  if config.cold_start.steps:
    P, R = config.cold_start.batch, config.sampler.max_new_tokens
    turns = None
    if config.rollout.environment:
      turns = jax.ShapeDtypeStruct((P, R), jnp.int16)
    update = program.cold_start.update.lower(
      program.cold_start.abstract,
      _prompts(config, program, P),
      *rows(program.mesh, (_ints(P, R), _ints(P), turns)),
      Packing(_ints(P), _ints(P), _ints(1)),
    )
    lowered.append(update)
  return lowered


def _prompts(config, program, P):
  S = config.data.max_prompt_length
  return rows(program.mesh, Prompts(_ints(P, S), _ints(P)))


def _ints(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)
