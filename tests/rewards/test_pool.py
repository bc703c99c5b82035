"""Rewards of responses and groups, from worker processes to their total."""

import numpy as np
import pytest

from gspo_jax.rewards.pool import RewardPool, Rewards, too_many
from gspo_jax.rewards.reward import EXAMPLE, Response
from gspo_jax.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("user_module")
MODULE_NAME = "user_rewards"
MODULE = """
import json, os, sys, time

class Odd:
  def __float__(self): raise OverflowError("no float")

RETURNS = {"nan": float("nan"), "infinite": float("-inf"), "large": 1e30,
           "enormous": 10**400, "text": "1.0", "list": [1.0],
           "imaginary": 1j, "odd": Odd()}

def act(prompt, response, reference):
  if response == "raises": raise ValueError("this")
  if response == "ends": os._exit(1)
  if response == "sleeps": time.sleep(60)
  return RETURNS.get(response, 1.0)

def measured(prompt, response, reference, *, tokens, limit, scale=1.0):
  return scale * tokens / limit

def of_run(prompt, response, reference, *, step, workdir):
  return step + len(workdir) / 10

def of_rest(prompt, response, reference, *, workdir, **columns):
  return len(workdir) + len(columns)

def column(prompt, response, reference, *, level, bonus=0):
  return level + bonus

def ranks(prompt, responses, reference, *, tokens, level):
  acts = {"few": lambda: [1.0], "exit": lambda: os._exit(1),
          "words": lambda: ["1"] * len(responses)}
  for response in responses:
    if response in acts:
      return acts[response]()
  return tuple(float("nan") if r == "nan" else level * t
               for r, t in zip(responses, tokens))

def of_sums(prompt, response, reference):
  return 1.0 if response.isdigit() else None

def of_words(prompt, response, reference):
  return 1.0 if response.isalpha() else None

def ranks_or_none(prompt, responses, reference):
  return [3 if r.isdigit() else None for r in responses]

class Counts:
  calls = 0
  async def __call__(self, prompt, responses, reference):
    self.calls += 1
    return [self.calls] * len(responses)
count = Counts()

def returning(value):
  return lambda prompt, response, reference: value

returns_text, returns_nan = map(returning, ("1.0", float("nan")))

def decodes(prompt, response, reference): return json.loads(reference)["score"]
def dies(prompt, response, reference): return response == "kind" or os._exit(1)
def hangs(prompt, response, reference):
  return response == "kind" or time.sleep(60)

def has_numpy(prompt, response, reference):
  return float(bool({"numpy", "jax"} & {*sys.modules}))

def one_float(prompt, responses, reference): return 1.0
def too_few(prompt, responses, reference): return [1.0]
"""
NAMES = ("column", "ranks", "act", "count")
GROUP = 4


def make_pool(*names, weights=None, **options):
  names = [x if ":" in x else f"user_rewards.{x}" for x in names]
  return RewardPool(names, weights or [1.0] * len(names), workers=1, **options)


@pytest.fixture(scope="module")
def pool(user_module):
  example = EXAMPLE._replace(columns={"level": 1})
  with make_pool(*NAMES, seconds=1.0, examples=[example]) as pool:
    yield pool


def rewards_of(pool, *texts, **columns):
  """The rewards of responses in groups; response i has i tokens."""
  columns = {"level": 1} | columns
  responses = [
    Response("", text, "", tokens, 8, columns)
    for tokens, text in enumerate(texts)
  ]
  rewards = pool.submit(responses, GROUP).result()
  return rewards, dict(zip(NAMES, rewards.parts.values(), strict=True))


def test_rewards_of_columns_and_of_groups(pool):
  assert pool.takes_groups
  rewards, parts = rewards_of(pool, *["x"] * 8, level=2, bonus=0.5)
  np.testing.assert_array_equal(parts["column"], [2.5] * 8)
  np.testing.assert_array_equal(parts["ranks"], 2 * np.arange(8))
  np.testing.assert_array_equal(parts["act"], [1] * 8)
  np.testing.assert_array_equal(parts["count"], [1] * 4 + [2] * 4)
  assert not rewards.failed.any()
  np.testing.assert_array_equal(rewards.total, np.sum([*parts.values()], 0))


FAILS = {
  "raises": "ValueError: this", "ends": "its process ended",
  "sleeps": "took over 1 s", "nan": "expected a number up to 1e9, got nan",
  "infinite": "expected a number up to 1e9, got -inf",
  "large": "expected a number up to 1e9, got 1e+30",
  "enormous": "OverflowError", "odd": "OverflowError: no float",
  "text": "expected a number, got str", "list": "expected a number, got list",
  "imaginary": "expected a number, got complex",
}  # fmt: skip


def test_failing_responses_affect_no_others():
  texts = [text for kind in FAILS for text in (kind, "good")]
  with make_pool("act", seconds=1.0) as pool:
    pending = pool.submit([Response("", text, "") for text in texts])
    rewards = pending.result()
    reasons = [row[0].failure() for row in pending.calls]
  np.testing.assert_array_equal(rewards.failed, [True, False] * len(FAILS))
  np.testing.assert_array_equal(rewards.total, [0, 1] * len(FAILS))
  for kind, reason in zip(FAILS, reasons[::2], strict=True):
    assert reason.startswith("user_rewards.act: ")
    assert FAILS[kind] in reason
  assert list(rewards.reasons) == [*dict.fromkeys(reasons[::2])][:3]


@pytest.mark.parametrize(
  ("text", "reason"),
  [("few", "expected a list of floats, 4 for as many responses, got 1 of"),
   ("words", "user_rewards.ranks: expected a number, got str"),
   ("exit", "user_rewards.ranks: its process ended")],
)  # fmt: skip
def test_a_failing_group_affects_no_other(pool, text, reason):
  rewards, parts = rewards_of(pool, "x", "x", text, "x", *["x"] * 4)
  np.testing.assert_array_equal(rewards.failed, [True] * 4 + [False] * 4)
  np.testing.assert_array_equal(parts["ranks"][4:], [4, 5, 6, 7])
  assert reason in rewards.reasons[0]
  assert parts["act"].all()  # the other rewards of the group are there


def test_a_response_of_a_group_fails_alone(pool):
  """By its number in the group's list, or by a second reward."""
  rewards, parts = rewards_of(pool, "x", "nan", "raises", "x")
  np.testing.assert_array_equal(rewards.failed, [False, True, True, False])
  np.testing.assert_array_equal(parts["ranks"], [0, 0, 2, 3])
  np.testing.assert_array_equal(parts["act"], [1, 0, 0, 1])


def test_a_response_without_the_column_fails_and_names_it(pool):
  responses = [
    Response("", "x", "", 1, 8, columns)
    for columns in ({"level": 1}, {"lvl": 1})
    for _ in range(GROUP)
  ]
  rewards = pool.submit(responses, GROUP).result()
  np.testing.assert_array_equal(rewards.failed, [False] * 4 + [True] * 4)
  assert "the problem has no column 'level'" in rewards.reasons[0]
  assert "lvl" in rewards.reasons[0]


def test_incomplete_groups_are_refused(pool):
  with pytest.raises(ValueError, match="3 responses in groups of 4"):
    pool.submit([EXAMPLE] * 3, GROUP)


def test_a_worker_needs_no_column_and_no_package_that_no_reward_reads():
  column = {"tests": lambda: None}  # cannot be pickled
  with make_pool("act", "has_numpy") as pool:
    response = Response("", "x", "", columns=column)
    act, has_numpy = pool.submit([response]).result().parts.values()
    assert (act.tolist(), has_numpy.tolist()) == ([1], [0])
    assert pool.submit([]).result().total.shape == (0,)


def test_total_is_the_weighted_sum_of_the_rewards_that_worked():
  responses = [
    Response("", "#5", "5", 2, 8),
    Response("", "#5", "6", 4, 8),
    Response("", "raises", "5", 8, 8),
  ]
  names = ("final_answer", "user_rewards.measured:scale=-1", "user_rewards.act")
  with RewardPool(names, [1.0, 0.5, 0.25], workers=1) as pool:
    rewards = pool.submit(responses).result()
  assert list(rewards.parts) == [name.partition(":")[0] for name in names]
  parts = np.stack(list(rewards.parts.values()), 1)
  expected = [[1, -0.25, 1], [0, -0.5, 1], [0, -1, 0]]
  np.testing.assert_array_equal(parts, expected)
  np.testing.assert_array_equal(rewards.total, np.float32([1.125, 0, -0.5]))
  assert rewards.total.dtype == np.float32
  np.testing.assert_array_equal(rewards.failed, [False, False, True])


def test_none_leaves_a_reward_out():
  """None is no failure; a response without any reward is one."""
  names = ("of_sums", "of_words", "ranks_or_none")
  texts = ("1", "a", "1", "?")
  responses = [Response("", x, "") for x in texts]
  with make_pool(*names, weights=[1.0, 2.0, 0.5]) as pool:
    rewards = pool.submit(responses, 4).result()
  nan = np.nan
  parts = np.stack([*rewards.parts.values()], 1)
  expected = [[1, nan, 3], [nan, 1, nan], [1, nan, 3], [nan, nan, nan]]
  np.testing.assert_array_equal(parts, expected)
  np.testing.assert_array_equal(rewards.total, [2.5, 2, 2.5, 0])
  np.testing.assert_array_equal(rewards.first, [1, 1, 1, 0])
  np.testing.assert_array_equal(rewards.failed, [False] * 3 + [True])
  assert rewards.reasons == ("no reward: all of them returned None",)


def test_a_failure_gets_no_more_than_a_wrong_response():
  names = ("act", "user_rewards.measured:scale=-1")
  texts = ("good", "raises", "sleeps", "ends")
  responses = [
    Response("", text, "", tokens, 8) for text in texts for tokens in (8, -8)
  ]
  with make_pool(*names, weights=[0.0, 1.0], seconds=1.0) as pool:
    rewards = pool.submit(responses).result()
  np.testing.assert_array_equal(rewards.failed, [False] * 2 + [True] * 6)
  np.testing.assert_array_equal(rewards.total, [-1, 1] + [-1, 0] * 3)


@pytest.mark.parametrize(
  ("name", "got"),
  [("returns_text", "a number, got str"),
   ("one_float", "a list of floats, 2 for as many responses, got float"),
   ("too_few", "a list of floats, 2 for as many responses, got 1 of them")],
)  # fmt: skip
def test_a_wrong_return_type_is_refused_at_the_start(name, got):
  message = f"reward 'user_rewards.{name}': expected {got} for an example"
  with pytest.raises(UserError, match=message):
    make_pool("act", name)


@pytest.mark.parametrize("name", ["decodes", "dies", "hangs", "returns_nan"])
def test_the_example_response_may_fail(name):
  with make_pool(name, seconds=0.5) as pool:
    responses = [Response("", "kind", '{"score": 1}')]
    rewards = pool.submit(responses).result()
  assert rewards.failed.tolist() == [name == "returns_nan"]


@pytest.mark.parametrize(
  ("names", "weights", "message"),
  [
    ([], [], "a weight for each of one or more rewards"),
    (["gsm8k"], [1.0, 2.0], "a weight for each"),
    (["gsm8k", "gsm8k"], [1.0, 2.0], "each reward once"),
    (["gsm8k"], [float("nan")], "finite weights"),
    (["final_answer", "user_rewards.f"], [1.0, 1.0], "has no function 'f'"),
    (["user_rewards.column"], [1.0],
     r"reward 'user_rewards.column': the problem has no column 'level': did "
     r"you mean 'levle'\? \(the problem 'What is 1\+2\?'; or set it, "
     r"'user_rewards.column:level=VALUE'\)"),
  ],
)  # fmt: skip
def test_mistakes_of_the_config_are_errors_at_the_start(
  names, weights, message
):
  example = EXAMPLE._replace(columns={"levle": 1})
  with pytest.raises(UserError, match=message):
    RewardPool(names, weights, workers=1, examples=[example])


@pytest.mark.parametrize(
  ("failed", "size", "share", "allowed"),
  [
    (0, 1, 0.0, None), (1, 16, 0.0, 0), (9, 16, 0.5, 8), (15, 16, 1.0, None),
    (16, 16, 1.0, 15), (29, 100, 0.29, None),  # 0.29 * 100 is under 29
    (30, 100, 0.29, 29),
  ],
)  # fmt: skip
def test_how_many_responses_may_fail(failed, size, share, allowed):
  message = too_many(failed, size, share, "it")
  if allowed is None:
    assert message == ""
  else:
    assert message == (
      f"it: {failed} of {size} responses could not be scored, expected at most "
      f"{allowed} (reward.max_failed={share:g})"
    )


@pytest.mark.parametrize(
  ("parts", "failed", "first"),
  [([-3, 0, -2], [False, True, False], [-3, -3, -2]),
   ([1, 0, 0], [True, True, False], [1, 0, 0])],
)  # fmt: skip
def test_a_failure_is_no_better_than_the_worst_of_its_group(
  parts, failed, first
):
  parts = np.float32(parts)
  rewards = Rewards(parts, {"model": parts}, np.array(failed))
  np.testing.assert_array_equal(rewards.first, first)


def test_a_reward_sees_the_step_and_the_folder_of_the_run():
  """The run's folder goes before a column of this name."""
  with make_pool("of_run", "of_rest", workdir="x" * 5) as pool:
    columns = {"workdir": "column", "level": 1}
    response = Response("", "", "", columns=columns, step=7)
    (total, rest) = pool.submit([response]).result().parts.values()
    response = response._replace(columns={"step": 2})
    step, _ = pool.submit([response]).result().parts.values()
  assert (total.item(), rest.item()) == (7.5, 6.0)
  assert step.item() == 2.5  # a column of this name goes before the iteration
