"""The caller's side of a `rewards.worker`: starts it, asks it, replaces it."""

import contextlib
import itertools
import json
import os
import pickle
import select
import subprocess
import sys
import time
from concurrent import futures

from gspo_jax import errors

# Seconds for a worker's imports, and of its silence beyond an answer's time.
START, GRACE = 120.0, 30.0


class Process:
  """One process, started again when it dies."""

  def __init__(self, setup: tuple):
    self._setup, self._closed = setup, False
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
    )
    self._wait = select.poll()
    self._wait.register(self._process.stdout, select.POLLIN)
    self._rest = b""
    with contextlib.suppress(BrokenPipeError):
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

  def score(self, answers: list[tuple]) -> list[list]:
    """[parts, None] or [None, reason] of each answer."""
    rows, size = [], len(answers)
    while len(rows) < len(answers):
      asked = answers[len(rows) : len(rows) + size]
      got = self._asked(asked)
      rows += got
      if len(got) < len(asked):
        # What it died of may be one it had not yet told of, or no answer at
        # all: from now on one at a time.
        if size == 1:
          rows.append([None, "the process that scores ended"])
        size = 1
        self._restart()
    return rows

  def close(self) -> None:
    self._closed = True
    with contextlib.suppress(BrokenPipeError):
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
    if self._closed:
      raise futures.CancelledError
    self._start()
    self.wait_ready()

  def _asked(self, answers: list[tuple]) -> list[list]:
    """The rows of these answers, fewer if the process dies or stands still."""
    with contextlib.suppress(BrokenPipeError):
      self._ask(answers)
    lines = (self._line(self._setup[1] + GRACE) for _ in answers)
    return list(itertools.takewhile(lambda row: row is not None, lines))

  def _ask(self, request) -> None:
    body = pickle.dumps(request)
    self._process.stdin.write(len(body).to_bytes(8, "big") + body)
    self._process.stdin.flush()

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
