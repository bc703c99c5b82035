"""Tools as functions: what the policy reads, and what a bad tool costs."""

import json
import re

import pytest
from repository import ROOT

from gspo_jax.data.problem import Problem
from gspo_jax.rollout import environment
from gspo_jax.rollout.environment import Question, Step
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("user_module")
MODULE_NAME = "user_tools"
MODULE = '''
import functools, threading, time

def add(a: int, b: int = 1) -> int:
  """Adds two numbers.

  Args:
    a: the first number.
    b: the second number.
  """
  return a + b

def word(text: str) -> str:
  """A word.

  Args:
    text: what to do.
  """
  if text == "refuse":
    raise ValueError("no such word \\ud83d")
  if text == "hang":
    time.sleep(60)
  if text == "exit":
    raise SystemExit
  return {"huge": "x" * (2 << 20), "surrogate": "a\\ud83d", "list": [1, "é"],
          "odd": threading.Lock(), "loop": LOOP, "nan": [1e999]}.get(text, text)

LOOP = []
LOOP.append(LOOP)
TOOLS = [add, word]

class Shop:
  """Its methods are the tools of a conversation."""
  def __init__(self):
    self._things = []
  def reset(self, problem):
    self._things.append(problem.columns["gift"])
  def buy(self, thing: str) -> list:
    """Buys a thing.

    Args:
      thing: its name.
    """
    self._things.append(thing if thing != "lock" else threading.Lock())
    return self._things if thing != "lock" else "bought"

class Asked(Shop):
  def __init__(self, name):
    pass
class Lazy(Shop):
  @property
  def stock(self):
    raise KeyError("no stock")
  @functools.cached_property
  def price(self):
    raise KeyError("no price")
class Callable:
  def __call__(self, x: int): pass
made = Callable()
part = functools.partial(add, 1)
def placed(x: int, /): pass
def several(*xs: int): pass

async def later(x: int): pass
def untyped(x):
  """Says.

  Args:
    x: a number.
  """
def group(prompt, responses, reference): pass
NOTHING = 3
TWICE = [add, add]
'''
SPEC = "tools:functions=user_tools.%s,reward=gsm8k,characters=80"


@pytest.fixture(scope="module")
def pools(user_module):
  limits = {"workers": 1, "seconds": 2.0, "tool_format": "hermes"}
  schemas = lambda name: environment.tools(SPEC % name, "hermes")[0]
  with (
    EnvironmentPool(
      SPEC % "TOOLS", schemas=schemas("TOOLS"), **limits
    ) as functions,
    EnvironmentPool(SPEC % "Shop", schemas=schemas("Shop"), **limits) as shop,
  ):
    yield {"TOOLS": functions, "Shop": shop}


def call(name, **arguments):
  text = json.dumps({"name": name, "arguments": arguments})
  return f"<tool_call>\n{text}\n</tool_call>"


def replies(pool, *texts):
  """The replies to these responses, of a conversation each."""
  problem = Problem("2+2?", "4", "", {"gift": "sock"})
  begun = pool.begin([(problem, 0, 0)] * len(texts))
  assert all(reply.step.messages == () for reply in begun)
  calls = zip((reply.state for reply in begun), texts, strict=True)
  return pool.replies(pool.step([*calls]))


def test_calls_are_answered_and_an_answer_is_scored(pools):
  both = call("add", a=2, b=40) + call("word", text="list")
  called, right, wrong = replies(pools["TOOLS"], both, "#### 4", "#### 5")
  messages = ("tool", "42", "add"), ("tool", '[1, "é"]', "word")
  assert called.step == Step(messages, tool_calls=2)
  assert right.step == Step(done=True, reward=1.0)
  assert wrong.step == Step(done=True)
  # Not for what the policy thinks.
  thought, answered = replies(
    pools["TOOLS"], "<think>#### 4\n</think>", "<think>#### 5\n</think>#### 4"
  )
  assert (thought.step.reward, answered.step.reward) == (0.0, 1.0)


ERRORS = {
  call("wordy", a=1): ("unknown", "no function 'wordy': did you mean 'word'"),
  call("add", c=1): ("add", "error: add(a: int, b: int = 1) -> int: missing"),
  call("add", a="3"): ("add", '1) -> int: a: expected integer, got "3"'),
  call("add", a={}): ("add", "a: expected integer, got an object"),
  call("word", text="refuse"): ("word", "error: no such word ?"),
  call("word", text="loop"): ("word", "error: Circular reference detected"),
  call("word", text="nan"): ("word", "error: Out of range float values"),
  # The token limit may have cut it.
  call("add", a=1).removesuffix("</tool_call>"): ("unknown", "has no end"),
  "<tool_call>{x}</tool_call>": ("unknown", "a call is not valid JSON"),
  call("\ud83d", a="\ud83d"): ("unknown", "no function"),
  call("x" * 10**5): ("unknown", "no function"),
  call("add", a=1, **{"\ud83d": 1}): ("add", "unexpected keyword"),
}


def test_what_is_wrong_with_a_call_is_told_to_the_policy(pools):
  found = replies(pools["TOOLS"], *ERRORS)
  for reply, (name, text) in zip(found, ERRORS.values(), strict=True):
    assert not reply.failure
    ((role, said, of),) = reply.step.messages
    assert (role, of) == ("tool", name)
    assert said.startswith("error")
    assert text in said
    assert len(said) <= 80
    assert reply.step[1:] == Step(tool_calls=1, tool_errors=1)[1:]


def test_a_hostile_tool_costs_its_conversation_alone(pools):
  say = lambda text: call("word", text=text)
  texts = [say(x) for x in ("hang", "exit", "huge", "surrogate", "odd", "ok")]
  hang, exits, *fine = replies(pools["TOOLS"], *texts)
  assert "took over 2 s" in hang.failure
  assert "SystemExit" in exits.failure
  said = [reply.step.messages[0][1] for reply in fine]
  assert said[:2] == ["x" * 80, "a?"]
  assert "error: TypeError: Object of type lock is not JSON" in said[2]
  assert said[3] == "ok"
  kept, lost = replies(
    pools["Shop"], call("buy", thing="hat"), call("buy", thing="lock")
  )
  assert kept.step.messages == (("tool", '["sock", "hat"]', "buy"),)
  assert "cannot pickle" in lost.failure


def test_an_object_lives_as_long_as_its_conversation(pools):
  first, second = replies(
    pools["Shop"], call("buy", thing="hat"), call("buy", thing="tie")
  )
  again = pools["Shop"].step([(first.state, call("buy", thing="bag"))])
  (reply,) = pools["Shop"].replies(again)
  assert reply.step.messages[0][1] == '["sock", "hat", "bag"]'
  assert second.step.messages[0][1] == '["sock", "tie"]'
  reset = call("reset", problem="x")
  (refused,) = replies(pools["Shop"], reset)
  assert "no function 'reset'" in refused.step.messages[0][1]


def test_the_example_of_the_docs(user_module):
  page = (ROOT / "docs" / "environments.md").read_text()
  section = page.partition("## Tools as functions")[2]
  module = re.search("(?s)```python\n(.*?)```", section)[1]
  (user_module / "my_tools.py").write_text(module)
  spec = "tools:functions=my_tools.TOOLS,reward=gsm8k"
  assert spec in section
  schemas, _ = environment.tools(spec, "hermes")
  assert [tool["function"]["name"] for tool in schemas] == ["euros", "total"]
  game = environment.named(spec, "hermes", schemas)()
  assert game.reset(Question("", "3"), 0) == ()
  calls = call("euros", amount=2, currency="USD")
  step = game.step(calls + call("euros", amount=2, currency="usd"))
  assert [text for _, text, _ in step.messages] == [
    "1.72",
    "error: unknown currency, expected one of USD, JPY",
  ]
  step = game.step(call("total", amounts=[1, 2.5]))
  assert step == Step([("tool", "3.5", "total")], tool_calls=1)


@pytest.mark.parametrize("name", ["TOOLS", "Shop", "Lazy"])
def test_the_chat_template_is_told_of_the_functions(name):
  tools, form = environment.tools(SPEC % name, "glm45")
  assert form == "glm45"
  functions = [tool["function"] for tool in tools]
  expected = {"TOOLS": ["add", "word"]}.get(name, ["buy"])
  assert [function["name"] for function in functions] == expected
  first = functions[0]["parameters"]
  assert first["required"] == [{"TOOLS": "a"}.get(name, "thing")]
  # A key of the spec comes before the template.
  assert environment.tools(SPEC % name + ",format=hermes", "glm45") == (
    tools,
    "hermes",
  )
  assert environment.tools("python", "glm45") == ([], "")
  assert environment.tools("calculator", "glm45") == ([], "call")


@pytest.mark.parametrize(
  ("spec", "reason"),
  [(SPEC % "Tools", "module 'user_tools' has no attribute 'Tools'"),
   (SPEC % "NOTHING", "expected a function, a list of functions"),
   ("tools:functions=no_tools.X,reward=gsm8k", "No module named 'no_tools'"),
   (SPEC % "Asked", "its __init__: TypeError:.*missing.*'name'"),
   (SPEC % "made", "expected a function, a list of functions"),
   (SPEC % "part", "expected a function, a list of functions"),
   (SPEC % "placed", r"'placed': .* can name, got \(x: int, /\)"),
   (SPEC % "several", r"'several': .* can name, got \(\*xs: int"),
   (SPEC % "later", "'later': expected a plain.* `async`"),
   ("tools:functions=user_tools.add,reward=gsm8", "unknown reward 'gsm8'"),
   ("tools:functions=user_tools.add,reward=user_tools.group", "takes a group"),
   ("tools:functions=user_tools.add,reward=overlong:buffer=9",
    "reads the len"),
   (SPEC % "TWICE", "functions with different names"),
   ("tools:reward=gsm8k", "missing.*functions.*'tools:key=value'"),
   (SPEC.replace("80", "0") % "add", "expected characters of 1 or more")],
)  # fmt: skip
def test_what_cannot_be_used_is_named(spec, reason):
  with pytest.raises(UserError, match=reason):
    environment.load(spec, 2.0, tool_format="hermes")


@pytest.mark.parametrize(
  ("spec", "form", "reason"),
  [(SPEC % "TOOLS", "", "the chat template shows none.*format=NAME.*hermes"),
   (SPEC % "TOOLS" + ",format=hermess", "glm45", "got 'hermess'"),
   (SPEC % "untyped", "hermes", "function 'untyped':.*expected a type for")],
)  # fmt: skip
def test_what_the_template_cannot_be_told_is_named(spec, form, reason):
  with pytest.raises(UserError, match=reason):
    environment.tools(spec, form)
