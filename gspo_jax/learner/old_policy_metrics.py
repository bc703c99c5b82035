"""Metrics of the old policy: entropy, routing, mismatch with the sampler.

Dimension key: B rows, T columns, R response columns, N sequences of a row, L
layers, k experts a token.
"""

import jax
import jax.numpy as jnp

from gspo_jax import losses, model
from gspo_jax.learner import routing_metrics
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
  metrics = _mismatch(out.logps, batch.sampler_logps, batch)
  metrics["policy/entropy"] = Mean.of(out.entropy, mask)
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


def _mismatch(recomputed_BR, sampled_BR, batch: TrainBatch) -> Metrics:
  mask_BR = batch.response_mask
  gap_BR = jnp.where(mask_BR, recomputed_BR - sampled_BR, 0.0)
  gap_BN, has_tokens_BN = sequence_log_ratio(recomputed_BR, sampled_BR, batch)
  return {
    "mismatch/token_abs_mean": Mean.of(jnp.abs(gap_BR), mask_BR),
    "mismatch/token_gap": Histogram.of(gap_BR, mask_BR),
    "mismatch/sequence_abs_mean": Mean.of(jnp.abs(gap_BN), has_tokens_BN),
    "mismatch/sequence_gap": Histogram.of(gap_BN, has_tokens_BN),
  }


def _routing_metrics(out: TokenLogprobs, mask_BR, cfg) -> Metrics:
  assert out.experts is not None and out.router_entropy is not None
  experts_BLTk, entropy_BLR = (
    x.swapaxes(0, 1) for x in (out.experts, out.router_entropy)
  )
  tokens = routing_metrics.tokens(experts_BLTk, mask_BR, cfg.num_experts)
  total_L = jnp.where(mask_BR[:, None], entropy_BLR, 0.0).sum((0, 2))
  entropy = Mean(total_L, mask_BR.sum(dtype=jnp.float32))
  return {
    "moe/load_max": routing_metrics.MeanLoad(tokens),
    "moe/layer_load_max": routing_metrics.Load(tokens),
    "moe/router_entropy": routing_metrics.over_layers(entropy),
    "moe/layer_router_entropy": entropy,
  }
