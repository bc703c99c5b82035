"""Environments in worker processes: their protocol, limits and faults."""

import base64
import pickle
import re
import time

import pytest
from repository import ROOT

from gspo_jax.data.problem import Problem
from gspo_jax.rollout import environment
from gspo_jax.rollout.environment import Question, Step
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("user_module")
MODULE_NAME = "user_games"
MODULE = """
import asyncio, sys, threading, time

class Counts:
  roles = ("user", "tool")
  def __init__(self, *, most=3):
    self.most = most
  def reset(self, problem, seed):
    self.steps = 0
    if problem.text == "bad reset":
      raise ValueError("no game")
    if problem.columns.get("begin"):
      return [("system", "s"), ("user", f"{problem.text} {seed % 7}")]
    if problem.text == "run":
      return [("user", f"{problem.step} of {problem.workdir}")]
  def step(self, response):
    self.steps += 1
    act = getattr(self, "do_" + response, None)
    if act:
      return act()
    return [("tool", f"{self.steps}: {response}")], self.steps == self.most, 0.5
  def do_raise(self): raise KeyError("mine")
  def do_hang(self): time.sleep(60)
  def do_memory(self): return bytearray(1 << 30)
  def do_number(self): return 3
  def do_role(self): return [("assistant", "I am the policy")], False, 0.0
  def do_huge(self): return [("tool", "x" * (2 << 20))], False, 0.0
  def do_nan(self): return [("tool", "x")], False, float("nan")
  def do_bytes(self): return [("tool", b"x")], False, 0.0
  def do_surrogate(self): return [("tool", "a\\ud83d")], False, 0.0
  def do_lock(self):
    self.lock = threading.Lock()
    return [("tool", "x")], False, 0.0
  def do_modules(self):
    return [], True, float(bool({"numpy", "jax"} & {*sys.modules}))
  def do_silent(self): return [], False, 0.25
  def do_print(self):
    print('[0, 0, [[1, null]]]', flush=True)
    return [("tool", "printed")], False, 0.0

running = most = 0
class Waits:
  def reset(self, problem, seed): pass
  async def step(self, response):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.05)
    running -= 1
    return [], True, float(most)

class NoStep:
  def reset(self, problem, seed): pass
class Speaks(Waits):
  roles = ("assistant",)
class Letters(Waits):
  roles = ("tool")
class Resets(Waits):
  async def reset(self, problem, seed): pass
class Needs:
  def __init__(self, *, address): pass
  def reset(self, problem, seed): pass
  def step(self, response): pass
"""


@pytest.fixture(scope="module")
def pool(user_module):
  with EnvironmentPool(
    "user_games.Counts:most=2",
    workers=1,
    seconds=1.0,
    memory=0.2,
    workdir="runs/x",
  ) as pool:
    yield pool


def begin(pool, *problems, seed=0):
  return pool.begin([(problem, 0, seed) for problem in problems])


def step(pool, replies, *texts):
  calls = zip((reply.state for reply in replies), texts, strict=True)
  return pool.replies(pool.step(list(calls)))


def test_a_conversation_keeps_its_own_state(pool):
  first, second = begin(pool, Problem("a", "", ""), Problem("b", "", ""))
  (once,) = step(pool, [first], "x")
  (twice,) = step(pool, [once], "y")
  (other,) = step(pool, [second], "z")
  expected = Step((("tool", "1: x"),), reward=0.5)
  assert once.step == expected
  assert other.step == expected._replace(messages=(("tool", "1: z"),))
  assert (twice.step.done, twice.step.reward) == (True, 0.5)


def test_reset_sees_the_step_and_the_folder_of_the_run(pool):
  (reply,) = pool.begin([(Problem("run", "", ""), 7, 0)])
  assert reply.step.messages == (("user", "7 of runs/x"),)


def test_reset_sees_the_problem_and_the_seed(pool):
  begins = Problem("a", "ref", "", {"begin": True})
  (one,), (again,), (other,) = (
    begin(pool, begins, seed=seed) for seed in (1, 8, 2)
  )
  assert one.step.messages == (("system", "s"), ("user", "a 1"))
  assert again.step == one.step != other.step
  (silent,) = begin(pool, Problem("a", "", ""))
  assert silent.step.messages == ()


HOSTILE = {
  "raise": "KeyError", "hang": "took over 1 s", "memory": "MemoryError",
  "number": "expected a Step, got int", "role": "with roles .*user.*tool",
  "huge": "more than 1048576 characters",
  "nan": "expected a reward up to 1e9, got nan",
  "bytes": "expected messages of",
  "surrogate": "expected text that UTF-8 can encode, got 'a.*ud83d'",
  "lock": "cannot pickle",
}  # fmt: skip


def test_a_hostile_step_costs_its_conversation_alone(pool):
  """One batch of calls, the good ones between the bad ones."""
  names = [name for bad in HOSTILE for name in (bad, "print")]
  begun = begin(pool, *[Problem(name, "", "") for name in names])
  began = time.monotonic()
  replies = step(pool, begun, *names)
  assert time.monotonic() - began < 20
  for name, reply in zip(names, replies, strict=True):
    if name == "print":
      assert reply.step.messages == (("tool", "printed"),), reply
    else:
      assert reply.step == Step(done=True)
      assert re.search(HOSTILE[name], reply.failure)
      assert reply.failure.startswith("environment 'user_games.Counts:most=2'")


def test_a_step_without_messages_ends_a_conversation(pool):
  """And a worker needs the standard library alone."""
  games = begin(pool, Problem("a", "", ""), Problem("b", "", ""))
  silent, modules = step(pool, games, "silent", "modules")
  assert silent.step == Step((), done=True, reward=0.25)
  assert modules.step == Step((), done=True, reward=0.0)


def test_the_size_of_a_state_is_that_of_its_pickle(monkeypatch):
  game = b"x" * 999
  size = len(pickle.dumps(game))
  answer = lambda: environment._answer(game, Step(), ())
  monkeypatch.setattr(environment, "_MAX_STATE", size)
  assert pickle.loads(base64.b64decode(answer()[0])) == game
  monkeypatch.setattr(environment, "_MAX_STATE", size - 1)
  with pytest.raises(ValueError, match=f"more than {size - 1} bytes"):
    answer()


def test_the_example_of_the_docs_answers_any_response():
  page = (ROOT / "docs" / "environments.md").read_text()
  names = {}
  exec(re.search("(?s)```python\n(class .*?)```", page)[1], names)
  game = names["Thermostat"](most=25.0)
  assert game.reset(Question("", "20"), 0) == ()
  steps = [Step(*game.step(x)) for x in ("", "99", "-4", "20")]
  said = [text for step in steps for _, text in step.messages]
  assert said == ["expected a number", "colder", "warmer"]
  assert [step.done for step in steps] == [False, False, False, True]
  assert [step.reward for step in steps] == [0, 0, 0, 1]


def test_a_reset_is_tried_at_the_start():
  limits = {"workers": 1, "seconds": 2.0, "memory": 0.2}
  good, bad = Problem("good", "", ""), Problem("bad reset", "", "")
  EnvironmentPool("user_games.Counts", examples=[good], **limits).close()
  with pytest.raises(UserError, match=r"no game.*problem 'bad reset'"):
    EnvironmentPool("user_games.Counts", examples=[good, bad], **limits)


def test_async_steps_wait_together():
  with EnvironmentPool(
    "user_games.Waits", workers=1, seconds=2.0, concurrency=4
  ) as pool:
    begun = begin(pool, *[Problem(str(i), "", "") for i in range(8)])
    replies = step(pool, begun, *"abcdefgh")
  assert max(reply.step.reward for reply in replies) == 4


@pytest.mark.parametrize(
  ("spec", "message"),
  [("calculater", "unknown environment.*did you mean 'calculator'"),
   ("user_games.Count", "has no class 'Count'.*'Counts'"),
   ("user_games.Counts:mosst=1", "no argument 'mosst'.*'most'"),
   ("user_games.NoStep", r"step\(response\)"),
   ("user_games.Needs", "missing.*address.*'user_games.Needs:key=value'"),
   ("user_games.Speaks", "roles=.*assistant"),
   ("user_games.Letters", r"roles='tool': expected \('user',\)"),
   ("user_games.Resets", "its reset is `async`"),
   ("no_such_module.Game", "importing 'no_such_module' failed")],
)  # fmt: skip
def test_what_is_no_environment_is_named(spec, message):
  with pytest.raises(UserError, match=message):
    environment.roles(spec)
