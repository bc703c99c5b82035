"""The pool and its workers: a failing reward affects its response only."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import numpy as np
import pytest

from gspo_jax.rewards import process, worker
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import Response, too_many
from gspo_jax.runtime.errors import UserError

# Rewards of a user: `act` does what the response names, and then returns 1.
MODULE = """
import ctypes, json, os, random, signal, subprocess, sys, threading, time

def act(prompt, response, reference):
  if response in ACTS:
    value = ACTS[response](reference)
    return 1.0 if value is None else value
  return 1.0

def same(prompt, response, reference):
  return float(response == reference)

def measured(prompt, response, reference, *, tokens, limit, scale=1.0):
  return scale * tokens / limit

def has_jax(prompt, response, reference):
  return float("jax" in sys.modules)

def returning(value):
  return lambda prompt, response, reference: value

returns_text, returns_nothing, returns_list = map(
  returning, ("1.0", None, [1.0])
)

def decodes(prompt, response, reference):
  return json.loads(reference)["score"]

def dies(prompt, response, reference):
  if response != "kind":
    os._exit(1)
  return 1.0

def hangs(prompt, response, reference):
  if response != "kind":
    time.sleep(60)
  return 1.0

def raises(_): raise ValueError("this \\n one \\ud800")
def exits(_): sys.exit(1)
def interrupts(_): raise KeyboardInterrupt
def ends(_): os._exit(0)
def crashes(_): ctypes.string_at(0)
def kills_itself(_): os.kill(os.getpid(), signal.SIGKILL)
def kills_its_worker(_):
  os.kill(os.getppid(), signal.SIGKILL)
  time.sleep(60)
def nan(_): return float("nan")
def infinite(_): return float("-inf")
def enormous(_): return 10**400
def large(_): return 1e30
def text(_): return "1.0"
def nothing(_): return [1.0]
def imaginary(_): return 1j
class Shy(Exception):
  def __str__(self): raise RuntimeError("no")
def shy(_): raise Shy
def recurses(_): recurses(_)
def sleeps(_): time.sleep(60)
def spins(_):
  while True:
    pass
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

ACTS = {k: v for k, v in list(globals().items()) if callable(v)}
"""

FAILS = {
  "raises": r"user_rewards.act: ValueError: this \n one \ud800",
  "exits": "user_rewards.act: SystemExit: 1",
  "interrupts": "user_rewards.act: KeyboardInterrupt",
  "ends": "its process ended",
  "crashes": "its process ended",
  "kills_itself": "its process ended",
  "kills_its_worker": "the worker process ended",
  "nan": "expected a number up to 1e9, got nan",
  "infinite": "expected a number up to 1e9, got -inf",
  "enormous": "OverflowError",
  "large": "expected a number up to 1e9, got 1e+30",
  "text": "expected a number, got str",
  "nothing": "expected a number, got list",
  "imaginary": "expected a number, got complex",
  "shy": "an error that cannot be shown",
  "recurses": "RecursionError",
  "sleeps": "user_rewards.act: took over 2 s",
  "spins": "took over 2 s",
  "spins_in_c": "took over 2 s",
  "stops": "took over 2 s",
  "deaf": "took over 2 s",
  "at_once": "MemoryError",
  "more_and_more": "MemoryError",
  "closes": "its process ended",
}
HARMLESS = (
  "prints",
  "reads",
  "alarms",
  "dies_later",
  "forks",
  "forks_and_raises",
  "forks_and_stays",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("user")
  (folder / "user_rewards.py").write_text(MODULE)
  sys.path.insert(0, str(folder))
  yield folder
  sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(folder):
  names = ["user_rewards.act"]
  with RewardPool(names, [1.0], workers=1, seconds=2.0, memory=0.1) as pool:
    yield pool


def act(*kinds, reference=""):
  return [Response("", kind, reference) for kind in kinds]


@pytest.mark.parametrize("kind", FAILS)
def test_a_failing_response_affects_no_other(pool, kind):
  scores = pool.submit(act("good", "good", kind, "good")).result()
  np.testing.assert_array_equal(scores.failed, [False, False, True, False])
  np.testing.assert_array_equal(scores.total, [1, 1, 0, 1])
  assert len(scores.reasons) == 1
  assert FAILS[kind] in scores.reasons[0]


def test_a_first_call_that_hangs_is_ended_in_time(pool):
  scores = pool.submit(act("sleeps", "good")).result()
  np.testing.assert_array_equal(scores.failed, [True, False])
  assert "took over 2 s" in scores.reasons[0]


@pytest.mark.parametrize("kind", HARMLESS)
def test_side_effects_of_a_reward_affect_no_response(pool, kind):
  kinds = ["good", kind, "naps", kind, "good", "raises"]
  scores = pool.submit(act(*kinds)).result()
  np.testing.assert_array_equal(scores.failed, [k == "raises" for k in kinds])
  np.testing.assert_array_equal(scores.total, [k != "raises" for k in kinds])


@pytest.mark.parametrize(
  ("name", "got"),
  [
    ("returns_text", "str"),
    ("returns_nothing", "NoneType"),
    ("returns_list", "list"),
  ],
)
def test_a_wrong_return_type_is_refused_at_the_start(folder, name, got):
  names = ["final_answer", f"user_rewards.{name}"]
  message = f"reward 'user_rewards.{name}': expected a number, got {got} for an"
  with pytest.raises(UserError, match=message):
    RewardPool(names, [1.0, 1.0], workers=1)


@pytest.mark.parametrize("name", ["decodes", "dies", "hangs"])
def test_the_example_response_may_fail(folder, name):
  responses = [Response("", "kind", '{"score": 1}')]
  with RewardPool(
    [f"user_rewards.{name}"], [1.0], workers=1, seconds=0.5
  ) as pool:
    scores = pool.submit(responses).result()
  np.testing.assert_array_equal(scores.total, [1])


@pytest.mark.parametrize(
  ("failed", "size", "most", "allowed"),
  [
    (0, 1, 0.0, None),
    (1, 1, 1.0, 0),
    (0, 16, 0.0, None),
    (1, 16, 0.0, 0),
    (8, 16, 0.5, None),
    (9, 16, 0.5, 8),
    (15, 16, 1.0, None),
    (16, 16, 1.0, 15),
    (29, 100, 0.29, None),  # 0.29 * 100 is under 29
    (30, 100, 0.29, 29),
  ],
)
def test_how_many_responses_may_fail(failed, size, most, allowed):
  message = too_many(failed, size, most, of="it")
  if allowed is None:
    assert message == ""
  else:
    assert message == (
      f"it: {failed} of {size} responses could not be scored, expected at most "
      f"{allowed} (reward.max_failed={most:g})"
    )


def test_many_failures_in_a_row(pool):
  kinds = ["ends", "raises", "crashes", "good"] * 20
  scores = pool.submit(act(*kinds)).result()
  np.testing.assert_array_equal(scores.failed, [k != "good" for k in kinds])
  assert len(scores.reasons) == 2  # each kind once, at most three


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


def test_a_daemon_does_not_outlive_its_chunk(pool, tmp_path):
  path = tmp_path / "pid"
  responses = act("daemon", "naps", reference=str(path))
  assert not pool.submit(responses).result().failed.any()
  assert gone(int(path.read_text()))


def test_a_worker_that_hangs_is_replaced(pool, folder, monkeypatch):
  monkeypatch.setattr(process, "GRACE", 0.5)
  os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
  scores = pool.submit(act("good", "good")).result()
  np.testing.assert_array_equal(scores.total, [1, 1])


def test_a_worker_that_hangs_before_a_large_request_is_replaced(
  pool, monkeypatch
):
  monkeypatch.setattr(process, "GRACE", 0.5)
  os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
  responses = [Response("", "good", "x" * 1_000_000)] * 2
  pending = pool.submit(responses)
  np.testing.assert_array_equal(pending.calls.result(30), [[[[1, None]]]] * 2)


def test_close_ends_a_worker_that_takes_no_request(folder):
  with RewardPool(["user_rewards.act"], [1.0], workers=1) as pool:
    os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
    pending = pool.submit([Response("", "good", "x" * 1_000_000)])
    time.sleep(0.5)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(10)
    stuck = closing.is_alive()
    pool._workers[0]._process.kill()  # else the test would never end
    assert not stuck
  assert pending.calls.exception(timeout=5) is not None


def test_a_restart_that_fails_fails_its_responses_and_ends_nothing(
  folder, tmp_path
):
  path = folder / "once.py"
  path.write_text(
    "import os, signal, time\n"
    "def f(prompt, response, reference):\n"
    "  if response: os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)\n"
    "  return 1.0\n"
  )
  with RewardPool(["once.f"], [1.0], workers=1) as pool:
    path.write_text("1 / 0")
    responses = [Response("", text, "") for text in ("", "x", "")]
    scores = pool.submit(responses).result()
    assert scores.failed[1:].all()
    assert "ZeroDivisionError" in scores.reasons[-1]


def test_a_process_started_during_close_is_ended(folder, monkeypatch):
  pool = RewardPool(["user_rewards.act"], [1.0], workers=1)
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


def test_order_and_rewards_do_not_depend_on_the_workers(folder):
  rng = np.random.default_rng(0)
  responses = [
    Response("", "", "", int(n), 1000) for n in rng.integers(0, 1000, 700)
  ]
  expected = np.float32([response.tokens / 1000 for response in responses])
  for workers in (1, 3):
    with RewardPool(["user_rewards.measured"], [1.0], workers=workers) as pool:
      pending = [pool.submit(responses), pool.submit(responses[:5])]
      np.testing.assert_array_equal(pending[1].result().total, expected[:5])
      np.testing.assert_array_equal(pending[0].result().total, expected)
      assert pool.submit([]).result().total.shape == (0,)


def test_text_reaches_a_reward_unchanged(folder):
  texts = [
    "",
    "\0",
    "é\n",
    "\ud800",
    "\ud83d\ude00",
    "\U0001f600",
    "x" * 3_000_000,
  ]
  texts.append("".join(map(chr, range(0x11000))))
  with RewardPool(["user_rewards.same"], [1.0], workers=1) as pool:
    same = pool.submit([Response("", t, t) for t in texts]).result()
    assert same.total.sum() == len(texts)
    other = [Response("", "\ud83d\ude00", "\U0001f600")]
    assert pool.submit(other).result().total.sum() == 0
    # Columns that no reward reads stay here: this one cannot be pickled.
    column = {"tests": lambda: None}
    apart = [Response("", "same", "same", columns=column)]
    assert pool.submit(apart).result().total.sum() == 1


def test_total_is_the_weighted_sum_of_the_rewards_that_worked(folder):
  names = ["final_answer", "user_rewards.measured:scale=-1", "user_rewards.act"]
  responses = [
    Response("", "#5", "5", 2, 8),
    Response("", "#5", "6", 4, 8),
    Response("", "raises", "5", 8, 8),
  ]
  with RewardPool(names, [1.0, 0.5, 0.25], workers=1) as pool:
    scores = pool.submit(responses).result()
  assert list(scores.parts) == [
    "final_answer",
    "user_rewards.measured",
    "user_rewards.act",
  ]
  np.testing.assert_array_equal(
    np.stack(list(scores.parts.values()), 1),
    [[1, -0.25, 1], [0, -0.5, 1], [0, -1, 0]],
  )
  np.testing.assert_array_equal(scores.total, np.float32([1.125, 0, -0.5]))
  assert scores.total.dtype == np.float32
  np.testing.assert_array_equal(scores.failed, [False, False, True])


@pytest.mark.parametrize("kind", ["raises", "sleeps", "ends"])
def test_a_failure_gets_no_more_than_a_wrong_response(folder, kind):
  names = ["user_rewards.act", "user_rewards.measured:scale=-1"]
  responses = [
    Response("", text, "", tokens, 8)
    for text in ("good", kind)
    for tokens in (8, -8)
  ]
  with RewardPool(names, [0.0, 1.0], workers=1, seconds=1.0) as pool:
    scores = pool.submit(responses).result()
  np.testing.assert_array_equal(scores.failed, [False, False, True, True])
  np.testing.assert_array_equal(scores.total, [-1, 1, -1, 0])


def test_submit_does_not_wait(pool):
  began = time.monotonic()
  pending = pool.submit(act("naps"))
  assert time.monotonic() - began < 0.2
  assert pending.result().total == 1
  assert time.monotonic() - began > 0.4


def test_the_caller_never_forks_and_the_workers_need_no_jax(
  folder, monkeypatch
):
  def refuse():
    raise AssertionError("forked")

  monkeypatch.setattr(os, "fork", refuse)
  with RewardPool(["user_rewards.has_jax"], [1.0], workers=1) as pool:
    assert pool.submit(act("")).result().total == 0


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("1 / 0", "ZeroDivisionError"),
    ("import sys; sys.exit(0)", "SystemExit: 0"),
    ("import os; os._exit(0)", "ended or blocked the worker process"),
    ("import ctypes; ctypes.string_at(0)", "ended or blocked the worker"),
    ("import time; time.sleep(60)", "ended or blocked the worker"),
    ("print('[[], null]')", "has no function 'f'"),
  ],
)
def test_a_module_that_fails_at_import_is_a_user_error(
  tmp_path, monkeypatch, text, message
):
  monkeypatch.setattr(process, "START", 2.0)
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "at_import.py").write_text(text)
  with pytest.raises(UserError, match=message):
    RewardPool(["final_answer", "at_import.f"], [1.0, 1.0], workers=1)


@pytest.mark.parametrize(
  ("names", "weights", "more", "message"),
  [
    ([], [], {}, "a weight for each of one or more rewards"),
    (["gsm8k"], [1.0, 2.0], {}, "a weight for each"),
    (["gsm8k", "gsm8k"], [1.0, 2.0], {}, "each reward once"),
    (["gsm8k"], [float("nan")], {}, "finite weights"),
    (["gsm8k"], [1.0], {"workers": 0}, "workers above 0, got 0"),
    (["gsm8k"], [1.0], {"seconds": 0}, "seconds above 0, got 0"),
    (["gsm8k"], [1.0], {"memory": -1}, "memory above 0, got -1"),
    (["gms8k"], [1.0], {}, "did you mean 'gsm8k'"),
  ],
)
def test_mistakes_of_the_config_are_errors_at_the_start(
  names, weights, more, message
):
  with pytest.raises(UserError, match=message):
    RewardPool(names, weights, **more)


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
import os, signal, sys
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import Response
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
pool = RewardPool(["user_rewards.act"], [1.0], workers=1, seconds=60)
"""


def run(folder, rest):
  path = os.pathsep.join([str(folder), *filter(None, sys.path)])
  return subprocess.run(
    [sys.executable, "-c", RUN + rest],
    env=os.environ | {"PYTHONPATH": path},
    start_new_session=True,
    capture_output=True,
    text=True,
    timeout=60,
  )


def test_signals_to_the_run_do_not_end_its_workers(folder):
  done = run(
    folder,
    "for s in (signal.SIGTERM, signal.SIGINT): os.killpg(0, s)\n"
    "scores = pool.submit([Response('', 'naps', '')]).result()\n"
    "pool.close()\n"
    "print(scores.total, scores.failed)\n",
  )
  assert done.stdout == "[1.] [False]\n", done.stderr


def test_workers_end_with_the_run_however_it_ends(folder, tmp_path):
  path = tmp_path / "pids"
  run(
    folder,
    "import time\n"
    f"pool.submit([Response('', 'remember', {str(path)!r})])\n"
    f"while not os.path.exists({str(path)!r}): time.sleep(.05)\n"
    "time.sleep(.2)\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n",
  )
  for pid in path.read_text().split():
    assert gone(int(pid))


def test_close_does_not_wait_for_a_call_that_hangs(folder):
  with RewardPool(["user_rewards.act"], [1.0], workers=1, seconds=60) as pool:
    pending = pool.submit(act("sleeps"))
    time.sleep(0.3)
    began = time.monotonic()
  assert time.monotonic() - began < 5
  assert pending.calls.exception(timeout=5) is not None
