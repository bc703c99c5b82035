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
from collections.abc import Sequence
from concurrent import futures
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
  """

  names: tuple[str, ...]
  seconds: float
  memory: float


class Call(NamedTuple):
  """One call of a reward: its value, or why it failed (then None)."""

  value: float | None
  failure: str | None


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

  def wait_ready(self) -> None:
    """Waits for the imports of the worker; UserError if they failed."""
    ready = self._receive(START)
    if ready is None:
      raise errors.UserError(
        f"rewards {', '.join(self._setup.names)}: importing them ended or "
        "blocked the worker process; its output is above"
      )
    if ready.failure:
      raise errors.UserError(ready.failure)

  def score(self, responses: Sequence) -> list[list[Call]]:
    """Calls every reward on every response: [responses][rewards] calls."""
    rows, size = [], len(responses)
    while len(rows) < len(responses):
      chunk = responses[len(rows) : len(rows) + size]
      complete, partial = self._request(chunk)
      rows += complete
      if len(complete) == len(chunk):
        continue
      # The worker may have died of a response that it had not reported yet, or
      # of none: from now on it gets one response at a time.
      if size == 1:
        rows.append(self._pad(partial, "the worker process ended"))
      size = 1
      try:
        self._restart()
      except errors.UserError as e:
        if self._closed:
          raise futures.CancelledError from e
        rows += [self._pad([], str(e)) for _ in responses[len(rows) :]]
    return rows

  def _pad(self, calls: list[Call], failure: str) -> list[Call]:
    missing = len(self._setup.names) - len(calls)
    return calls + [Call(None, failure)] * missing

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

  def _request(self, responses) -> tuple[list[list[Call]], list[Call]]:
    """The calls of complete responses, and those of one that is incomplete.

    Fewer than the responses if the worker dies or hangs.
    """
    if not self._send(responses):
      return [], []
    width = len(self._setup.names)
    lines = (
      self._receive(self._setup.seconds + GRACE)
      for _ in range(width * len(responses))
    )
    calls = list(itertools.takewhile(lambda call: call is not None, lines))
    whole = len(calls) // width * width
    rows = [calls[i : i + width] for i in range(0, whole, width)]
    return rows, calls[whole:]

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

  def _receive(self, seconds: float) -> Call | None:
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
    return Call(*json.loads(line))
