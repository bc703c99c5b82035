"""Sequences of episodes: what a row of the update has of each."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.learner import credit, packing
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.packing import PackingConfig
from gspo_jax.losses.advantages import group_relative_advantages
from gspo_jax.rollout.episode import (
  EpisodeSequence,
  SequenceLimits,
  episode_samples,
)
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, Prompts, Samples

G, K, S, R = 2, 3, 5, 9
FINISH = np.array([STOPPED, STOPPED, TRUNCATED, STOPPED], np.int8)
REWARDS = np.array([1, 0, 0.25, 0.5], np.float32)


def random_episodes(seed=0) -> dict[int, list[EpisodeSequence]]:
  """Four episodes of 0 to 3 sequences; no two tokens of a kind are equal."""
  rng, ids = np.random.default_rng(seed), iter(range(10, 10_000))
  some = lambda n: [next(ids) for _ in range(n)]
  episodes = {}
  for b, count in enumerate((1, 3, 0, 2)):
    episodes[b] = []
    for k in range(count):
      sequence = EpisodeSequence(some(rng.integers(1, S + 3)), k)
      for turn in (1, 2):
        sequence.add(some(rng.integers(0, 2)))
        sequence.add(some(rng.integers(1, 3)), turn)
      episodes[b].append(sequence)
  return episodes


@pytest.fixture(scope="module")
def batch_sharding():
  return sharding.batch_sharding(sharding.make_mesh(jax.devices()[:1]))


def arranged(episodes, batch_sharding):
  """The prompts and the samples; a token's log-prob is its negative."""

  def finish_episodes(numbers, turns, tokens, prompts, **rows):
    assert numbers == [*range(len(FINISH) * K)]
    prompts = Prompts(prompts.tokens, np.maximum(prompts.lengths, 1))
    rows["prompts"] = prompts
    logps = np.where(turns > 0, -tokens, 0).astype(np.float32)
    return Samples(tokens, logps, turns=turns, slot_steps=0, **rows)

  samples = episode_samples(
    SimpleNamespace(finish_episodes=finish_episodes),
    episodes,
    dict(enumerate(FINISH.tolist())),
    SequenceLimits(4, K, S, R),
  )
  return samples.prompts, samples


def test_a_row_has_the_tokens_of_its_sequence(batch_sharding):
  episodes = random_episodes()
  prompts, samples = arranged(episodes, batch_sharding)
  samples = jax.device_get(samples)
  assert samples.finish.tolist() == np.repeat(FINISH, K).tolist()
  for b, own in episodes.items():
    for k in range(K):
      row = b * K + k
      start, end = S - prompts.lengths[row], samples.lengths[row]
      if k >= len(own):
        assert end == 0
        continue
      ids = [*prompts.tokens[row, start:], *samples.tokens[row, :end]]
      assert ids == own[k].ids
      sampled = samples.turns[row] > 0
      turns = [t for t in own[k].turns if t]
      assert samples.turns[row][sampled].tolist() == turns


def test_a_prompt_beyond_its_columns_takes_room_of_the_response():
  limits = SequenceLimits(4, K, S, R)
  assert limits.room([1] * (S - 1)) == R
  assert limits.room([1] * (S + 2)) == R - 2
  sequence = EpisodeSequence([1] * (S + 2))
  sequence.add([1] * 3, 1)
  assert limits.room([*sequence.ids, 1], sequence) == R - 2 - 4


def test_each_sequence_has_the_advantage_of_its_episode(batch_sharding):
  episodes = random_episodes(1)
  prompts, samples = arranged(episodes, batch_sharding)
  cfg = PackingConfig(S + R, minibatches=2, micro_batch_size=1)
  total = np.where(samples.lengths > 0, prompts.lengths + samples.lengths, 0)
  order = packing.shuffled_groups(jax.random.key(0), 2, G * K)
  with jax.set_mesh(batch_sharding.mesh):
    batch = packing.train_batch_from_samples(
      multihost.to_global(prompts, batch_sharding),
      samples,
      packing.pack(total, order, cfg),
      cfg=model.variant("tiny"),
      objective=ObjectiveConfig(truncated="zero_advantage"),
      instruments=False,
      packing_config=cfg,
    )
    batch = credit.assign_advantages(
      batch,
      REWARDS,
      samples.finish,
      objective=ObjectiveConfig(truncated="zero_advantage"),
      group_size=G,
    )
  expected = np.array(group_relative_advantages(REWARDS.reshape(2, G))).ravel()
  expected[FINISH == TRUNCATED] = 0
  rows = jax.device_get(batch.rows)
  found = {}
  for token, advantage, learned in zip(
    rows.tokens[..., 1:].ravel(),
    rows.advantages.ravel(),
    rows.response_mask.ravel(),
    strict=True,
  ):
    if learned:
      found[int(token)] = float(advantage)
  sampled = {
    token: expected[b]
    for b, own in episodes.items()
    for sequence in own
    for token, turn in zip(sequence.tokens, sequence.turns, strict=True)
    if turn
  }
  assert found == pytest.approx(sampled)
