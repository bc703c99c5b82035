"""The pool and its workers: a call that fails affects no other."""

import contextlib
import os
import signal
import sys
import threading
import time
from concurrent import futures

import numpy as np
import pytest
from processes import python

from gspo_jax.runtime.errors import UserError
from gspo_jax.workers import process, worker
from gspo_jax.workers.pool import Call, Pool, Result

# Tasks of a user: `act` does what the request names, and then returns 1.
pytestmark = pytest.mark.usefixtures("user_module")
MODULE_NAME = "user_tasks"
MODULE = """
import asyncio, contextlib, ctypes, os, signal, subprocess, sys, threading, time
import urllib.request

def act(request):
  kind, argument = request
  value = ACTS.get(kind, lambda _: None)(argument)
  return 1.0 if value is None else value

def raises(_): raise ValueError("this \\n one \\ud800")
def exits(_): sys.exit(1)
def ends(_): os._exit(0)
def crashes(_): ctypes.string_at(0)
def kills_itself(_): os.kill(os.getpid(), signal.SIGKILL)
def kills_its_worker(_):
  os.kill(os.getppid(), signal.SIGKILL)
  time.sleep(60)
def imaginary(_): return 1j  # is not JSON
class Shy(Exception):
  def __str__(self): raise RuntimeError("no")
def shy(_): raise Shy
def recurses(_): recurses(_)
def sleeps(_): time.sleep(60)
def spins_in_c(_): (9**9**8).bit_length()
def stops(_): os.kill(os.getpid(), signal.SIGSTOP)
def deaf(_):
  for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(s, signal.SIG_IGN)
  signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
  while True:
    try:
      time.sleep(60)
    except BaseException:
      pass
def at_once(_): bytearray(1 << 42)
def more_and_more(_):
  kept = []
  while True:
    kept.append(bytearray(1 << 20))
def closes(_): os.closerange(0, 100)
def prints(_):
  for _ in range(100):
    print("x" * 100_000)
    os.write(1, b"y" * 100_000)
    os.write(2, b"z" * 100_000)
def reads(_): sys.stdin.read()
def alarms(_):
  signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
  signal.setitimer(signal.ITIMER_REAL, 0.05)
def forges(line):  # to the pipe of its results
  for fd in range(3, 30):
    with contextlib.suppress(OSError):
      os.write(fd, line + b"\\n")
def dies_later(_): threading.Timer(0.2, os._exit, (1,)).start()
def forks(_): os.fork()
def forks_and_raises(_):
  if not os.fork():
    raise ValueError
def forks_and_stays(_):
  if not os.fork():
    time.sleep(60)
def daemon(path):
  if os.fork():
    return
  os.setsid()
  if os.fork():
    os._exit(0)
  with open(path, "w") as file:
    file.write(str(os.getpid()))
  time.sleep(60)
def naps(_): time.sleep(0.4)
def remember(path):
  with open(path, "w") as file:
    file.write(f"{os.getpid()} {os.getppid()}")
  time.sleep(60)

running = most = calls = 0

async def act_async(kind):  # how many were seen to run at once
  global running, most
  running += 1
  most = max(most, running)
  try:
    await ACTS.get(kind, lambda: asyncio.sleep(0.02))()
  finally:
    running -= 1
  return most

async def raises_async(): raise ValueError("mine")
async def exits_async(): raise SystemExit
async def dies(): os._exit(1)
async def blocks(): time.sleep(60)
async def waits(): await asyncio.sleep(60)
async def never_cancelled():
  while True:
    with contextlib.suppress(asyncio.CancelledError):
      await asyncio.sleep(60)
async def threads():
  ready = threading.Barrier(4)
  await asyncio.gather(*(asyncio.to_thread(ready.wait, 1) for _ in range(4)))
async def hangs(): await asyncio.to_thread(time.sleep, 60)
async def naps_async(): await asyncio.to_thread(time.sleep, 0.01)
async def rests(): await asyncio.sleep(0.4)
ACTS = {k: v for k, v in list(globals().items()) if callable(v)}

async def child(_): return os.getpid()

def parent(seconds):
  time.sleep(seconds)
  return os.getppid()

async def count(_):
  global calls
  calls += 1
  return calls

def same(pair): return pair[0] == pair[1]
def has(module): return module in sys.modules
def direct(host): return bool(urllib.request.proxy_bypass(host))
def pid(_): return os.getpid()

def load(seconds):
  tasks = [act, act_async, child, parent, count, same, has, pid, direct]
  return tasks, {"seconds": seconds}
"""
ACT, ACT_ASYNC, CHILD, PARENT, COUNT, SAME, HAS, PID, DIRECT = range(9)

FAILS = {
  "raises": r"ValueError: this \n one \ud800", "exits": "SystemExit: 1",
  "ends": "its process ended", "crashes": "its process ended",
  "kills_itself": "its process ended",
  "kills_its_worker": "the worker process ended",
  "imaginary": "its process ended", "shy": "an error that cannot be shown",
  "recurses": "RecursionError", "sleeps": "took over 2 s",
  "spins_in_c": "took over 2 s", "stops": "took over 2 s",
  "deaf": "took over 2 s", "at_once": "MemoryError",
  "more_and_more": "MemoryError", "closes": "its process ended",
}  # fmt: skip
HARMLESS = (
  "prints", "reads", "alarms", "dies_later", "forks", "forks_and_raises",
  "forks_and_stays",
)  # fmt: skip


def make_pool(module="user_tasks", workers=1, **limits):
  load = __import__(module).load
  return Pool("the tasks", load, workers=workers, **limits)


@pytest.fixture(scope="module")
def pool(user_module):
  with make_pool(seconds=2.0, memory=0.1, concurrency=4) as pool:
    yield pool


@pytest.fixture(scope="module")
def async_pool(user_module):
  with make_pool(seconds=1.0, concurrency=4) as pool:
    yield pool


def act(pool, *kinds, argument=""):
  return pool.start([Call(ACT, (kind, argument)) for kind in kinds])


def values(started):
  return [result.value for result in started.wait()]


@pytest.mark.parametrize("kind", FAILS)
def test_a_failing_call_affects_no_other(pool, kind):
  first, *good, failed = act(pool, kind, "good", "good", kind).wait()
  assert good == [Result(1.0, None)] * 2
  for result in (first, failed):
    assert result.value is None
    assert FAILS[kind] in result.failure


@pytest.mark.parametrize("kind", HARMLESS)
def test_side_effects_of_a_call_affect_no_other(pool, kind):
  kinds = ["good", kind, "naps", kind, "good", "raises"]
  failures = [result.failure for result in act(pool, *kinds).wait()]
  assert failures[:-1] == [None] * 5
  assert failures[-1]


def test_many_failures_in_a_row(pool):
  kinds = ["ends", "raises", "crashes", "good"] * 20
  failed = [bool(x.failure) for x in act(pool, *kinds).wait()]
  assert failed == [kind != "good" for kind in kinds]


@pytest.mark.parametrize(
  "line",
  [*(b"x", b"\xff", b"3", b"[9, 7.0, null]", b"[0, 7.0]", b"[0, 7.0, 3]"),
   b"[0, 7.0, null]\n" * 3, b"[" * 9999],
)  # fmt: skip
def test_a_call_that_forges_results_costs_no_other(pool, line):
  (forger,) = act(pool, "forges", argument=line).wait()
  assert forger.failure or forger.value == 7.0
  assert values(act(pool, "good", "good")) == [1.0, 1.0]


def test_workers_call_this_machine_without_a_proxy(monkeypatch):
  monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
  monkeypatch.setenv("NO_PROXY", "own.invalid")
  hosts = ["127.0.0.1:80", "localhost", "own.invalid", "other.invalid"]
  with make_pool() as pool:
    started = pool.start([Call(DIRECT, host) for host in hosts])
    assert values(started) == [True, True, True, False]


def gone(pid, seconds=5.0):
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    try:
      with open(f"/proc/{pid}/stat") as file:
        if file.read().rpartition(")")[2].split()[0] == "Z":
          return True
    except FileNotFoundError:
      return True
    time.sleep(0.02)
  return False


def test_a_daemon_does_not_outlive_its_request(pool, tmp_path):
  path = tmp_path / "pid"
  assert values(act(pool, "daemon", "naps", argument=str(path))) == [1.0, 1.0]
  assert gone(int(path.read_text()))


def test_small_requests_share_a_process_up_to_a_limit(pool):
  """A fork takes longer than many calls."""
  pool.start([Call(COUNT, None)]).wait()  # async: ends what was there
  pids = [values(pool.start([Call(PID, None)] * 3))[0] for _ in range(50)]
  # 43 requests of three reach the limit.
  assert [len({*pids[:43]}), len({*pids[43:]})] == [1, 1]
  assert pids[42] != pids[43]


@pytest.mark.parametrize("kind", ["forks_and_stays", "dies_later", "daemon"])
def test_a_process_that_a_call_left_busy_serves_no_other(pool, tmp_path, kind):
  before = values(pool.start([Call(PID, None)]))
  assert values(act(pool, kind, argument=str(tmp_path / "pid"))) == [1.0]
  assert values(pool.start([Call(PID, None)])) != before
  assert gone(before[0])


def test_a_call_is_not_blamed_for_a_process_that_died_before_it(pool):
  (pid,) = values(pool.start([Call(PID, None)]))
  os.kill(pid, signal.SIGKILL)
  assert (
    act(pool, "good", "ends", "good").wait()[::2] == [Result(1.0, None)] * 2
  )


@pytest.mark.parametrize("repeats", [True, False])
def test_a_lost_worker_costs_at_most_the_calls_that_had_begun(
  async_pool, repeats, caplog
):
  """The calls that had not begun run as many at once as before."""
  setup = async_pool._workers[0]._setup._replace(repeats=repeats)
  one = process.Process(setup)
  one.wait_ready()
  pid, began = one._process.pid, time.monotonic()
  threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
  results = dict(one.run([Call(ACT_ASYNC, "rests")] * 24))
  took = time.monotonic() - began
  one.close()
  assert sorted(results) == [*range(24)]
  failed = [i for i, result in sorted(results.items()) if result.failure]
  assert failed == ([] if repeats else [*range(4)])
  assert all("SIGKILL" in results[i].failure for i in failed)
  assert caplog.text.count("a new one goes on") == 1
  # One by one the last 20 alone would take 8 s.
  assert took < 8


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_a_worker_that_hangs_is_replaced(pool, monkeypatch, size):
  """Also one that hangs before it has read a large request."""
  monkeypatch.setattr(process, "GRACE", 0.5)
  os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
  started = act(pool, "good", "good", argument="x" * size)
  started.done.result(30)
  assert values(started) == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["sleeps", "good"])
def test_close_does_not_wait(kind):
  """For a call that hangs, or for a worker that takes no request."""
  with make_pool(seconds=60) as pool:
    worker = pool._workers[0]._process
    if kind == "good":
      os.kill(worker.pid, signal.SIGSTOP)
    pending = act(pool, kind, argument="x" * 1_000_000)
    time.sleep(0.5)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(5)
    stuck = closing.is_alive()
    worker.kill()  # else the test would never end
    assert not stuck
  assert pending.done.exception(timeout=5) is not None


def test_a_restart_that_fails_fails_its_calls_and_ends_nothing(user_module):
  path = user_module / "once.py"
  path.write_text(
    "import os, signal, time\n"
    "from gspo_jax.runtime.errors import UserError\n"
    "def f(text):\n"
    "  if text: os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)\n"
    "  return 1.0\n"
    "def load(seconds):\n"
    "  if os.path.exists(__file__ + '.broken'): raise UserError('broken')\n"
    "  return [f], None\n"
  )
  with make_pool("once") as pool:
    (user_module / "once.py.broken").write_text("")
    _, *lost = pool.start([Call(0, text) for text in ("", "x", "")]).wait()
    assert lost == [Result(None, "broken", lost=True)] * 2


def test_a_worker_that_cannot_start_again_fails_only_its_calls(monkeypatch):
  def no_memory():
    raise OSError("Cannot allocate memory")

  with make_pool() as pool:
    (one,) = pool._workers
    with monkeypatch.context() as patched:
      patched.setattr(one, "_start", no_memory)
      os.kill(one._process.pid, signal.SIGKILL)
      for _ in range(2):
        (lost,) = act(pool, "good").wait()
        assert "Cannot allocate memory" in lost.failure
    assert values(act(pool, "good")) == [1.0]


def test_a_process_started_during_close_is_ended(monkeypatch):
  pool = make_pool()
  one, closing = pool._workers[0], threading.Thread(target=pool.close)
  start = one._start

  def closes_and_starts():
    closing.start()
    closing.join(0.5)
    start()

  monkeypatch.setattr(one, "_start", closes_and_starts)
  with contextlib.suppress(futures.CancelledError, UserError):
    one._restart()
  closing.join(10)
  assert one._process.poll() is not None


def test_results_come_to_their_calls_with_any_number_of_workers():
  expected = np.random.default_rng(0).integers(0, 9, 700).tolist()
  calls = [Call(SAME, (n, 4)) for n in expected]
  for workers in (1, 3):
    with make_pool(workers=workers) as pool:
      first, second = pool.start(calls), pool.start(calls[:5])
      assert values(second) == [n == 4 for n in expected[:5]]
      assert values(first) == [n == 4 for n in expected]
      assert pool.start([]).wait() == []


def test_text_reaches_a_task_unchanged(pool):
  texts = ["", "\0", "é\n", "\ud800", "\ud83d\ude00", "\U0001f600"]
  texts += ["x" * 3_000_000, "".join(map(chr, range(0x11000)))]
  assert all(values(pool.start([Call(SAME, (t, t)) for t in texts])))
  other = Call(SAME, ("\ud83d\ude00", "\U0001f600"))
  assert values(pool.start([other])) == [False]


def test_start_does_not_wait(pool):
  began = time.monotonic()
  started = act(pool, "naps")
  assert time.monotonic() - began < 0.2
  assert values(started) == [1.0]
  assert time.monotonic() - began > 0.4


def test_the_caller_never_forks_and_the_workers_need_no_jax(monkeypatch):
  def refuse():
    raise AssertionError("forked")

  monkeypatch.setattr(os, "fork", refuse)
  with make_pool(seconds=7.0) as pool:
    assert pool.facts == {"seconds": 7.0}
    modules = ("jax", "numpy", "sys")
    calls = [Call(HAS, name) for name in modules]
    assert values(pool.start(calls)) == [False, False, True]


@pytest.mark.parametrize(
  "text",
  ["import time; time.sleep(60)",
   "def load(seconds): import ctypes; ctypes.string_at(0)",
   "def load(seconds): print('[null, null]'); raise ValueError"],
)  # fmt: skip
def test_a_load_that_ends_or_blocks_is_a_user_error(
  tmp_path, monkeypatch, text
):
  monkeypatch.setattr(process, "START", 2.0)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "at_start", raising=False)
  path = tmp_path / "at_start.py"
  path.write_text("def load(seconds): return [], None")
  load = __import__("at_start").load
  path.write_text(text)
  with pytest.raises(UserError, match="ended or blocked the worker process"):
    Pool("the tasks", load, workers=1)


@pytest.mark.parametrize(
  ("kind", "reason"),
  [("raises_async", "ValueError: mine"), ("exits_async", "SystemExit"),
   ("dies", "its process ended"), ("blocks", "took over 1 s"),
   ("waits", "took over 1 s"), ("never_cancelled", "took over 1 s")],
)  # fmt: skip
def test_a_failing_async_call_affects_none_beside_it(async_pool, kind, reason):
  kinds = [*["x"] * 5, kind, "x", "x"]
  calls = [Call(ACT_ASYNC, kind) for kind in kinds]
  ended = async_pool.start(calls).wait()
  assert [bool(x.failure) for x in ended] == [i == 5 for i in range(8)]
  assert reason in ended[5].failure


def test_async_calls_run_at_once_up_to_the_limit(async_pool):
  """With as many threads as calls, and not with calls of other tasks."""
  calls = [Call(ACT_ASYNC, "x")] * 8 + [Call(ACT, ("good", ""))]
  *most, good = values(async_pool.start(calls))
  assert max(most) == 4
  assert good == 1.0
  (threads,) = async_pool.start([Call(ACT_ASYNC, "threads")]).wait()
  assert threads.failure is None


def test_threads_that_hang_are_replaced(async_pool):
  kinds = [*["hangs"] * 4, *["naps_async"] * 4]
  ended = async_pool.start([Call(ACT_ASYNC, kind) for kind in kinds]).wait()
  assert [bool(x.failure) for x in ended] == [True] * 4 + [False] * 4


def test_a_call_that_blocks_and_is_made_again_fails_alone(monkeypatch):
  """The pool waits for both tries, at a limit longer than its grace."""
  monkeypatch.setattr(process, "GRACE", 1.5)
  with make_pool(seconds=1.0, concurrency=4) as pool:
    kinds = ("blocks", "x", "x", "x")
    calls = [Call(ACT_ASYNC, kind) for kind in kinds]
    blocked, *others = pool.start(calls).wait()
  assert blocked.failure == "took over 1 s"
  assert not any(other.failure for other in others)


def test_workers_share_what_came_while_all_were_busy():
  with make_pool(workers=2, seconds=5) as pool:
    busy = [pool.start([Call(PARENT, 0.4)]) for _ in range(2)]
    time.sleep(0.1)
    later = [pool.start([Call(PARENT, 0.05)]) for _ in range(8)]
    pids = [values(each)[0] for each in [*busy, *later]]
  assert len({*pids[2:]}) == 2


def test_workers_take_equal_shares():
  """Each request is a child process, and only its calls run together."""
  with make_pool(workers=2, seconds=5) as pool:
    children = values(pool.start([Call(CHILD, None)] * 64))
  assert sorted(map(children.count, {*children})) == [32, 32]


def test_what_comes_while_a_worker_is_busy_runs_together(async_pool):
  """Else responses that finish one by one would wait for one another."""
  first = async_pool.start([Call(ACT_ASYNC, "waits")])
  time.sleep(0.3)
  later = [async_pool.start([Call(COUNT, None)]) for _ in range(4)]
  assert first.wait()[0].failure
  assert sorted(values(each)[0] for each in later) == [1, 2, 3, 4]  # one child


def test_no_memory_limit_is_set_off_linux(monkeypatch):
  limits = []
  monkeypatch.setattr(
    worker.resource, "setrlimit", lambda *limit: limits.append(limit)
  )
  monkeypatch.setattr(worker, "Path", None)  # no /proc
  monkeypatch.setattr(worker.sys, "platform", "darwin")
  worker._limit_memory(1.0)
  assert not limits


RUN = """
import os, signal, sys, time
import user_tasks
from gspo_jax.workers.pool import Call, Pool
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
pool = Pool("the tasks", user_tasks.load, workers=1, seconds=60)
act = lambda *request: pool.start([Call(0, request)])
"""


def run(folder, rest):
  path = os.pathsep.join([str(folder), *filter(None, sys.path)])
  env = os.environ | {"PYTHONPATH": path}
  return python("-c", RUN + rest, env=env, start_new_session=True, timeout=60)


def test_signals_to_the_run_do_not_end_its_workers(user_module):
  done = run(
    user_module,
    "for s in (signal.SIGTERM, signal.SIGINT): os.killpg(0, s)\n"
    "print(act('naps', '').wait()[0].value)\n"
    "pool.close()\n",
  )
  assert done.stdout == "1.0\n", done.stderr


def test_workers_end_with_the_run_however_it_ends(user_module, tmp_path):
  path = tmp_path / "pids"
  run(
    user_module,
    f"act('remember', {str(path)!r})\n"
    f"while not os.path.exists({str(path)!r}): time.sleep(.05)\n"
    "time.sleep(.2)\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n",
  )
  for pid in path.read_text().split():
    assert gone(int(pid))
