"""Samples a policy's responses to problems."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data import pipeline
from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.program.config import Config
from gspo_jax.program.functions import build_program
from gspo_jax.program.sampler_functions import shards_of_rows
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout.scoring import ResponseDecoder
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.many_prompts import equal_batches, sample_many
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  FinishedResponse,
  Prompts,
)


class BatchShape(NamedTuple):
  """A problem gets `group_size * repeats` responses."""

  group_size: int  # responses to each prompt
  repeats: int  # prompts of each problem, perhaps in several batches
  prompts: int  # in a batch


def batch_shape(
  config: Config, mesh: jax.sharding.Mesh, samples: int, problems: int
) -> BatchShape:
  """The smallest batch for a benchmark.

  One batch holds all problems, or there are as few batches as possible, of
  about equal size, with at most `data.prompts * rollout.group_size` responses,
  as in training. The number of prompts is rounded up to a multiple of the
  devices that share rows. `samples` is the number of responses to each problem.
  """
  limit, prompts = config.rollout.group_size, config.data.prompts
  for name, value in ("rollout.group_size", limit), ("data.prompts", prompts):
    if value < 1:
      raise UserError(f"{name}={value}: expected at least 1")
  group_size = max(g for g in range(1, limit + 1) if samples % g == 0)
  repeats = samples // group_size
  most_prompts = prompts * (limit // group_size)
  if repeats > most_prompts:  # several batches for a problem
    size = equal_batches(repeats, most_prompts)
  else:
    size = repeats * equal_batches(problems, most_prompts // repeats)
  shards = shards_of_rows(config, mesh)
  return BatchShape(group_size, repeats, -(-size // shards) * shards)


class PolicySampler:
  """Samples responses as a config says, in batches of one shape.

  One compiled function samples all batches. A problem with more than
  `rollout.group_size` responses has several prompts. Responses are greedy at
  `sampler.temperature=0`.

  Keys that only training uses are not checked: they may not fit these devices
  or this model.

  Attributes:
    program: of the config, without the learner.
    batch_size: problems that fill a batch.
  """

  def __init__(
    self, config: Config, mesh: jax.sharding.Mesh, shape: BatchShape
  ):
    samples = shape.group_size * shape.repeats
    self._shape, self._greedy = shape, config.sampler.temperature == 0
    if self._greedy and samples > 1:
      raise UserError(
        f"sampler.temperature=0 gives {samples} equal responses to a problem: "
        "expected --samples=1"
      )
    self.batch_size = max(shape.prompts // shape.repeats, 1)
    config = config.replace(
      data={"prompts": shape.prompts},
      eval={"prompts": shape.prompts, "samples": shape.group_size},
    )
    self.program = build_program(config, mesh, training=False)

  def prompts(self, problems: Sequence[Problem]) -> PromptBatch:
    """The prompts of problems; UserError if one is too long."""
    # A benchmark is never shortened, whatever data.too_long says.
    config = dataclasses.replace(self.program.prompt_config, too_long="error")
    return pipeline.take(problems, config, len(problems))

  def sample(
    self,
    params: model.Params,
    problems: Sequence[Problem],
    key: jax.Array,
    progress: Progress | None = None,
  ) -> tuple[list[Response], list[bool]]:
    """Samples responses to any number of problems; the same on every process.

    Returns the responses, grouped by problem, and whether each was cut at
    `sampler.max_new_tokens`.
    """
    repeated = np.repeat(np.arange(len(problems)), self._shape.repeats)
    prompts = self.prompts(problems).pick(repeated)
    functions, group_size = self.program.sampler, self._shape.group_size
    responses, truncated = [], []
    for batch in sample_many(
      functions.generate_greedy if self._greedy else functions.generate_eval,
      params,
      Prompts(prompts.tokens, prompts.lengths),
      key,
      batch_size=self._shape.prompts,
      batch_sharding=sharding.batch_sharding(self.program.mesh),
      progress=progress,
    ):
      decode = ResponseDecoder(
        prompts.pick(batch.index),
        self.program.tokenizer,
        group_size,
        functions.stop,
      )
      samples = batch.samples
      columns = multihost.to_host(
        (samples.tokens, samples.lengths, samples.finish)
      )
      for row in range(batch.new * group_size):
        tokens, length, finish = (column[row] for column in columns)
        finished = FinishedResponse(tokens, int(length), finish == STOPPED)
        responses.append(decode(row, finished))
        truncated.append(bool(finish == TRUNCATED))
    return responses, truncated
