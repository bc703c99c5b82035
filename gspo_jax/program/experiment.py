"""What a run is made of before its first step, and what it must agree with."""

import json
from typing import NamedTuple

import jax
from etils import epath
from ml_collections import ConfigDict

from gspo_jax.data import datasets, pipeline
from gspo_jax.program import load_params
from gspo_jax.program.functions import Program, build_program
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.runtime.errors import UserError


class Keys(NamedTuple):
  """One key for each use of chance; a step folds its number into `steps`."""

  init: jax.Array
  imitate: jax.Array
  evaluate: jax.Array
  steps: jax.Array


class Experiment(NamedTuple):
  """What stays the same from the first step to the last.

  Attributes:
    config: all the keys of configs/common.py.
    workdir: where everything is written.
    program: the jitted functions, and the tokenizer.
    scorer: the processes that reward answers.
    material: questions.
    held_out: `eval.prompts` of the held-out questions, as one batch.
    identity: what a checkpoint, and a cold start, must agree with to be of
      this run.
    keys: of everything random.
  """

  config: ConfigDict
  workdir: epath.Path
  program: Program
  scorer: RewardPool
  datasets: datasets.Datasets
  held_out: dict
  identity: dict
  keys: Keys


def prepare(
  config: ConfigDict, workdir: str, mesh: jax.sharding.Mesh
) -> Experiment:
  """What a process can check by itself, before any work.

  Raises:
    UserError: the config or the data cannot work as they are.
  """
  functions = build_program(config, mesh)
  found = datasets.load(config)
  identity = load_params.identity(functions) | {
    "seed": config.seed,
    "data": {"fingerprint": datasets.fingerprint(found.stages)},
  }
  return Experiment(
    config=config,
    workdir=epath.Path(workdir),
    program=functions,
    scorer=_scorer(config.reward),
    material=found,
    held_out=pipeline.take(
      found.held_out, functions.prompting, config.eval.prompts
    ),
    identity=identity,
    keys=Keys(*jax.random.split(jax.random.key(config.seed), 4)),
  )


def _scorer(c: ConfigDict) -> RewardPool:
  try:
    return RewardPool(c.names, c.weights, workers=c.workers, seconds=c.seconds)
  except UserError as error:
    raise UserError(f"reward.names={tuple(c.names)}: {error}") from error


def checkpoint_identity(run: Experiment) -> dict:
  """What a state of RL must agree with, more than a cold start's."""
  more, state = {}, run.program.abstract
  if state.reference is not None:
    more["a reference (objective.kl_coef)"] = True
  if state.critic is not None:
    more["a critic (objective.name='ppo')"] = True
  c = run.config
  if c.rollout.one_step_off_policy:
    more["answers drawn ahead (rollout.one_step_off_policy)"] = True
  if c.rollout.max_tokens_per_iteration:
    more["answers in flight (rollout.extra_prompts_in_flight)"] = (
      c.rollout.extra_prompts_in_flight
    )
  if c.rollout.one_step_off_policy or c.rollout.max_tokens_per_iteration:
    # Answers that wait were drawn for these prompts, and are of this shape.
    for key in ("prompts", "max_prompt_length", "system_prompt", "instruction"):
      more[f"data.{key}"] = c.data[key]
    for key in ("group_size", "max_new_tokens"):
      more[f"sampler.{key}"] = c.sampler[key]
  return run.identity | more


def config_as_json(config: ConfigDict) -> dict:
  """A config as JSON gives it back, for a checkpoint."""
  return json.loads(config.to_json_best_effort())


def iteration_keys(run: Experiment, step: int) -> tuple[jax.Array, jax.Array]:
  """To draw answers with, and to shuffle them."""
  return tuple(jax.random.split(jax.random.fold_in(run.keys.steps, step)))
