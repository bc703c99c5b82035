"""The policy as one who is asked: texts in, texts out."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data import pipeline
from gspo_jax.data.tasks import Problem
from gspo_jax.evaluate.judge import Responses
from gspo_jax.program.config import Config
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.many_prompts import sample_many
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, Prompts


class BatchShape(NamedTuple):
  """How answers to a set of questions are drawn.

  Attributes:
    group: answers that a question gets where it stands in a batch.
    times: how often a question stands in a batch, or in consecutive ones.
    rows: prompts of a batch.
  """

  group: int
  times: int
  rows: int


def batch_shape(
  config: Config, mesh: jax.sharding.Mesh, samples: int, questions: int
) -> BatchShape:
  """A batch for so many questions, of no more rows than they need.

  It holds all of them, or as many as give `data.prompts * sampler.group_size`
  answers, as in training; then there are several batches. Its rows are rounded
  up to a multiple of the devices, so that every mesh of them can split it.

  Args:
    config: from `config.parse`.
    mesh: of all devices.
    samples: answers a question.
    questions: of a set.

  Raises:
    UserError: a batch would be empty.
  """
  most, prompts = config.rollout.group_size, config.data.prompts
  for name, value in ("rollout.group_size", most), ("data.prompts", prompts):
    if value < 1:
      raise UserError(f"{name}={value}: expected at least 1")
  group = max(g for g in range(1, most + 1) if samples % g == 0)
  times = samples // group
  rows = min(prompts * (most // group), questions * times)
  return BatchShape(group, times, -(-rows // mesh.size) * mesh.size)


class PolicySampler:
  """Draws answers as a config says.

  One compiled function draws a batch. A question that gets more than
  `rollout.group_size` answers stands several times in it. At
  `sampler.temperature=0` the one answer is the likeliest.

  What only training uses is not checked, for its sizes may not fit to the
  devices at hand, nor its objective to another model.

  Args:
    config: from `config.parse`.
    mesh: of all devices.
    size: from `fit`.

  Attributes:
    program: the functions of the config, of which those that learn are not to
      be used.
    at_once: questions that fill a batch.
  """

  def __init__(self, config: Config, mesh: jax.sharding.Mesh, size: BatchShape):
    self._greedy = config.sampler.temperature == 0
    self._group, self._times, self._batch = size
    samples = self._group * self._times
    if self._greedy and samples > 1:
      raise UserError(
        f"sampler.temperature=0 gives {samples} times the same answer to a "
        "question: expected --samples=1"
      )
    self._limit = config.sampler.max_new_tokens
    self.at_once = max(self._batch // self._times, 1)
    config = config.replace(
      data={"prompts": self._batch},
      eval={"samples": self._group},
      rollout={"extra_prompts_in_flight": 0},
    )
    self.program = build_program(config, mesh, training=False)
    # A set is asked whole, or not at all.
    self._cfg = dataclasses.replace(
      self.program.prompt_config, too_long="error"
    )

  def read(self, questions: Sequence[str]) -> Prompts:
    """Questions as the policy reads them; UserError for a long one."""
    problems = [Problem(question, "", "") for question in questions]
    rows = pipeline.take(problems, self._cfg, len(problems))
    return Prompts(rows["tokens"], rows["length"])

  def reply(
    self, params: model.Params, questions: Sequence[str], key: jax.Array
  ) -> Responses:
    """Responses to some problems; the same on every process.

    Args:
      params: of the model.
      questions: any number of problems.
      key: of these responses alone.
    """
    prompts, decode = self.read(questions), self.program.tokenizer.decode
    rows = zip(prompts.tokens, prompts.lengths, strict=True)
    texts = [decode(row[len(row) - n :].tolist()) for row, n in rows]
    responses = Responses(texts, [], [], [], self._limit)
    functions = self.program.sampler
    repeat = lambda x: np.repeat(x, self._times, axis=0)
    for batch in sample_many(
      functions.generate_greedy if self._greedy else functions.generate_eval,
      params,
      Prompts(repeat(prompts.tokens), repeat(prompts.lengths)),
      key,
      batch_size=self._batch,
      batch_sharding=sharding.batch_sharding(self.program.mesh),
    ):
      samples, new = batch.samples, batch.new * self._group
      columns = multihost.to_host(
        (samples.tokens, samples.lengths, samples.finish)
      )
      for row, length, finish in zip(*(x[:new] for x in columns), strict=True):
        text = row[: length - (finish == STOPPED)].tolist()
        responses.texts.append(decode(text))
        responses.tokens.append(int(length))
        responses.truncated.append(bool(finish == TRUNCATED))
    return responses
