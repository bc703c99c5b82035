"""Prints the progress of slow work, and what JAX compiles."""

import contextlib
import functools
import sys
import threading
import time
from typing import ClassVar, TextIO

from jax import monitoring

from gspo_jax.runtime import multihost

SECONDS = 10.0  # before the first line, and between the lines of a minute
COMPILE_SECONDS = 1.0  # before the first line of a compilation
_TICK = 0.25  # seconds between two checks for lines to print
# JAX reports the start of a stage as a scalar, and its end as a duration.
_STAGES = {
  "/jax/core/compile/jaxpr_trace_duration": "tracing",
  "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
  "/jax/core/compile/backend_compile_duration": "compiling",
}
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Progress:
  """A context manager that prints a line every 10 seconds while work goes on.

  Work of less than 10 seconds prints nothing. The lines of long work become
  rarer, down to one a minute. Process 0 prints whole lines, for log files:

    cold start: 150/800 steps in 20 s, 85 s left
    cold start: 800 steps in 105 s

  One thread prints all lines, even while a call compiles or runs on the device.
  Of nested Progresses only the innermost prints. The remaining time ignores
  compilation and everything before the first `advance`.

  Args:
    work: the beginning of each line.
    total: units to do; None if unknown.
    unit: a plural, such as "steps"; "" for work that is not counted, whose
      lines show the seconds so far.
    done: units that an earlier run has done.
    after: seconds before the first line; None is 10.
    file: None is stdout.
  """

  compile_seconds: ClassVar[float] = 0.0  # measured by `Compilations`
  _open: ClassVar[list["Progress"]] = []  # the innermost is last
  _lock: ClassVar[threading.Lock] = threading.Lock()  # for `_open` and lines

  def __init__(
    self,
    work: str,
    total: int | None = None,
    unit: str = "",
    *,
    done: int = 0,
    after: float | None = None,
    file: TextIO | None = None,
  ):
    self._work, self._total, self._unit, self._file = work, total, unit, file
    self._after = SECONDS if after is None else after
    self._start, self._done, self._tokens = time.monotonic(), done, 0
    self._first: tuple[float, int] | None = None  # (clock, done)
    self._last: tuple[float, int] | None = None  # of the newest `advance`
    self._next, self._prints = 0.0, multihost.is_primary()
    self.note = ""  # ends the last line, and lines that count

  def __enter__(self) -> "Progress":
    self._start = time.monotonic()
    self._next = self._start + self._after
    with self._lock:
      self._open.append(self)
    _start_printer()
    return self

  def __exit__(self, kind, error, traceback) -> None:
    with self._lock:
      self._open.remove(self)
    seconds = time.monotonic() - self._start
    if kind is None and seconds >= self._after:
      done = f"{self._done:,} {self._unit} in " if self._unit else ""
      rate = self._tokens_per_second(seconds)
      self._print(f"{self._work}: {done}{duration(seconds)}{rate}{self.note}")

  @classmethod
  def clock(cls) -> float:
    """Seconds, on a clock that stops while JAX compiles."""
    return time.monotonic() - cls.compile_seconds

  def advance(self, n: int = 1, *, tokens: int = 0) -> None:
    """Counts `n` more units as done, and `tokens` sampled in them."""
    self._done += n
    self._tokens += tokens
    self._last = self.clock(), self._done
    self._first = self._first or self._last

  def line(self) -> str:
    now, seconds = self.clock(), time.monotonic() - self._start
    if not self._unit:
      return f"{self._work}: {duration(seconds)} so far"
    total = f"/{self._total:,}" if self._total else ""
    line = f"{self._work}: {self._done:,}{total} {self._unit} in "
    line += duration(seconds) + self._tokens_per_second(seconds)
    first_time, first_done = self._first or (now, self._done)
    last_time, done = self._last or (now, self._done)
    if not self._total or done >= self._total or done == first_done:
      return line + self.note
    pace = (last_time - first_time) / (done - first_done)
    left = (self._total - done) * pace - (now - last_time)
    return f"{line}, {duration(max(left, 0))} left{self.note}"

  def _tokens_per_second(self, seconds: float) -> str:
    rate = self._tokens / max(seconds, 1e-9)
    return f", {rate:,.0f} tokens/s" if rate else ""

  @classmethod
  def print_due(cls) -> None:
    """Prints the line of the innermost Progress, if it is due."""
    with cls._lock:
      for self in cls._open[-1:]:
        now = time.monotonic()
        if now >= self._next:
          self._print(self.line())
          wait = max(SECONDS, (now - self._start) / 4)
          self._next = now + min(wait, 6 * SECONDS)

  def _print(self, line: str) -> None:
    if self._prints:
      # One write, so that the lines of other threads do not mix with it.
      file = self._file or sys.stdout
      file.write(line + "\n")
      file.flush()


@functools.cache
def _start_printer() -> None:
  def print_lines():
    while True:
      threading.Event().wait(_TICK)
      with contextlib.suppress(OSError, ValueError):  # stdout may be closed
        Progress.print_due()

  threading.Thread(target=print_lines, daemon=True).start()


def duration(seconds: float) -> str:
  """Seconds in words: "85 s", "12 min", "3 h 20 min"."""
  minutes = round(seconds / 60)
  if seconds < 120:
    return f"{seconds:.0f} s"
  if minutes < 120:
    return f"{minutes} min"
  return f"{minutes // 60} h {minutes % 60:02} min"


class Compilations(threading.local):
  """A context manager that says what JAX compiles.

  It prints lines for compilations over a second, and for traces and lowerings
  over ten. `Progress.compile_seconds` gets the time, also the time to read
  JAX's compilation cache.
  """

  def __init__(self):
    self._stages: list[Progress] = []  # open in this thread

  def __enter__(self) -> "Compilations":
    monitoring.register_scalar_listener(self._begin)
    monitoring.register_event_listener(self._event)
    monitoring.register_event_duration_secs_listener(self._end)
    return self

  def __exit__(self, *exception) -> None:
    monitoring.unregister_scalar_listener(self._begin)
    monitoring.unregister_event_listener(self._event)
    monitoring.unregister_event_duration_listener(self._end)

  def _begin(self, event: str, value: float, **facts: str | int) -> None:
    if event in _STAGES:
      stage = _STAGES[event]
      # "update" of "jit(_update)"
      name = str(facts.get("fun_name", "")).removeprefix("jit(")
      name = name.removesuffix(")").strip("_")
      progress = Progress(
        f"{stage} {name}",
        after=COMPILE_SECONDS if stage == "compiling" else None,
      )
      self._stages.append(progress.__enter__())

  def _event(self, event: str, **facts: str | int) -> None:
    if event == _CACHE_HIT and self._stages:
      self._stages[-1].note = ", from the compilation cache"

  def _end(self, event: str, duration_secs: float, **facts: str | int) -> None:
    if event in _STAGES and self._stages:
      self._stages.pop().__exit__(None, None, None)
      if not self._stages:  # an outer stage includes the inner ones
        Progress.compile_seconds += duration_secs
