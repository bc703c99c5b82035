"""Lines that say how far a slow piece of work is."""

import sys
import threading
import time
from typing import TextIO

from gspo_jax.runtime import multihost

SECONDS = 10.0  # before the first line, and between two lines


class Progress:
  """A context manager that prints a line every 10 seconds while work goes on.

  Work of less than 10 seconds prints nothing. Only process 0 prints, and only
  whole lines, so that a log file reads like a terminal:

    with Progress("cold start", 800, "steps") as progress:
      for batch in batches:
        ...
        progress.advance()

    cold start: 150/800 steps in 20 s, 85 s left
    ...
    cold start: 800 steps in 105 s

  A thread prints, so that the lines also come while a single call is compiled
  or runs on the device. The remaining time leaves out everything up to the
  first `advance`, which is where JAX compiles.

  Args:
    what: the work, the beginning of each line.
    total: how many units there are to do; None if that is not known.
    unit: a plural, such as "steps"; "" for work that is not counted, whose
      lines show the seconds so far.
    file: where to print; None is stdout.
  """

  def __init__(
    self,
    what: str,
    total: int | None = None,
    unit: str = "",
    *,
    file: TextIO | None = None,
  ):
    self._what, self._total, self._unit, self._file = what, total, unit, file
    self._done = self._tokens = self._first_done = 0
    self._start = self._first = self._last = time.monotonic()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._print_lines, daemon=True)

  def __enter__(self) -> "Progress":
    self._start = time.monotonic()
    if multihost.is_primary():
      self._thread.start()
    return self

  def __exit__(self, kind, error, traceback) -> None:
    self._stop.set()
    if not self._thread.ident:
      return
    self._thread.join()
    if kind is None and time.monotonic() - self._start >= SECONDS:
      self._print(self._end())

  def advance(self, n: int = 1, *, tokens: int = 0) -> None:
    """Counts `n` more units as done, and `tokens` sampled on the way."""
    self._last = time.monotonic()
    if not self._done:
      self._first, self._first_done = self._last, n
    self._done += n
    self._tokens += tokens

  def line(self) -> str:
    """What there is to say now."""
    now = time.monotonic()
    seconds = now - self._start
    if not self._unit:
      return f"{self._what}: {duration(seconds)} so far"
    total = f"/{self._total:,}" if self._total else ""
    line = f"{self._what}: {self._done:,}{total} {self._unit} in "
    line += duration(seconds) + self._tokens_per_second(seconds)
    later = self._done - self._first_done
    if not self._total or later <= 0 or self._done >= self._total:
      return line
    pace = (self._last - self._first) / later
    left = (self._total - self._done) * pace - (now - self._last)
    return f"{line}, {duration(max(left, 0))} left"

  def _end(self) -> str:
    seconds = time.monotonic() - self._start
    done = f"{self._done:,} {self._unit} in " if self._unit else ""
    tokens = self._tokens_per_second(seconds)
    return f"{self._what}: {done}{duration(seconds)}{tokens}"

  def _tokens_per_second(self, seconds: float) -> str:
    if not self._tokens:
      return ""
    return f", {self._tokens / max(seconds, 1e-9):,.0f} tokens/s"

  def _print_lines(self) -> None:
    while not self._stop.wait(SECONDS):
      self._print(self.line())

  def _print(self, line: str) -> None:
    # In one write, so that lines of other threads do not get in between.
    file = self._file or sys.stdout
    file.write(line + "\n")
    file.flush()


def duration(seconds: float) -> str:
  """Seconds in words: "85 s", "12 min", "3 h 20 min"."""
  minutes = round(seconds / 60)
  if seconds < 120:
    return f"{seconds:.0f} s"
  if minutes < 120:
    return f"{minutes} min"
  return f"{minutes // 60} h {minutes % 60:02} min"
