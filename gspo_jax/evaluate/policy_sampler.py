"""Samples a policy's responses to problems."""

import dataclasses
from collections.abc import Sequence

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
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  FinishedResponse,
  Prompts,
)


class PolicySampler:
  """Samples `samples` responses to each of many problems, as a config says.

  Responses are greedy at `sampler.temperature=0`. Batches are as few as
  possible, of about equal size, with at most `data.prompts *
  rollout.group_size` responses, as in training; the responses to a problem are
  always in one batch.

  Keys that only training uses are not checked: they may not fit these devices
  or this model.

  Attributes:
    program: of the config, without the learner.
    batch_size: problems that fill a batch.
  """

  def __init__(
    self,
    config: Config,
    mesh: jax.sharding.Mesh,
    *,
    samples: int,
    problems: int,
  ):
    limit = config.rollout.group_size * config.data.prompts
    if config.sampler.temperature == 0 and samples > 1:
      raise UserError(
        f"sampler.temperature=0 gives {samples} equal responses to a problem: "
        "expected --samples=1"
      )
    batches = -(-problems // max(limit // samples, 1))
    self._samples, self.batch_size = samples, -(-problems // batches)
    shards = shards_of_rows(config, mesh)
    prompts = self._prompts = -(-self.batch_size // shards) * shards
    config = config.replace(
      data={"prompts": prompts}, eval={"prompts": prompts, "samples": samples}
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
    functions, responses, truncated = self.program.sampler, [], []
    for i, begin in enumerate(range(0, len(problems), self.batch_size)):
      some = problems[begin : begin + self.batch_size]
      count = len(some) * self._samples
      # All batches have one shape; nothing is sampled for padding.
      prompts = self.prompts(some).pick(np.arange(self._prompts) % len(some))
      stop_at = np.zeros(self._prompts * self._samples, int)
      stop_at[:count] = functions.respond.config.max_new_tokens
      batch_key = jax.random.fold_in(key, i)
      samples = functions.respond(
        params,
        Prompts(prompts.tokens, prompts.lengths),
        sharding.key_beside(functions.respond.batch_sharding, batch_key),
        group_size=self._samples,
        stop_at=stop_at,
        progress=progress,
      )
      decode = ResponseDecoder(
        prompts, self.program.tokenizer, self._samples, functions.stop
      )
      columns = multihost.to_host(
        (samples.tokens, samples.lengths, samples.finish)
      )
      for row in range(count):
        tokens, length, finish = (column[row] for column in columns)
        finished = FinishedResponse(tokens, int(length), finish == STOPPED)
        responses.append(decode(row, finished))
        truncated.append(bool(finish == TRUNCATED))
    return responses, truncated
