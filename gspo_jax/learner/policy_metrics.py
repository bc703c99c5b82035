"""Metrics of policies: entropy, routing, mismatch with the sampler.

Dimension key: B rows, T columns, R response columns (the last of each row; of a
packed row all but the first), N sequences of a row, L layers, k experts a
token, E experts.

Routing is measured at the tokens that predict the response tokens, one column
earlier.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import losses, model
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import Histogram, Mean, Metrics


def old_policy_metrics(
  out: TokenLogprobs, batch: TrainBatch, cfg: model.ModelConfig
) -> Metrics:
  """Metrics of the old policy; `out` is its forward pass over the batch.

  Empty for a batch without the sampler's log-probs.
  `mismatch/*` is the recomputed log-prob minus the sampler's. In bfloat16 it
  can exceed GSPO's clip range, so it is measured also if the sampler's
  log-probs are the old ones. `moe/dropped` is a mean over the micro-batches
  that hold responses, of each part of the mesh axis `data`.
  """
  mask = batch.response_mask
  if batch.sampler_logps is None:
    return {}
  gap_BR = jnp.where(mask, out.logps - batch.sampler_logps, 0.0)
  gap_BN, has_tokens_BN = sequence_log_ratio(
    out.logps, batch.sampler_logps, batch
  )
  metrics: Metrics = {
    "mismatch/token_abs_mean": Mean.of(jnp.abs(gap_BR), mask),
    "mismatch/token_gap": Histogram.of(gap_BR, mask),
    "mismatch/sequence_abs_mean": Mean.of(jnp.abs(gap_BN), has_tokens_BN),
    "mismatch/sequence_gap": Histogram.of(gap_BN, has_tokens_BN),
    "policy/entropy": Mean.of(out.entropy, mask),
  }
  if cfg.exact:
    differ_BR = (out.logps != batch.sampler_logps).astype(jnp.float32)
    metrics["mismatch/exact_tokens_differ"] = Mean.of(differ_BR, mask)
  if out.dropped is not None:
    metrics |= _routing_metrics(out, mask, cfg)
    dropped = out.dropped.sum(dtype=jnp.float32)
    metrics["moe/dropped"] = Mean(dropped, jnp.float32(1))
  return jax.lax.stop_gradient(metrics)


def sequence_log_ratio(
  new_BR: jax.Array, old_BR: jax.Array, batch: TrainBatch
) -> tuple[jax.Array, jax.Array]:
  """[B, N] each: mean new - old log-prob of a response; whether it exists."""
  sums = lambda x_BR: losses.sequence_sums(
    x_BR, batch.response_mask, batch.response_segments
  )
  lengths_BN = sums(jnp.ones_like(new_BR))
  gaps_BN = sums(new_BR - old_BR) / jnp.maximum(lengths_BN, 1)
  return gaps_BN, lengths_BN > 0


def _routing_metrics(out: TokenLogprobs, mask_BR, cfg) -> Metrics:
  assert out.experts is not None and out.router_entropy is not None
  experts_BLTk, entropy_BLR = (
    x.swapaxes(0, 1) for x in (out.experts, out.router_entropy)
  )
  # Compared and summed: a TPU would scatter one number at a time.
  chosen_BLRk = predicting(experts_BLTk, mask_BR.shape[1])
  # In the experts' small integer type: this is the largest array of a pass.
  numbers_E = jnp.arange(cfg.num_experts, dtype=chosen_BLRk.dtype)
  chosen_BLRkE = chosen_BLRk[..., None] == numbers_E
  chosen_BLRkE &= mask_BR[:, None, :, None, None]
  tokens_LE = chosen_BLRkE.sum((0, 2, 3), dtype=jnp.float32)
  total_L = jnp.where(mask_BR[:, None], entropy_BLR, 0.0).sum((0, 2))
  entropy = Mean(total_L, mask_BR.sum(dtype=jnp.float32))
  return {
    "moe/load_max": MeanLoad(tokens_LE),
    "moe/layer_load_max": Load(tokens_LE),
    "moe/router_entropy": over_layers(entropy),
    "moe/layer_router_entropy": entropy,
  }


def predicting(x: jax.Array, length: int) -> jax.Array:
  """The columns of [B, L, T, ...] that predict the last `length` tokens."""
  return x[:, :, -length - 1 : -1]


def expert_flips(new: jax.Array, old: jax.Array, mask: jax.Array) -> Mean:
  """[L]: share of the old policy's experts that the new one does not choose."""
  # Experts are [B, L, T, k], in any order.
  new, old = (predicting(x, mask.shape[1]) for x in (new, old))
  kept_BLRk = (old[..., :, None] == new[..., None, :]).any(-1)
  lost_L = jnp.where(mask[:, None, :, None], ~kept_BLRk, False).sum((0, 2, 3))
  count = mask.sum(dtype=jnp.float32) * old.shape[-1]
  return Mean(lost_L.astype(jnp.float32), count)


def router_shift(new: jax.Array, old: jax.Array) -> jax.Array:
  """RSPO's router shift d (arXiv 2510.23027v2): [B, R], without gradient.

  `|log p_new(e) - log p_old(e)|`, averaged over layers and over the OLD
  policy's experts e. Both arguments are log-probs of these experts,
  [B, L, R, k] float32.
  """
  return jax.lax.stop_gradient(jnp.abs(new - old).mean((1, 3)))


class Load(NamedTuple):
  """[L]: tokens of the busiest expert over the mean of all experts."""

  tokens: jax.Array  # [L, E] float32, of each expert

  def value(self) -> float | np.ndarray:
    tokens = np.asarray(self.tokens, float)
    return tokens.max(1) / np.maximum(tokens.mean(1), 1e-9)


class MeanLoad(Load):
  """`Load`, averaged over the layers."""

  def value(self) -> float:
    return float(np.mean(super().value()))


def over_layers(metric: Mean) -> Mean:
  """The mean over the layers of a `Mean` [L]."""
  return Mean(metric.total.mean(), metric.count)
