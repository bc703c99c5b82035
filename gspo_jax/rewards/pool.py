"""Scores answers in processes of their own, beside whatever else goes on.

The caller may have threads and devices: it never forks, it starts programs,
each a `rewards.worker`. A reward that raises, hangs, dies, eats memory or
returns no finite number costs that answer only: it is `failed`, its total is
what the other rewards make it, and never above 0. Where too many failed, the
caller is to stop: `too_many`.
"""

import math
import queue
from collections.abc import Sequence
from concurrent import futures
from typing import NamedTuple

import numpy as np

from gspo_jax.rewards.process import Process
from gspo_jax.rewards.worker import NO_NUMBER
from gspo_jax.runtime import errors

# Answers to a fork, which takes 1-3 ms.
CHUNK = 128


class Response(NamedTuple):
  """What a reward may look at.

  Attributes:
    prompt: the question.
    text: what the policy wrote, without its stop token.
    reference: the answer expected, in the form its rewards read.
    tokens: length of the answer, stop token included.
    limit: the most tokens that were allowed.
  """

  prompt: str
  text: str
  reference: str
  tokens: int = 0
  limit: int = 0


# Made up, to call each reward once before there are any.
_TRIAL = Response("What is 1+2?", "1+2=3\n#### 3", "3", tokens=8, limit=64)


class Scores(NamedTuple):
  """Of N answers, in the order submitted.

  Attributes:
    total: [N] float32, the weighted sum of `parts`; of one that failed, the
      same if below 0, else 0: failing must not pay better than being wrong.
    parts: name of a reward (without arguments) -> [N] float32; 0 where it could
      not be computed.
    failed: [N] bool; where true, a part of the answer could not be computed.
    reasons: what went wrong with the first few that failed.
  """

  total: np.ndarray
  parts: dict[str, np.ndarray]
  failed: np.ndarray
  reasons: tuple[str, ...]


class Pending(NamedTuple):
  """Answers being scored."""

  names: tuple[str, ...]
  weights: tuple[float, ...]
  chunks: list[futures.Future]

  def result(self) -> Scores:
    """Waits for all of them."""
    chunks = [chunk.result() for chunk in self.chunks]
    rows = [None] * sum(map(len, chunks))
    for i, chunk in enumerate(chunks):
      rows[i :: len(chunks)] = chunk
    calls = [call for row in rows for call in row]
    parts = np.array([value or 0.0 for value, _ in calls], np.float64)
    parts = parts.reshape(-1, len(self.names)).astype(np.float32)
    failed = np.array([bool(reason) for _, reason in calls], bool)
    failed = failed.reshape(parts.shape).any(1)
    total = parts.astype(np.float64) @ np.float64(self.weights)
    total = np.float32(np.where(failed, np.minimum(total, 0), total))
    reasons = tuple(dict.fromkeys(reason for _, reason in calls if reason))
    by_name = dict(zip(self.names, parts.T, strict=True))
    return Scores(total, by_name, failed, reasons[:3])


def too_many(failed: np.ndarray, most: float, *, of: str) -> str:
  """What to stop with where a reward fails on so many answers; else "".

  Args:
    failed: [...] bool, of all answers, one or more.
    most: `reward.max_failed`, the share that may fail. All may never.
    of: what the answers are of, for the error.
  """
  count, size = int(failed.sum()), failed.size
  allowed = min(int(most * size + 1e-6), size - 1)
  if count <= allowed:
    return ""
  return (
    f"{of}: {count} of {size} answers could not be scored, expected at most "
    f"{allowed} (reward.max_failed={most:g})"
  )


class RewardPool:
  """A pool of worker processes that call rewards; a context manager.

  Each reward is called once at the start, on a made-up answer, to see that it
  returns a number. An exception there is no mistake: the reward may expect
  another form of answer or reference.

  Args:
    names: rewards, as `rewards.named` reads them.
    weights: of each in an answer's total.
    workers: processes; each scores one answer at a time.
    seconds: for one reward of one answer, by the clock. One that fails by
      taking too long takes all of it.
    memory: GiB that rewards may add to a worker; Linux alone bounds them.

  Raises:
    UserError: a reward is not there, does not import, misses something, takes
      other arguments or returns no number.
  """

  def __init__(
    self,
    names: Sequence[str],
    weights: Sequence[float],
    *,
    workers: int = 2,
    seconds: float = 10.0,
    memory: float = 4.0,
  ):
    self._names = tuple(name.partition(":")[0] for name in names)
    self._weights = tuple(weights)
    _check(self._names, self._weights, workers, seconds, memory)
    setup = (tuple(names), seconds, memory)
    self._workers = [Process(setup) for _ in range(workers)]
    self._idle = queue.SimpleQueue()
    self._threads = futures.ThreadPoolExecutor(workers, "rewards")
    try:
      for worker in self._workers:
        worker.wait_ready()
        self._idle.put(worker)
      self._require_numbers()
    except BaseException:
      self.close()
      raise

  def submit(self, answers: Sequence[Response]) -> Pending:
    """Starts to score the answers and returns at once."""
    most = math.ceil(len(answers) / CHUNK)
    count = min(len(answers), max(most, len(self._workers)))
    # Every count-th, not neighbours: answers to a problem are alike in cost.
    chunks = [
      self._threads.submit(self._score, list(answers[i::count]))
      for i in range(count)
    ]
    return Pending(self._names, self._weights, chunks)

  def close(self) -> None:
    """Ends the workers; what is not scored yet raises CancelledError."""
    self._threads.shutdown(wait=False, cancel_futures=True)
    for worker in self._workers:
      worker.close()
    self._threads.shutdown()

  def __enter__(self) -> "RewardPool":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _require_numbers(self) -> None:
    (calls,) = self._workers[0].score([_TRIAL])
    for name, (_, reason) in zip(self._names, calls, strict=True):
      if reason and reason.startswith(f"{name}: {NO_NUMBER}"):
        what = reason.removeprefix(f"{name}: ")
        raise errors.UserError(f"reward {name!r}: {what} for a made-up answer")

  def _score(self, answers: list[Response]) -> list[list[list]]:
    worker = self._idle.get()
    try:
      return worker.score(answers)
    finally:
      self._idle.put(worker)


def _check(names, weights, workers, seconds, memory) -> None:
  if not names or len(names) != len(weights):
    raise errors.UserError(
      f"expected a weight for each of one or more rewards, got {names=} and "
      f"{weights=}"
    )
  if len(set(names)) < len(names):
    raise errors.UserError(f"expected each reward once, got {names=}")
  if not all(math.isfinite(weight) for weight in weights):
    raise errors.UserError(f"expected finite weights, got {weights=}")
  limits = {"workers": workers, "seconds": seconds, "memory": memory}
  for name, value in limits.items():
    if not value > 0:
      raise errors.UserError(f"rewards: expected {name} above 0, got {value}")
