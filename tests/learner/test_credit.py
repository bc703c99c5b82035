"""Credit: rewards become advantages of responses, or of tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.learner import credit
from gspo_jax.learner.credit import CreditConfig
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.losses.advantages import (
  generalized_advantages,
  group_relative_advantages,
)
from gspo_jax.sampler.samples import STOPPED, TRUNCATED


@pytest.fixture
def batch():
  """Four responses of up to three tokens; NaN behind their ends."""
  rng = np.random.default_rng(0)
  mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
  floats = lambda: jnp.where(
    mask, rng.normal(size=(4, 3)).astype(np.float32), jnp.nan
  )
  unused = np.zeros((4, 5), np.int32)
  return TrainBatch(
    unused,
    unused,
    unused,
    jnp.asarray(mask),
    old_logps=floats(),
    advantages=jnp.zeros(4),
    reference_logps=floats(),
    values=floats(),
  )


REWARDS = jnp.array([1.0, 0.0, 0.5, 0.5])
FINISH = jnp.array([STOPPED, STOPPED, STOPPED, TRUNCATED], jnp.int8)


def test_responses_are_compared_with_their_group(batch):
  out = credit.assign_advantages(batch, REWARDS, FINISH, credit=CreditConfig(2))
  np.testing.assert_allclose(out.advantages, [1, -1, 0, 0], atol=1e-5)
  assert out.returns is None
  raw = CreditConfig(2, normalize_std=False)
  out = credit.assign_advantages(batch, REWARDS, FINISH, credit=raw)
  np.testing.assert_allclose(out.advantages, [0.5, -0.5, 0, 0], atol=1e-6)


def test_k1_is_subtracted_from_the_reward(batch):
  raw = CreditConfig(2, normalize_std=False, kl_coef=0.1)
  out = credit.assign_advantages(batch, REWARDS, FINISH, credit=raw)
  gap = np.nansum(batch.old_logps - batch.reference_logps, axis=1)
  rewards = (np.asarray(REWARDS) - 0.1 * gap).reshape(2, 2)
  expected = group_relative_advantages(rewards, normalize_std=False)
  np.testing.assert_allclose(out.advantages, expected.ravel(), atol=1e-6)
  assert np.all(out.advantages != 0)  # the second group's rewards are equal


def test_k1_is_not_divided_by_the_std_of_the_rewards(batch):
  """Else in a group of equal rewards it would become advantages of 1."""
  with_kl = CreditConfig(2, kl_coef=1e-3)
  out = credit.assign_advantages(batch, REWARDS, FINISH, credit=with_kl)
  plain = credit.assign_advantages(
    batch, REWARDS, FINISH, credit=CreditConfig(2)
  )
  gap = np.nansum(batch.old_logps - batch.reference_logps, axis=1)
  gap = gap.reshape(2, 2) - gap.reshape(2, 2).mean(1, keepdims=True)
  np.testing.assert_allclose(
    plain.advantages - out.advantages, 1e-3 * gap.ravel(), atol=1e-6
  )


@pytest.mark.parametrize("trace_decay", [None, 0.9])
def test_truncated_responses_have_no_advantage(batch, trace_decay):
  config = CreditConfig(2, zero_truncated=True, trace_decay=trace_decay)
  rewards = REWARDS.at[3].set(2.0)
  out = credit.assign_advantages(batch, rewards, FINISH, credit=config)
  kept = dataclasses.replace(config, zero_truncated=False)
  whole = credit.assign_advantages(batch, rewards, FINISH, credit=kept)
  np.testing.assert_array_equal(out.advantages[:3], whole.advantages[:3])
  assert not out.advantages[3].any()
  assert np.any(whole.advantages[3] != 0)


def test_with_a_critic_the_reward_is_of_the_last_token_and_k1_of_each(batch):
  config = CreditConfig(2, kl_coef=0.1, discount=0.9, trace_decay=0.8)
  out = credit.assign_advantages(batch, REWARDS, FINISH, credit=config)
  mask = np.asarray(batch.response_mask)
  gap = np.asarray(batch.old_logps - batch.reference_logps)
  tokens = np.where(mask, -0.1 * gap, 0)
  for row, last in enumerate((2, 1, 0, 2)):
    tokens[row, last] += REWARDS[row]
  advantages, returns = generalized_advantages(
    tokens.astype(np.float32),
    batch.values,
    mask,
    discount=0.9,
    trace_decay=0.8,
  )
  np.testing.assert_allclose(out.returns[mask], returns[mask], atol=1e-5)
  real = np.asarray(advantages)[mask]
  expected = (real - real.mean()) / real.std()
  np.testing.assert_allclose(out.advantages[mask], expected, atol=1e-3)
  assert not out.advantages[~mask].any()
