"""The program of a worker process of `rewards.pool`, which starts it.

The worker imports the rewards once and never calls one itself. For each chunk
of responses it forks a child, which makes the calls one by one and reports each
result. If a call hangs, the child is killed together with all processes that it
started. If a child dies, a new one goes on after the call that ended it.

stdin: pickles, each after 8 bytes with its length; first a `process.Setup`,
then lists of `pool.Response`. stdout: a line of JSON when ready, and one for
each call of a reward, response by response: [value, null] or [null, failure].
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo_jax import rewards
from gspo_jax.runtime import errors

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
# Begins the failure of a reward that returned something else.
NO_NUMBER = "expected a number, got"
# Largest size of a reward: the sum of squares over a group stays finite in
# float32.
_LARGEST = 1e9


def main() -> None:
  # Rewards may print, and what they print must not be read as a result.
  requests, results = os.dup(0), os.dup(1)
  os.dup2(2, 1)
  with open(os.devnull) as empty:
    os.dup2(empty.fileno(), 0)
  names, seconds, memory = _receive(requests)
  try:
    functions = [rewards.named(name, seconds) for name in names]
  except errors.UserError as e:
    _send(results, [None, str(e)])
    return
  lengths = [sorted(rewards.length_arguments(f)) for f in functions]
  to_call = list(zip(names, functions, lengths, strict=True))
  _prctl(_SET_CHILD_SUBREAPER, 1)
  _send(results, [None, None])
  while (responses := _receive(requests)) is not None:
    calls = [_Call(*reward, r) for r in responses for reward in to_call]
    while calls:
      calls = calls[_run_child(calls, requests, results, seconds, memory) :]


class _Call(NamedTuple):
  """A reward to call on a response.

  Attributes:
    name: spec of the reward.
    reward: the function.
    length_arguments: which of `tokens` and `limit` it takes.
    response: a `pool.Response`.
  """

  name: str
  reward: Callable[..., float]
  length_arguments: Sequence[str]
  response: Any


def _receive(source: int):
  """The next request; None once the other end is closed."""
  size = int.from_bytes(_read_exactly(source, 8), "big")
  return pickle.loads(_read_exactly(source, size)) if size else None


def _read_exactly(source: int, size: int) -> bytes:
  parts = []
  while size and (part := os.read(source, min(size, 1 << 20))):
    parts.append(part)
    size -= len(part)
  return b"" if size else b"".join(parts)


def _send(results: int, message) -> None:
  os.write(results, json.dumps(message).encode() + b"\n")


def _run_child(calls, requests, results, seconds, memory) -> int:
  """Makes calls in a new child; returns how many are finished, 1 or more."""
  source, sink = os.pipe()
  child = os.fork()
  if not child:
    try:
      for fd in (requests, results, source):
        os.close(fd)
      _make_calls(calls, sink, memory)
    finally:
      os._exit(0)
  os.close(sink)
  try:
    finished, failure = _forward(source, requests, results, len(calls), seconds)
  finally:
    os.close(source)
    _kill_all(child)
  # A child that died on its first call died of that call. Later it may have
  # died of what an earlier call left behind, so the rest gets a new child.
  if failure and (finished == 0 or failure != _DIED):
    _send(results, [None, failure])
    finished += 1
  return finished


_DIED = "its process ended"


class _Forwarded(NamedTuple):
  """How many results a child sent, and why not all (None if all)."""

  finished: int
  failure: str | None


def _forward(source, requests, results, count, seconds) -> _Forwarded:
  """Forwards the results of a child to the pool as they come."""
  wait = select.poll()
  wait.register(source, select.POLLIN)
  wait.register(requests, select.POLLIN)
  finished, rest = 0, b""
  end = time.monotonic() + seconds
  while finished < count:
    ready = {fd for fd, _ in wait.poll(max(0, 1000 * (end - time.monotonic())))}
    if not ready:
      return _Forwarded(finished, f"took over {seconds:g} s")
    if requests in ready:  # the pool sends nothing meanwhile: it was closed
      sys.exit()
    data = os.read(source, 1 << 16)
    if not data:
      return _Forwarded(finished, _DIED)
    lines, newline, rest = (rest + data).rpartition(b"\n")
    if newline:
      os.write(results, lines + newline)
      finished += lines.count(b"\n") + 1
      end = time.monotonic() + seconds
  return _Forwarded(finished, None)


def _kill_all(child: int) -> None:
  """Kills a child and all its descendants, in its session or not."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child, signal.SIGKILL)
  with contextlib.suppress(ProcessLookupError):
    os.kill(child, signal.SIGKILL)
  # Orphans of the child become children of this process, the subreaper.
  while True:
    for pid in _children():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
      os.wait()
    except ChildProcessError:
      return


def _children() -> list[int]:
  pid = os.getpid()
  with contextlib.suppress(OSError):
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return list(map(int, pids.split()))
  return []


def _make_calls(calls: list[_Call], sink: int, memory: float) -> None:
  """In the child: makes the calls and writes a line for each."""
  os.setsid()
  _prctl(_SET_PDEATHSIG, signal.SIGKILL)
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  _limit_memory(memory)
  pid = os.getpid()
  for call in calls:
    message = _make_call(call)
    for timer in _TIMERS:  # one set by a reward would end the next reward
      signal.setitimer(timer, 0)
    if os.getpid() != pid:  # a reward forked, and both processes returned
      return
    _send(sink, message)


def _limit_memory(memory: float) -> None:
  """Limits the growth of the address space, in GiB; on Linux only.

  /proc has its present size on Linux alone, and macOS has no such limit.
  """
  if sys.platform != "linux":
    return
  pages = int(Path("/proc/self/statm").read_text().split()[0])
  limit = pages * resource.getpagesize() + int(memory * 2**30)
  hard = resource.getrlimit(resource.RLIMIT_AS)[1]
  limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _make_call(call: _Call) -> list:
  """[value, None] or [None, failure]."""
  name, reward, length_arguments, response = call
  try:
    lengths = {key: getattr(response, key) for key in length_arguments}
    value = reward(
      response.prompt, response.text, response.reference, **lengths
    )
    if inspect.iscoroutine(value):
      import asyncio  # not above: few rewards need it

      value = asyncio.run(value)
    if not hasattr(value, "__float__"):  # float() also takes strings
      return [None, f"{name}: {NO_NUMBER} {type(value).__name__}"]
    if not abs(value := float(value)) <= _LARGEST:  # NaN too
      raise ValueError(f"expected a number up to 1e9, got {value}")
  except BaseException as e:
    return [None, f"{name}: {_describe(e)}"]
  return [value, None]


def _describe(error: BaseException) -> str:
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
