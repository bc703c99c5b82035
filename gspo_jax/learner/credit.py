"""Credit: from what answers earned to the advantages an update learns from.

Dimension key: P prompts, G answers a prompt, B = P * G rows, R response slots.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.losses.advantages import (
  generalized_advantages,
  group_relative_advantages,
  whiten,
)
from gspo_jax.sampler.samples import TRUNCATED


@dataclasses.dataclass(frozen=True)
class CreditConfig:
  """How rewards become advantages; static under jit.

  Attributes:
    group_size: G.
    normalize_std: divide by the group's standard deviation.
    kl_coef: of k1, `old - reference`: with a critic taken off the reward at
      each token, else off the advantage, its sum against the group's mean. It
      is not divided by the rewards' spread, so that in a group of equal rewards
      it does not become as loud as a reward.
    zero_truncated: an answer cut at the limit teaches nothing.
    discount: of a critic's returns, per token.
    trace_decay: GAE's lambda; None without a critic.
  """

  group_size: int
  normalize_std: bool = True
  kl_coef: float = 0.0
  zero_truncated: bool = False
  discount: float = 1.0
  trace_decay: float | None = None


def assign_advantages(
  rollout: TrainBatch,
  rewards: jax.Array,
  finish: jax.Array,
  *,
  credit: CreditConfig,
) -> TrainBatch:
  """The rollout with its advantages, and returns where there is a critic.

  Whole groups are compared, so it comes before any shuffle.

  Args:
    rollout: B rows, their log-probs and values known.
    rewards: [B] float32, of whole answers.
    finish: [B], `Samples.finish`.
    credit: how; static.
  """
  mask = rollout.response_mask
  fee = jnp.zeros_like(rollout.old_logps)
  if credit.kl_coef:
    gap = rollout.old_logps - rollout.reference_logps
    fee = jnp.where(mask, credit.kl_coef * gap, 0.0)
  if credit.trace_decay is None:
    groups = lambda x: x.reshape(-1, credit.group_size)
    advantages = group_relative_advantages(
      groups(rewards), normalize_std=credit.normalize_std
    )
    fees = groups(fee.sum(1))
    advantages -= fees - fees.mean(1, keepdims=True)
    advantages, returns = advantages.reshape(-1), None
  else:
    last = jnp.arange(mask.shape[1]) == mask.sum(1, keepdims=True) - 1
    advantages, returns = generalized_advantages(
      jnp.where(last, rewards[:, None], 0.0) - fee,
      rollout.values,
      mask,
      discount=credit.discount,
      trace_decay=credit.trace_decay,
    )
    advantages = whiten(advantages, mask)
  if credit.zero_truncated:
    whole = (finish != TRUNCATED).reshape(-1, *[1] * (advantages.ndim - 1))
    advantages = jnp.where(whole, advantages, 0.0)
  return dataclasses.replace(rollout, advantages=advantages, returns=returns)
