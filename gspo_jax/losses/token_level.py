"""Losses with one ratio for each token: GRPO's family, PPO, CISPO, SAPO."""

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

  Shao et al. 2024, arXiv 2402.03300, sec. 4.1.1, without its KL term: pass
  `kl_penalty` as `Terms.penalty`. l and h are those tuned for the comparison in
  arXiv 2507.18071, sec. 5.1.

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
  tokens = surrogate.clipped(batch, batch.log_ratio, clip_low, clip_high)
  return surrogate.reduce(batch, tokens, sequence_mean, normalizer)


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
  """Dr. GRPO: the sum of `grpo_loss`'s token losses / (sequences * max_length).

  Liu et al. 2025, arXiv 2503.20783, sec. 3.2: no division by the length of the
  response. Its advantages are not divided by the std either
  (`normalize_std=False`). l = h = 0.2 is PPO's, arXiv 1707.06347.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] or [B, T] float32; where `segment_ids` is given [B, T].
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    clip_low: l. The ratio is clipped at 1 - l where A < 0.
    clip_high: h. The ratio is clipped at 1 + h where A > 0.
    max_length: the longest response allowed, in tokens; T by default.
    normalizer: divides the sum, by default the number of sequences times
      `max_length`. With 1.0 losses, gradients and metrics of micro-batches add.
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
  length = logps.shape[1] if max_length is None else max_length

  def mean_over_max_length(batch: TokenBatch, values: jax.Array) -> Mean:
    count = sequence_mean(batch, values).count * length
    return Mean(token_mean(batch, values).total, count)

  tokens = surrogate.clipped(batch, batch.log_ratio, clip_low, clip_high)
  return surrogate.reduce(batch, tokens, mean_over_max_length, normalizer)


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
  """DAPO: the token losses of `grpo_loss`, averaged over all tokens.

  Yu et al. 2025, arXiv 2503.14476: clip-higher (sec. 3.1), token mean (sec.
  3.3).

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] or [B, T] float32; where `segment_ids` is given [B, T].
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    clip_low: l. The ratio is clipped at 1 - l where A < 0.
    clip_high: h. The ratio is clipped at 1 + h where A > 0.
    normalizer: divides the sum, by default the number of response tokens.
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
  tokens = surrogate.clipped(batch, batch.log_ratio, clip_low, clip_high)
  return surrogate.reduce(batch, tokens, token_mean, normalizer)


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
  """PPO: mean over tokens of -min(r A, clip(r, 1 - l, 1 + h) A).

  r = exp(x - o). Schulman et al. 2017, arXiv 1707.06347, sec. 3; l and h are
  the best of its table 1. Its advantages are those of
  `generalized_advantages`, its critic's loss is `value_loss`.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] or [B, T] float32; where `segment_ids` is given [B, T].
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    clip_low: l. The ratio is clipped at 1 - l where A < 0.
    clip_high: h. The ratio is clipped at 1 + h where A > 0.
    normalizer: divides the sum, by default the number of response tokens.
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
  tokens = surrogate.clipped(batch, batch.log_ratio, clip_low, clip_high)
  return surrogate.reduce(batch, tokens, token_mean, normalizer)


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
  """CISPO: mean over tokens of -sg[min(r, cap)] A x, with r = exp(x - o).

  Every token keeps a gradient. MiniMax 2025, arXiv 2506.13585, sec. 3.1, which
  has no lower bound either, and gives no number for the upper one. 5 is that of
  Khatri et al. 2025 (ScaleRL), arXiv 2510.13786, who saw no difference between
  4, 5 and 8.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] or [B, T] float32; where `segment_ids` is given [B, T].
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    cap: the largest weight of a token.
    normalizer: divides the sum, by default the number of response tokens.
      With 1.0 losses, gradients and metrics of micro-batches add.
    segment_ids: [B, T] int in 0..T-1, the sequence of each token in packed
      rows, counted within each row; None: each row is one sequence.
    terms: optional shift of the log-ratios, token weights and penalty.

  Returns:
    (loss, metrics): a scalar, and additive metrics by name.
      `clip_frac/*` counts r > cap where A is not 0, always as high.

  Raises:
    TypeError: a dtype other than float32.
    ValueError: a wrong shape, or a dual clip.
  """
  refuse_dual_clip(terms, "cispo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.truncated(batch, cap)
  return surrogate.reduce(batch, tokens, token_mean, normalizer)


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
  """SAPO: mean_i mean_t -(4 / tau) sigmoid(tau (r - 1)) A, r = exp(x - o).

  Gao et al. 2025, arXiv 2511.20347, and its two temperatures. Because of the
  factor 4 / tau the gradient at r = 1 is that of `grpo_loss`. With a smaller
  tau the gradient decays more slowly as r leaves 1.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, [B] or [B, T] float32; where `segment_ids` is given [B, T].
    mask: [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a response
      token. Values under a 0 are never read.
    tau_positive: tau where A > 0.
    tau_negative: tau where A < 0.
    normalizer: divides the sum, by default the number of sequences.
      With 1.0 losses, gradients and metrics of micro-batches add.
    segment_ids: [B, T] int in 0..T-1, the sequence of each token in packed
      rows, counted within each row; None: each row is one sequence.
    terms: optional shift of the log-ratios, token weights and penalty.

  Returns:
    (loss, metrics): a scalar, and additive metrics by name.
      `clip_frac/*` is 0: nothing is clipped.

  Raises:
    TypeError: a dtype other than float32.
    ValueError: a wrong shape, or a dual clip.
  """
  refuse_dual_clip(terms, "sapo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = surrogate.sigmoid_gated(batch, tau_positive, tau_negative)
  return surrogate.reduce(batch, tokens, sequence_mean, normalizer)
