"""Forward passes over a batch before its update, and metrics of them.

Dimension key: B rows, R response columns, S sequences of a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gspo_jax import losses, model
from gspo_jax.learner import critic, routing, train_batch
from gspo_jax.learner.train_batch import PackedBatch, TrainBatch
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import Histogram, Mean, Metrics


def old_policy_metrics(
  out: TokenLogprobs, batch: TrainBatch, cfg: model.ModelConfig
) -> Metrics:
  """Metrics of the old policy on its own samples.

  `mismatch/*` is the recomputed less the sampler's log-prob: the rounding, and
  any other difference of the sampler. In bfloat16 it can exceed GSPO's clip
  range, so it is measured whichever of the two are the old log-probs.
  `moe/dropped` is a mean over the micro-batches that hold responses.

  Args:
    out: the old policy's forward pass over the batch.
    batch: with the sampler's log-probs.
    cfg: the model; static.
  """
  mask = batch.response_mask
  metrics = _mismatch(out.logps, batch)
  metrics["policy/entropy"] = _mean(out.entropy, mask)
  if cfg.num_experts:
    metrics |= _routing_metrics(out, mask, cfg)
    dropped = out.dropped.sum(dtype=jnp.float32)
    metrics["moe/dropped"] = Mean(dropped, jnp.float32(1))
  return jax.lax.stop_gradient(metrics)


def _mean(x, mask) -> Mean:
  return Mean(jnp.where(mask, x, 0.0).sum(), mask.sum(dtype=jnp.float32))


def sequence_log_ratio(
  new_BR: jax.Array, old_BR: jax.Array, batch: TrainBatch
) -> tuple[jax.Array, jax.Array]:
  """Mean over a response's tokens of new less old log-probs.

  Returns:
    The means of the S responses of each row, [B, S], and whether there is such
    a response, [B, S] bool.
  """
  sums = lambda x_BR: losses.sequence_sums(
    x_BR, batch.response_mask, batch.response_segments
  )
  lengths_BS = sums(jnp.ones_like(new_BR))
  gaps_BS = sums(new_BR - old_BR) / jnp.maximum(lengths_BS, 1)
  return gaps_BS, lengths_BS > 0


def _mismatch(recomputed_BR, batch: TrainBatch) -> Metrics:
  """Recomputed less sampled log-probs, per token and per sequence."""
  mask_BR = batch.response_mask
  gap_BR = jnp.where(mask_BR, recomputed_BR - batch.sampler_logps, 0.0)
  gap_BS, has_tokens_BS = sequence_log_ratio(
    recomputed_BR, batch.sampler_logps, batch
  )
  return {
    "mismatch/token_abs_mean": _mean(jnp.abs(gap_BR), mask_BR),
    "mismatch/token_gap": Histogram.of(gap_BR, mask_BR),
    "mismatch/sequence_abs_mean": _mean(jnp.abs(gap_BS), has_tokens_BS),
    "mismatch/sequence_gap": Histogram.of(gap_BS, has_tokens_BS),
  }


def _routing_metrics(out: TokenLogprobs, mask_BR, cfg) -> Metrics:
  experts, router_entropy = (
    x.swapaxes(0, 1) for x in (out.experts, out.router_entropy)
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
  batch: PackedBatch,
  cfg: model.ModelConfig,
  *,
  reference: model.Params | None,
  critic_params: model.Params | None,
  temperature: float,
) -> PackedBatch:
  """The batch with the reference's log-probs and the critic's values.

  Args:
    batch: M minibatches.
    cfg: the model; static.
    reference: weights of the reference policy, or None.
    critic_params: weights of the critic, or None.
    temperature: the sampler's; static.
  """

  def forward(micro_batch: TrainBatch):
    fields = {}
    if reference is not None:
      fields["reference_logps"] = train_batch.logprobs(
        reference, cfg, micro_batch, temperature=temperature
      ).logps
    if critic_params is not None:
      fields["values"] = critic.values(critic_params, cfg, micro_batch)
    return fields

  names = []
  if reference is not None:
    names.append("reference_logps")
  if critic_params is not None:
    names.append("values")
  fields = batch.map(forward, *names)
  return batch._replace(rows=dataclasses.replace(batch.rows, **fields))
