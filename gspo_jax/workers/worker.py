"""The program of a worker process; `workers.pool` starts it.

The worker loads its tasks once and never calls one itself. It forks a child,
which makes the calls of a request and reports each result. The child serves the
next requests, too, until it has made `_CALLS`, or until a call leaves a thread
or a process behind. `async` tasks get a child of their own for each request,
which makes up to `concurrency` calls at once. If a call hangs, the child and
all processes that it started are killed. If a child dies, a new one goes on
after the call that ended it. Concurrent calls that were not finished are then
made again, one by one.

stdin: pickles, first a `process.Setup`, then lists of `process.Call`s. stdout:
a line of JSON when ready, [facts, null] or [null, failure]; and a line for each
call, in any order: [its number, value, null] or [number, null, failure].
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import pickle
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gspo_jax.runtime import errors
from gspo_jax.workers.process import SHARED_END, Call, Setup, children

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
# Seconds that a child may be silent after the time limit of its calls. A child
# with concurrent calls also stops them in time.
_SLACK = 1.0
# After which a child ends, and with it what they have changed or leaked. A fork
# takes 3 ms, as long as many calls.
_CALLS = 128


def main() -> None:
  # Tasks may print, and what they print must not be read as a result.
  requests, results = os.fdopen(os.dup(0), "rb"), os.dup(1)
  os.dup2(2, 1)
  with open(os.devnull) as empty:
    os.dup2(empty.fileno(), 0)
  setup = _receive(requests)
  try:
    tasks, facts = setup.load(setup.seconds)
  except errors.UserError as e:
    _send(results, [None, str(e)])
    return
  _prctl(_SET_CHILD_SUBREAPER, 1)
  _send(results, [facts, None])
  forked = _Children(setup, tasks, requests, results)
  is_async = [inspect.iscoroutinefunction(task) for task in tasks]
  while (calls := _receive(requests)) is not None:
    together = [call for call in calls if is_async[call.task]]
    calls = [call for call in calls if not is_async[call.task]]
    while together:
      left = forked.make_together(together)
      # One of the calls that ran is at fault; the other calls have not begun.
      ran, together = left[: setup.concurrency], left[setup.concurrency :]
      if setup.repeats:
        calls += ran
        continue
      for call in ran:
        _send(results, [call.number, None, SHARED_END])
    while calls:
      calls = forked.make_one_by_one(calls)


def _receive(source: BinaryIO):
  """The next pickle; None at the end, or if the sender died within one."""
  try:
    return pickle.load(source)
  except (EOFError, pickle.UnpicklingError):
    return None


def _send(results: int, message) -> None:
  os.write(results, json.dumps(message).encode() + b"\n")


class _Child(NamedTuple):
  pid: int
  lines: int  # a file descriptor, from the child
  feed: int  # a file descriptor, to the child
  calls: int  # that it was given before

  def is_idle(self) -> bool:
    """Whether no thread or process is left of its calls; False off Linux."""
    try:
      threads = os.listdir(f"/proc/{self.pid}/task")
    except OSError:
      return False
    processes = children(os.getpid()), children(self.pid)
    return len(threads) == 1 and processes == ([self.pid], [])

  def end(self) -> None:
    os.close(self.lines)
    os.close(self.feed)
    for kill in (os.killpg, os.kill):
      with contextlib.suppress(ProcessLookupError):
        kill(self.pid, signal.SIGKILL)
    # Orphans of the child become children of this process, the subreaper.
    while True:
      for pid in children(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
      try:
        os.wait()
      except ChildProcessError:
        return


class _Children:
  """Forks a child at a time; the file descriptors are from and to the pool."""

  def __init__(
    self, setup: Setup, tasks: Sequence, requests: BinaryIO, results: int
  ):
    self._setup, self._tasks = setup, tasks
    self._requests, self._results = requests.fileno(), results
    self._idle: _Child | None = None  # waits for calls

  def make_together(self, calls: list[Call]) -> list[Call]:
    """Makes `async` calls at once; returns calls that are left over.

    Calls are left over only if one of them ended the child or blocked its event
    loop; which one is unknown.
    """
    if self._idle:
      self._idle.end()
      self._idle = None
    child = self._fork(
      lambda _, sink: _make_together(calls, sink, self._setup, self._tasks)
    )
    try:
      silence = self._setup.seconds + _SLACK
      lines, failure = self._forward(child.lines, len(calls), silence)
    finally:
      child.end()
    if not failure:
      return []
    done = {json.loads(line)[0] for line in lines}
    return [call for call in calls if call.number not in done]

  def make_one_by_one(self, calls: list[Call]) -> list[Call]:
    """Makes calls in order; returns the rest, if the child did not make all.

    A new child makes at least the first.
    """
    child, self._idle = self._idle, None
    is_new = child is None
    if is_new:
      child = self._fork(
        lambda source, sink: _make_one_by_one(calls, source, sink, self._tasks)
      )
    stays = False
    try:
      if not is_new:
        with (
          contextlib.suppress(BrokenPipeError),  # `_forward` finds out
          open(child.feed, "wb", closefd=False) as feed,
        ):
          pickle.dump(calls, feed)
      silence = self._setup.seconds
      lines, failure = self._forward(child.lines, len(calls), silence)
      made = child.calls + len(calls)
      stays = not failure and made < _CALLS and child.is_idle()
    finally:
      if not stays:
        child.end()
    if stays:
      self._idle = child._replace(calls=made)
    finished = len(lines)
    # A new child that died on its first call died of that call. Later it may
    # have died of what an earlier call left behind, so the rest gets a new one.
    if failure and ((is_new and not finished) or failure != _DIED):
      _send(self._results, [calls[finished].number, None, failure])
      finished += 1
    return calls[finished:]

  def _fork(self, make: Callable[[int, int], None]) -> _Child:
    lines, sink = os.pipe()
    source, feed = os.pipe()
    child = os.fork()
    if not child:
      try:
        for fd in (self._requests, self._results, lines, feed):
          os.close(fd)
        _confine(self._setup.memory)
        make(source, sink)
      finally:
        os._exit(0)
    os.close(sink)
    os.close(source)
    return _Child(child, lines, feed, 0)

  def _forward(
    self, source: int, count: int, silence: float
  ) -> tuple[list[bytes], str | None]:
    """The lines of a child, and why some are missing (None if all came)."""
    wait = select.poll()
    wait.register(source, select.POLLIN)
    wait.register(self._requests, select.POLLIN)
    lines, rest = [], b""
    end = time.monotonic() + silence
    while len(lines) < count:
      left = max(0, end - time.monotonic())
      ready = {fd for fd, _ in wait.poll(1000 * left)}
      if not ready:
        return lines, f"took over {self._setup.seconds:g} s"
      if self._requests in ready:  # no request comes now: it was closed
        sys.exit()
      data = os.read(source, 1 << 16)
      if not data:
        return lines, _DIED
      *new, rest = (rest + data).split(b"\n")
      if new:
        os.write(self._results, b"".join(line + b"\n" for line in new))
        lines += new
        end = time.monotonic() + silence
    return lines, None


_DIED = "its process ended"


def _confine(memory: float) -> None:
  """In the child: a new session, streams and a limit of memory."""
  os.setsid()
  _prctl(_SET_PDEATHSIG, signal.SIGKILL)
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  _limit_memory(memory)


def _make_one_by_one(
  calls: list[Call], source: int, sink: int, tasks: Sequence
) -> None:
  pid, requests = os.getpid(), os.fdopen(source, "rb")
  while calls:
    for call in calls:
      line = _make(call, tasks)
      for timer in _TIMERS:  # one set by a call would end the next call
        signal.setitimer(timer, 0)
      if os.getpid() != pid:  # a task forked, and both processes returned
        return
      _send(sink, line)
    calls = _receive(requests)


def _make(call: Call, tasks: Sequence) -> list:
  try:
    value = tasks[call.task](call.request)
    if inspect.iscoroutine(value):  # made again after it ended its child
      value = asyncio.run(value)
    return [call.number, value, None]
  except BaseException as e:
    return [call.number, None, _describe(e)]


def _make_together(
  calls: list[Call], sink: int, setup: Setup, tasks: Sequence
) -> None:
  waiting = iter(calls)

  async def make_each():
    for call in waiting:
      _send(sink, await _make_in_time(call, setup, tasks))

  async def make_all():
    _renew_threads(setup)
    await asyncio.gather(*(make_each() for _ in range(setup.concurrency)))

  # Not closed: a call whose time is up may still have a thread. The process
  # ends without it.
  asyncio.new_event_loop().run_until_complete(make_all())


def _renew_threads(setup: Setup) -> None:
  """Gives `asyncio.to_thread` a thread for each call at once."""
  threads = futures.ThreadPoolExecutor(setup.concurrency)
  asyncio.get_running_loop().set_default_executor(threads)


async def _make_in_time(call: Call, setup: Setup, tasks: Sequence) -> list:
  task = asyncio.ensure_future(_make_async(call, tasks))
  await asyncio.wait({task}, timeout=setup.seconds)
  if task.done():
    return task.result()
  task.cancel()  # do not wait: it may go on, and keep its thread
  _renew_threads(setup)
  return [call.number, None, f"took over {setup.seconds:g} s"]


async def _make_async(call: Call, tasks: Sequence) -> list:
  try:
    return [call.number, await tasks[call.task](call.request), None]
  except BaseException as e:
    return [call.number, None, _describe(e)]


def _limit_memory(memory: float) -> None:
  """Limits the address space's growth, in GiB; macOS has no such limit."""
  if sys.platform != "linux":
    return
  pages = int(Path("/proc/self/statm").read_text().split()[0])
  limit = pages * resource.getpagesize() + int(memory * 2**30)
  hard = resource.getrlimit(resource.RLIMIT_AS)[1]
  limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _describe(error: BaseException) -> str:
  try:
    return ascii(f"{type(error).__name__}: {error}"[:300])[1:-1]
  except BaseException:
    return "an error that cannot be shown"


def _prctl(option: int, value: int) -> None:
  if sys.platform == "linux":
    _LIBC.prctl(option, value, 0, 0, 0)


_LIBC = ctypes.CDLL(None)

if __name__ == "__main__":
  main()
