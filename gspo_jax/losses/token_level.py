"""Losses with a clipped ratio for each token; see the head of `losses`."""

import jax

from gspo_jax.losses import surrogate
from gspo_jax.losses.batch import (
  TokenBatch,
  checked_batch,
  sequence_mean,
  token_mean,
)
from gspo_jax.losses.metrics import Mean, Metrics
from gspo_jax.losses.terms import NO_TERMS, Terms, refuse_dual_clip


def grpo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.27,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """GRPO: mean_i mean_t -min(r A, clip(r, 1 - l, 1 + h) A), r = exp(x - o).

  Shao et al. 2024, arXiv 2402.03300, sec. 4.1.1, without its KL term (a
  `Terms.penalty` of `kl_penalty`); l and h as tuned for the comparison in arXiv
  2507.18071, sec. 5.1.

  Advantages are [B] or [B, T]. Normalizer: the number of sequences.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.clipped(batch, batch.log_ratio, clip_low, clip_high)
  return surrogate.reduced(batch, tokens, sequence_mean, normalizer)


def dr_grpo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  max_length: int | None = None,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """Dr. GRPO: the terms of `grpo_loss`, summed over (sequences * max_length).

  Liu et al. 2025, arXiv 2503.20783, sec. 3.2: no division by the length of the
  answer; the advantages too come undivided (`normalize_std=False`). l = h = 0.2
  is PPO's, arXiv 1707.06347.

  Advantages are [B] or [B, T]. `max_length`: the longest answer allowed, in
  tokens, T by default. Normalizer: number of sequences times `max_length`.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  length = logps.shape[1] if max_length is None else max_length

  def constant(batch: TokenBatch, values: jax.Array) -> Mean:
    count = sequence_mean(batch, values).count * length
    return Mean(token_mean(batch, values).total, count)

  tokens = surrogate.clipped(batch, batch.log_ratio, clip_low, clip_high)
  return surrogate.reduced(batch, tokens, constant, normalizer)


def dapo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """DAPO: the terms of `grpo_loss`, averaged over all tokens of the batch.

  Yu et al. 2025, arXiv 2503.14476: clip-higher (sec. 3.1), token mean (3.3).

  Advantages are [B] or [B, T]. Normalizer: the number of response tokens.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.clipped(batch, batch.log_ratio, clip_low, clip_high)
  return surrogate.reduced(batch, tokens, token_mean, normalizer)


def ppo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """PPO: mean over tokens of -min(r A_it, clip(r, 1 - l, 1 + h) A_it).

  Schulman et al. 2017, arXiv 1707.06347, sec. 3; l and h are the best of
  its table 1. The advantages are those of `generalized_advantages`, the
  critic's loss is `value_loss`.

  Advantages are [B, T] or [B]. Normalizer: the number of response tokens.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.clipped(batch, batch.log_ratio, clip_low, clip_high)
  return surrogate.reduced(batch, tokens, token_mean, normalizer)


def cispo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  cap: float = 5.0,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """CISPO: mean over tokens of -sg[min(r, cap)] A x, which drops no token.

  MiniMax 2025, arXiv 2506.13585, sec. 3.1, without a lower bound, as there; it
  gives no number for the upper one. 5 is that of Khatri et al. 2025 (ScaleRL),
  arXiv 2510.13786, who saw no difference between 4, 5 and 8.

  Advantages are [B] or [B, T]. Normalizer: the number of response tokens.
  `clip_frac` counts r > cap, of either sign of A, always as high. Raises
  ValueError for a dual clip.
  """
  refuse_dual_clip(terms, "cispo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.truncated(batch, cap)
  return surrogate.reduced(batch, tokens, token_mean, normalizer)


def sapo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  tau_positive: float = 1.0,
  tau_negative: float = 1.05,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """SAPO: mean_i mean_t -(4 / tau) sigmoid(tau (r - 1)) A, tau by A's sign.

  Gao et al. 2025, arXiv 2511.20347, and its two temperatures. 4 / tau makes the
  gradient at r = 1 that of `grpo_loss`; a smaller tau forgives more.

  Advantages are [B] or [B, T]; 0 gives 0. Normalizer: the number of sequences.
  `clip_frac` is 0: nothing is clipped. Raises ValueError for a dual clip.
  """
  refuse_dual_clip(terms, "sapo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.gated(batch, tau_positive, tau_negative)
  return surrogate.reduced(batch, tokens, sequence_mean, normalizer)
