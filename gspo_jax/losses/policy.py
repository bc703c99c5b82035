"""The policy losses; `gspo_loss` describes the arguments of all of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import (
  TokenBatch,
  checked_batch,
  clamp,
  require_float32_BT,
  sequence_mean,
  token_mean,
)
from gspo_jax.losses.metrics import Mean, Metrics
from gspo_jax.losses.surrogate import Surrogate, reduce
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

  s_i = exp(sum_t m (x - o) / n_i) is the geometric mean of the token ratios of
  sequence i, with the mask m and n_i = sum_t m. Zheng et al. 2025, arXiv
  2507.18071, sec. 4.1; l and h are from sec. 5.1.

  Args:
    logps: x, [B, T] float32: log-probs of the response tokens under the policy
      that is trained. The only differentiated argument.
    old_logps: o, [B, T] float32: their log-probs under the old policy.
    advantages: A, float32: [B], or [B, T] with `segment_ids`, constant within a
      sequence. All losses except GSPO, GMPO, RSPO and LUSPO also take one for
      each token, [B, T], with or without `segment_ids`.
    mask: m, [B, T], bool or 0/1: 1 where logps[:, t] is the log-prob of a
      response token. Values where it is 0 are never read.
    clip_low: l. The ratio is clipped at 1 - l where A < 0.
    clip_high: h. The ratio is clipped at 1 + h where A > 0.
    normalizer: divides the sum, by default the number of sequences. With 1.0
      losses, gradients and metrics of micro-batches add.
    segment_ids: [B, T] int in 0..T-1: the sequence of each token in its packed
      row. None: each row is one sequence.
    terms: optional shift of the log-ratios, token weights, penalty, dual clip.

  Returns:
    (loss, metrics): a scalar, and additive metrics by name.

  Raises:
    TypeError: a dtype other than float32.
    ValueError: a wrong shape, a dual clip of 1 or less, or a dual clip for a
      loss that has none.
  """
  _require_one_advantage("gspo_loss", advantages, segment_ids)
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  log_ratio = batch.to_tokens(batch.means(batch.log_ratio))
  tokens = clipped(batch, log_ratio, clip_low, clip_high)
  return reduce(batch, tokens, sequence_mean, normalizer)


def clipped(
  batch: TokenBatch,
  log_ratio: jax.Array,
  clip_low: jax.Array | float,
  clip_high: jax.Array | float,
) -> Surrogate:
  """-min(r A, clip(r, 1 - l, 1 + h) A); with a dual clip c, at most -c A."""
  ratio = jnp.exp(log_ratio)
  positive, negative = batch.advantages > 0, batch.advantages < 0
  low = negative & (ratio < 1 - clip_low)
  high = positive & (ratio > 1 + clip_high)
  bounded = jnp.where(low, 1 - clip_low, jnp.where(high, 1 + clip_high, ratio))
  if batch.terms.dual_clip is not None:
    above = negative & (ratio > batch.terms.dual_clip)
    bounded = jnp.where(above, batch.terms.dual_clip, bounded)
    high = high | above
  return Surrogate(-bounded * batch.advantages, low, high)


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
  `kl_penalty` as `Terms.penalty`. The defaults of l and h were tuned for GRPO
  in arXiv 2507.18071, sec. 5.1. The default normalizer is the number of
  sequences.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = clipped(batch, batch.log_ratio, clip_low, clip_high)
  return reduce(batch, tokens, sequence_mean, normalizer)


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
  """GSPO-token: the value of `gspo_loss`, with an advantage for each token.

  mean_i mean_t -min(s_it A_it, clip(s_it, 1 - l, 1 + h) A_it), with
  s_it = sg[s_i] exp(x - sg[x]), s_i of `gspo_loss`, and sg for stop_gradient.
  Zheng et al. 2025, arXiv 2507.18071, sec. 4.3. If the advantages are constant
  within a sequence, value and gradient equal those of `gspo_loss`. The default
  normalizer is the number of sequences.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  sequence = batch.to_tokens(batch.means(batch.log_ratio))
  sg = jax.lax.stop_gradient
  # The bracketed difference is exactly 0 in value only in this order.
  log_ratio = sg(sequence) + (batch.log_ratio - sg(batch.log_ratio))
  tokens = clipped(batch, log_ratio, clip_low, clip_high)
  return reduce(batch, tokens, sequence_mean, normalizer)


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

  Liu et al. 2025, arXiv 2503.20783, sec. 3.2: the loss is not divided by the
  response's length. Use advantages without a division by the std
  (`normalize_std=False`). l = h = 0.2 is from PPO, arXiv 1707.06347.
  `max_length` is the longest response allowed, in tokens; by default T. The
  default normalizer is the number of sequences times `max_length`.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  length = logps.shape[1] if max_length is None else max_length
  tokens = clipped(batch, batch.log_ratio, clip_low, clip_high)
  return reduce(batch, tokens, _mean_over_length(length), normalizer)


def _mean_over_length(length: int) -> Callable[[TokenBatch, jax.Array], Mean]:
  """The sum over all tokens / (sequences * length), for `reduce`."""

  def mean(batch: TokenBatch, values: jax.Array) -> Mean:
    count = sequence_mean(batch, values).count * length
    return Mean(token_mean(batch, values).total, count)

  return mean


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
  3.3). The default normalizer is the number of response tokens.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = clipped(batch, batch.log_ratio, clip_low, clip_high)
  return reduce(batch, tokens, token_mean, normalizer)


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
  the best of its table 1. The advantages are `generalized_advantages`, the
  critic's loss is `value_loss`. The default normalizer is the number of
  response tokens.
  """
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tokens = clipped(batch, batch.log_ratio, clip_low, clip_high)
  return reduce(batch, tokens, token_mean, normalizer)


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

  c = min(x - o, h) where A > 0, and max(x - o, -l) where A < 0: here l and h
  bound the log-ratio, not the ratio. Zhao et al. 2025, arXiv 2507.20673, with
  ratios from e^-0.4 to e^0.4. One advantage for each sequence, and no dual
  clip. The default normalizer is the number of sequences.
  """
  _require_one_advantage("gmpo_loss", advantages, segment_ids)
  refuse_dual_clip(terms, "gmpo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  low = (batch.advantages < 0) & (batch.log_ratio < -clip_low)
  high = (batch.advantages > 0) & (batch.log_ratio > clip_high)
  bounded = jnp.where(high, clip_high, batch.log_ratio)
  bounded = jnp.where(low, -clip_low, bounded)
  ratio = jnp.exp(batch.to_tokens(batch.means(bounded)))
  tokens = Surrogate(-ratio * batch.advantages, low, high)
  return reduce(batch, tokens, sequence_mean, normalizer)


def rspo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  router_shift: jax.Array,
  router_shift_floor: float = 0.8,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """RSPO: `gmpo_loss` with token ratios times g = sg[max(exp(-d), floor)].

  The product is formed before clipping: Zhang et al. 2025, arXiv 2510.23027v2.
  `router_log_weight` describes d (`router_shift`) and the floor, and gives g to
  any other loss. `terms` must have no `log_ratio_shift`.
  """
  if terms.log_ratio_shift is not None:
    raise ValueError(
      "rspo_loss makes its log_ratio_shift from router_shift:"
      " expected none in terms"
    )
  require_float32_BT({"router_shift": router_shift}, mask)
  shift = router_log_weight(router_shift, mask, floor=router_shift_floor)
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

  Every token keeps a gradient. MiniMax 2025, arXiv 2506.13585, sec. 3.1, also
  without a lower bound; it gives no number for the cap. The default 5 is from
  Khatri et al. 2025 (ScaleRL), arXiv 2510.13786, who saw no difference between
  4, 5 and 8. No dual clip. `clip_frac/*` counts r > cap where A is not 0,
  always as high. The default normalizer is the number of response tokens.
  """
  refuse_dual_clip(terms, "cispo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  ratio = jax.lax.stop_gradient(jnp.exp(batch.log_ratio))
  high = (batch.advantages != 0) & (ratio > cap)
  loss = -jnp.minimum(ratio, cap) * batch.advantages * batch.logps
  tokens = Surrogate(loss, jnp.zeros_like(high), high)
  return reduce(batch, tokens, token_mean, normalizer)


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

  Gao et al. 2025, arXiv 2511.20347: tau is `tau_positive` where A > 0 and
  `tau_negative` where A < 0. The factor 4 / tau makes the gradient at r = 1
  equal to the gradient of `grpo_loss`. With a smaller tau the gradient decays
  more slowly as r leaves 1. No dual clip; nothing is clipped, so `clip_frac/*`
  is 0. The default normalizer is the number of sequences.
  """
  refuse_dual_clip(terms, "sapo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  tau = jnp.where(batch.advantages > 0, tau_positive, tau_negative)
  gate = jax.nn.sigmoid(tau * jnp.expm1(batch.log_ratio))
  never = jnp.zeros_like(batch.mask)
  tokens = Surrogate(-4 / tau * gate * batch.advantages, never, never)
  return reduce(batch, tokens, sequence_mean, normalizer)


def luspo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 2e-3,
  clip_high: float = 2.5e-3,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """LUSPO: mean_i -n_i min(s_i A_i, clip(s_i, 1 - l, 1 + h) A_i).

  `gspo_loss` times the length n_i of each sequence, so that a token of a long
  response has the gradient of one of a short response. Liu et al. 2026, arXiv
  2602.05261; l and h are from sec. 5.1. One advantage for each sequence. The
  loss is about n_i times that of GSPO, as is a penalty: its sum over tokens is
  divided by the number of sequences, the default normalizer.
  """
  _require_one_advantage("luspo_loss", advantages, segment_ids)
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  log_ratio = batch.to_tokens(batch.means(batch.log_ratio))
  tokens = clipped(batch, log_ratio, clip_low, clip_high)
  return reduce(batch, tokens, _mean_over_length(1), normalizer)


def vespo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  k_positive: float = 2.0,
  lambda_positive: float = 3.0,
  k_negative: float = 3.0,
  lambda_negative: float = 2.0,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """VESPO: mean over tokens of -sg[W^k exp(lambda (1 - W))] A x.

  W = exp(sum_t m (x - o)) is the product of the token ratios of a sequence,
  without a division by its length. The weight is 1 at W = 1; k makes it fall
  below W = 1, lambda above. Shen et al. 2026, arXiv 2602.10693v3, eq. 20, with
  k for c1 and lambda for c2; the numbers, by the sign of A, are from sec. 4.1.
  In the paper o are the log-probs of the sampler.

  As in the authors' code, log W is clamped at ±20. No dual clip; nothing is
  clipped, so `clip_frac/*` is 0. The default normalizer is the number of
  response tokens.
  """
  refuse_dual_clip(terms, "vespo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  log_weight = clamp(batch.sums(batch.log_ratio))
  log_weight = batch.to_tokens(jax.lax.stop_gradient(log_weight))
  positive = batch.advantages > 0
  k = jnp.where(positive, k_positive, k_negative)
  rate = jnp.where(positive, lambda_positive, lambda_negative)
  weight = jnp.exp(k * log_weight - rate * jnp.expm1(log_weight))
  never = jnp.zeros_like(batch.mask)
  tokens = Surrogate(-weight * batch.advantages * batch.logps, never, never)
  return reduce(batch, tokens, token_mean, normalizer)


def dppo_tv_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  delta: float = 0.2,
  max_length: int | None = None,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """DPPO-Binary-TV: the sum over tokens of -M r A / (sequences * max_length).

  M is 0 where D > delta and the token has moved as A wants (A > 0 and x > o, or
  A < 0 and x < o), else 1. D = |e^x - e^o| is the total variation between the
  two policies, of the chosen token against all others; r = exp(x - o). Qi et
  al. 2026, arXiv 2602.04879, eq. 12 and 13; delta is from app. E, where a run
  with LoRA has 0.15. By sec. 5.2, o are the log-probs of the sampler, not
  recomputed ones.

  As in the authors' recipe, mean, `max_length` and default normalizer are those
  of `dr_grpo_loss`, and advantages are not divided by the std
  (`normalize_std=False`). No dual clip. `clip_frac/*` counts where M is 0.
  """
  refuse_dual_clip(terms, "dppo_tv_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  divergence = jnp.abs(jnp.exp(batch.logps) - _old_probs(batch, old_logps))
  return _dppo(batch, divergence, delta, max_length, normalizer)


def dppo_kl_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  delta: float = 0.05,
  max_length: int | None = None,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """DPPO-Binary-KL: `dppo_tv_loss` with a KL divergence as D.

  D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), with p = e^x and q = e^o.
  Qi et al. 2026, arXiv 2602.04879, eq. 14; delta is from app. E. 1 - p and
  1 - q are at least 2^-24, the smallest that float32 can tell from 0.
  """
  refuse_dual_clip(terms, "dppo_kl_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  old = _old_probs(batch, old_logps)
  new_others, old_others = (
    jnp.maximum(1 - p, 2.0**-24) for p in (jnp.exp(batch.logps), old)
  )
  others = old_others * jnp.log(old_others / new_others)
  divergence = others - old * batch.raw_log_ratio
  return _dppo(batch, divergence, delta, max_length, normalizer)


def _old_probs(batch: TokenBatch, old_logps: jax.Array) -> jax.Array:
  return jnp.exp(jnp.where(batch.mask, old_logps, 0.0))


def _dppo(batch, divergence, delta, max_length, normalizer):
  far = divergence > delta
  low = far & (batch.advantages < 0) & (batch.raw_log_ratio < 0)
  high = far & (batch.advantages > 0) & (batch.raw_log_ratio > 0)
  loss = -jnp.exp(batch.log_ratio) * batch.advantages
  tokens = Surrogate(jnp.where(low | high, 0.0, loss), low, high)
  length = batch.mask.shape[1] if max_length is None else max_length
  return reduce(batch, tokens, _mean_over_length(length), normalizer)


def ctpo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.025,
  clip_high: float = 0.05,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> tuple[jax.Array, Metrics]:
  """CTPO: mean_i mean_t -min(c A, clip(c, e^(-l sqrt t), e^(h sqrt t)) A).

  c_it = exp(sum_{s <= t} (x_is - o_is)) is the product of the ratios up to
  token t, the t-th response token of sequence i: l and h bound the log-ratio of
  the first token, and the range grows as the spread of log c does. Zhang et al.
  2026, arXiv 2605.07331, sec. 3.3; l and h are from sec. 4.1. In a packed row
  the tokens of a sequence are in their order.

  As in the authors' code, (1) a token's term is differentiated by its x only:
  c_it = sg[c_it] exp(x - sg[x]); (2) log c is clamped (here at ±20). Their code
  also has a dual clip, which the paper does not: none here. The default
  normalizer is the number of sequences.
  """
  refuse_dual_clip(terms, "ctpo_loss")
  batch = checked_batch(logps, old_logps, advantages, mask, segment_ids, terms)
  sg = jax.lax.stop_gradient
  own = sg(batch.log_ratio)
  log_ratio = clamp(batch.running_sums(own)) + (batch.log_ratio - own)
  root = jnp.sqrt(batch.running_sums(jnp.ones_like(own)))
  low, high = -jnp.expm1(-clip_low * root), jnp.expm1(clip_high * root)
  tokens = clipped(batch, log_ratio, low, high)
  return reduce(batch, tokens, sequence_mean, normalizer)


def _require_one_advantage(loss, advantages, segment_ids) -> None:
  if segment_ids is None and advantages.ndim != 1:
    raise ValueError(
      f"{loss} takes one advantage a sequence, [B], got {advantages.shape=};"
      " gspo_token_loss takes [B, T], packed rows need segment_ids"
    )
