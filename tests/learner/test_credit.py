"""Credit: rewards become advantages of responses, or of tokens."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import unpacked

from gspo_jax.learner import credit
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.train_batch import PackedBatch, TrainBatch
from gspo_jax.losses.advantages import (
  ESTIMATORS,
  gdpo_advantages,
)
from gspo_jax.sampler.samples import STOPPED, TRUNCATED

# Four responses of up to three tokens.
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
OLD, REFERENCE, VALUES = np.random.default_rng(0).normal(size=(3, 4, 3))
GAP = np.where(MASK, OLD - REFERENCE, 0)
# In each row the response of every column, or -1 at prompts and padding.
ROWS = {
  "one a row": [[0, 0, 0, -1], [1, 1, -1, -1], [2, -1, -1, -1], [3, 3, 3, -1]],
  "shared rows": [
    [3, 3, 3, -1, 1, 1, -1],
    [2, -1, 0, 0, 0, -1, -1],
    *[[-1] * 7] * 2,  # not used
  ],
}


@pytest.fixture(params=ROWS)
def batch(request):
  """A minibatch of two micro-batches; NaN where there is no response."""
  response = np.array(ROWS[request.param])
  mask = response >= 0

  def put(x):
    rows = np.full(response.shape, np.nan, np.float32)
    for b in range(4):
      rows[response == b] = x[b][MASK[b]]
    return rows

  segments = np.where(mask, response + 1, 0).astype(np.int32)
  rows = TrainBatch(
    tokens=segments,
    positions=segments,
    segment_ids=segments,
    response_mask=mask,
    old_logps=put(OLD),
    advantages=np.zeros(response.shape, np.float32),
    response_index=np.where(mask, response, 0).astype(np.int32),
    reference_logps=put(REFERENCE),
    values=put(VALUES),
  )
  return unpacked.cut(rows, micro_batch_size=2)


def assign(batch: PackedBatch, rewards, config) -> dict[str, np.ndarray]:
  """[4, 3] advantages, and returns if there are any."""
  out = credit.assign_advantages(
    batch, rewards, FINISH, objective=config, group_size=2
  )
  rows = out.rows
  assert rows.advantages.shape == rows.response_mask.shape
  assert not np.asarray(rows.advantages)[~rows.response_mask].any()
  return unpacked.by_response(out, MASK.sum(1), 3)


def of_response(x):
  """[4] -> [4, 3]: the same at each token."""
  return np.where(MASK, np.reshape(x, (4, 1)), 0)


K1 = functools.partial(ObjectiveConfig, kl_estimator="k1")
REWARDS = jnp.array([1.0, 0.0, 0.5, 0.5])
FINISH = jnp.array([STOPPED, STOPPED, STOPPED, TRUNCATED], jnp.int8)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_gives_the_advantages_of_responses(batch, name):
  spec = f"{name}:k=2" if name == "pass_at_k" else name
  config = ObjectiveConfig("grpo", advantage_estimator=spec)
  rewards, weights = np.array([[1, 0], [0, 1], [0, 1], [0, 0.5]]), (1.0, 0.1)
  groups = rewards.reshape(2, 2, 2).astype(np.float32)
  if name == "gdpo":
    expected = gdpo_advantages(groups, weights)
  else:
    rewards, (_, numbers) = rewards[:, 0], config.estimator
    expected = ESTIMATORS[name].advantages(groups[..., 0], **numbers)
  out = credit.assign_advantages(
    batch,
    jnp.asarray(rewards, jnp.float32),
    FINISH,
    objective=config,
    group_size=2,
    reward_weights=weights,
  )
  found = unpacked.by_response(out, MASK.sum(1), 3)["advantages"]
  np.testing.assert_allclose(found, of_response(expected), atol=1e-6)


def test_k1_of_masked_responses_is_not_in_the_mean_of_their_group(batch):
  """Their rewards are: response 2 alone is left of its group."""
  config = K1("dr_grpo", kl_coef=0.1, truncated="mask")
  out = assign(batch, REWARDS.at[3].set(2.0), config)["advantages"]
  np.testing.assert_allclose(out[2, 0], -0.75, atol=1e-6)
  plain = assign(batch, REWARDS, dataclasses.replace(config, truncated="train"))
  np.testing.assert_allclose(out[:2], plain["advantages"][:2])


def test_with_a_critic_a_conversation_has_one_reward(batch):
  """On its last token, however many turns it has."""
  gap = np.array([[1, 0, 1], [1, 1, 0], [1, 0, 0], [0, 1, 1]], bool)
  mask = np.zeros(batch.rows.response_mask.shape, bool)
  for b in range(4):
    index = np.asarray(batch.rows.response_index)
    mask |= _tokens_of(batch, index, b, gap[b])
  rows = dataclasses.replace(batch.rows, response_mask=jnp.asarray(mask))
  config = ObjectiveConfig("ppo:critic_trace_decay=1")
  out = credit.assign_advantages(
    batch._replace(rows=rows), REWARDS, FINISH, objective=config, group_size=2
  ).rows
  # Without discount every token's return is the reward of its response.
  returns = np.asarray(out.returns)[mask]
  expected = np.asarray(REWARDS)[np.asarray(out.response_index)[mask]]
  np.testing.assert_allclose(returns, expected, atol=1e-6)


def _tokens_of(batch, index, b, chosen, dtype=bool):
  """The values of a response's three columns where they stand; else 0."""
  of_b = np.asarray(batch.rows.response_mask) & (index == b)
  values, count = np.zeros(of_b.shape, dtype), int(of_b.sum())
  places = np.argwhere(of_b)
  for place, keep in zip(places, chosen[:count], strict=True):
    values[tuple(place)] = keep
  return values
