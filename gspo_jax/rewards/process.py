"""The caller's side of a `rewards.worker`: starts it, asks it, replaces it."""

import itertools
import json
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from concurrent import futures

from gspo_jax.runtime import errors

# Seconds for a worker's imports, and of its silence beyond an answer's time.
START, GRACE = 120.0, 30.0


class Process:
  """One process, started again when it dies."""

  def __init__(self, setup: tuple):
    self._setup, self._closed = setup, False
    # Held where stdin is written to or closed, and where a process starts.
    self._lock = threading.RLock()
    self._start()

  def _start(self) -> None:
    path = [os.path.abspath(folder) for folder in sys.path]
    env = os.environ | {
      "PYTHONPATH": os.pathsep.join(path),
      # Not the devices of the run, and no more threads than rewards.
      "JAX_PLATFORMS": "cpu",
      "OMP_NUM_THREADS": "1",
      "OPENBLAS_NUM_THREADS": "1",
    }
    # A session of its own: Ctrl-C and SIGTERM reach the run, which ends it.
    self._process = subprocess.Popen(
      [sys.executable, "-P", "-m", "gspo_jax.rewards.worker"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=env,
      start_new_session=True,
      bufsize=0,
    )
    os.set_blocking(self._process.stdin.fileno(), False)
    self._room = select.poll()
    self._room.register(self._process.stdin, select.POLLOUT)
    self._wait = select.poll()
    self._wait.register(self._process.stdout, select.POLLIN)
    self._rest = b""
    self._ask(self._setup)

  def wait_ready(self) -> None:
    answer = self._line(START)
    if answer is None:
      raise errors.UserError(
        f"rewards {', '.join(self._setup[0])}: importing them ended or blocked "
        "the process that scores; its output is above"
      )
    if answer[1]:
      raise errors.UserError(answer[1])

  def score(self, answers: list[tuple]) -> list[list[list]]:
    """Of each answer, for each reward: [value, None] or [None, reason]."""
    rows, size = [], len(answers)
    while len(rows) < len(answers):
      asked = answers[len(rows) : len(rows) + size]
      got, begun = self._asked(asked)
      rows += got
      if len(got) == len(asked):
        continue
      # What it died of may be one it had not yet told of, or no answer at
      # all: from now on one at a time.
      if size == 1:
        rows.append(self._filled(begun, "the process that scores ended"))
      size = 1
      try:
        self._restart()
      except errors.UserError as e:
        if self._closed:
          raise futures.CancelledError from e
        rows += [self._filled([], str(e)) for _ in answers[len(rows) :]]
    return rows

  def _filled(self, begun: list[list], reason: str) -> list[list]:
    missing = len(self._setup[0]) - len(begun)
    return begun + [[None, reason]] * missing

  def close(self) -> None:
    with self._lock:
      self._closed = True
      self._process.stdin.close()  # it takes that as its end
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

  def _asked(self, answers: list[tuple]) -> tuple[list[list], list]:
    """Rows, fewer if the process dies or stands still, and a part of one."""
    if not self._ask(answers):
      return [], []
    width = len(self._setup[0])
    lines = (
      self._line(self._setup[1] + GRACE) for _ in range(width * len(answers))
    )
    lines = list(itertools.takewhile(lambda line: line is not None, lines))
    whole = len(lines) // width * width
    rows = [lines[i : i + width] for i in range(0, whole, width)]
    return rows, lines[whole:]

  def _ask(self, request) -> bool:
    """Writes a request; whether all of it was taken, never waiting forever."""
    body = pickle.dumps(request)
    rest = memoryview(len(body).to_bytes(8, "big") + body)
    while rest:
      # A process that stands still takes no more than the pipe holds.
      if not self._room.poll(1000 * GRACE):
        return False
      with self._lock:
        if self._closed:
          raise futures.CancelledError
        try:
          rest = rest[os.write(self._process.stdin.fileno(), rest) :]
        except BrokenPipeError:
          return False
    return True

  def _line(self, seconds: float) -> list | None:
    """The next line, read as JSON; None if none comes."""
    end = time.monotonic() + seconds
    while b"\n" not in self._rest:
      if not self._wait.poll(max(0, 1000 * (end - time.monotonic()))):
        return None
      data = os.read(self._process.stdout.fileno(), 1 << 16)
      if not data:
        return None
      self._rest += data
    line, _, self._rest = self._rest.partition(b"\n")
    return json.loads(line)
