"""Losses with one ratio for a sequence; the head of `losses` has the rest."""

import jax

from gspo_jax.losses import surrogate
from gspo_jax.losses.batch import (
  checked_batch,
  require_float32_BT,
  sequence_mean,
)
from gspo_jax.losses.metrics import Metrics
from gspo_jax.losses.terms import (
  NO_TERMS,
  Terms,
  refuse_dual_clip,
  router_log_weight,
)


def check_one_advantage(loss, advantages, segment_ids) -> None:
  if segment_ids is None and advantages.ndim != 1:
    raise ValueError(
      f"{loss} takes one advantage a sequence, [B], got {advantages.shape=};"
      " gspo_token_loss takes [B, T], packed rows need segment_ids"
    )


def gspo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """GSPO: mean_i -min(s_i A_i, clip(s_i, 1 - l, 1 + h) A_i).

  s_i = exp(sum_t m (x - o) / n_i), the geometric mean of the token ratios.
  Zheng et al. 2025, arXiv 2507.18071, sec. 4.1; l and h of sec. 5.1.

  Advantages are [B], or in packed rows [B, T] and constant in a sequence.
  Normalizer: the number of sequences.
  """
  check_one_advantage("gspo_loss", advantages, segment_ids)
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  log_ratio = batch.spread(batch.means(batch.log_ratio))
  tokens = surrogate.clipped(batch, log_ratio, clip_low, clip_high)
  return surrogate.reduced(batch, tokens, sequence_mean, normalizer)


def gspo_token_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """GSPO-token: `gspo_loss` in value, with an advantage for each token.

  s_it = sg[s_i] exp(x - sg[x]); mean_i mean_t -min(s_it A_it, clip(s_it) A_it).
  Zheng et al. 2025, arXiv 2507.18071, sec. 4.3.

  Advantages are [B] or [B, T]; where they are constant in a sequence, value and
  gradient are those of `gspo_loss`. Normalizer: the number of sequences.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  sequence = batch.spread(batch.means(batch.log_ratio))
  sg = jax.lax.stop_gradient
  # Exactly 0 in value only in these brackets.
  log_ratio = sg(sequence) + (batch.log_ratio - sg(batch.log_ratio))
  tokens = surrogate.clipped(batch, log_ratio, clip_low, clip_high)
  return surrogate.reduced(batch, tokens, sequence_mean, normalizer)


def gmpo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """GMPO: mean_i -A_i exp(sum_t m l_it / n_i), of token ratios clipped apart.

  l = min(x - o, h) where A > 0, max(x - o, -l) where A < 0: in logs, unlike in
  the other losses. Zhao et al. 2025, arXiv 2507.20673; e^±0.4 is its range.

  Advantages are [B], or in packed rows [B, T] and constant in a sequence.
  Normalizer: the number of sequences. Raises ValueError for a dual clip.
  """
  check_one_advantage("gmpo_loss", advantages, segment_ids)
  refuse_dual_clip(terms, "gmpo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.geometric(batch, clip_low, clip_high)
  return surrogate.reduced(batch, tokens, sequence_mean, normalizer)


def rspo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  router_shift: jax.Array,
  floor: float = 0.8,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """RSPO: `gmpo_loss` of token ratios times g = sg[max(exp(-d), floor)].

  d, `router_shift`, says how far the router has moved from where it sent the
  token; see `router_log_weight`, which lends g to any other loss. Multiplied
  before clipping: Zhang et al. 2025, arXiv 2510.23027v2.

  Advantages are [B], or in packed rows [B, T] and constant in a sequence.
  Normalizer: the number of sequences. Raises ValueError for a dual clip or for
  a `Terms.shift` besides.
  """
  if terms.shift is not None:
    raise ValueError("rspo_loss makes its own shift, got one in terms too")
  require_float32_BT({"router_shift": router_shift}, mask)
  shift = router_log_weight(router_shift, mask, floor=floor)
  return gmpo_loss(
    logps,
    old_logps,
    advantages,
    mask,
    clip_low=clip_low,
    clip_high=clip_high,
    normalizer=normalizer,
    segment_ids=segment_ids,
    terms=terms._replace(shift=shift),
  )
