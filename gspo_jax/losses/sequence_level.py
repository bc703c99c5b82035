"""Losses with one ratio for each sequence: GSPO, GSPO-token, GMPO, RSPO."""

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

  s_i = exp(sum_t m (x - o) / n_i), the geometric mean of the token ratios of
  sequence i, with n_i = sum_t m and m the mask. Zheng et al. 2025, arXiv
  2507.18071, sec. 4.1; l and h are from sec. 5.1.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] float32; where `segment_ids` is given [B, T], constant
      within a sequence.
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    clip_low: l. The ratio is clipped at 1 - l where A < 0.
    clip_high: h. The ratio is clipped at 1 + h where A > 0.
    normalizer: divides the sum, by default the number of sequences.
      With 1.0 losses, gradients and metrics of micro-batches add.
    segment_ids: [B, T] int in 0..T-1, the sequence of each token in packed
      rows, counted within each row; None: each row is one sequence.
    terms: optional shift of the log-ratios, token weights, penalty, dual clip.

  Returns:
    (loss, metrics): a scalar, and additive metrics by name.

  Raises:
    TypeError: a dtype other than float32.
    ValueError: a wrong shape, [B, T] advantages without `segment_ids`, or a
      dual clip of 1 or less.
  """
  _require_one_advantage("gspo_loss", advantages, segment_ids)
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  log_ratio = batch.to_tokens(batch.means(batch.log_ratio))
  tokens = surrogate.clipped(batch, log_ratio, clip_low, clip_high)
  return surrogate.reduce(batch, tokens, sequence_mean, normalizer)


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

  mean_i mean_t -min(s_it A_it, clip(s_it, 1 - l, 1 + h) A_it), with
  s_it = sg[s_i] exp(x - sg[x]) and s_i of `gspo_loss`. Zheng et al. 2025, arXiv
  2507.18071, sec. 4.3. Where the advantages are constant within a sequence,
  value and gradient equal those of `gspo_loss`.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] or [B, T] float32; where `segment_ids` is given [B, T].
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    clip_low: l. The ratio is clipped at 1 - l where A < 0.
    clip_high: h. The ratio is clipped at 1 + h where A > 0.
    normalizer: divides the sum, by default the number of sequences.
      With 1.0 losses, gradients and metrics of micro-batches add.
    segment_ids: [B, T] int in 0..T-1, the sequence of each token in packed
      rows, counted within each row; None: each row is one sequence.
    terms: optional shift of the log-ratios, token weights, penalty, dual clip.

  Returns:
    (loss, metrics): a scalar, and additive metrics by name.

  Raises:
    TypeError: a dtype other than float32.
    ValueError: a wrong shape, or a dual clip of 1 or less.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  sequence = batch.to_tokens(batch.means(batch.log_ratio))
  sg = jax.lax.stop_gradient
  # The bracketed difference is exactly 0 in value only in this order.
  log_ratio = sg(sequence) + (batch.log_ratio - sg(batch.log_ratio))
  tokens = surrogate.clipped(batch, log_ratio, clip_low, clip_high)
  return surrogate.reduce(batch, tokens, sequence_mean, normalizer)


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
  """GMPO: mean_i -A_i exp(sum_t m c_it / n_i), the mean of clipped log-ratios.

  c = min(x - o, h) where A > 0, max(x - o, -l) where A < 0. Zhao et al. 2025,
  arXiv 2507.20673; its range is e^-0.4 to e^0.4.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] float32; where `segment_ids` is given [B, T], constant
      within a sequence.
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    clip_low: l, of the log-ratio, unlike in the other losses.
    clip_high: h, of the log-ratio, likewise.
    normalizer: divides the sum, by default the number of sequences.
      With 1.0 losses, gradients and metrics of micro-batches add.
    segment_ids: [B, T] int in 0..T-1, the sequence of each token in packed
      rows, counted within each row; None: each row is one sequence.
    terms: optional shift of the log-ratios, token weights and penalty.

  Returns:
    (loss, metrics): a scalar, and additive metrics by name.

  Raises:
    TypeError: a dtype other than float32.
    ValueError: a wrong shape, [B, T] advantages without `segment_ids`, or a
      dual clip.
  """
  _require_one_advantage("gmpo_loss", advantages, segment_ids)
  refuse_dual_clip(terms, "gmpo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.geometric_mean(batch, clip_low, clip_high)
  return surrogate.reduce(batch, tokens, sequence_mean, normalizer)


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
  """RSPO: `gmpo_loss` with token ratios times g = sg[max(exp(-d), floor)].

  The product is formed before clipping: Zhang et al. 2025, arXiv 2510.23027v2.
  For g in any other loss see `router_log_weight`.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] float32; where `segment_ids` is given [B, T], constant
      within a sequence.
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    router_shift: d, [B, T] float32 >= 0: how far the router's log-probs of the
      old policy's experts have moved, see `router_log_weight`.
    floor: the smallest g, in (0, 1].
    clip_low: l, of the log-ratio.
    clip_high: h, of the log-ratio.
    normalizer: divides the sum, by default the number of sequences.
      With 1.0 losses, gradients and metrics of micro-batches add.
    segment_ids: [B, T] int in 0..T-1, the sequence of each token in packed
      rows, counted within each row; None: each row is one sequence.
    terms: optional token weights and penalty.

  Returns:
    (loss, metrics): a scalar, and additive metrics by name.

  Raises:
    TypeError: a dtype other than float32.
    ValueError: a wrong shape, [B, T] advantages without `segment_ids`, a floor
      outside (0, 1], a dual clip, or `Terms.log_ratio_shift`.
  """
  if terms.log_ratio_shift is not None:
    raise ValueError(
      "rspo_loss makes its log_ratio_shift from router_shift:"
      " expected none in terms"
    )
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
    terms=terms._replace(log_ratio_shift=shift),
  )


def _require_one_advantage(loss, advantages, segment_ids) -> None:
  if segment_ids is None and advantages.ndim != 1:
    raise ValueError(
      f"{loss} takes one advantage a sequence, [B], got {advantages.shape=};"
      " gspo_token_loss takes [B, T], packed rows need segment_ids"
    )
