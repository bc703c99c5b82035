"""Conversations: who wrote which token of a row, and what ends one."""

import collections
import contextlib
import json
import re
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspo_jax.data import pipeline, prompt_batch, tokenizers
from gspo_jax.data.problem import Problem
from gspo_jax.rollout import conversations
from gspo_jax.rollout.conversations import Conversations
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.rollout.episode import SequenceLimits
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  SamplerConfig,
  Samples,
)

MODULE_NAME = "scripted_game"
MODULE = """
class Script:
  def reset(self, problem, seed):
    self.name, self.count = problem.text, 0
    if self.name == "bad": raise ValueError("no game")
    if self.name == "prompt": return [("user", "!" * 3)]
    if self.name == "long": return [("user", "!" * 99)]
    if self.name == "seed": return [("user", chr(65 + seed % 7))]
  def step(self, response):
    self.count += 1
    if response == "fail": raise ValueError("broken tool")
    if response[:1] == "=": return [], True, float(response[1:])
    if response[:1] == "+": return [("user", "?")], False, float(response[1:])
    done = response == "end"
    messages = [("user", "<" + response + ">")] * (1 + (response == "pair"))
    return messages, done, self.count * 1.0, 2, int(response == "err")
"""
BYTES = tokenizers.load("bytes")
G, R, S, STOP = 2, 24, 6, BYTES.stop_ids[0]
SAMPLING = SamplerConfig(G, R, stop_ids=BYTES.stop_ids, pad_id=BYTES.pad_id)


pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def pool(user_module):
  with EnvironmentPool("scripted_game.Script", workers=1, seconds=5) as pool:
    yield pool


class Strict(type(BYTES)):
  """A tokenizer that raises for some messages, as chat templates do."""

  def chat(self, messages, tools=()):
    return ord(messages[-1]["content"])  # of one letter alone

  def turn(self, messages, *, stopped):
    if len(messages) > 1:
      raise UserError("roles must alternate")
    if messages[0][1] == "<odd>":
      raise TypeError("no text")
    return super().turn(messages, stopped=stopped)


class Scripted:
  """An engine that gives each episode its responses, one a turn."""

  group_size, idle_seconds, idle = G, 0.0, contextlib.nullcontext

  def __init__(self, responses):
    self.responses, self.waiting = responses, []
    self.calls, self.prompts = collections.Counter(), {}  # by row

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def most_new_tokens(self, prompt_length):
    return min(R, S + R - prompt_length)

  def submit(self, generation):
    self.waiting.append(generation)

  def wake(self):
    pass

  def run(self, until):
    while not until():
      together, self.waiting = self.waiting, []
      for g in together:
        self.calls[g.row] += 1
        self.prompts.setdefault(g.row, BYTES.decode(g.prompt))
        ids = [*BYTES.encode(self.responses[g.row].pop(0)), STOP]
        room = g.max_new_tokens
        finish = "stop" if len(ids) <= room else "length"
        g.add(ids[:room], [-1.0] * len(ids[:room]), finish)
      time.sleep(0 if together else 0.002)

  def finish_episodes(self, numbers, turns, **rows):
    logps = -1.0 * (turns > 0)
    return Samples(logps=logps, turns=turns, slot_steps=0, **rows)


def prompts_of(names):
  """A batch of problems with these texts."""
  problems = [Problem(name, "ref", "") for name in names]
  config = prompt_batch.PromptConfig(BYTES, S)
  return pipeline.take(problems, config, len(problems))


def converse(pool, names, responses, max_turns=4, key=0, tokenizer=BYTES):
  """The conversations about these problems, and the sampler."""
  config = prompt_batch.PromptConfig(tokenizer, S)
  batch = prompts_of(names)
  policy = Scripted([list(x) for x in responses])
  generate = SimpleNamespace(
    config=SAMPLING,
    played_rows=range,
    open=lambda params, key, rows: policy,
  )
  play = Conversations(pool, SequenceLimits(max_turns, 1, S, R), config, None)
  done = play(generate, None, batch, jax.random.key(key), label="test")
  return done, policy


class Opens(type(BYTES)):
  """A tokenizer whose prompts open the thinking, from the second turn on."""

  def turn(self, messages, *, stopped):
    return [*super().turn(messages, stopped=stopped), *self.encode("<think>\n")]


@pytest.mark.parametrize(
  ("tokenizer", "rewards"), [(BYTES, [1, 7]), (Opens(), [1, 2])]
)
def test_thinking_that_a_prompt_opens_is_in_the_response(
  pool, tokenizer, rewards
):
  """So that an environment knows it from the answer."""
  done, _ = converse(pool, "a", [["b", "+7"]] * G, 2, tokenizer=tokenizer)
  assert done.conversation["rewards"].tolist() == [rewards] * G


def test_a_row_has_the_tokens_of_all_turns_in_order(pool):
  done, policy = converse(pool, ["ab"], [["one", "end"], ["end"]], max_turns=3)
  samples = jax.device_get(done.samples)
  written = [*BYTES.encode("one"), STOP]
  given = BYTES.encode("\n\n<one>")
  last = [*BYTES.encode("end"), STOP]
  whole = written + given + last
  assert samples.tokens[0, : samples.lengths[0]].tolist() == whole
  turns = [1] * len(written) + [0] * len(given) + [2] * len(last)
  assert samples.turns[0].tolist() == turns + [0] * (R - len(turns))
  assert samples.turns[1].tolist() == [1] * 4 + [0] * (R - 4)
  assert samples.finish.tolist() == [STOPPED, STOPPED]
  np.testing.assert_array_equal(samples.logps != 0, samples.turns > 0)
  assert policy.calls == {0: 2, 1: 1}
  assert done.responses[0].text == "one\n\n<one>end"
  rewards = done.rewards.result()
  assert rewards.total.tolist() == [[1.0 + 2.0, 1.0]]
  nan = np.nan
  expected = [[1, 2, nan], [1, nan, nan]]
  np.testing.assert_array_equal(done.conversation["rewards"], expected)
  assert done.conversation["turns"].tolist() == [2, 1]
  assert done.conversation["tool_calls"].tolist() == [4, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_async_environment_is_asked_about_several_at_once(
  pool, monkeypatch, is_async
):
  events, step = [], pool.step

  def spy(calls, notify):
    events.append([text for _, text in calls])
    return step(calls, notify)

  assert not pool.is_async
  monkeypatch.setattr(pool, "is_async", is_async)
  monkeypatch.setattr(pool, "step", spy)
  converse(pool, ["ab"], [["one", "end"], ["two", "end"]])
  together = [["one", "two"], ["end", "end"]]
  alone = [[text] for turn in together for text in turn]
  assert events == (together if is_async else alone)


def test_a_message_that_nobody_reads_is_no_failure(pool):
  """The template would refuse it, but this is the last turn."""
  run = lambda turns: converse(
    pool, ["a"], [["odd"], ["odd"]], max_turns=turns, tokenizer=Strict()
  )[0].rewards.result()
  assert not run(1).failed.any()
  assert run(2).failed.all()


def test_max_turns_cuts_a_conversation_that_keeps_its_reward(pool):
  """Not one that ends by itself, or fails, at the last turn."""
  done, policy = converse(
    pool,
    ["ab", "cd"],
    [["a", "err", "x"], ["end"], ["b", "end"], ["c", "fail"]],
    max_turns=2,
  )
  assert max(policy.calls.values()) == 2
  assert done.rewards.result().total.tolist() == [[3.0, 1.0], [3.0, 0.0]]
  assert done.conversation["tool_errors"].tolist() == [1, 0, 0, 0]
  samples = jax.device_get(done.samples)
  assert samples.finish.tolist() == [TRUNCATED, STOPPED, STOPPED, STOPPED]
  assert samples.turns[0].max() == 2
  # The last message is not read by anyone, so it is not in the row.
  assert samples.turns[0, samples.lengths[0] - 1] == 2


def test_a_conversation_without_room_is_truncated(pool):
  """No room for the message and a token, and a response that is cut."""
  long = "y" * ((R - 4) // 2)
  done, _ = converse(pool, ["ab"], [[long, "end"], ["a", "z" * R]])
  samples = jax.device_get(done.samples)
  assert samples.finish.tolist() == [TRUNCATED, TRUNCATED]
  assert samples.lengths.tolist() == [len(long) + 1, R]
  assert samples.turns[0].max() == 1
  assert done.conversation["turns"].tolist() == [1, 2]
  # What was cut is still scored, as the response of a single turn is.
  assert done.rewards.result().total.tolist() == [[1.0, 1.0 + 2.0]]


def test_a_failure_ends_its_conversation_alone(pool):
  done, policy = converse(
    pool,
    ["ab", "cd", "bad"],
    [["a", "fail"], ["b", "end"], ["fail"], ["end"], ["end"], ["end"]],
  )
  rewards = done.rewards.result()
  failed = [[True, False], [True, False], [True, True]]
  assert rewards.failed.tolist() == failed
  # It had a reward of 1 before; a failure must not pay.
  assert rewards.total.tolist() == [[0.0, 3.0], [0.0, 1.0], [0.0, 0.0]]
  np.testing.assert_array_equal(done.conversation["rewards"][0, :2], [0, 0])
  begin, reason = sorted(rewards.reasons, key=lambda x: "broken" in x)
  assert "ValueError: no game" in begin
  assert "ValueError: broken tool" in reason
  assert policy.calls == {0: 2, 1: 2, 2: 1, 3: 1}  # none of the last group
  assert not done.samples.lengths[4:].any()


@pytest.mark.parametrize(
  ("other", "failing", "rewards", "of_turns"),
  [
    (["=-5"], ["fail"], [-5, -5], [[-5, np.nan], [-5, np.nan]]),
    (["=3"], ["fail"], [3, 0], [[3, np.nan], [0, np.nan]]),
    # Its own rewards count, too.
    (["=-1"], ["+-2", "fail"], [-1, -2], [[-1, np.nan], [-2, -1]]),
    # From its second turn on, the other one has a reward of -4.
    (["+3", "=-4"], ["+1", "fail"], [-1, -1], [[3, -4], [0, -4]]),
    (["+-4", "=3"], ["+1", "fail"], [-1, -1], [[-4, 3], [0, -1]]),
    (["fail"], ["+-2", "fail"], [0, -2], [[0, np.nan], [-2, 0]]),
  ],
)
def test_a_failure_pays_no_better_than_the_worst_of_its_group(
  pool, other, failing, rewards, of_turns
):
  """The rows of a group may lie on several hosts, so on any of them."""
  for order in (slice(None), slice(None, None, -1)):
    group = [[*other], [*failing]][order]
    done, _ = converse(pool, ["ab", "cd"], [*group, ["=-9"], ["=-9"]], 2)
    paid = done.rewards.result()
    assert paid.total.tolist() == [rewards[order], [-9, -9]]
    assert paid.first.tolist() == paid.total.tolist()
    np.testing.assert_array_equal(
      done.conversation["rewards"][:2], of_turns[order]
    )


def test_messages_that_a_tokenizer_refuses_cost_their_conversation(pool):
  done, policy = converse(
    pool,
    ["ab", "cd", "prompt"],
    [["a", "end"], ["pair"], ["b", "odd"], ["end"], ["end"], ["end"]],
    tokenizer=Strict(),
  )
  rewards = done.rewards.result()
  failed = [[False, True], [True, False], [True, True]]
  assert rewards.failed.tolist() == failed
  assert (rewards.total[rewards.failed] == 0).all()
  assert policy.calls == {0: 2, 1: 1, 2: 2, 3: 1}  # none of the last group
  pair, odd, begin = rewards.reasons
  assert "environment: TypeError: ord() expected" in begin
  assert pair == "roles must alternate"
  assert odd.endswith("environment: TypeError: no text")


def test_an_environment_may_write_the_prompt(pool):
  done, policy = converse(
    pool, ["prompt", "ab"], [["end"], ["end"], ["end"], ["end"]]
  )
  assert [policy.prompts[b] for b in range(4)] == ["!!!", "!!!", "ab", "ab"]
  assert done.samples.prompts.lengths.tolist() == [3, 3, 2, 2]
  assert done.samples.prompts.tokens[0, -3:].tolist() == BYTES.encode("!!!")


def test_the_seed_is_of_the_key_and_the_problem(pool):
  prompts = [
    [*converse(pool, ["seed"] * 4, [["end"]] * 8, key=key)[1].prompts.values()]
    for key in (0, 0, 1)
  ]
  assert prompts[0] == prompts[1] != prompts[2]
  assert len(set(prompts[0])) > 1


def test_a_prompt_that_is_too_long_costs_its_group(pool):
  done, _ = converse(pool, ["long", "ab"], [["end"]] * 4)
  rewards = done.rewards.result()
  assert rewards.failed.tolist() == [[True, True], [False, False]]
  assert (rewards.total[0] <= 0).all()
  (reason,) = rewards.reasons
  assert re.search(r"99 tokens.*data.max_prompt_length=6", reason)


def test_a_prompt_of_the_environment_tells_of_tools():
  """As the prompts of the data do: without a chat template both are refused."""
  cfg = prompt_batch.PromptConfig(BYTES, S, tools=[{"type": "function"}])
  with pytest.raises(UserError, match="tools and tool calls need"):
    conversations.prompt_ids(cfg, {(("user", "!"),)})
  with pytest.raises(UserError, match="tools and tool calls need"):
    cfg.tokens_of(Problem("!", "", ""))


def test_a_checkpoint_has_what_samples_do_not(pool):
  """Rewards, and those of the turns."""
  done, _ = converse(pool, ["prompt", "ab"], [["x", "end"], ["end"]] * 2)
  limits = SequenceLimits(4, 1, S, R)
  play = Conversations(None, limits, prompt_batch.PromptConfig(BYTES, S), None)
  state = json.loads(json.dumps(play.state(done)))
  batch, samples = prompts_of(["prompt", "ab"]), jax.device_put(done.samples)
  restored = play.restore(batch, samples, state)
  assert restored.responses == done.responses
  rewards, expected = restored.rewards.result(), done.rewards.result()
  np.testing.assert_array_equal(rewards.total, expected.total)
  np.testing.assert_array_equal(rewards.first, expected.first)
  np.testing.assert_array_equal(rewards.failed, expected.failed)
  assert restored.conversation.keys() == done.conversation.keys()
  for name, values in done.conversation.items():
    np.testing.assert_array_equal(restored.conversation[name], values)
    assert restored.conversation[name].dtype == values.dtype
