"""Runs a benchmark: responses to its problems are sampled and scored."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gspo_jax.data.tasks import Problem
from gspo_jax.evaluate.benchmarks import Benchmark
from gspo_jax.rewards.pool import PendingRewards, RewardPool
from gspo_jax.rewards.reward import Response

# Longest reference, in characters, that is written beside each response. The
# tests of a program can have millions; they are in the benchmark's file.
_LONGEST = 2000


class Responses(NamedTuple):
  """Responses to some problems, n each; those to a problem are side by side.

  Attributes:
    prompts: the prompt of each problem, as the policy reads it.
    responses: the text of each response, without its stop token.
    tokens: the length of each response, its stop token included.
    truncated: whether each response was cut at `limit`.
    limit: most tokens of a response.
  """

  prompts: list[str]
  responses: list[str]
  tokens: list[int]
  truncated: list[bool]
  limit: int


class SampleFn(Protocol):
  """Samples responses, as `PolicySampler.sample` does."""

  def __call__(
    self, problems: list[Problem], samples: int, batch: int
  ) -> Responses:
    """`samples` responses to each problem.

    Args:
      problems: of a benchmark.
      samples: responses to each problem.
      batch: the number of the batch, which makes its random key.
    """


class SaveFn(Protocol):
  """Stores the scored responses of a batch."""

  def __call__(self, records: list[dict], reasons: tuple[str, ...]) -> None:
    """Stores a batch.

    Args:
      records: for answers.jsonl.
      reasons: why rewards failed, a few of them.
    """


def run_benchmark(
  sample: SampleFn,
  benchmark: Benchmark,
  *,
  batch_size: int,
  reward_pool: RewardPool | None,
  save: SaveFn,
  wait: Callable[[PendingRewards], None] = lambda pending: None,
  first_batch: int = 0,
  run_on_all: Callable[[Callable[[], None]], None] = lambda work: work(),
) -> None:
  """Samples `benchmark.samples` responses to each problem, and scores them.

  The responses of a batch are scored while the next batch is sampled.

  Args:
    sample: samples a batch.
    benchmark: the problems.
    batch_size: problems of a batch; the last batch may have fewer.
    reward_pool: scores; None on processes that only help to sample.
    save: stores each batch.
    wait: waits until a batch is scored, or raises.
    first_batch: the first batch that is not done yet.
    run_on_all: `multihost.run_on_all` where there are several processes, so
      that an error in `save` on one of them stops all.
  """
  count = len(benchmark.problems)
  pending = None

  def save_pending():
    if pending is not None:
      scores, records = pending
      wait(scores)
      save(*records(scores.result()))

  for batch in range(first_batch, -(-count // batch_size)):
    indices = range(batch * batch_size, min((batch + 1) * batch_size, count))
    problems = [benchmark.problems[i] for i in indices]
    responses = sample(problems, benchmark.samples, batch)
    run_on_all(save_pending)
    if reward_pool is not None:
      pending = _start_scoring(reward_pool, benchmark, indices, responses)
  run_on_all(save_pending)


def _start_scoring(reward_pool, benchmark, indices, responses):
  """Begins to score a batch.

  Returns:
    The pending scores, and a function of the scores: what `save` takes.
  """
  prompts = dict(zip(indices, responses.prompts, strict=True))
  places = [(i, n) for i in indices for n in range(benchmark.samples)]
  scored = [
    Response(
      prompts[i],
      text,
      benchmark.problems[i].reference,
      tokens,
      responses.limit,
      benchmark.problems[i].columns,
    )
    for (i, _), text, tokens in zip(
      places, responses.responses, responses.tokens, strict=True
    )
  ]
  scores = reward_pool.submit(scored, benchmark.samples)
  return scores, functools.partial(
    _records, benchmark, places, scored, responses.truncated
  )


def _records(benchmark, places, responses, truncated, scores):
  """The records of answers.jsonl, and reasons."""
  records = [
    {
      "set": benchmark.name,
      "id": benchmark.ids[i],
      "sample": n,
      "problem": benchmark.problems[i].text,
      "response": response.text,
      "reference": _unless_long(response.reference),
      "score": float(score),
      "failed": bool(failed),
      "tokens": int(response.tokens),
      "finish": "truncated" if cut else "stopped",
    }
    for (i, n), response, score, failed, cut in zip(
      places, responses, scores.total, scores.failed, truncated, strict=True
    )
  ]
  return records, scores.reasons


def _unless_long(reference: str) -> str | None:
  return reference if len(reference) <= _LONGEST else None
