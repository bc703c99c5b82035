"""Losses that weigh or gate each token by its ratio; see `losses`."""

import jax

from gspo_jax.losses import surrogate
from gspo_jax.losses.batch import as_batch, sequence_mean, token_mean
from gspo_jax.losses.metrics import Metrics
from gspo_jax.losses.terms import NO_TERMS, Terms, refuse_dual_clip


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
  batch = as_batch(logps, old_logps, advantages, mask, segment_ids, terms)
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
  batch = as_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.gated(batch, tau_positive, tau_negative)
  return surrogate.reduced(batch, tokens, sequence_mean, normalizer)
