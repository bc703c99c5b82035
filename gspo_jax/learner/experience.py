"""Rollouts: answers beside their prompts, and how they are cut up to learn.

Dimension key: P prompts, G answers a prompt, B = P * G rows, S prompt slots,
R response slots, T = S + R, L layers, k experts a token, M minibatches.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.learner import routing
from gspo_jax.learner.train_batch import TrainBatch, logprobs
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import Histogram, Mean, Metrics
from gspo_jax.runtime.sharding import constrain_batch


def old_policy_metrics(
  scored: TokenLogprobs, rows: TrainBatch, cfg: model.ModelConfig
) -> Metrics:
  """Metrics of the old policy on its own samples.

  `mismatch/*` is the recomputed less the sampler's log-prob: rounding, and what
  the sampler does otherwise. In bfloat16 it exceeds GSPO's clip range, so it is
  measured whichever of the two become the old log-probs. `moe/dropped` is a
  mean over micro-batches.

  Args:
    scored: the old policy's pass over these rows.
    rows: with the sampler's log-probs.
    cfg: the model; static.
  """
  mask = rows.response_mask
  metrics = _mismatch(scored.logps, rows.sampler_logps, mask)
  metrics["policy/entropy"] = _mean(scored.entropy, mask)
  if cfg.num_experts:
    metrics |= _routing_metrics(scored, mask, cfg)
    dropped = scored.dropped.sum(dtype=jnp.float32)
    metrics["moe/dropped"] = Mean(dropped, jnp.float32(1))
  return jax.lax.stop_gradient(metrics)


def _mean(x, mask) -> Mean:
  return Mean(jnp.where(mask, x, 0.0).sum(), mask.sum(dtype=jnp.float32))


def sequence_log_ratio(new_BR, old_BR, mask_BR):
  """Mean over a response's tokens of new less old log-probs, [B]."""
  gap_BR = jnp.where(mask_BR, new_BR - old_BR, 0.0)
  return gap_BR.sum(1) / jnp.maximum(mask_BR.sum(1), 1)


def _mismatch(recomputed_BR, sampled_BR, mask_BR) -> Metrics:
  """Recomputed less sampled log-probs, per token and per sequence."""
  gap_BR = jnp.where(mask_BR, recomputed_BR - sampled_BR, 0.0)
  gap_B = sequence_log_ratio(recomputed_BR, sampled_BR, mask_BR)
  answered_B = mask_BR.any(1)
  return {
    "mismatch/token_abs_mean": _mean(jnp.abs(gap_BR), mask_BR),
    "mismatch/token_gap": Histogram.of(gap_BR, mask_BR),
    "mismatch/sequence_abs_mean": _mean(jnp.abs(gap_B), answered_B),
    "mismatch/sequence_gap": Histogram.of(gap_B, answered_B),
  }


def _routing_metrics(scored: TokenLogprobs, mask_BR, cfg) -> Metrics:
  experts, router_entropy = (
    x.swapaxes(0, 1) for x in (scored.experts, scored.router_entropy)
  )
  tokens = routing.tokens(experts, mask_BR, cfg.num_experts)
  entropy = routing.entropy(router_entropy, mask_BR)
  return {
    "moe/load_max": routing.MeanLoad(tokens),
    "moe/layer_load_max": routing.Load(tokens),
    "moe/router_entropy": routing.over_layers(entropy),
    "moe/layer_router_entropy": entropy,
  }


def add_reference_and_values(
  rollout: TrainBatch,
  cfg: model.ModelConfig,
  *,
  reference: model.Params | None,
  values: Callable[[TrainBatch], jax.Array] | None,
  micro_batch_size: int,
  temperature: float,
) -> TrainBatch:
  """The rollout with what a reference policy and a critic say of it.

  Args:
    rollout: B rows.
    cfg: the model; static.
    reference: weights of the reference policy, or None.
    values: rows -> [rows, R], a critic's values, or None.
    micro_batch_size: rows at a time; divides B; static.
    temperature: the sampler's; static.
  """

  def of_rows(rows: TrainBatch):
    said = {}
    if reference is not None:
      scored = logprobs(reference, cfg, rows, temperature=temperature)
      said["reference_logps"] = scored.logps
    if values is not None:
      said["values"] = values(rows)
    return said

  said = _join(_in_micro_batches(of_rows, rollout, micro_batch_size))
  return dataclasses.replace(rollout, **said)


def _in_micro_batches(function, rollout: TrainBatch, micro_batch_size: int):
  """`function` of a few rows at a time: leaves [B / micro_batch_size, ...]."""
  B = rollout.tokens.shape[0]
  cut = lambda x: x.reshape(
    B // micro_batch_size, micro_batch_size, *x.shape[1:]
  )
  cuts = constrain_batch(jax.tree.map(cut, rollout), axis=1)
  return jax.lax.map(function, cuts)


def _join(tree):
  """Leaves [n, micro_batch_size, ...] as rows again."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
