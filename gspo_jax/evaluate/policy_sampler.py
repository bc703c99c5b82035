"""The policy as one who is asked: texts in, texts out."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from gspo_jax import model
from gspo_jax.data import pipeline
from gspo_jax.data.tasks import Problem
from gspo_jax.evaluate.judge import Responses
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
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
  config: ConfigDict, mesh: jax.sharding.Mesh, samples: int, questions: int
) -> BatchShape:
  """A batch for so many questions, of no more rows than they need.

  It holds all of them, or as many as give `data.prompts * sampler.group_size`
  answers, as in training; then there are several batches. Its rows are rounded
  up to a multiple of the devices, so that every mesh of them can split it.

  Args:
    config: all the keys of configs/common.py.
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
    config: all the keys of configs/common.py.
    mesh: of all devices.
    size: from `fit`.

  Attributes:
    program: the functions of the config, of which those that learn are not to
      be used.
    at_once: questions that fill a batch.
  """

  def __init__(
    self, config: ConfigDict, mesh: jax.sharding.Mesh, size: BatchShape
  ):
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
    config = _without_learning(config)
    config.data.prompts, config.eval.samples = self._batch, self._group
    config.learner.micro_batch_size = self._batch * config.rollout.group_size
    if self._greedy:
      config.sampler.temperature = 1.0  # not for `generate_greedy`
    self.program = build_program(config, mesh)
    # A set is asked whole, or not at all.
    self._cfg = dataclasses.replace(self.program.prompting, too_long="error")

  def read(self, questions: Sequence[str]) -> Prompts:
    """Questions as the policy reads them; UserError for a long one."""
    problems = [Problem(question, "", "") for question in questions]
    rows = pipeline.take(problems, self._cfg, len(problems))
    return Prompts(rows["tokens"], rows["length"])

  def reply(
    self, params: model.Params, questions: Sequence[str], key: jax.Array
  ) -> Responses:
    """Answers some questions; the same on every process.

    Args:
      params: of the model.
      questions: any number of them.
      key: of these answers alone.
    """
    prompts, decode = self.read(questions), self.program.tokenizer.decode
    read = zip(prompts.tokens, prompts.lengths, strict=True)
    read = [decode(row[len(row) - n :].tolist()) for row, n in read]
    replies = Responses(read, [], [], [], self._limit)
    count = len(questions) * self._times
    for call, start in enumerate(range(0, count, self._batch)):
      # Filled up with the first prompts: one compiled function serves.
      index = np.arange(start, start + self._batch) % count // self._times
      batch = Prompts(prompts.tokens[index], prompts.lengths[index])
      drawn = self._draw(params, batch, jax.random.fold_in(key, call))
      new = min(self._batch, count - start) * self._group
      for row, length, finish in zip(*(x[:new] for x in drawn), strict=True):
        text = row[: length - (finish == STOPPED)].tolist()
        replies.texts.append(decode(text))
        replies.tokens.append(int(length))
        replies.truncated.append(bool(finish == TRUNCATED))
    return replies

  def _draw(self, params, batch, key):
    batch = multihost.to_global(
      batch, sharding.batch_sharding(self.program.mesh)
    )
    made = self.program
    draw = made.generate_greedy if self._greedy else made.generate_eval
    drawn = draw(params, batch, key)
    return multihost.to_host((drawn.tokens, drawn.lengths, drawn.finish))


def _without_learning(config: ConfigDict) -> ConfigDict:
  """A copy in which what only training uses has values that always fit."""
  config = config.copy_and_resolve_references()
  config.rollout.group_size = max(2, config.rollout.group_size)
  config.rollout.update(ahead=False, budget=0, spare=0)
  config.rollout.dynamic_sampling_rounds = config.learner.minibatches = 1
  config.cold_start.steps = 0
  config.objective.update(name="gspo", replay="none", mismatch="none")
  config.objective.update(reference_every=0, router_shift_floor=-1.0)
  config.objective.update(cap=-1.0, tau_positive=-1.0, tau_negative=-1.0)
  return config
