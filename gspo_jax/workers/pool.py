"""A pool of worker processes that run tasks while the caller goes on.

The caller may have threads and devices, so it never forks: it starts programs,
each a `workers.worker`. If a call raises, hangs, dies or runs out of memory,
only that call fails: its `Result` has the reason.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent import futures

from gspo_jax.workers.process import Call, Process, Result, Setup, Tasks

__all__ = ["Call", "Pool", "Result", "Started", "Tasks"]

# Calls per request to a worker, which forks for each of this size: 1-3 ms.
_CHUNK = 128


class Started:
  """Calls that were started together; the pool's lock guards the fields.

  They share one future: with 20,000 responses a step, one each takes a second.
  """

  def __init__(self, calls: Sequence[Call], notify: Callable[[], None]):
    self.calls, self.notify = calls, notify
    # In their order; None until the call has ended.
    self.results: list[Result | None] = [None] * len(calls)
    self.left = len(calls)
    self.done = futures.Future()  # set when all have ended
    self.done.add_done_callback(lambda _: notify())

  def has_ended(self, place: int) -> bool:
    return self.results[place] is not None or self.done.done()

  def wait(self) -> list[Result]:
    self.done.result()
    return self.results


class Pool(contextlib.AbstractContextManager["Pool"]):
  """A pool of worker processes; a context manager.

  `facts` is what `load` tells about the tasks.

  Args:
    name: of the tasks, for errors.
    load: makes the tasks once in each worker, from `seconds`; is pickled.
    workers: processes; each makes one call at a time, or `concurrency` calls of
      `async` tasks.
    seconds: wall-clock time for one call.
    memory: GiB that calls may add to a worker process; enforced on Linux.
    concurrency: calls of `async` tasks that a worker makes at once.
    repeats: make calls again that ran beside one that ended their process or
      blocked it, or that ran in a worker that was lost. Else they fail, too.
  """

  def __init__(
    self,
    name: str,
    load: Callable[[float], Tasks],
    *,
    workers: int = 2,
    seconds: float = 10.0,
    memory: float = 4.0,
    concurrency: int = 32,
    repeats: bool = True,
  ):
    setup = Setup(name, load, seconds, memory, concurrency, repeats)
    self._changed = threading.Condition()  # guards the next four, and `Started`
    self._waiting: list[tuple[Started, int]] = []
    self._share = 1  # most waiting calls that a worker takes at once
    self._closed = False
    self._restarts = 0  # told so far
    self._threads: list[threading.Thread] = []
    self._workers = [Process(setup) for _ in range(workers)]
    try:
      for worker in self._workers:
        self.facts = worker.wait_ready()
    except BaseException:
      self.close()
      raise
    for worker in self._workers:
      thread = threading.Thread(target=self._serve, args=(worker,), daemon=True)
      self._threads.append(thread)
      thread.start()

  def start(
    self, calls: Sequence[Call], notify: Callable[[], None] = lambda: None
  ) -> Started:
    """Starts calls and returns at once; a thread calls `notify` at each end.

    Calls of `async` tasks run together only if they were started together, or
    waited while all workers were busy.
    """
    started = Started(calls, notify)
    if not calls:
      started.done.set_result(None)
    with self._changed:
      if self._closed:
        raise futures.CancelledError
      self._waiting += [(started, i) for i in range(len(calls))]
      share = math.ceil(len(self._waiting) / len(self._workers))
      self._share = max(1, min(share, _CHUNK))
      self._changed.notify_all()
    return started

  def take_restarts(self) -> int:
    """How many workers were lost since the last call."""
    before = self._restarts
    self._restarts = sum(worker.restarts for worker in self._workers)
    return self._restarts - before

  def close(self) -> None:
    """Ends the workers; waiting for pending calls raises CancelledError."""
    with self._changed:
      self._closed = True
      for started, _ in self._waiting:
        started.done.cancel()
      self._waiting.clear()
      self._changed.notify_all()
    for worker in self._workers:
      worker.close()
    for thread in self._threads:
      thread.join()

  def __exit__(self, *_) -> None:
    self.close()

  def _serve(self, worker: Process) -> None:
    """In a thread: gives a worker the waiting calls until the pool closes."""
    while taken := self._take():
      try:
        for i, result in worker.run([x.calls[place] for x, place in taken]):
          started, place = taken[i]
          with self._changed:
            started.results[place] = result
            started.left -= 1
            if not started.left:
              started.done.set_result(None)
          started.notify()
      except BaseException as e:
        with self._changed:
          for started, _ in taken:
            if not started.done.done():
              started.done.set_exception(e)

  def _take(self) -> list[tuple[Started, int]]:
    """Waits, and takes a worker's share of the calls; []: the pool is closed.

    Calls that came while the workers were busy go into one request: calls of
    `async` tasks run together only within a request.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._waiting or self._closed)
      # Every n-th, not neighbours, which often cost the same.
      n = math.ceil(len(self._waiting) / self._share) or 1
      taken = self._waiting[::n]
      del self._waiting[::n]
      return taken
