"""Policies that a run saved, and their responses to held-out problems."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from gspo_jax import model
from gspo_jax.data import datasets, pipeline
from gspo_jax.evaluate import held_out
from gspo_jax.learner import train_batch
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.model import rounding
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.experiment import prepare
from gspo_jax.program.functions import Program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import Prompts, Samples


def weights(
  config: ConfigDict, program: Program, folder: Path, step: int
) -> model.Params:
  """The weights after iteration `step` of the run in `folder`."""
  checkpoint = str(folder / "checkpoints" / str(step))
  return load_params.load(parse(config), program, checkpoint)


def accuracy(config: ConfigDict, folder: Path, step: int) -> float:
  """pass@1 after iteration `step` of the run in `folder`; 0: of its start.

  That is `eval/pass@1` with `eval.prompts` in one batch.
  """
  config = parse(config).replace(
    data={"prompts": config.eval.prompts}, eval={"every": 1}
  )
  mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
  with jax.set_mesh(mesh):
    experiment = prepare(config, str(folder), mesh)
    program, keys = experiment.program, experiment.keys
    if step:
      checkpoint = str(folder / "checkpoints" / str(step))
      params = load_params.load(config, program, checkpoint)
    else:
      params = program.init_params(keys.init)
    with experiment.reward_pool:
      return float(
        held_out.first_rewards(
          experiment,
          params,
          keys.evaluate,
          config.eval.samples,
          program.sampler.respond.config.params,
        ).mean()
      )


def prompts(config: ConfigDict, program: Program) -> Iterator[Prompts]:
  """Endless batches of `data.prompts` held-out chains."""
  chain = datasets.load(parse(config).data, config.seed).held_out
  batches = pipeline.prompts(
    chain, program.prompt_config, batch=config.data.prompts, seed=config.seed
  )
  return (Prompts(batch.tokens, batch.lengths) for batch in batches)


def responses(
  program: Program, params: model.Params, prompts: Prompts, key: jax.Array
) -> tuple[Samples, TrainBatch]:
  """Responses of a policy, and rows of one each with its own log-probs."""
  samples = program.sampler.generate(params, prompts, key)
  batch = _one_a_row(prompts, samples.tokens, samples.lengths)
  old_logps = log_probs(params, program.cfg, batch)
  return samples, dataclasses.replace(batch, old_logps=old_logps)


@jax.jit
def _one_a_row(prompts, responses, lengths):
  rows = train_batch.unpacked(prompts, responses, lengths)
  return sharding.constrain(rows, sharding.BATCH_AXES)


@functools.partial(
  jax.jit, static_argnames="cfg", compiler_options=rounding.OPTIONS
)
def log_probs(
  params: model.Params, cfg: model.ModelConfig, batch: TrainBatch
) -> jax.Array:
  """Log-probs of the responses at temperature 1, [B, R] float32."""
  return train_batch.response_logps(params, cfg, batch).logps
