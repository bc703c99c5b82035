"""Rewards of columns, of groups, and of several calls at once, in a pool."""

import sys
import time

import numpy as np
import pytest

from gspo_jax.rewards import process
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import EXAMPLE, Response
from gspo_jax.runtime.errors import UserError

MODULE = """
import asyncio, contextlib, os, threading, time

def column(prompt, response, reference, *, level, bonus=0):
  return level + bonus

def ranks(prompt, responses, reference, *, tokens, level):
  acts = {"raise": lambda: 1 / 0, "few": lambda: [1.0], "one": lambda: 1.0,
          "text": lambda: ["1"] * len(responses), "exit": lambda: os._exit(1)}
  for response in responses:
    if response in acts:
      return acts[response]()
  numbers = [float("nan") if r == "nan" else level * t
             for r, t in zip(responses, tokens)]
  return tuple(numbers)

running = most = 0

async def together(prompt, response, reference):
  global running, most
  running += 1
  most = max(most, running)
  try:
    await acts.get(response, lambda: asyncio.sleep(0.02))()
  finally:
    running -= 1
  return most

async def raises(): raise ValueError("mine")
async def exits(): raise SystemExit
async def dies(): os._exit(1)
async def blocks(): time.sleep(60)
async def waits(): await asyncio.sleep(60)
async def deaf():
  while True:
    with contextlib.suppress(asyncio.CancelledError):
      await asyncio.sleep(60)
async def threads():
  ready = threading.Barrier(4)
  await asyncio.gather(*(asyncio.to_thread(ready.wait, 1) for _ in range(4)))
async def hangs(): await asyncio.to_thread(time.sleep, 60)
async def sleeps(): await asyncio.to_thread(time.sleep, 0.01)
acts = {f.__name__: f for f in (raises, exits, dies, blocks, waits, deaf,
                                threads, hangs, sleeps)}

class Counts:
  calls = 0
  async def __call__(self, prompt, responses, reference):
    self.calls += 1
    return [self.calls] * len(responses)
count = Counts()

async def child(prompt, response, reference): return os.getpid()

def parent(prompt, response, reference):
  time.sleep(0.4 if response == "slow" else 0.05)
  return os.getppid()

def one_float(prompt, responses, reference): return 1.0
def too_few(prompt, responses, reference): return [1.0]
"""
NAMES = ("column", "ranks", "together", "count")
GROUP = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("user")
  (folder / "call_rewards.py").write_text(MODULE)
  sys.path.insert(0, str(folder))
  yield folder
  sys.path.remove(str(folder))


def make_pool(*names, **options):
  names = [f"call_rewards.{name}" for name in names]
  return RewardPool(names, [1.0] * len(names), workers=1, **options)


@pytest.fixture(scope="module")
def pool(folder):
  example = EXAMPLE._replace(columns={"level": 1})
  with make_pool(
    *NAMES, seconds=1.0, concurrency=4, examples=[example]
  ) as pool:
    yield pool


def score(pool, *texts, **columns):
  """The scores of responses in groups; response i has i tokens."""
  columns = {"level": 1} | columns
  responses = [
    Response("", text, "", tokens, 8, columns)
    for tokens, text in enumerate(texts)
  ]
  scores = pool.submit(responses, GROUP).result()
  return scores, dict(zip(NAMES, scores.parts.values(), strict=True))


def test_rewards_of_columns_of_groups_and_of_calls_at_once(pool):
  assert pool.takes_groups
  scores, parts = score(pool, *["x"] * 8, level=2, bonus=0.5)
  np.testing.assert_array_equal(parts["column"], [2.5] * 8)
  np.testing.assert_array_equal(parts["ranks"], 2 * np.arange(8))
  # Four calls run at once, and no more.
  assert parts["together"].max() == 4
  np.testing.assert_array_equal(parts["count"], [1] * 4 + [2] * 4)
  assert not scores.failed.any()


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ("raise", "call_rewards.ranks: ZeroDivisionError"),
    ("few", "expected a list of floats, 4 for as many responses, got 1 of"),
    ("one", "expected a list of floats, 4 for as many responses, got float"),
    ("text", "call_rewards.ranks: expected a number, got str"),
    ("exit", "call_rewards.ranks: its process ended"),
  ],
)
def test_a_failing_group_affects_no_other(pool, text, reason):
  scores, parts = score(pool, "x", "x", text, "x", *["x"] * 4)
  np.testing.assert_array_equal(scores.failed, [True] * 4 + [False] * 4)
  np.testing.assert_array_equal(parts["ranks"][4:], [4, 5, 6, 7])
  assert reason in scores.reasons[0]
  assert parts["together"].all()  # the other rewards of the group are there


def test_a_number_of_a_group_fails_alone(pool):
  scores, parts = score(pool, "x", "nan", "x", "x")
  np.testing.assert_array_equal(scores.failed, [False, True, False, False])
  np.testing.assert_array_equal(parts["ranks"], [0, 0, 2, 3])


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ("raises", "ValueError: mine"),
    ("exits", "SystemExit"),
    ("dies", "its process ended"),
    ("blocks", "took over 1 s"),
    ("waits", "took over 1 s"),
    ("deaf", "took over 1 s"),
  ],
)
def test_a_failing_call_affects_none_that_runs_beside_it(pool, text, reason):
  scores, parts = score(pool, *["x"] * 5, text, "x", "x")
  failed = np.arange(8) == 5
  np.testing.assert_array_equal(scores.failed, failed)
  np.testing.assert_array_equal(parts["together"] > 0, ~failed)
  assert f"call_rewards.together: {reason}" in scores.reasons[0]


def test_threads_that_hang_are_replaced(pool):
  scores, _ = score(pool, *["hangs"] * 4, *["sleeps"] * 4)
  np.testing.assert_array_equal(scores.failed, [True] * 4 + [False] * 4)


def test_a_call_that_blocks_and_is_made_again_fails_alone(folder, monkeypatch):
  """The pool waits for both tries, at a limit longer than its grace."""
  monkeypatch.setattr(process, "GRACE", 1.5)
  with make_pool("together", seconds=1.0, concurrency=4) as pool:
    scores = pool.submit(
      [EXAMPLE._replace(text=t) for t in ("blocks", "x", "x", "x")]
    ).result()
  np.testing.assert_array_equal(scores.failed, [True, False, False, False])
  assert "took over 1 s" in scores.reasons[0]


def test_workers_share_what_came_while_all_were_busy(folder):
  with RewardPool(["call_rewards.parent"], [1.0], workers=2, seconds=5) as pool:
    busy = [pool.submit([EXAMPLE._replace(text="slow")]) for _ in range(2)]
    time.sleep(0.1)
    later = [pool.submit([EXAMPLE]) for _ in range(8)]
    workers = [each.result().total[0] for each in [*busy, *later]]
  assert len({*workers[2:]}) == 2


def test_workers_take_equal_shares(folder):
  """Each request is a child process, and only its calls run together."""
  with RewardPool(["call_rewards.child"], [1.0], workers=2, seconds=5) as pool:
    children = pool.submit([EXAMPLE] * 64).result().total
  assert sorted(map(list(children).count, {*children})) == [32, 32]


def test_an_async_reward_has_as_many_threads_as_calls(pool):
  scores, _ = score(pool, "threads", "x", "x", "x")
  assert not scores.failed.any()


def test_a_response_without_the_column_fails_and_names_it(pool):
  with_level, without = {"level": 1}, {"lvl": 1}
  responses = [
    Response("", "x", "", 1, 8, columns)
    for columns in (with_level, without)
    for _ in range(GROUP)
  ]
  scores = pool.submit(responses, GROUP).result()
  np.testing.assert_array_equal(scores.failed, [False] * 4 + [True] * 4)
  assert "the problem has no column 'level'" in scores.reasons[0]
  assert "lvl" in scores.reasons[0]


def test_what_comes_while_a_worker_is_busy_runs_together(pool):
  """Else responses that finish one by one would wait for one another."""
  responses = [Response("", "x", "", 1, 8, {"level": 1})] * GROUP
  first = pool.submit(
    [r._replace(text="waits") for r in responses[:1]] + responses[1:], GROUP
  )
  time.sleep(0.3)
  later = [pool.submit(responses, GROUP) for _ in range(4)]
  assert first.result().failed.sum() == 1
  counts = [each.result().parts["call_rewards.count"][0] for each in later]
  assert counts == [1, 2, 3, 4]  # of one child process


def test_incomplete_groups_are_refused(pool):
  with pytest.raises(ValueError, match="3 responses in groups of 4"):
    pool.submit([EXAMPLE] * 3, GROUP)


@pytest.mark.parametrize(
  ("name", "examples", "message"),
  [
    (
      "column",
      [EXAMPLE._replace(columns={"levle": 1})],
      r"reward 'call_rewards.column': the problem has no column 'level': did "
      r"you mean 'levle'\? \(the problem 'What is 1\+2\?'; or set it, "
      r"'call_rewards.column:level=VALUE'\)",
    ),
    (
      "one_float",
      [EXAMPLE],
      "'call_rewards.one_float': expected a list of floats, 2 for as many "
      "responses, got float for an example",
    ),
    ("too_few", [EXAMPLE], "2 for as many responses, got 1 of them"),
  ],
)
def test_mistakes_are_reported_before_training(folder, name, examples, message):
  with pytest.raises(UserError, match=message):
    make_pool(name, examples=examples)
