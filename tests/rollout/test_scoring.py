"""Samples become responses with rewards, each beside its own problem."""

from concurrent import futures
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from byte_samples import samples_of

from gspo_jax.data import pipeline, prompt_batch, tokenizers
from gspo_jax.data.problem import Problem
from gspo_jax.record import progress
from gspo_jax.rewards.pool import PendingRewards, RewardPool, Rewards
from gspo_jax.rollout import scoring
from gspo_jax.rollout.scoring import ResponseDecoder, Scorer
from gspo_jax.runtime import multihost
from gspo_jax.sampler import stop_strings
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  Samples,
)

BYTES = tokenizers.load("bytes")
PROBLEMS = [Problem("6+1=?", "7", ""), Problem("3+5=?", "8", "")]
LEVELS = [
  problem._replace(columns={"level": level})
  for level, problem in enumerate(PROBLEMS, 1)
]
# Responses to the problems, three each, and whether they are correct.
RESPONSES = ["#7", "", "x", "#8", "#7", "#8"]
CORRECT = [[1, 0, 0], [1, 0, 1]]


def batch_of(problems):
  cfg = prompt_batch.PromptConfig(BYTES, 16)
  return pipeline.take(problems, cfg, len(problems))


def decoded(samples, batch, stop=None):
  decode = ResponseDecoder(
    batch, BYTES, len(samples.tokens) // len(batch), stop
  )
  finished = scoring.finished_responses(samples)
  return {row: decode(row, response) for row, response in finished.items()}


def scored_at_once(pool, samples, batch):
  group_size = len(samples.tokens) // len(batch)
  scorer = Scorer(pool, ResponseDecoder(batch, BYTES, group_size))
  scorer.add(scoring.finished_responses(samples))
  return scorer.scored(samples)


def test_the_text_of_a_response_ends_before_its_stop_token():
  """And its prompt is what the policy reads."""
  cfg = prompt_batch.PromptConfig(BYTES, 17, "Sum.", "{problem}<think>")
  batch = pipeline.take([Problem("1+1?", "2", "")], cfg, 1)
  responses = decoded(samples_of(["#1", "", "#é"]), batch)
  texts = {row: response.text for row, response in responses.items()}
  assert texts == {0: "#1", 1: "", 2: "#é"}
  assert [response.tokens for response in responses.values()] == [3, 1, 4]
  assert {response.limit for response in responses.values()} == {8}
  assert responses[0].prompt == "Sum.\n\n1+1?<think>"


def test_the_text_of_a_response_keeps_its_stop_string():
  """And a truncated one has all its tokens."""
  tokens = jnp.full((2, 8), ord("7"), jnp.int32)
  finish = jnp.array([STOPPED, TRUNCATED])
  samples = Samples(tokens, tokens, jnp.array([3, 7]), finish, jnp.int32(8))
  stop = stop_strings.build(("777",), BYTES)
  batch = batch_of(PROBLEMS[:1])
  responses = decoded(samples, batch, stop)
  assert [r.text for r in responses.values()] == ["777", "7777777"]


@pytest.mark.parametrize("parts", [[range(6)], [[4, 1], [], [5, 0, 3], [2]]])
def test_responses_are_scored_against_their_own_problem(pool, parts):
  """At once, or in parts as they finish."""
  samples, batch = samples_of(RESPONSES), batch_of(PROBLEMS)
  scorer = Scorer(pool, ResponseDecoder(batch, BYTES, 3))
  finished = scoring.finished_responses(samples)
  for rows in parts:
    scorer.add({row: finished[row] for row in rows})
  responses = decoded(samples, batch)
  assert dict(sorted(scorer.responses.items())) == responses
  assert responses[2].prompt == PROBLEMS[0].text
  assert responses[3].reference == PROBLEMS[1].reference
  rewards = scorer.scored(samples).rewards.result()
  assert list(rewards.parts) == ["final_answer"]
  assert rewards.total.dtype == np.float32
  assert not rewards.failed.any()
  np.testing.assert_array_equal(rewards.first, CORRECT)
  np.testing.assert_array_equal(rewards.total, CORRECT)


class GroupPool:
  """A reward pool that notes the groups that it is given."""

  takes_groups, model = True, None

  def __init__(self):
    self.groups = []

  def submit(self, responses, group_size=1):
    texts = [response.text for response in responses]
    groups = range(0, len(texts), group_size)
    self.groups += [texts[i : i + group_size] for i in groups]
    total = np.float32([response.columns["level"] for response in responses])
    scores = Rewards(total, {"level": total}, total < 0, ())
    return PendingRewards.computed(scores)


def test_a_group_is_scored_when_its_last_response_finished():
  samples, batch, pool = samples_of(RESPONSES), batch_of(LEVELS), GroupPool()
  scorer = Scorer(pool, ResponseDecoder(batch, BYTES, 3))
  first, second = RESPONSES[:3], RESPONSES[3:]
  finished = scoring.finished_responses(samples)
  for rows, complete in (
    ([4, 1, 3], []),
    ([5], [second]),
    ([2, 0], [second, first]),
  ):
    scorer.add({row: finished[row] for row in rows})
    assert pool.groups == complete
  rewards = scorer.scored(samples).rewards.result()
  # Each response has the columns of its own problem.
  np.testing.assert_array_equal(rewards.total, [[1] * 3, [2] * 3])


def test_a_group_of_two_hosts_is_scored_by_the_host_of_its_rows(monkeypatch):
  """Response 5 decoded on the other host, which also sent 0 to 2."""
  samples, batch, pool = samples_of(RESPONSES), batch_of(LEVELS), GroupPool()
  scorer = Scorer(pool, ResponseDecoder(batch, BYTES, 3))
  whole = scoring.finished_responses(samples)
  scorer.add({row: whole[row] for row in (0, 3, 2, 4, 1)})
  assert pool.groups == [RESPONSES[:3]]
  gathered = []

  def allgather_rows(values, size):
    gathered.append(values)
    return np.array([values.get(row, 0) for row in range(6)], np.float32)

  monkeypatch.setattr(scoring.multihost, "allgather_rows", allgather_rows)
  monkeypatch.setattr(scoring.jax, "process_count", lambda: 2)
  # Rows 3 to 5 are of this host, 0 to 2 of the other.
  own = {row: whole[row] for row in (3, 4, 5)}
  monkeypatch.setattr(scoring, "finished_responses", lambda _: own)
  rewards = scorer.scored(samples).rewards.result()
  assert pool.groups == [RESPONSES[:3], RESPONSES[3:]]
  assert gathered[0] == {0: 1, 1: 1, 2: 1}
  np.testing.assert_array_equal(rewards.total, [[1] * 3, [2] * 3])


def test_a_host_without_responses_has_the_names_of_the_rewards(pool):
  """The hosts gather each reward in turn: none may leave one out."""
  scorer = Scorer(pool, ResponseDecoder({}, BYTES, 3))
  scored = scorer.scored(SimpleNamespace(lengths=jnp.zeros(0)))
  rewards = scored.rewards.result()
  assert list(rewards.parts) == ["final_answer"]
  assert rewards.total.shape == (0, 3)


def test_the_first_reward_decides_correctness_and_the_total_has_all():
  samples = samples_of(["#7", "#wrong"])
  names = ("final_answer", "length")
  with RewardPool(names, (1.0, 0.5), workers=1) as pool:
    scored = scored_at_once(pool, samples, batch_of(PROBLEMS[:1]))
    rewards = scored.rewards.result()
  np.testing.assert_array_equal(rewards.first, [[1, 0]])
  assert list(rewards.parts) == ["final_answer", "length"]
  total = rewards.parts["final_answer"] + 0.5 * rewards.parts["length"]
  np.testing.assert_allclose(rewards.total, total)
  assert rewards.parts["length"].any()


def test_a_failure_pays_no_better_than_the_worst_of_its_group():
  """Where rewards are negative 0 would be the best."""
  total = np.float32([-1.0, 0.0, 0.5, 1.0, 0.0, -2.0])
  failed = np.array([False, True, False, False, True, True])
  rewards = lambda n: Rewards(total[:n], {"reward": total[:n]}, failed[:n])
  submit = lambda responses, _=1: PendingRewards.computed(
    rewards(len(responses))
  )
  pool = SimpleNamespace(takes_groups=False, model=None, submit=submit)
  samples = samples_of(RESPONSES)
  scorer = Scorer(pool, ResponseDecoder(batch_of(LEVELS), BYTES, 3))
  scorer.add(scoring.finished_responses(samples))
  paid = scorer.scored(samples).rewards.result().total
  np.testing.assert_array_equal(paid, [[-1, -1, 0.5], [1, 0, -2]])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_failure_gets_the_worst_of_its_group_by_each_reward(sign):
  """Under a negative weight the worst is the highest."""
  nan = np.nan
  one = np.float32([[0.5, 1.0, 2.0], [-1.0, 3.0, nan]])
  two = sign * np.float32([[0.0, 1.0, -1.0], [2.0, nan, 5.0]])
  failed = np.array([[True, False, False], [False, False, True]])
  rewards = Rewards(one + two, {"one": one, "two": two}, failed)
  apart = scoring.rewards_apart(rewards, [2.0, 0.5 * sign])
  expected = [[0, 1, 2], [-1, 3, nan]], [[-1, 1, -1], [2, nan, 0]]
  assert apart.dtype == np.float32
  np.testing.assert_array_equal(apart[:, 0], np.ravel(expected[0]))
  np.testing.assert_array_equal(apart[:, 1], sign * np.ravel(expected[1]))


def test_rewards_are_gathered_once(pool, monkeypatch):
  """Each result is a collective: every host must call it as often."""
  calls = []
  gather = multihost.allgather_rows
  monkeypatch.setattr(
    multihost, "allgather_rows", lambda *a: calls.append(a) or gather(*a)
  )
  samples = samples_of(RESPONSES)
  pending = scored_at_once(pool, samples, batch_of(PROBLEMS)).rewards
  assert pending.result() is pending.result()
  assert len(calls) == 3  # the total, its one part, and the failures


def test_the_error_has_a_reason_of_another_host(monkeypatch):
  """All hosts stop together: each has the rewards of all."""
  zeros = np.zeros((2, 4), np.float32)
  rewards = Rewards(zeros, {"math": zeros}, zeros == 0, ())
  monkeypatch.setattr(
    multihost, "allgather_json", lambda text: [text, "theirs", "others"]
  )
  with pytest.raises(
    multihost.AgreedError, match=r"it: 8 of 8 .* first reason: theirs$"
  ):
    scoring.wait_scored([PendingRewards.computed(rewards)], 1.0, label="it")
  rewards = rewards._replace(failed=zeros > 0)
  scoring.wait_scored([PendingRewards.computed(rewards)], 0.0, label="it")


def test_it_stops_before_a_failure_of_its_own_where_earlier_ones_suffice():
  ended, waits = (
    SimpleNamespace(
      has_ended=is_there,
      failure=lambda: "",
      started=SimpleNamespace(done=futures.Future()),
    )
    for is_there in (True, False)
  )
  pending = [SimpleNamespace(calls=[[ended], [waits]])]
  error = scoring.wait_for_calls(pending, lambda count: "many", label="it")
  assert error.startswith("many; the first reason: ")


def test_it_stops_once_too_many_failed_and_prints_how_far_it_is(
  tmp_path, monkeypatch, capsys
):
  """A reward that always takes its time limit, once for each response."""
  (tmp_path / "slow_reward.py").write_text(
    "import time\ndef f(prompt, response, reference): time.sleep(60)"
  )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(progress, "SECONDS", 0.3)
  samples = samples_of(RESPONSES)
  with RewardPool(("slow_reward.f",), (1.0,), workers=1, seconds=1.5) as pool:
    pending = [
      scored_at_once(pool, samples, batch_of(PROBLEMS)).rewards
      for _ in range(2)
    ]
    with pytest.raises(
      multihost.AgreedError,
      match=r"it: [23] of 12 responses could not be scored, expected at most "
      r"1 .*reason: slow_reward.f: took over 1.5 s$",
    ):
      scoring.wait_scored(pending, 0.1, label="it")
  assert "scoring it: 1/12 responses in " in capsys.readouterr().out
