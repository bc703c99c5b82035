"""Credit: the rewards of responses become advantages.

Dimension key: P prompts, G responses a prompt, B = P * G rows, R response
tokens.
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
    normalize_std: whether to divide by the group's standard deviation.
    kl_coef: of the KL penalty k1, `old - reference` log-probs. With a critic
      it is subtracted from the reward of each token. Without one its sum over
      the response, less the group's mean, is subtracted from the advantage; it
      is not divided by the std of the rewards, so that in a group of equal
      rewards it does not grow as large as a reward.
    zero_truncated: whether truncated responses have advantage 0.
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
  batch: TrainBatch,
  rewards: jax.Array,
  finish: jax.Array,
  *,
  credit: CreditConfig,
) -> TrainBatch:
  """The batch with its advantages, and with returns where there is a critic.

  Call it before any shuffle: it compares the responses of whole groups.

  Args:
    batch: B rows, with the log-probs and values that the credit needs.
    rewards: [B] float32, of whole responses.
    finish: [B], `Samples.finish`.
    credit: how rewards become advantages; static.
  """
  mask = batch.response_mask
  penalty = jnp.zeros_like(batch.old_logps)
  if credit.kl_coef:
    gap = batch.old_logps - batch.reference_logps
    penalty = jnp.where(mask, credit.kl_coef * gap, 0.0)
  if credit.trace_decay is None:
    groups = lambda x: x.reshape(-1, credit.group_size)
    advantages = group_relative_advantages(
      groups(rewards), normalize_std=credit.normalize_std
    )
    penalties = groups(penalty.sum(1))
    advantages -= penalties - penalties.mean(1, keepdims=True)
    advantages, returns = advantages.reshape(-1), None
  else:
    last = jnp.arange(mask.shape[1]) == mask.sum(1, keepdims=True) - 1
    advantages, returns = generalized_advantages(
      jnp.where(last, rewards[:, None], 0.0) - penalty,
      batch.values,
      mask,
      discount=credit.discount,
      trace_decay=credit.trace_decay,
    )
    advantages = whiten(advantages, mask)
  if credit.zero_truncated:
    whole = (finish != TRUNCATED).reshape(-1, *[1] * (advantages.ndim - 1))
    advantages = jnp.where(whole, advantages, 0.0)
  return dataclasses.replace(batch, advantages=advantages, returns=returns)
