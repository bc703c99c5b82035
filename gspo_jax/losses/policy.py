"""The policy losses: the mathematics of each, from a batch to its tokens.

`method` turns each function into a loss with the arguments of `gspo_loss`.
"""

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import (
  TokenBatch,
  clamp,
  fixed_length_mean,
  require_float32_BT,
  sequence_mean,
  sum_mean,
  token_mean,
)
from gspo_jax.losses.methods import METHODS, Surrogate, method
from gspo_jax.losses.terms import router_log_weight


@method(sequence_mean, unit="sequence", clips="ratio", one_advantage=True)
def gspo_loss(
  batch: TokenBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Surrogate:
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
  return clipped(batch, _sequence_log_ratio(batch), clip_low, clip_high)


def _sequence_log_ratio(batch: TokenBatch) -> jax.Array:
  """[B, T]: log s_i of `gspo_loss`, at each token of sequence i."""
  return batch.to_tokens(batch.means(batch.log_ratio))


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


@method(sequence_mean, unit="sequence", clips="ratio")
def gspo_token_loss(
  batch: TokenBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Surrogate:
  """GSPO-token: the value of `gspo_loss`, with an advantage for each token.

  mean_i mean_t -min(s_it A_it, clip(s_it, 1 - l, 1 + h) A_it), with
  s_it = sg[s_i] exp(x - sg[x]), s_i of `gspo_loss`, and sg for stop_gradient.
  Zheng et al. 2025, arXiv 2507.18071, sec. 4.3. If the advantages are constant
  within a sequence, value and gradient equal those of `gspo_loss`. The default
  normalizer is the number of sequences.
  """
  sg = jax.lax.stop_gradient
  # The bracketed difference is exactly 0 in value only in this order.
  sequence = sg(_sequence_log_ratio(batch))
  log_ratio = sequence + (batch.log_ratio - sg(batch.log_ratio))
  return clipped(batch, log_ratio, clip_low, clip_high)


@method(sequence_mean, clips="ratio")
def grpo_loss(
  batch: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.27
) -> Surrogate:
  """GRPO: mean_i mean_t -min(r A, clip(r, 1 - l, 1 + h) A), r = exp(x - o).

  Shao et al. 2024, arXiv 2402.03300, sec. 4.1.1, without its KL term: pass
  `kl_penalty` as `Terms.penalty`. The defaults of l and h were tuned for GRPO
  in arXiv 2507.18071, sec. 5.1. The default normalizer is the number of
  sequences.
  """
  return clipped(batch, batch.log_ratio, clip_low, clip_high)


@method(fixed_length_mean, clips="ratio", normalize_std=False)
def dr_grpo_loss(
  batch: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Surrogate:
  """Dr. GRPO: the sum of `grpo_loss`'s token losses / (sequences * max_length).

  Liu et al. 2025, arXiv 2503.20783, sec. 3.2: the loss is not divided by the
  response's length. Use advantages without a division by the std
  (`normalize_std=False`). l = h = 0.2 is from PPO, arXiv 1707.06347.
  `max_length` is the longest response allowed, in tokens; by default T. The
  default normalizer is the number of sequences times `max_length`.
  """
  return clipped(batch, batch.log_ratio, clip_low, clip_high)


@method(token_mean, clips="ratio")
def dapo_loss(
  batch: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.28
) -> Surrogate:
  """DAPO: the token losses of `grpo_loss`, averaged over all tokens.

  Yu et al. 2025, arXiv 2503.14476: clip-higher (sec. 3.1), token mean (sec.
  3.3). The default normalizer is the number of response tokens.
  """
  return clipped(batch, batch.log_ratio, clip_low, clip_high)


@method(token_mean, clips="ratio", critic=True)
def ppo_loss(
  batch: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Surrogate:
  """PPO: mean over tokens of -min(r A, clip(r, 1 - l, 1 + h) A).

  r = exp(x - o). Schulman et al. 2017, arXiv 1707.06347, sec. 3; l and h are
  the best of its table 1. The advantages are `generalized_advantages`, the
  critic's loss is `value_loss`. The default normalizer is the number of
  response tokens.
  """
  return clipped(batch, batch.log_ratio, clip_low, clip_high)


@method(sequence_mean, clips="log_ratio", one_advantage=True)
def gmpo_loss(
  batch: TokenBatch, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> Surrogate:
  """GMPO: mean_i -A_i exp(sum_t m c_it / n_i), the mean of clipped log-ratios.

  c = min(x - o, h) where A > 0, and max(x - o, -l) where A < 0: here l and h
  bound the log-ratio, not the ratio. Zhao et al. 2025, arXiv 2507.20673, with
  ratios from e^-0.4 to e^0.4. One advantage for each sequence, and no dual
  clip. The default normalizer is the number of sequences.
  """
  return _mean_of_clipped(batch, batch.log_ratio, clip_low, clip_high)


def _mean_of_clipped(
  batch: TokenBatch, log_ratio: jax.Array, clip_low: float, clip_high: float
) -> Surrogate:
  """The surrogate of `gmpo_loss`, from the log-ratio of each token."""
  low = (batch.advantages < 0) & (log_ratio < -clip_low)
  high = (batch.advantages > 0) & (log_ratio > clip_high)
  bounded = jnp.where(high, clip_high, log_ratio)
  bounded = jnp.where(low, -clip_low, bounded)
  ratio = jnp.exp(batch.to_tokens(batch.means(bounded)))
  return Surrogate(-ratio * batch.advantages, low, high)


@method(sequence_mean, clips="log_ratio", one_advantage=True)
def rspo_loss(
  batch: TokenBatch,
  *,
  router_shift: jax.Array,
  router_shift_floor: float = 0.8,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
) -> Surrogate:
  """RSPO: `gmpo_loss` with token ratios times g = sg[max(exp(-d), floor)].

  The product is formed before clipping: Zhang et al. 2025, arXiv 2510.23027v2.
  `router_log_weight` describes d (`router_shift`) and the floor, and gives g to
  any other loss. `terms` must have no `log_ratio_shift`.
  """
  if batch.terms.log_ratio_shift is not None:
    raise ValueError(
      "rspo_loss makes its log_ratio_shift from router_shift:"
      " expected none in terms"
    )
  require_float32_BT({"router_shift": router_shift}, batch.mask)
  weight = router_log_weight(router_shift, batch.mask, floor=router_shift_floor)
  log_ratio = clamp(batch.logps - batch.old_logps + weight)
  return _mean_of_clipped(batch, log_ratio, clip_low, clip_high)


@method(token_mean)
def cispo_loss(batch: TokenBatch, *, cap: float = 5.0) -> Surrogate:
  """CISPO: mean over tokens of -sg[min(r, cap)] A x, with r = exp(x - o).

  Every token keeps a gradient. MiniMax 2025, arXiv 2506.13585, sec. 3.1, also
  without a lower bound; it gives no number for the cap. The default 5 is from
  Khatri et al. 2025 (ScaleRL), arXiv 2510.13786, who saw no difference between
  4, 5 and 8. No dual clip. `clip_frac/*` counts r > cap where A is not 0,
  always as high. The default normalizer is the number of response tokens.
  """
  ratio = jax.lax.stop_gradient(jnp.exp(batch.log_ratio))
  high = (batch.advantages != 0) & (ratio > cap)
  loss = -jnp.minimum(ratio, cap) * batch.advantages * batch.logps
  return Surrogate(loss, jnp.zeros_like(high), high)


@method(sequence_mean)
def sapo_loss(
  batch: TokenBatch, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Surrogate:
  """SAPO: mean_i mean_t -(4 / tau) sigmoid(tau (r - 1)) A, r = exp(x - o).

  Gao et al. 2025, arXiv 2511.20347: tau is `tau_positive` where A > 0 and
  `tau_negative` where A < 0. The factor 4 / tau makes the gradient at r = 1
  equal to the gradient of `grpo_loss`. With a smaller tau the gradient decays
  more slowly as r leaves 1. No dual clip; nothing is clipped, so `clip_frac/*`
  is 0. The default normalizer is the number of sequences.
  """
  tau = jnp.where(batch.advantages > 0, tau_positive, tau_negative)
  gate = jax.nn.sigmoid(tau * jnp.expm1(batch.log_ratio))
  never = jnp.zeros_like(batch.mask)
  return Surrogate(-4 / tau * gate * batch.advantages, never, never)


@method(sum_mean, unit="sequence", clips="ratio", one_advantage=True)
def luspo_loss(
  batch: TokenBatch, *, clip_low: float = 2e-3, clip_high: float = 2.5e-3
) -> Surrogate:
  """LUSPO: mean_i -n_i min(s_i A_i, clip(s_i, 1 - l, 1 + h) A_i).

  `gspo_loss` times the length n_i of each sequence, so that a token of a long
  response has the gradient of one of a short response. Liu et al. 2026, arXiv
  2602.05261; l and h are from sec. 5.1. One advantage for each sequence. The
  loss is about n_i times that of GSPO, as is a penalty: its sum over tokens is
  divided by the number of sequences, the default normalizer.
  """
  return clipped(batch, _sequence_log_ratio(batch), clip_low, clip_high)


@method(token_mean, unit="sequence")
def vespo_loss(
  batch: TokenBatch,
  *,
  k_positive: float = 2.0,
  lambda_positive: float = 3.0,
  k_negative: float = 3.0,
  lambda_negative: float = 2.0,
) -> Surrogate:
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
  log_weight = clamp(batch.sums(batch.log_ratio))
  log_weight = batch.to_tokens(jax.lax.stop_gradient(log_weight))
  positive = batch.advantages > 0
  k = jnp.where(positive, k_positive, k_negative)
  rate = jnp.where(positive, lambda_positive, lambda_negative)
  weight = jnp.exp(k * log_weight - rate * jnp.expm1(log_weight))
  never = jnp.zeros_like(batch.mask)
  return Surrogate(-weight * batch.advantages * batch.logps, never, never)


@method(fixed_length_mean, normalize_std=False)
def dppo_tv_loss(batch: TokenBatch, *, delta: float = 0.2) -> Surrogate:
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
  divergence = jnp.abs(jnp.exp(batch.logps) - jnp.exp(batch.old_logps))
  return _masked_far(batch, divergence, delta)


@method(fixed_length_mean, normalize_std=False)
def dppo_kl_loss(batch: TokenBatch, *, delta: float = 0.05) -> Surrogate:
  """DPPO-Binary-KL: `dppo_tv_loss` with a KL divergence as D.

  D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), with p = e^x and q = e^o.
  Qi et al. 2026, arXiv 2602.04879, eq. 14; delta is from app. E. 1 - p and
  1 - q are at least 2^-24, the smallest that float32 can tell from 0.
  """
  new, old = jnp.exp(batch.logps), jnp.exp(batch.old_logps)
  new_others, old_others = (jnp.maximum(1 - p, 2.0**-24) for p in (new, old))
  others = old_others * jnp.log(old_others / new_others)
  return _masked_far(batch, others - old * batch.raw_log_ratio, delta)


def _masked_far(
  batch: TokenBatch, divergence: jax.Array, delta: float
) -> Surrogate:
  """-M r A of `dppo_tv_loss`, from D of each token."""
  far = divergence > delta
  low = far & (batch.advantages < 0) & (batch.raw_log_ratio < 0)
  high = far & (batch.advantages > 0) & (batch.raw_log_ratio > 0)
  loss = -jnp.exp(batch.log_ratio) * batch.advantages
  return Surrogate(jnp.where(low | high, 0.0, loss), low, high)


@method(sequence_mean, clips="log_ratio")
def ctpo_loss(
  batch: TokenBatch, *, clip_low: float = 0.025, clip_high: float = 0.05
) -> Surrogate:
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
  sg = jax.lax.stop_gradient
  own = sg(batch.log_ratio)
  log_ratio = clamp(batch.running_sums(own)) + (batch.log_ratio - own)
  root = jnp.sqrt(batch.running_sums(jnp.ones_like(own)))
  low, high = -jnp.expm1(-clip_low * root), jnp.expm1(clip_high * root)
  return clipped(batch, log_ratio, low, high)


__all__ = [row.loss.__name__ for row in METHODS.values()]
