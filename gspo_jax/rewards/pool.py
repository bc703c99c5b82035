"""A pool of worker processes that compute rewards while the caller goes on.

The caller may have threads and devices, so it never forks: it starts programs,
each a `rewards.worker`. A reward that raises, hangs, dies, runs out of memory
or returns no finite number affects that response only: the response is marked
as failed, and its total is the weighted sum of its other rewards, at most 0.
`too_many` decides whether so many failed that the caller should stop.
"""

import math
import queue
from collections.abc import Sequence
from concurrent import futures
from typing import NamedTuple

import numpy as np

from gspo_jax.rewards.process import Call, Process, Setup
from gspo_jax.rewards.worker import NO_NUMBER
from gspo_jax.runtime import errors

# Responses per fork of a worker; a fork takes 1-3 ms.
CHUNK = 128


class Response(NamedTuple):
  """A response of the policy with what its rewards need.

  Attributes:
    prompt: what the policy read.
    text: what the policy wrote, without its stop token.
    reference: the target, in the form that the rewards read.
    tokens: length of the response, stop token included.
    limit: the largest length allowed, in tokens.
  """

  prompt: str
  text: str
  reference: str
  tokens: int = 0
  limit: int = 0


# Each reward is called on this one at the start.
_EXAMPLE = Response("What is 1+2?", "1+2=3\n#### 3", "3", tokens=8, limit=64)


class Scores(NamedTuple):
  """The rewards of N responses, in the order of submission.

  Attributes:
    total: [N] float32, the weighted sum of `parts`. Where `failed`, the smaller
      of that sum and 0: a failure must not pay better than a wrong response.
    parts: name of a reward (without arguments) -> [N] float32; 0 where it could
      not be computed.
    failed: [N] bool, true where some reward could not be computed.
    reasons: up to three different reasons of failures.
  """

  total: np.ndarray
  parts: dict[str, np.ndarray]
  failed: np.ndarray
  reasons: tuple[str, ...]


class Pending(NamedTuple):
  """Responses whose rewards are being computed.

  Attributes:
    names: of the rewards, without arguments.
    weights: of each reward in the total.
    chunks: [responses][rewards] calls each; response i is in chunk i modulo the
      number of chunks.
  """

  names: tuple[str, ...]
  weights: tuple[float, ...]
  chunks: list[futures.Future]

  def result(self) -> Scores:
    """Waits for all rewards."""
    chunks = [chunk.result() for chunk in self.chunks]
    responses = [None] * sum(map(len, chunks))
    for i, chunk in enumerate(chunks):
      responses[i :: len(chunks)] = chunk
    calls = [call for response in responses for call in response]
    parts = np.array([value or 0.0 for value, _ in calls], np.float64)
    parts = parts.reshape(-1, len(self.names)).astype(np.float32)
    failed = np.array([bool(failure) for _, failure in calls], bool)
    failed = failed.reshape(parts.shape).any(1)
    total = parts.astype(np.float64) @ np.float64(self.weights)
    total = np.float32(np.where(failed, np.minimum(total, 0), total))
    reasons = tuple(dict.fromkeys(why for _, why in calls if why))
    by_name = dict(zip(self.names, parts.T, strict=True))
    return Scores(total, by_name, failed, reasons[:3])


def too_many(failed: np.ndarray, most: float, *, of: str) -> str:
  """The error message if more rewards failed than are allowed; else "".

  Args:
    failed: [...] bool, one for each response, one or more.
    most: `reward.max_failed`, the share of responses that may fail. At least
      one must succeed whatever the share.
    of: where the responses come from, for the message.
  """
  count, size = int(failed.sum()), failed.size
  allowed = min(int(most * size + 1e-6), size - 1)
  if count <= allowed:
    return ""
  return (
    f"{of}: {count} of {size} responses could not be scored, expected at most "
    f"{allowed} (reward.max_failed={most:g})"
  )


class RewardPool:
  """A pool of worker processes that call rewards; a context manager.

  Each reward is called once at the start, on an example, to check that it
  returns a number. It may raise there: the example may not have the form of
  response or reference that the reward expects.

  Args:
    names: specs of the rewards, as `rewards.named` reads them.
    weights: of each reward in the total.
    workers: processes; each handles one response at a time.
    seconds: wall-clock time for one reward of one response. A call that times
      out takes all of it.
    memory: GiB that rewards may add to a worker process; enforced on Linux.

  Raises:
    UserError: a reward is unknown, does not import, lacks a package, takes
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
    setup = Setup(tuple(names), seconds, memory)
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

  def submit(self, responses: Sequence[Response]) -> Pending:
    """Starts to compute the rewards and returns at once."""
    least = math.ceil(len(responses) / CHUNK)
    count = min(len(responses), max(least, len(self._workers)))
    # Every count-th, not neighbours: responses to one problem cost the same.
    chunks = [
      self._threads.submit(self._score, list(responses[i::count]))
      for i in range(count)
    ]
    return Pending(self._names, self._weights, chunks)

  def close(self) -> None:
    """Ends the workers; pending rewards raise CancelledError."""
    self._threads.shutdown(wait=False, cancel_futures=True)
    for worker in self._workers:
      worker.close()
    self._threads.shutdown()

  def __enter__(self) -> "RewardPool":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _require_numbers(self) -> None:
    (calls,) = self._workers[0].score([_EXAMPLE])
    for name, (_, failure) in zip(self._names, calls, strict=True):
      if failure and failure.startswith(f"{name}: {NO_NUMBER}"):
        mistake = failure.removeprefix(f"{name}: ")
        raise errors.UserError(
          f"reward {name!r}: {mistake} for an example response"
        )

  def _score(self, responses: list[Response]) -> list[list[Call]]:
    worker = self._idle.get()
    try:
      return worker.score(responses)
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
