"""A worker process as the pool sees it: started, sent requests, replaced."""

import contextlib
import json
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

from gspo_jax.runtime import errors

# Seconds for a worker's imports, and beyond the limit of its calls.
START, GRACE = 120.0, 30.0
# The failure of calls of which one is at fault; nobody knows which.
SHARED_END = "it, or a call beside it, ended or blocked their process"


# The tasks of a worker, functions of a request; and JSON about them.
Tasks = tuple[Sequence[Callable[[Any], Any]], Any]


class Setup(NamedTuple):
  """The first message to a worker: tasks and limits, as of `pool.Pool`."""

  name: str
  load: Callable[[float], Tasks]
  seconds: float
  memory: float
  concurrency: int
  repeats: bool


class Call(NamedTuple):
  task: int  # its index in the tasks of `load`
  request: Any  # its argument, picklable
  number: int = -1  # its place in one `Process.run`


class Result(NamedTuple):
  """A call's JSON, or why it failed (then `value` is None)."""

  value: Any
  failure: str | None
  lost: bool = False  # it may have run in part, in a process that is gone


def children(pid: int) -> list[int]:
  """The children of a process's main thread; [] if Linux does not tell."""
  try:
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text()
  except OSError:
    return []
  return list(map(int, pids.split()))


class Process:
  def __init__(self, setup: Setup):
    self._setup, self._closed = setup, False
    self.restarts = 0
    # Held while stdin is written to or closed, and while a process starts.
    self._lock = threading.RLock()
    self._start()

  def _start(self) -> None:
    path = [os.path.abspath(folder) for folder in sys.path]
    # Hosts called directly: agents call an endpoint on this one.
    hosts = [os.environ.get(name) for name in ("no_proxy", "NO_PROXY")]
    direct = ",".join(filter(None, [*hosts, "127.0.0.1", "localhost"]))
    no_proxy = "*" if "*" in hosts else direct
    env = os.environ | {
      "PYTHONPATH": os.pathsep.join(path),
      # Tasks must not take the accelerators, and get one thread each.
      "JAX_PLATFORMS": "cpu",
      "OMP_NUM_THREADS": "1",
      "OPENBLAS_NUM_THREADS": "1",
      # Else each thread of an async task takes 64 MiB of address space.
      "MALLOC_ARENA_MAX": "2",
      "NO_PROXY": no_proxy,
      "no_proxy": no_proxy,
    }
    # A separate session: Ctrl-C and SIGTERM reach only the run, which then
    # ends its workers.
    self._process = subprocess.Popen(
      [sys.executable, "-P", "-m", "gspo_jax.workers.worker"],
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

  def wait_ready(self) -> Any:
    line = self._receive(START)
    if line is None:
      raise errors.UserError(
        f"{self._setup.name}: the import ended or blocked the worker process; "
        "its output is above"
      )
    facts, failure = line
    if failure:
      raise errors.UserError(failure)
    return facts

  def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Result]]:
    """Makes calls; yields (number, result) as each ends.

    After the loss of the worker, a new one goes on with the calls that had not
    begun. The others fail, or with `repeats` are made again, one by one.
    """
    left, suspects = dict(enumerate(calls)), []
    while left:
      suspects = [i for i in suspects if i in left]
      is_alone = bool(suspects)
      was_dead = self._process.poll() is not None  # so no call is at fault
      chunk = {i: left[i] for i in suspects[:1]} or left.copy()
      for i, result in self._request(chunk):
        del left[i]
        yield i, result
      lost = [i for i in chunk if i in left]
      # What a call wrote beyond its line would be read as the next results.
      if not (lost or self._unread):
        continue
      began = lost[: 0 if was_dead else self._setup.concurrency]
      try:
        reason = self._restart()
      except errors.UserError as e:
        if self._closed:
          raise futures.CancelledError from e
        for i in left:
          yield i, Result(None, str(e), lost=i in began)
        return
      if was_dead:
        continue
      if self._setup.repeats and not is_alone:
        suspects = began
        continue
      for i in began:
        del left[i]
        yield i, Result(None, reason, lost=True)

  def close(self) -> None:
    """Closes the worker's stdin, which ends it; after 2 seconds SIGKILL."""
    with self._lock:
      self._closed = True
      self._process.stdin.close()
    try:
      self._process.wait(2)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def _restart(self) -> str:
    """Starts a new worker; returns why the old one was lost, if it is known."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(1)  # it may be about to end
    status = self._process.returncode
    self._process.kill()
    self._process.wait()
    reason = "the worker process hung, or a call wrote to its results"
    if status is not None:
      reason = f"the worker process ended with status {status}"
    if status == -signal.SIGKILL:
      reason = "the worker process ended by SIGKILL; perhaps memory ran out"
    logging.warning("%s: %s; a new one goes on", self._setup.name, reason)
    self.restarts += 1
    self._process.stdout.close()
    with self._lock:
      if self._closed:
        raise futures.CancelledError
      self._process.stdin.close()
      try:
        self._start()
      except OSError as e:
        raise errors.UserError(f"no worker process could start: {e}") from e
    self.wait_ready()
    return reason

  def _request(self, calls: dict[int, Call]) -> Iterator[tuple[int, Result]]:
    """Yields results as they come; not all if the worker is lost.

    It died, it hung, or a call wrote other lines to the pipe of its results.
    """
    waiting = {*calls}
    if not self._send([x._replace(number=i) for i, x in calls.items()]):
      return
    while waiting:
      # Twice: calls that did not end together are made again, one by one.
      match self._receive(2 * self._setup.seconds + GRACE):
        case [int(i), value, None | str() as failure] if i in waiting:
          lost = failure == SHARED_END
          waiting.remove(i)
          yield i, Result(value, failure, lost)
        case _:
          return

  def _send(self, request) -> bool:
    rest = memoryview(pickle.dumps(request))
    while rest:
      # A process that hangs takes no more than the pipe holds.
      if not self._writable.poll(1000 * GRACE):
        return False
      with self._lock:
        if self._closed:
          raise futures.CancelledError
        try:
          rest = rest[os.write(self._process.stdin.fileno(), rest) :]
        except (BrokenPipeError, ValueError):  # it ended, or never started
          return False
    return True

  def _receive(self, seconds: float) -> Any:
    """The worker's next line; None if none comes in time, or it is no JSON."""
    end = time.monotonic() + seconds
    while b"\n" not in self._unread:
      if not self._readable.poll(max(0, 1000 * (end - time.monotonic()))):
        return None
      data = os.read(self._process.stdout.fileno(), 1 << 16)
      if not data:
        return None
      self._unread += data
    line, _, self._unread = self._unread.partition(b"\n")
    try:
      return json.loads(line)
    except (ValueError, RecursionError):
      return None
