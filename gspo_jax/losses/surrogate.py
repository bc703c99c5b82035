"""From the loss of each token to the loss of a batch, and its metrics."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import TokenBatch, sequence_mean, token_mean
from gspo_jax.losses.metrics import Histogram, Mean, Metrics, Std


class Surrogate(NamedTuple):
  """The loss of each token, and where its ratio was clipped."""

  loss: jax.Array  # [B, T] float32, to be minimised
  low: jax.Array  # [B, T] bool, clipped from below
  high: jax.Array  # [B, T] bool, clipped from above


def reduce(
  batch: TokenBatch,
  surrogate: Surrogate,
  aggregate: Callable[[TokenBatch, jax.Array], Mean],
  normalizer: jax.Array | float | None,
) -> tuple[jax.Array, Metrics]:
  """The loss of a batch with its terms, and the metrics that all losses share.

  `aggregate` is `sequence_mean`, `token_mean` or another function
  (batch, [B, T]) -> Mean. `normalizer` replaces the mean's count as the
  divisor.
  """
  weights, penalty = batch.terms.weights, batch.terms.penalty
  loss = surrogate.loss if weights is None else weights * surrogate.loss
  policy = aggregate(batch, loss)
  metrics: Metrics = {"loss/policy": policy} | _ratio_metrics(batch, surrogate)
  total = policy.total
  if penalty is not None:
    metrics["loss/penalty"] = mean = aggregate(batch, penalty)
    total = total + mean.total
  if normalizer is None:
    normalizer = jnp.maximum(policy.count, 1.0)
  return total / normalizer, jax.lax.stop_gradient(metrics)


def _ratio_metrics(batch: TokenBatch, surrogate: Surrogate) -> Metrics:
  """Metrics of every loss; the ratios are without `log_ratio_shift`."""
  token_log_ratio = batch.raw_log_ratio
  # Std sums squares of r - 1: in float32 squares of r would round them away.
  offset = jnp.expm1(token_log_ratio)
  metrics: Metrics = {
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
