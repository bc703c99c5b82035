"""A worker process as the pool sees it: started, sent requests, replaced."""

import itertools
import json
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

from gspo_jax.runtime import errors

# Seconds for the imports of a worker, and for its silence beyond one call.
START, GRACE = 120.0, 30.0


class Setup(NamedTuple):
  """The first message to a worker.

  Attributes:
    names: specs of the rewards, as `rewards.named` reads them.
    seconds: wall-clock time for one call.
    memory: GiB that rewards may add to the process.
    concurrency: calls of `async` rewards that run at once.
  """

  names: tuple[str, ...]
  seconds: float
  memory: float
  concurrency: int


class Needs(NamedTuple):
  """What a reward needs: whole groups, these columns, or any column at all."""

  group: bool
  columns: tuple[str, ...]
  reads_columns: bool


class Call(NamedTuple):
  """One call of a reward: its value, or why it failed (then None)."""

  value: float | None
  failure: str | None


def children(pid: int) -> list[int]:
  """The children of the main thread of a process; [] where Linux tells none."""
  try:
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text()
  except OSError:
    return []
  return list(map(int, pids.split()))


class Process:
  """One worker process, replaced when it dies."""

  def __init__(self, setup: Setup):
    self._setup, self._closed = setup, False
    # Held while stdin is written to or closed, and while a process starts.
    self._lock = threading.RLock()
    self._start()

  def _start(self) -> None:
    path = [os.path.abspath(folder) for folder in sys.path]
    env = os.environ | {
      "PYTHONPATH": os.pathsep.join(path),
      # Rewards must not take the accelerators, and get one thread each.
      "JAX_PLATFORMS": "cpu",
      "OMP_NUM_THREADS": "1",
      "OPENBLAS_NUM_THREADS": "1",
      # Else each thread of an async reward takes 64 MiB of address space.
      "MALLOC_ARENA_MAX": "2",
    }
    # A session of its own: Ctrl-C and SIGTERM reach only the run, which then
    # ends its workers.
    self._process = subprocess.Popen(
      [sys.executable, "-P", "-m", "gspo_jax.rewards.worker"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=env,
      start_new_session=True,
      bufsize=0,
    )
    os.set_blocking(self._process.stdin.fileno(), False)
    self._writable = select.poll()
    self._writable.register(self._process.stdin, select.POLLOUT)
    self._readable = select.poll()
    self._readable.register(self._process.stdout, select.POLLIN)
    self._unread = b""
    self._send(self._setup)

  def wait_ready(self) -> list[Needs]:
    """Waits for the imports of the worker, and returns what rewards need.

    Raises:
      UserError: the imports failed.
    """
    line = self._receive(START)
    if line is None:
      raise errors.UserError(
        f"rewards {', '.join(self._setup.names)}: importing them ended or "
        "blocked the worker process; its output is above"
      )
    needs, failure = line
    if failure:
      raise errors.UserError(failure)
    return [Needs(*each) for each in needs]

  def score(self, units: Sequence) -> Iterator[tuple[int, list[list[Call]]]]:
    """Calls every reward; yields each unit as it ends.

    Yields:
      The number of the unit, and its [responses][rewards] calls.
    """
    left, size = {i: self._empty(unit) for i, unit in enumerate(units)}, None
    while left:
      chunk = dict(itertools.islice(left.items(), size))
      for i in self._request([units[i] for i in chunk], chunk):
        yield i, left.pop(i)
      lost = chunk.keys() & left.keys()
      if not lost:
        continue
      # The worker may have died of a response that it had not reported yet, or
      # of none: from now on it gets one unit at a time.
      if size == 1:
        (i,) = lost
        yield i, _fill(left.pop(i), "the worker process ended")
      size = 1
      try:
        self._restart()
      except errors.UserError as e:
        if self._closed:
          raise futures.CancelledError from e
        for i, table in left.items():
          yield i, _fill(table, str(e))
        return

  def _empty(self, unit) -> list[list[Call | None]]:
    return [[None] * len(self._setup.names) for _ in unit]

  def close(self) -> None:
    """Ends the worker: by closing its stdin, after 2 seconds by SIGKILL."""
    with self._lock:
      self._closed = True
      self._process.stdin.close()
    try:
      self._process.wait(2)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def _restart(self) -> None:
    self._process.kill()
    self._process.wait()
    self._process.stdout.close()
    with self._lock:
      if self._closed:
        raise futures.CancelledError
      self._process.stdin.close()
      self._start()
    self.wait_ready()

  def _request(self, units, tables) -> Iterator[int]:
    """Fills the tables of these units; yields the number of each that is whole.

    It ends before all are if the worker died or hung.
    """
    rows = [(i, row) for i, table in tables.items() for row in table]
    missing = len(rows) * len(self._setup.names)
    if not self._send(units):
      return
    while missing:
      # Twice: calls that did not end together are made again, one by one.
      line = self._receive(2 * self._setup.seconds + GRACE)
      if line is None:
        return
      first, reward, results = line
      called = rows[first : first + len(results)]  # all of one unit
      for (_, row), result in zip(called, results, strict=True):
        row[reward] = Call(*result)
      missing -= len(results)
      i = called[0][0]
      if _is_whole(tables[i]):
        yield i

  def _send(self, request) -> bool:
    """Writes a request to the worker; False if it did not take all of it."""
    body = pickle.dumps(request)
    rest = memoryview(len(body).to_bytes(8, "big") + body)
    while rest:
      # A process that hangs takes no more than the pipe holds.
      if not self._writable.poll(1000 * GRACE):
        return False
      with self._lock:
        if self._closed:
          raise futures.CancelledError
        try:
          rest = rest[os.write(self._process.stdin.fileno(), rest) :]
        except BrokenPipeError:
          return False
    return True

  def _receive(self, seconds: float) -> list | None:
    """The next line of the worker; None if none comes in time."""
    end = time.monotonic() + seconds
    while b"\n" not in self._unread:
      if not self._readable.poll(max(0, 1000 * (end - time.monotonic()))):
        return None
      data = os.read(self._process.stdout.fileno(), 1 << 16)
      if not data:
        return None
      self._unread += data
    line, _, self._unread = self._unread.partition(b"\n")
    return json.loads(line)


def _is_whole(table: list[list[Call | None]]) -> bool:
  return all(call is not None for row in table for call in row)


def _fill(table: list[list[Call | None]], failure: str) -> list[list[Call]]:
  """The table with a failure for each call that is missing."""
  return [[call or Call(None, failure) for call in row] for row in table]
