"""Dynamic sampling against plain Python, over scripted rewards."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout import dynamic_sampling
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import Samples, merge_groups

P, G = 4, 3
MERGE = jax.jit(merge_groups)


def response_id(round_, p, g):
  """A number that no other response has."""
  return 100 * round_ + 10 * p + g


class ScriptedRewards:
  """Rewards: 0, 1, 1 in mixed groups, else equal; `computed` notes calls."""

  size, calls = P * G, ()

  def __init__(self, round_, mixed, computed):
    self.round, self.mixed, self.computed = round_, mixed, computed

  def result(self):
    self.computed.append(self.round)
    total = np.zeros((P, G), np.float32)
    for p, mixed in enumerate(self.mixed):
      total[p] = [0, 1, 1] if mixed else p % 2
    parts = {"a": total, "b": total * 2 + np.arange(P)[:, None]}
    failed = total + self.round > 2
    return Rewards(total, parts, failed, (f"reason {self.round}",))


class ScriptedSampler:
  """Gives the batch of a round; each second response is of another host."""

  def __init__(self, *script):
    self.script, self.rounds, self.computed = script, [], []

  def rewards(self, round_):
    return ScriptedRewards(round_, self.script[round_], self.computed)

  def __call__(self, round_):
    self.rounds.append(round_)
    ids = [response_id(round_, p, g) for p in range(P) for g in range(G)]
    tokens = jnp.array(ids, jnp.int32)[:, None] * jnp.ones((1, 2), jnp.int32)
    samples = Samples(
      tokens,
      tokens.astype(jnp.float32),
      tokens[:, 0] % 10 + 1,
      (tokens[:, 0] % 2).astype(jnp.int8),
      jnp.int32(round_ + 2),
    )
    prompts = PromptBatch(
      problems=[Problem(f"{round_}/{p}", str(p), "") for p in range(P)],
      tokens=np.array([[round_, p] for p in range(P)], np.int32),
      lengths=np.full(P, 2, np.int32),
      positions=np.array([[0, 0, 10 * round_ + p] for p in range(P)], np.int32),
      steps=np.full(P, round_, np.int32),
    )
    responses = {
      row: Response("", str(ids[row]), "", 1, 2) for row in range(0, P * G, 2)
    }
    return ScoredSamples(prompts, samples, responses, self.rewards(round_))


def sample_until_mixed(sampler, rounds, merge=MERGE, max_failed=1.0):
  context = SimpleNamespace(
    rollout=SimpleNamespace(dynamic_sampling_rounds=rounds),
    sampler=SimpleNamespace(merge_groups=merge),
    max_failed=max_failed,
  )
  return dynamic_sampling.sample_until_mixed(context, sampler, "it")


def expected_groups(script, rounds):
  """The groups to keep as (round, prompt), and how many rounds it takes."""
  if rounds == 1:
    return [(0, p) for p in range(P)], 1
  mixed, equal = [], []
  for round_ in range(rounds):
    for p, is_mixed in enumerate(script[round_]):
      (mixed if is_mixed else equal).append((round_, p))
    if len(mixed) >= P:
      break
  return (mixed + equal)[:P], round_ + 1


def scripts():
  """Corner cases, and random ones."""
  none, every = (0,) * P, (1,) * P
  yield every, none, none
  yield none, none, none
  yield none, every, none
  yield none, none, every
  yield (1, 0, 0, 0), every, every
  yield (0, 1, 1, 1), (0, 0, 0, 1), every
  rng = np.random.default_rng(0)
  for share in (0.2, 0.5, 0.8):
    yield tuple(map(tuple, (rng.random((3, P)) < share).astype(int).tolist()))


@pytest.mark.parametrize("script", list(scripts()))
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_keeps_the_first_mixed_groups_then_the_first_others(script, rounds):
  sampler = ScriptedSampler(*script)
  kept, costs = sample_until_mixed(sampler, rounds)
  groups, took = expected_groups(script, rounds)
  assert sampler.rounds == list(range(took)) == list(range(len(costs)))
  # Every field of a group moves with it.
  ids = [response_id(*group, g) for group in groups for g in range(G)]
  rewards = kept.rewards.result()
  assert kept.samples.tokens[:, 0].tolist() == ids
  assert kept.samples.logps[:, 1].tolist() == ids
  assert kept.samples.lengths.tolist() == [n % 10 + 1 for n in ids]
  assert kept.samples.finish.tolist() == [n % 2 for n in ids]
  assert kept.samples.slot_steps == sum(n + 2 for n in range(took))
  texts = [problem.text for problem in kept.prompts.problems]
  assert texts == [f"{round_}/{p}" for round_, p in groups]
  assert kept.prompts.tokens.tolist() == [list(group) for group in groups]
  assert kept.prompts.positions[:, 2].tolist() == [
    10 * n + p for n, p in groups
  ]
  each = [sampler.rewards(n).result() for n in range(took)]
  of_groups = lambda field: [field(each[n])[p] for n, p in groups]
  equal = np.testing.assert_array_equal
  equal(rewards.total, of_groups(lambda x: x.total))
  equal(rewards.failed, of_groups(lambda x: x.failed))
  equal(rewards.parts["a"], of_groups(lambda x: x.parts["a"]))
  equal(rewards.parts["b"], of_groups(lambda x: x.parts["b"]))
  assert rewards.reasons == tuple(f"reason {n}" for n in range(took))
  assert MERGE._cache_size() <= 1  # compiled once for all rounds
  # The responses of this host: those that had even rows when they were sampled.
  local = {
    row: str(n)
    for row, n in enumerate(ids)
    if (n // 10 % 10 * G + n % 10) % 2 == 0
  }
  assert {row: x.text for row, x in kept.responses.items()} == local


def test_one_round_does_not_wait_for_rewards():
  """The device works on while responses are scored."""
  sampler = ScriptedSampler((0,) * P)
  sample_until_mixed(sampler, 1)
  assert sampler.computed == []


def test_a_round_of_conversations_fails_at_once():
  """Their rewards are known, so nothing is compiled or learnt before."""

  def sample(_):
    rewards = PendingRewards.computed(
      Rewards(np.zeros((P, G)), {}, np.eye(P, G) > 0, ("no answer",))
    )
    turns = {"turns": np.ones(P * G)}
    return ScriptedSampler((0,) * P)(0)._replace(
      rewards=rewards, conversation=turns
    )

  sample_until_mixed(sample, 1, max_failed=3 / 12)
  with pytest.raises(multihost.AgreedError, match=r"3 of 12 .*: no answer"):
    sample_until_mixed(sample, 1, max_failed=2 / 12)


def test_costs_include_discarded_batches():
  script = [(0, 1, 0, 0), (0, 0, 1, 0), (1, 1, 1, 1)]
  kept, costs = sample_until_mixed(ScriptedSampler(*script), 3)
  index = [cost.prompts.positions[:, 2].tolist() for cost in costs]
  assert index == [[10 * n + p for p in range(P)] for n in range(3)]
  mixed = [cost.rewards.result().mixed_groups.tolist() for cost in costs]
  assert mixed == [[bool(m) for m in row] for row in script]
  metrics = dynamic_sampling.metrics(kept, costs)
  tokens = 3 * P * (1 + 2 + 3)
  kept_tokens = sum(n % 10 + 1 for n in kept.samples.tokens[:, 0].tolist())
  assert metrics == {
    "dynamic_sampling/rounds": 3,
    "dynamic_sampling/groups_sampled": 12,
    "dynamic_sampling/groups_discarded": 8,
    "dynamic_sampling/tokens_sampled": tokens,
    "dynamic_sampling/tokens_discarded": tokens - kept_tokens,
    "dynamic_sampling/tokens_discarded_share": pytest.approx(
      1 - kept_tokens / tokens
    ),
    # Of the first batch: 2 of 3 in one group, and all in one of the others.
    "dynamic_sampling/mixed_groups": 0.25,
    "dynamic_sampling/reward": pytest.approx((2 + 0 + 0 + 3) / 12),
  }


def test_no_more_batches_once_too_many_rewards_failed():
  """Those of the third batch fail where they are 1: 6 of 36 responses."""
  script = [(0,) * P] * 3
  sample = lambda most: sample_until_mixed(
    ScriptedSampler(*script), 3, max_failed=most
  )
  sample(6 / 36)
  with pytest.raises(multihost.AgreedError, match=r"it: 6 of 36 .* at most 5"):
    sample(5 / 36)
