"""Credit: the rewards of responses become advantages.

Dimension key: B responses, R response columns of a packed row.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.train_batch import PackedBatch
from gspo_jax.losses.advantages import (
  generalized_advantages,
  turn_advantages,
  whiten,
)
from gspo_jax.sampler.samples import TRUNCATED


def assign_advantages(
  batch: PackedBatch,
  rewards: jax.Array,
  finish: jax.Array,
  *,
  objective: ObjectiveConfig,
  group_size: int,
  reward_weights: Sequence[float] = (),
) -> PackedBatch:
  """The batch with its advantages, and with returns if there is a critic.

  Responses of a group are compared even if they are in different rows, or
  truncated: as in NeMo RL, overlong filtering leaves the mean of the
  rewards as it is.

  The KL penalty k1 of a token is `kl_coef * (old_logps - reference_logps)`.
  With a critic it is subtracted from the token's reward. Without a critic, its
  sum over the response, minus the group's mean of these sums, is subtracted
  from the advantage; overlong filtering leaves truncated responses out of this
  mean. It is not divided by the std of the rewards: in a group of equal rewards
  it would become as large as a reward.

  With teachers the result is multiplied by `distillation.reward_weight`; the
  update adds what the teachers say, for truncated responses, too.

  `rewards` are [B] float32; [B, K] with credit="turn" (see `turn_advantages`);
  and with gdpo [B, N], each with a weight (see `gdpo_advantages`). `finish` is
  `Samples.finish`, [B * K] where an episode is K sequences of the samples; each
  of them gets what its episode gets.
  """
  rows = batch.rows
  sequences = len(finish) // len(rewards)
  finish = finish[::sequences]
  mask, response = rows.response_mask, rows.response_index // sequences
  penalty = jnp.zeros(mask.shape)
  if objective.has_kl_in_reward:
    assert rows.reference_logps is not None
    gap = rows.old_logps - rows.reference_logps
    penalty = jnp.where(mask, objective.kl_coef * gap, 0.0)
  groups = lambda x: x.reshape(-1, group_size, *x.shape[1:])
  returns = None
  if objective.credit == "turn":
    assert rows.turns is not None
    by_turn = turn_advantages(
      groups(rewards), normalize_std=objective.method.normalize_std
    ).reshape(rewards.shape)
    advantages = by_turn[response, jnp.maximum(rows.turns - 1, 0)]
    advantages = jnp.where(mask, advantages, 0.0)
  elif objective.critic:
    advantages, returns = _of_tokens(
      rows, rewards[response], penalty, objective.critic
    )
  else:
    advantages = _of_responses(objective, groups(rewards), reward_weights)
    if objective.has_kl_in_reward:
      sums = jnp.zeros(len(rewards)).at[response].add(penalty, mode="drop")
      advantages -= _less_group_mean(objective, groups(sums), groups(finish))
    advantages = jnp.where(mask, advantages.reshape(-1)[response], 0.0)
  if objective.truncated == "zero_advantage":
    advantages = jnp.where(finish[response] != TRUNCATED, advantages, 0.0)
  if objective.distillation.teachers:
    advantages *= objective.distillation.reward_weight
  rows = dataclasses.replace(rows, advantages=advantages, returns=returns)
  return batch._replace(rows=rows)


def _of_responses(objective, rewards, reward_weights) -> jax.Array:
  """[P, G]: the advantages of responses, by the method or the estimator."""
  method, estimator = objective.method, objective.estimator_row
  if method.advantages:
    return method.advantages(rewards)
  _, options = objective.estimator
  if estimator.rewards == "each":
    options |= {"weights": jnp.array(reward_weights)}
  if estimator.method_scales:
    options |= {"normalize_std": method.normalize_std}
  return estimator.advantages(rewards, **options)


def _less_group_mean(objective, penalties, finish) -> jax.Array:
  """[P, G]: the penalties of responses minus the mean of their group."""
  counted = None
  if objective.truncated == "mask":  # the others have no log-probs
    counted = finish != TRUNCATED
    counted |= ~counted.any(1, keepdims=True)
  return penalties - penalties.mean(1, keepdims=True, where=counted)


def _of_tokens(rows, rewards, penalty, critic) -> tuple[jax.Array, jax.Array]:
  """The advantages and returns of tokens, [M, A, rows, W], with a critic."""
  # [M, A, rows, W] -> [all rows, W]
  flat = lambda x: x.reshape(-1, x.shape[-1])
  mask_BR, segments_BR = flat(rows.response_mask), flat(rows.response_segments)
  last_BR = _is_last(mask_BR, segments_BR)
  advantages, returns = generalized_advantages(
    jnp.where(last_BR, flat(rewards), 0.0) - flat(penalty),
    flat(rows.values),
    mask_BR,
    discount=critic.discount,
    trace_decay=critic.trace_decay,
    segment_ids=segments_BR,
  )
  advantages = whiten(advantages, mask_BR).reshape(penalty.shape)
  return advantages, returns.reshape(penalty.shape)


def _is_last(mask_BR, segments_BR):
  """[B, R]: whether a token is the last one of its response."""
  # Tokens between two turns of a response are not in the mask.
  R = mask_BR.shape[1]
  column_BR = jnp.where(mask_BR, jnp.arange(R), R)
  after_BR = jnp.pad(column_BR[:, 1:], ((0, 0), (0, 1)), constant_values=R)
  next_BR = jax.lax.cummin(after_BR, axis=1, reverse=True)
  ids = jnp.pad(segments_BR, ((0, 0), (0, 1)), constant_values=-1)
  following = jnp.take_along_axis(ids, next_BR, axis=1)
  return mask_BR & (segments_BR != following)
