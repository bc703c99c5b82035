"""Rewards by name: which function, with which arguments, and the errors."""

import inspect
import re
import sys

import pytest
from repository import ROOT

from gspo_jax import rewards
from gspo_jax.rewards.reward import Response
from gspo_jax.runtime import spec
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
  reward = spec.imported(name, rewards.BUILT_IN)
  parameters = inspect.signature(getattr(reward, "function", reward)).parameters
  assert list(parameters)[:3] == ["prompt", "response", "reference"]


def test_a_users_reward_by_dotted_name_with_arguments(module):
  module(
    "user_reward",
    "def f(prompt, response, reference, *,\n"
    "      scale=1, word='a', tokens, limit=9):\n"
    "  return scale * (response == word) + tokens / limit\n",
  )
  reward = rewards.named("user_reward.f:scale=-2.5,word=yes,limit=10")
  assert reward("", "yes", "", tokens=5) == -2.0
  # An argument set by the spec is not passed again, nor replaced by a column.
  columns = {"scale": 0, "word": "b", "limit": 0, "tokens": 0}
  response = Response("", "yes", "", tokens=5, limit=7, columns=columns)
  assert reward.keywords([response]) == {"tokens": 5}
  free = rewards.named("user_reward.f")
  assert free.keywords([response]) == columns | {"tokens": 5, "limit": 7}


@pytest.mark.parametrize(
  ("text", "message"),
  [("final_anser", "did you mean 'final_answer'"), ("", "unknown reward ''"),
   ("no_such_package.f", "importing 'no_such_package' failed: ModuleNot"),
   ("gspo_jax.rewards.numbers.gms8k", "did you mean 'gsm8k'"),
   ("gspo_jax.rewards.numbers.x", "no function 'x': choose one of final_"),
   ("errno.x", "'errno' has no function 'x': it has none"),
   ("final_answer:scale=2", "no argument 'scale': it takes none"),
   ("overlong:bufer=2", "no argument 'bufer': did you mean 'buffer'"),
   ("overlong:buffer", "expected key=value once each, got 'buffer'"),
   ("overlong:buffer=1,buffer=2", "once each, got 'buffer=2'"),
   ("overlong", "expected a buffer of 1 token or more"),
   ("overlong:buffer=0", "buffer of 1 token or more.*got 0"),
   ("overlong:buffer=8,limit=4", "limit of buffer=8 tokens or more, got 4"),
   ("code:seconds=0", "seconds above 0, got 0"),
   ("gspo_jax.rewards.code.CODEE", "did you mean 'CODE'"),
   ("code:memory=1", "memory of 32 MiB or more, got 1")],
)  # fmt: skip
def test_mistakes_in_a_spec_are_errors(text, message):
  with pytest.raises(UserError, match=message):
    rewards.named(text)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("def f(prompt, response): return 1.0",
     r"takes \(prompt, response\): expected \(prompt, response, reference\).*"
     "too many positional arguments"),
    ("def f(prompt, response, reference, more): return 1.0", "'more'"),
    ("def f(prompt, responses): return [1.0]", r"or \(prompt, responses, ref"),
    ("def f(prompt, response, reference, level): return 1.0",
     r"behind a \*, by keyword only, columns.*argument: 'level'"),
    ("class f:\n  def __init__(self, decay=.9): pass",
     r"is a class: expected a function or an instance, such as f = f\(...\)"),
    ("def f(data_source, solution_str, ground_truth, extra_info=None): pass",
     r"takes \(data_source, .*, as in verl: call it in a reward \(prompt, "),
    ("def f(prompts, completions, completion_ids, **kwargs): pass",
     r"as in TRL: call it in a reward \(prompt, responses, reference\)"),
    ("f = max", "no signature found.*: expected a Python function"),
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("import sys; sys.exit(3)", "SystemExit: 3"),
    ("def f(:", "SyntaxError"),
    ("def f(p, a, r): pass\nf.columns = len", "attribute 'columns' is not"),
  ],
)  # fmt: skip
def test_a_module_that_fails_or_a_wrong_signature_is_refused(
  module, text, message
):
  module("odd_reward", text)
  with pytest.raises(UserError, match=message) as error:
    rewards.named("odd_reward.f")
  assert str(error.value).startswith("reward 'odd_reward.f'")


@pytest.mark.parametrize(
  ("signature", "expected"),
  [
    ("p, a, r", {}),
    ("p, a, r, *, level", {"level": 3}),
    ("p, a, r, *, level, missing=1", {"level": 3}),
    ("p, a, r, *, completions=1", {}),
    ("p, a, r, *, limit, **columns", {"limit": 8, "level": 3, "url": "u"}),
    ("p, level, r, **columns", {"url": "u"}),  # cannot be passed twice
    ("p, responses, r, *, tokens", {"tokens": [4, 5]}),
    ("p, a, r, more=None, *, tokens, scale=1", {"tokens": 4}),
    ("*args, **more", {"level": 3, "url": "u"}),
    ("p, responses, *, reference, tokens", None),
  ],
)
def test_a_reward_gets_the_columns_that_it_names(module, signature, expected):
  module("column_reward", f"def f({signature}): return 1.0")
  if expected is None:
    with pytest.raises(UserError, match="too many positional"):
      rewards.named("column_reward.f")
    return
  reward = rewards.named("column_reward.f")
  columns = {"level": 3, "url": "u", "tokens": "not these", "limit": "nor this"}
  group = [Response("", "", "", n, 8, columns) for n in (4, 5)]
  assert reward.takes_group == ("responses" in signature)
  keywords = reward.keywords(group if reward.takes_group else group[:1])
  assert keywords == expected
  assert reward("", "", "", **keywords) == 1.0


def test_a_column_does_not_replace_a_setting_of_a_built_in():
  columns = dict.fromkeys(("seconds", "total", "memory"), 1)
  reward = rewards.named("code")
  assert reward.keywords([Response("", "", "", 1, 1, columns)]) == {}


def test_a_missing_column_is_named_beside_those_there_are(module):
  module("column_reward", "def f(p, a, r, *, level): return 1.0")
  reward = rewards.named("column_reward.f")
  assert reward.needed_columns == ("level",)
  for columns, hint in (({}, "it has none"), ({"x": 1, "y": 2}, "one of x, y")):
    with pytest.raises(LookupError, match=f"no column 'level': .*{hint}"):
      reward.keywords([Response("", "", "", columns=columns)])


def test_a_reward_object_of_a_user_is_prepared(module):
  """With the arguments of its spec, and the time of a call if there is one."""
  module(
    "own_reward",
    "from gspo_jax.rewards import Reward\n"
    "seen = []\n"
    "def f(p, a, r, *, n, **columns): return n + columns['level']\n"
    "OWN = Reward(f, prepare=lambda **k: seen.append(k),\n"
    "  fits=lambda seconds, **k: seen.append((seconds, k)),\n"
    "  columns=lambda n: ['level'])\n",
  )
  reward = rewards.named("own_reward.OWN:n=3", 7.0)
  seen = sys.modules["own_reward"].seen
  assert seen == [{"n": 3}, (7.0, {"n": 3})]
  assert reward.needed_columns == ("level",)
  response = Response("", "", "", columns={"level": 2, "n": 9, "x": 0})
  assert reward.keywords([response]) == {"level": 2, "x": 0}
  assert reward("", "", "", **reward.keywords([response])) == 5
  rewards.named("own_reward.OWN:n=4")
  assert seen[2:] == [{"n": 4}]


def test_the_reward_object_of_the_docs(module, tmp_path):
  page = (ROOT / "docs" / "rewards.md").read_text()
  module(
    "my_rewards", re.search("```python\n(from pathlib.*?)```", page, re.S)[1]
  )
  (tmp_path / "ask.txt").write_text("{response}, {difficulty}")
  reward = rewards.named(f"my_rewards.TEMPLATED:path={tmp_path}/ask.txt", 9.0)
  assert reward.needed_columns == ("difficulty",)
  response = Response("", "yes", "yes, 3", columns={"difficulty": 3})
  assert reward("", "yes", "yes, 3", **reward.keywords([response])) == 1.0
