"""The process that scores: one a worker of `rewards.pool`, which starts it.

It imports the rewards once and never calls one. Each chunk of answers is scored
by a child forked for it, which reports call by call; what hangs is killed, with
all it started, and what dies is replaced, behind the call it was on.

In: pickles, each behind 8 bytes of length; first (names, seconds, memory), then
lists of answers. Out: a line of JSON when ready, and one for each call of a
reward, answer by answer: [value, null] or [null, reason].
"""

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
from pathlib import Path

from gspo_jax import rewards
from gspo_jax.runtime import errors

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
# How the reason begins where a reward returned something else.
NO_NUMBER = "expected a number, got"
# Of a reward: its square, summed over a group, is finite in float32.
_LARGEST = 1e9


def main() -> None:
  # Rewards print. What they print must not pass for a result.
  requests, results = os.dup(0), os.dup(1)
  os.dup2(2, 1)
  with open(os.devnull) as nothing:
    os.dup2(nothing.fileno(), 0)
  names, seconds, memory = receive(requests)
  try:
    functions = [(name, rewards.named(name, seconds)) for name in names]
  except errors.UserError as e:
    _send(results, [None, str(e)])
    return
  functions = [(n, f, sorted(rewards.given(f))) for n, f in functions]
  _prctl(_SET_CHILD_SUBREAPER, 1)
  _send(results, [None, None])
  while (answers := receive(requests)) is not None:
    calls = [(*f, answer) for answer in answers for f in functions]
    while calls:
      calls = calls[_settle(calls, requests, results, seconds, memory) :]


def receive(source: int):
  """The next request; None once the other end is closed."""
  size = int.from_bytes(_exactly(source, 8), "big")
  return pickle.loads(_exactly(source, size)) if size else None


def _exactly(source: int, size: int) -> bytes:
  parts = []
  while size and (part := os.read(source, min(size, 1 << 20))):
    parts.append(part)
    size -= len(part)
  return b"" if size else b"".join(parts)


def _send(results: int, message) -> None:
  os.write(results, json.dumps(message).encode() + b"\n")


def _settle(calls, requests, results, seconds, memory) -> int:
  """Makes calls in a new child; how many are done with, 1 or more."""
  source, sink = os.pipe()
  child = os.fork()
  if not child:
    try:
      for fd in (requests, results, source):
        os.close(fd)
      _score_all(calls, sink, memory)
    finally:
      os._exit(0)
  os.close(sink)
  try:
    settled, reason = _watch(source, requests, results, len(calls), seconds)
  finally:
    os.close(source)
    _clear(child)
  # A child that died on its first call died of it. Later, it may have been of
  # what an earlier one left behind: the rest gets another child.
  if reason and (settled == 0 or reason != _DIED):
    _send(results, [None, reason])
    settled += 1
  return settled


_DIED = "its process ended"


def _watch(source, requests, results, count, seconds) -> tuple[int, str | None]:
  """Passes lines on as they come: how many, and why not all."""
  wait = select.poll()
  wait.register(source, select.POLLIN)
  wait.register(requests, select.POLLIN)
  settled, rest = 0, b""
  end = time.monotonic() + seconds
  while settled < count:
    ready = {fd for fd, _ in wait.poll(max(0, 1000 * (end - time.monotonic())))}
    if not ready:
      return settled, f"took over {seconds:g} s"
    if requests in ready:  # nothing is asked while this runs: it was closed
      sys.exit()
    data = os.read(source, 1 << 16)
    if not data:
      return settled, _DIED
    lines, newline, rest = (rest + data).rpartition(b"\n")
    if newline:
      os.write(results, lines + newline)
      settled += lines.count(b"\n") + 1
      end = time.monotonic() + seconds
  return settled, None


def _clear(child: int) -> None:
  """Ends a child and all that descends from it, in its session or not."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child, signal.SIGKILL)
  with contextlib.suppress(ProcessLookupError):
    os.kill(child, signal.SIGKILL)
  # What it left becomes a child of this process, the subreaper.
  while True:
    for pid in _children():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
      os.wait()
    except ChildProcessError:
      return


def _children() -> list[int]:
  me = os.getpid()
  with contextlib.suppress(OSError):
    return [
      int(p) for p in Path(f"/proc/{me}/task/{me}/children").read_text().split()
    ]
  return []


def _score_all(calls, sink: int, memory: float) -> None:
  """In the child: a line for each call."""
  os.setsid()
  _prctl(_SET_PDEATHSIG, signal.SIGKILL)
  nothing = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(nothing, fd)
  _limit(memory)
  me = os.getpid()
  for call in calls:
    message = _scored(*call)
    for timer in _TIMERS:  # set by a reward, they would end the next
      signal.setitimer(timer, 0)
    if os.getpid() != me:  # a reward forked, and both came back
      return
    _send(sink, message)


def _limit(memory: float) -> None:
  """Bounds what is added to the present address space, in GiB, on Linux.

  Other systems do not tell it here, and macOS bounds no address space at all.
  """
  if sys.platform != "linux":
    return
  pages = int(Path("/proc/self/statm").read_text().split()[0])
  most = pages * resource.getpagesize() + int(memory * 2**30)
  hard = resource.getrlimit(resource.RLIMIT_AS)[1]
  most = most if hard == resource.RLIM_INFINITY else min(most, hard)
  resource.setrlimit(resource.RLIMIT_AS, (most, most))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _scored(name: str, function, measures, answer) -> list:
  try:
    more = {measure: getattr(answer, measure) for measure in measures}
    value = function(answer.prompt, answer.text, answer.reference, **more)
    if inspect.iscoroutine(value):
      import asyncio  # here, for few rewards need it

      value = asyncio.run(value)
    if not hasattr(value, "__float__"):  # float() reads texts too
      return [None, f"{name}: {NO_NUMBER} {type(value).__name__}"]
    if not abs(value := float(value)) <= _LARGEST:  # NaN too
      raise ValueError(f"expected a number up to 1e9, got {value}")
  except BaseException as e:
    return [None, f"{name}: {_said(e)}"]
  return [value, None]


def _said(error: BaseException) -> str:
  try:
    return ascii(f"{type(error).__name__}: {error}"[:200])[1:-1]
  except BaseException:
    return "an error that cannot be shown"


def _prctl(option: int, value: int) -> None:
  if sys.platform == "linux":
    _LIBC.prctl(option, value, 0, 0, 0)


_LIBC = ctypes.CDLL(None)

if __name__ == "__main__":
  main()
