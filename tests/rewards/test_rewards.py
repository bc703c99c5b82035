"""Rewards by name: which function, with which arguments, and the errors."""

import functools
import inspect
import sys

import pytest

from gspo_jax import rewards
from gspo_jax.runtime.errors import UserError


@pytest.fixture
def module(tmp_path, monkeypatch):
  """Writes an importable module of the user's."""
  monkeypatch.syspath_prepend(tmp_path)

  def write(name, text):
    (tmp_path / f"{name}.py").write_text(text)
    return name

  yield write
  for path in tmp_path.glob("*.py"):
    sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("name", sorted(rewards.BUILT_IN))
def test_every_built_in_is_a_reward(name):
  path, _, attribute = rewards.BUILT_IN[name].rpartition(".")
  __import__(path)
  parameters = inspect.signature(
    getattr(sys.modules[path], attribute)
  ).parameters
  positional = [
    n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
  ]
  assert positional == ["prompt", "response", "reference"]


def test_built_in_by_name():
  assert rewards.named("final_answer")("2+3?", "#5", "5") == 1.0


def test_a_users_reward_by_dotted_name_with_arguments(module):
  module(
    "user_reward",
    "def f(prompt, response, reference, *,\n"
    "      scale=1, word='a', tokens, limit=9):\n"
    "  return scale * (response == word) + tokens / limit\n",
  )
  reward = rewards.named("user_reward.f:scale=-2.5,word=yes,limit=10")
  assert reward("", "yes", "", tokens=5) == -2.0
  # An argument set by the spec is not passed again.
  assert rewards.length_arguments(reward) == {"tokens"}
  assert rewards.length_arguments(rewards.named("user_reward.f")) == {
    "tokens",
    "limit",
  }


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    ("final_anser", "did you mean 'final_answer'"),
    ("", "unknown reward ''"),
    ("no_such_package.f", "importing 'no_such_package' failed: ModuleNot"),
    ("gspo_jax.rewards.numbers.gms8k", "did you mean 'gsm8k'"),
    ("gspo_jax.rewards.numbers.x", "no function 'x': choose one of final_"),
    ("gspo_jax.rewards.code.SLACK", "has no function 'SLACK'"),
    ("errno.x", "'errno' has no function 'x': it has none"),
    ("final_answer:scale=2", "no argument 'scale': it takes none"),
    ("overlong:bufer=2", "no argument 'bufer': did you mean 'buffer'"),
    ("overlong:buffer", "expected key=value once each, got 'buffer'"),
    ("overlong:", "expected key=value once each, got ''"),
    ("overlong:buffer=1,buffer=2", "once each, got 'buffer=2'"),
    ("overlong", "expected a buffer of 1 token or more"),
    ("overlong:buffer=0", "buffer of 1 token or more.*got 0"),
    ("overlong:buffer=x", "buffer of 1 token or more.*got 'x'"),
    ("overlong:buffer=8,limit=4", "limit of buffer=8 tokens or more, got 4"),
    ("code:seconds=0", "seconds above 0, got 0"),
    ("code:memory=1", "memory of 32 MiB or more, got 1"),
  ],
)
def test_mistakes_in_a_spec_are_errors(spec, message):
  with pytest.raises(UserError, match=message):
    rewards.named(spec)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("import sys; sys.exit(3)", "SystemExit: 3"),
    ("def f(:", "SyntaxError"),
  ],
)
def test_a_module_that_fails_is_a_user_error(module, text, message):
  module("broken_reward", text)
  with pytest.raises(UserError, match=message):
    rewards.named("broken_reward.f")


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("def f(prompt, response): return 1.0",
     r"takes \(prompt, response\): expected \(prompt, response, reference\).*"
     "too many positional arguments"),
    ("def f(prompt, response, reference, more): return 1.0", "'more'"),
    ("def f(p, r, *, reference): return 1.0", "too many positional"),
    ("def f(prompt, response, reference, *, scale): return 1.0",
     "'odd_reward.f:key=value' sets: missing a required argument: 'scale'"),
    ("async def f(prompt): return 1.0", "too many positional"),
    ("class f:\n  def __init__(self, prompt): pass", "too many positional"),
    ("f = max", "no signature found.*: expected a Python function"),
  ],
)  # fmt: skip
def test_a_wrong_signature_is_refused(module, text, message):
  module("odd_reward", text)
  with pytest.raises(UserError, match=message) as error:
    rewards.named("odd_reward.f")
  assert str(error.value).startswith("reward 'odd_reward.f'")


@pytest.mark.parametrize(
  "text",
  [
    "def f(p, a, r): return 1.0",
    "def f(*args, **more): return 1.0",
    "def f(p, a, r, more=None, *, tokens, scale=1): return 1.0",
    "class F:\n  def __call__(self, p, a, r): return 1.0\nf = F()",
  ],
)
def test_a_signature_that_takes_the_arguments(module, text):
  module("fine_reward", text)
  reward = rewards.named("fine_reward.f")
  measures = dict.fromkeys(rewards.length_arguments(reward), 1)
  assert reward("", "", "", **measures) == 1.0


def test_prepare_is_called_with_the_arguments(module):
  module(
    "prepared_reward",
    "def f(p, a, r, *, n): return n\n"
    "def prepare(n): f.seen = n\n"
    "f.prepare = prepare\n",
  )
  reward = rewards.named("prepared_reward.f:n=3")
  assert isinstance(reward, functools.partial)
  assert reward.func.seen == 3


def test_math_without_its_extra_says_how_to_get_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "math_verify", None)
  with pytest.raises(UserError, match=r"pip install 'gspo_jax\[math\]'"):
    rewards.named("math")
