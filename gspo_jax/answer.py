"""From drawn tokens to marks: texts of answers, and what the rewards say."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax import hosts, model
from gspo_jax.rewards.pool import Answer, Scorer
from gspo_jax.sampler import STOPPED, Prompts, Samples
from gspo_jax.tokenizer import Tokenizer

# Draws answers to a fixed number of prompts.
Generate = Callable[[model.Params, Prompts, jax.Array], Samples]


class Marks(NamedTuple):
  """What answers to P problems, G each, earned.

  Attributes:
    total: [P, G] float32, the weighted sum of the parts; 0 where one failed.
    parts: {name of a reward: [P, G] float32}, unweighted.
    failed: [P, G] bool, a reward could not be computed.
    reasons: why not, of a few on this host.
  """

  total: np.ndarray
  parts: dict[str, np.ndarray]
  failed: np.ndarray
  reasons: tuple[str, ...]

  @property
  def correct(self) -> np.ndarray:
    """[P, G], the verdict of the first reward: what accuracy means."""
    return next(iter(self.parts.values()))


def read(
  samples: Samples, batch: dict, tokenizer: Tokenizer
) -> dict[int, Answer]:
  """The answers of this host's rows, by row, without their stop tokens.

  Their prompts are what the policy read, a chat template with all its tokens.

  Args:
    samples: P * G rows; the G answers to a prompt stand side by side.
    batch: P prompts, of `data.prompts` or `data.take`.
    tokenizer: of the policy.
  """
  rows, limit = samples.tokens.shape
  group = rows // len(batch["problems"])
  lengths, finish = hosts.own(samples.lengths), hosts.own(samples.finish)

  @functools.cache
  def prompt(p):
    tokens = batch["tokens"][p]
    return tokenizer.decode(tokens[len(tokens) - batch["length"][p] :].tolist())

  def answer(i, tokens):
    problem, length = batch["problems"][i // group], int(lengths[i])
    text = tokenizer.decode(tokens[: length - (finish[i] == STOPPED)].tolist())
    return Answer(prompt(i // group), text, problem.answer, length, limit)

  return {i: answer(i, row) for i, row in hosts.own(samples.tokens).items()}


def mark(
  scorer: Scorer, answers: Mapping[int, Answer], group: int, rows: jax.Array
) -> Callable[[], Marks]:
  """Begins to score this host's answers; call the result for all hosts' marks.

  Args:
    scorer: the pool of processes.
    answers: from `read`.
    group: G.
    rows: [P * G], any array that lies over the hosts as the answers do.
  """
  pending = scorer.submit(list(answers.values()))

  def collect() -> Marks:
    scores = pending.result()

    def join(values):
      own = dict(zip(answers, values, strict=True))
      return hosts.join(own, rows).reshape(-1, group)

    return Marks(
      total=join(scores.total),
      parts={name: join(part) for name, part in scores.parts.items()},
      failed=join(scores.failed) > 0,
      reasons=scores.reasons,
    )

  return collect


def answer_all(
  generate: Generate,
  params,
  questions: dict,
  *,
  batch: int,
  key: jax.Array,
  rows: jax.sharding.Sharding,
  tokenizer: Tokenizer,
  scorer: Scorer,
) -> np.ndarray:
  """Whether answers are right, [N, G], for all questions (of `data.take`).

  `batch` questions at a time. The last batch is filled up with the first
  questions, so that one compiled `generate` serves; what it answers to those
  again is dropped.
  """
  count = len(questions["problems"])
  marks = []
  for i, start in enumerate(range(0, count, batch)):
    index = np.arange(start, start + batch) % count
    asked = {k: questions[k][index] for k in ("tokens", "length")}
    prompts = hosts.lay(Prompts(asked["tokens"], asked["length"]), rows)
    samples = generate(params, prompts, jax.random.fold_in(key, i))
    asked["problems"] = [questions["problems"][j] for j in index]
    answers = read(samples, asked, tokenizer)
    group = samples.lengths.shape[0] // batch
    marks.append(mark(scorer, answers, group, samples.lengths))
  correct = [collect().correct for collect in marks]
  return np.concatenate(correct)[:count]
