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
  ESTIMATORS,
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
  rows, method, critic = batch.rows, objective.method, objective.critic
  sequences = len(finish) // len(rewards)
  finish = finish[::sequences]
  mask, response = rows.response_mask, rows.response_index // sequences
  penalty = jnp.zeros(mask.shape)
  if objective.has_kl_in_reward:
    gap = rows.old_logps - rows.reference_logps
    penalty = jnp.where(mask, objective.kl_coef * gap, 0.0)
  returns = None
  if objective.credit == "turn":
    by_turn = turn_advantages(
      rewards.reshape(-1, group_size, rewards.shape[1]),
      normalize_std=method.normalize_std,
    ).reshape(rewards.shape)
    advantages = by_turn[response, jnp.maximum(rows.turns - 1, 0)]
    advantages = jnp.where(mask, advantages, 0.0)
  elif critic is None:
    groups = lambda x: x.reshape(-1, group_size, *x.shape[1:])
    name, options = objective.estimator
    if name == "grpo":
      options = {"normalize_std": method.normalize_std}
    if name == "gdpo":
      options = {"weights": jnp.array(reward_weights)}
    if method.advantages:
      advantages = method.advantages(groups(rewards))
    else:
      advantages = ESTIMATORS[name](groups(rewards), **options)
    if objective.has_kl_in_reward:
      penalties = groups(
        jnp.zeros(len(rewards)).at[response].add(penalty, mode="drop")
      )
      counted = None
      if objective.truncated == "mask":  # the others have no log-probs
        counted = groups(finish != TRUNCATED)
        counted |= ~counted.any(1, keepdims=True)
      mean = penalties.mean(1, keepdims=True, where=counted)
      advantages -= penalties - mean
    advantages = jnp.where(mask, advantages.reshape(-1)[response], 0.0)
  else:
    # [M, A, rows, W] -> [all rows, W]
    flat = lambda x: x.reshape(-1, x.shape[-1])
    mask_BR, segments_BR = flat(mask), flat(rows.response_segments)
    last_BR = _is_last(mask_BR, segments_BR)
    advantages, returns = generalized_advantages(
      jnp.where(last_BR, rewards[flat(response)], 0.0) - flat(penalty),
      flat(rows.values),
      mask_BR,
      discount=critic.discount,
      trace_decay=critic.trace_decay,
      segment_ids=segments_BR,
    )
    advantages = whiten(advantages, mask_BR).reshape(mask.shape)
    returns = returns.reshape(mask.shape)
  if objective.truncated == "zero_advantage":
    advantages = jnp.where(finish[response] != TRUNCATED, advantages, 0.0)
  if objective.distillation.teachers:
    advantages *= objective.distillation.reward_weight
  rows = dataclasses.replace(rows, advantages=advantages, returns=returns)
  return batch._replace(rows=rows)


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
