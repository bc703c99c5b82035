"""Policies that a run saved on its way, and their answers to new questions."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from gspo_jax import model
from gspo_jax.data import pipeline
from gspo_jax.data.tasks import Chain
from gspo_jax.learner import train_batch
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.model import rounding
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import Program
from gspo_jax.sampler.samples import Prompts, Samples


def weights(
  config: ConfigDict, program: Program, folder: Path, step: int
) -> model.Params:
  """Those after iteration `step` of the run in `folder`."""
  checkpoint = str(folder / "checkpoints" / str(step))
  return load_params.load(parse(config), program, checkpoint)


def questions(config: ConfigDict, program: Program) -> Iterator[Prompts]:
  """Endless batches of held-out chains, `data.prompts` in one."""
  chain = Chain(config.data.chain_steps, evaluation=True, seed=config.seed)
  batches = pipeline.prompts(
    chain, program.prompt_config, batch=config.data.prompts, seed=config.seed
  )
  return (Prompts(batch["tokens"], batch["length"]) for batch in batches)


def answers(
  program: Program, params: model.Params, prompts: Prompts, key: jax.Array
) -> tuple[Samples, TrainBatch]:
  """Answers of a policy, and the rollout with its own log-probs as the old."""
  samples = program.sampler.generate(params, prompts, key)
  batch = program.learner.make_train_batch(prompts, samples)
  # The routing is large, and studied elsewhere.
  batch = dataclasses.replace(batch, experts=None, router_logps=None)
  old_logps = log_probs(params, program.cfg, batch)
  return samples, dataclasses.replace(batch, old_logps=old_logps)


@functools.partial(
  jax.jit, static_argnames="cfg", compiler_options=rounding.OPTIONS
)
def log_probs(
  params: model.Params, cfg: model.ModelConfig, batch: TrainBatch
) -> jax.Array:
  """Of the answers' tokens at temperature 1, [B, R] float32."""
  return train_batch.logprobs(params, cfg, batch).logps
