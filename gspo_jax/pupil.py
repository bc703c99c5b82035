"""The policy as one who is asked: texts in, texts out."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from gspo_jax import data, hosts, model, program, sharding
from gspo_jax.errors import UserError
from gspo_jax.exam import Replies
from gspo_jax.sampler import STOPPED, TRUNCATED, Prompts
from gspo_jax.tasks import Problem


class Pupil:
  """Draws `samples` answers a question as a config says.

  One compiled function draws `data.prompts * sampler.group_size` answers at
  once, or a little less where their number does not divide. A question that
  gets more than `sampler.group_size` of them stands several times in a batch.
  At `sampler.temperature=0` the one answer is the likeliest.

  Args:
    config: all the keys of configs/common.py.
    mesh: of all devices.
    samples: answers a question.

  Attributes:
    program: the functions of the config.
    at_once: questions that fill a batch.
  """

  def __init__(self, config: ConfigDict, mesh: jax.sharding.Mesh, samples: int):
    self._greedy = config.sampler.temperature == 0
    if self._greedy and samples > 1:
      raise UserError(
        f"sampler.temperature=0 gives {samples} times the same answer to a "
        "question: expected --samples=1"
      )
    most = config.sampler.group_size
    self._group = max(g for g in range(1, most + 1) if samples % g == 0)
    self._times = samples // self._group  # a question stands in a batch
    self._batch = config.data.prompts * (most // self._group)
    self._limit = config.sampler.max_new_tokens
    self.at_once = max(self._batch // self._times, 1)
    config = config.copy_and_resolve_references()
    config.eval.samples = self._group
    if self._greedy:
      config.sampler.temperature = 1.0  # not for `generate_greedy`
    self.program = program.build(config, mesh)
    # A set is asked whole, or not at all.
    self._cfg = dataclasses.replace(self.program.prompting, too_long="error")

  def read(self, questions: Sequence[str]) -> Prompts:
    """Questions as the policy reads them; UserError for a long one."""
    problems = [Problem(question, "", "") for question in questions]
    rows = data.take(problems, self._cfg, len(problems))
    return Prompts(rows["tokens"], rows["length"])

  def reply(
    self, params: model.Params, questions: Sequence[str], key: jax.Array
  ) -> Replies:
    """Answers some questions; the same on every process.

    Args:
      params: of the model.
      questions: any number of them.
      key: of these answers alone.
    """
    prompts, decode = self.read(questions), self.program.tokenizer.decode
    read = zip(prompts.tokens, prompts.lengths, strict=True)
    read = [decode(row[len(row) - n :].tolist()) for row, n in read]
    replies = Replies(read, [], [], [], self._limit)
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
    batch = hosts.lay(batch, sharding.rows(self.program.mesh))
    made = self.program
    draw = made.generate_greedy if self._greedy else made.generate_eval
    drawn = draw(params, batch, key)
    return hosts.fetch((drawn.tokens, drawn.lengths, drawn.finish))
