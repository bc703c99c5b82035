"""A pool of worker processes that compute rewards while the caller goes on.

The caller may have threads and devices, so it never forks: it starts programs,
each a `rewards.worker`. A reward that raises, hangs, dies, runs out of memory
or returns no finite number affects that response only: the response is marked
as failed, and its total is the weighted sum of its other rewards, at most 0;
the caller may lower it further. If it fails on a group, it affects the
responses of that group. `too_many` decides whether so many failed that the
caller should stop.
"""

import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from gspo_jax.rewards import missing_column
from gspo_jax.rewards.process import Call, Process, Setup
from gspo_jax.rewards.worker import NO_LIST, NO_NUMBER
from gspo_jax.runtime import errors

# Responses or groups per request to a worker, which forks; that takes 1-3 ms.
CHUNK = 128


class Response(NamedTuple):
  """A response of the policy with what its rewards need.

  Attributes:
    prompt: what the policy read.
    text: what the policy wrote, without its stop token.
    reference: the target, in the form that the rewards read.
    tokens: length of the response, stop token included.
    limit: the largest length allowed, in tokens.
    columns: the other columns of the problem's record.
  """

  prompt: str
  text: str
  reference: str
  tokens: int = 0
  limit: int = 0
  columns: Mapping[str, Any] = {}

  def to(self, problem) -> "Response":
    """This response to another problem, a `data.problem.Problem`."""
    return self._replace(
      prompt=problem.text, reference=problem.reference, columns=problem.columns
    )


EXAMPLE = Response("What is 1+2?", "1+2=3\n#### 3", "3", tokens=8, limit=64)


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
    submission: the responses and their calls.
  """

  names: tuple[str, ...]
  weights: tuple[float, ...]
  submission: "Submission"

  @property
  def calls(self) -> futures.Future:
    """Of [units][responses][rewards] calls.

    A unit is one response, or a group of them.
    """
    return self.submission.future

  def result(self) -> Scores:
    """Waits for the scores of all responses."""
    units = self.calls.result()
    calls = [c for unit in units for row in unit for c in row]
    parts = np.array([value or 0.0 for value, _ in calls], np.float64)
    parts = parts.reshape(-1, len(self.names)).astype(np.float32)
    failed = np.array([bool(failure) for _, failure in calls], bool)
    failed = failed.reshape(parts.shape).any(1)
    total = parts.astype(np.float64) @ np.float64(self.weights)
    total = np.float32(np.where(failed, np.minimum(total, 0), total))
    reasons = tuple(dict.fromkeys(why for _, why in calls if why))
    by_name = dict(zip(self.names, parts.T, strict=True))
    return Scores(total, by_name, failed, reasons[:3])


def too_many(count: int, size: int, most: float, *, of: str) -> str:
  """The error message if more rewards failed than are allowed; else "".

  Args:
    count: of responses that failed.
    size: of all responses.
    most: `reward.max_failed`, the share of responses that may fail. At least
      one must succeed whatever the share.
    of: where the responses come from, for the message.
  """
  allowed = min(int(most * size + 1e-6), size - 1)
  if count <= allowed:
    return ""
  return (
    f"{of}: {count} of {size} responses could not be scored, expected at most "
    f"{allowed} (reward.max_failed={most:g})"
  )


class Submission:
  """The units of one `submit`, and their calls as they come.

  Attributes:
    units: a response, or a group of them, each.
    size: how many responses they are.
    future: of their calls, [units][responses][rewards].
    scored: responses that have their calls.
    failures: a reason for each of them that failed.
  """

  def __init__(self, units: Sequence[Sequence[Response]]):
    self.units, self.future = units, futures.Future()
    self.size = sum(map(len, units))
    self.scored, self.failures = 0, []
    self._calls, self._missing = [None] * len(units), len(units)
    if not units:
      self.future.set_result([])

  def finish(self, i: int, calls: list[list[Call]]) -> None:
    """Sets the calls of unit i."""
    self._calls[i] = calls
    self.scored += len(calls)
    for row in calls:
      self.failures += [call.failure for call in row if call.failure][:1]
    self._missing -= 1
    if not self._missing and not self.future.done():
      self.future.set_result(self._calls)

  def fail(self, error: BaseException) -> None:
    """Ends it: a unit has no calls."""
    if not self.future.done():
      self.future.set_exception(error)


class RewardPool:
  """A pool of worker processes that call rewards; a context manager.

  Each reward is called on the examples at the start, to check that it returns a
  number. It may raise there: the text of an example may not have the form that
  the reward expects of a response.

  Attributes:
    takes_groups: whether some reward takes all responses to a problem at once.

  Args:
    names: specs of the rewards, as `rewards.named` reads them.
    weights: of each reward in the total.
    workers: processes; each makes one call at a time, or `concurrency` calls
      of `async` rewards.
    seconds: wall-clock time for one call: of one reward, on one response or on
      one group. A call that times out takes all of it.
    memory: GiB that rewards may add to a worker process; enforced on Linux.
    concurrency: calls of `async` rewards that a worker makes at once.
    examples: responses whose problems have the columns of all others.

  Raises:
    UserError: a reward is unknown, does not import, lacks a package, takes
      other arguments, needs a column that an example lacks, or returns no
      number.
  """

  def __init__(
    self,
    names: Sequence[str],
    weights: Sequence[float],
    *,
    workers: int = 2,
    seconds: float = 10.0,
    memory: float = 4.0,
    concurrency: int = 32,
    examples: Sequence[Response] = (EXAMPLE,),
  ):
    self._names = tuple(name.partition(":")[0] for name in names)
    self._weights = tuple(weights)
    limits = {"workers": workers, "seconds": seconds, "memory": memory}
    limits["concurrency"] = concurrency
    _check(self._names, self._weights, limits)
    setup = Setup(tuple(names), seconds, memory, concurrency)
    self._changed = threading.Condition()  # of the next four
    self._waiting: list[tuple[Submission, int]] = []
    self._share = 1  # of what waits, for a worker
    self._closed = False
    self._threads: list[threading.Thread] = []
    self._workers = [Process(setup) for _ in range(workers)]
    try:
      for worker in self._workers:
        needs = worker.wait_ready()
      self.takes_groups = any(need.group for need in needs)
      self._reads_columns = any(need.reads_columns for need in needs)
      self._require_columns(needs, examples)
      self._require_numbers(examples)
    except BaseException:
      self.close()
      raise
    for worker in self._workers:
      thread = threading.Thread(target=self._serve, args=(worker,), daemon=True)
      self._threads.append(thread)
      thread.start()

  def submit(
    self, responses: Sequence[Response], group_size: int = 1
  ) -> Pending:
    """Starts to compute the rewards and returns at once.

    Args:
      responses: whole groups, one after the other.
      group_size: responses of a group.
    """
    size = group_size if self.takes_groups else 1
    if not self._reads_columns:  # they may be large, as tests of programs are
      responses = [response._replace(columns={}) for response in responses]
    units = [responses[i : i + size] for i in range(0, len(responses), size)]
    if units and len(units[-1]) < size:
      raise ValueError(f"{len(responses)} responses in groups of {group_size}")
    submission = Submission(units)
    with self._changed:
      if self._closed:
        raise futures.CancelledError
      self._waiting += [(submission, i) for i in range(len(units))]
      share = math.ceil(len(self._waiting) / len(self._workers))
      self._share = max(1, min(share, CHUNK))
      self._changed.notify_all()
    return Pending(self._names, self._weights, submission)

  def close(self) -> None:
    """Ends the workers; pending rewards raise CancelledError."""
    with self._changed:
      self._closed = True
      for submission, _ in self._waiting:
        submission.future.cancel()
      self._waiting.clear()
      self._changed.notify_all()
    for worker in self._workers:
      worker.close()
    for thread in self._threads:
      thread.join()

  def __enter__(self) -> "RewardPool":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _require_columns(self, needs, examples) -> None:
    for name, need in zip(self._names, needs, strict=True):
      for example in examples:
        if missing := missing_column(need.columns, example.columns):
          raise errors.UserError(
            f"reward {name!r}: {missing} (the problem {example.prompt[:40]!r}; "
            f"or set it, '{name}:{need.columns[0]}=VALUE')"
          )

  def _require_numbers(self, examples) -> None:
    size = 2 if self.takes_groups else 1
    scored = self._workers[0].score([[example] * size for example in examples])
    calls = itertools.chain(*(table[0] for _, table in scored))
    for name, (_, failure) in zip(itertools.cycle(self._names), calls):
      mistake = (failure or "").removeprefix(f"{name}: ")
      if mistake.startswith((NO_NUMBER, NO_LIST)):
        raise errors.UserError(
          f"reward {name!r}: {mistake} for an example response"
        )

  def _serve(self, worker: Process) -> None:
    """In a thread: gives a worker what waits, until the pool is closed."""
    while taken := self._take():
      try:
        for k, calls in worker.score([each.units[i] for each, i in taken]):
          submission, i = taken[k]
          with self._changed:
            submission.finish(i, calls)
      except BaseException as e:
        with self._changed:
          for submission, _ in taken:
            submission.fail(e)

  def _take(self) -> list[tuple[Submission, int]]:
    """Waits for units, and takes its share of them; none: it is closed.

    What came while the workers were busy goes into one request: calls of
    `async` rewards run together only within a request.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._waiting or self._closed)
      # Every n-th, not neighbours: responses to one problem cost the same.
      n = math.ceil(len(self._waiting) / self._share) or 1
      taken = self._waiting[::n]
      del self._waiting[::n]
      return taken


def _check(names, weights, limits) -> None:
  if not names or len(names) != len(weights):
    raise errors.UserError(
      f"expected a weight for each of one or more rewards, got {names=} and "
      f"{weights=}"
    )
  if len(set(names)) < len(names):
    raise errors.UserError(f"expected each reward once, got {names=}")
  if not all(math.isfinite(weight) for weight in weights):
    raise errors.UserError(f"expected finite weights, got {weights=}")
  for name, value in limits.items():
    if not value > 0:
      raise errors.UserError(f"rewards: expected {name} above 0, got {value}")
