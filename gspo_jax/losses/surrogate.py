"""Surrogates: from ratios and advantages to a loss for each token."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import TokenBatch, sequence_mean, token_mean
from gspo_jax.losses.metrics import Histogram, Mean, Metrics, Std

# The ratio that a method clips. Methods that are missing have no clip range.
CLIPPED = {
  "gspo": "sequence",
  "gspo_token": "sequence",
  "grpo": "token",
  "dr_grpo": "token",
  "dapo": "token",
  "ppo": "token",
  "gmpo": "token",
  "rspo": "token",
}
CLIP_LOGS = ("gmpo", "rspo")  # clip log-ratios; the others clip ratios


class Surrogate(NamedTuple):
  """The loss of each token, and where its ratio was clipped.

  Attributes:
    loss: [B, T] float32, to be minimised.
    low: [B, T] bool, clipped from below.
    high: [B, T] bool, clipped from above.
  """

  loss: jax.Array
  low: jax.Array
  high: jax.Array


def clipped(
  batch: TokenBatch, log_ratio: jax.Array, clip_low: float, clip_high: float
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


def geometric_mean(
  batch: TokenBatch, clip_low: float, clip_high: float
) -> Surrogate:
  """-A exp(mean_t l): l is log r, at most h if A > 0, at least -l if A < 0."""
  low = (batch.advantages < 0) & (batch.log_ratio < -clip_low)
  high = (batch.advantages > 0) & (batch.log_ratio > clip_high)
  bounded = jnp.where(high, clip_high, batch.log_ratio)
  bounded = jnp.where(low, -clip_low, bounded)
  ratio = jnp.exp(batch.to_tokens(batch.means(bounded)))
  return Surrogate(-ratio * batch.advantages, low, high)


def truncated(batch: TokenBatch, cap: float) -> Surrogate:
  """-sg[min(r, cap)] A x, a policy gradient with a truncated weight."""
  ratio = jax.lax.stop_gradient(jnp.exp(batch.log_ratio))
  high = (batch.advantages != 0) & (ratio > cap)
  loss = -jnp.minimum(ratio, cap) * batch.advantages * batch.logps
  return Surrogate(loss, jnp.zeros_like(high), high)


def sigmoid_gated(
  batch: TokenBatch, tau_positive: float, tau_negative: float
) -> Surrogate:
  """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A; no clipping."""
  tau = jnp.where(batch.advantages > 0, tau_positive, tau_negative)
  gate = jax.nn.sigmoid(tau * jnp.expm1(batch.log_ratio))
  never = jnp.zeros_like(batch.mask)
  return Surrogate(-4 / tau * gate * batch.advantages, never, never)


def reduce(
  batch: TokenBatch,
  surrogate: Surrogate,
  aggregate: Callable[[TokenBatch, jax.Array], Mean],
  normalizer: jax.Array | float | None,
) -> tuple[jax.Array, Metrics]:
  """The loss with the weights and the penalty of `Terms`, and its metrics."""
  weights, penalty = batch.terms.weights, batch.terms.penalty
  loss = surrogate.loss if weights is None else weights * surrogate.loss
  policy = aggregate(batch, loss)
  metrics = {"loss/policy": policy} | _ratio_metrics(batch, surrogate)
  total = policy.total
  if penalty is not None:
    metrics["loss/penalty"] = aggregate(batch, penalty)
    total = total + metrics["loss/penalty"].total
  if normalizer is None:
    normalizer = jnp.maximum(policy.count, 1.0)
  return total / normalizer, jax.lax.stop_gradient(metrics)


def _ratio_metrics(batch: TokenBatch, surrogate: Surrogate) -> Metrics:
  """The same keys for every loss; the ratios leave `log_ratio_shift` out."""
  token_log_ratio = batch.raw_log_ratio
  # The std accumulates r - 1: in float32 the squares of r would drown it.
  offset = jnp.expm1(token_log_ratio)
  metrics = {
    "ratio/moved": token_mean(batch, token_log_ratio != 0),
    "kl/old_new": token_mean(batch, offset - token_log_ratio),
  }
  sequence_log_ratio = batch.means(token_log_ratio)
  has_tokens = batch.lengths() > 0
  for unit, mean, log_ratio, mask in (
    ("sequence", sequence_mean, sequence_log_ratio, has_tokens),
    ("token", token_mean, token_log_ratio, batch.mask),
  ):
    metrics |= {
      f"ratio/{unit}_std": Std.of(jnp.expm1(log_ratio), mask),
      f"ratio/{unit}_log": Histogram.of(log_ratio, mask),
      f"clip_frac/{unit}": mean(batch, surrogate.low | surrogate.high),
      f"clip_frac/{unit}_low": mean(batch, surrogate.low),
      f"clip_frac/{unit}_high": mean(batch, surrogate.high),
    }
  return metrics
