"""The loss of a micro-batch: the objective, composed of `losses`.

Dimension key: B rows, R response tokens, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gspo_jax import losses, model
from gspo_jax.learner import (
  policy_metrics,
  train_batch,
  train_step,
)
from gspo_jax.learner.objective import DistillationConfig, ObjectiveConfig
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import Mean, Metrics, Std, Terms

# What `log.instruments` adds to the metrics of an update.
INSTRUMENTS = (
  "mismatch/sequence_gap",
  "mismatch/token_gap",
  "moe/layer_load_max",
  "moe/layer_router_entropy",
  "moe/router_entropy",
  "ratio/sequence_log",
  "ratio/token_log",
)


def policy_loss(
  params: model.Params,
  batch: TrainBatch,
  is_old_policy: jax.Array | bool = False,
  *,
  cfg: model.ModelConfig,
  objective: ObjectiveConfig,
  temperature: float,
  max_length: int,
  instruments: bool = True,
) -> train_step.LossOutput:
  """The objective on a micro-batch, a `train_step.Loss`.

  If the policy has not moved (`is_old_policy`, [] bool), this pass also gives
  the fields of the old policy, and the ratio is 1. `max_length` is the longest
  response allowed, in tokens. With `instruments` the metrics include
  `INSTRUMENTS`.
  """
  is_old_policy = jnp.asarray(is_old_policy)
  routes = None if batch.experts is None else batch.experts.swapaxes(0, 1)
  out = train_batch.response_logps(
    params,
    cfg,
    batch,
    temperature=temperature,
    routes=routes,
    replay=objective.replay != "none",
    use_own_experts=None if objective.replay == "r3" else is_old_policy,
    router_losses=objective.has_router_losses,
    head_ids=batch.head_ids,
  )
  old_metrics = policy_metrics.old_policy_metrics(out, batch, cfg)
  gap, has_tokens = policy_metrics.sequence_log_ratio(
    out.logps, batch.old_logps, batch
  )
  first_gap = Std.about_zero(jnp.expm1(gap), has_tokens)

  fields = {} if objective.has_sampler_logps else {"old_logps": out.logps}
  if batch.experts is not None and objective.replay != "r3":
    fields["experts"] = _rows_first(out.experts)
  if batch.router_logps is not None:
    fields["router_logps"] = _rows_first(out.router_logps)
  fields = jax.lax.stop_gradient(fields)  # of `TrainBatch`, from this pass
  old = {
    k: jnp.where(is_old_policy, x, getattr(batch, k)) for k, x in fields.items()
  }
  batch = dataclasses.replace(batch, **old)
  metrics: Metrics = {}
  if batch.teacher_logps is not None:
    batch, metrics = _distilled(batch, objective.distillation)
  options, option_metrics = _options(out, batch, objective, max_length)
  metrics |= option_metrics
  total, method_metrics = objective.method.loss(
    out.logps,
    batch.old_logps,
    batch.advantages,
    batch.response_mask,
    normalizer=1.0,
    segment_ids=batch.response_segments,
    **options,
  )
  metrics |= method_metrics
  if objective.has_router_losses:
    router_total, router_metrics = _router_losses(out, batch, objective)
    total, metrics = total + router_total, metrics | router_metrics
  if instruments and batch.router_logps is not None:
    metrics |= _routing_metrics(out, batch, objective)
  if not instruments:
    metrics, old_metrics = (
      {name: x for name, x in each.items() if name not in INSTRUMENTS}
      for each in (metrics, old_metrics)
    )
  return train_step.LossOutput(
    Mean(total, metrics["loss/policy"].count),  # type: ignore[attr-defined]  # a Mean
    metrics,
    fields,
    old_metrics,
    jax.lax.stop_gradient(first_gap),
  )


def _distilled(
  batch: TrainBatch, c: DistillationConfig
) -> tuple[TrainBatch, Metrics]:
  """Adds `coef * (teacher_logps - old_logps)` to each token's advantage.

  The estimate k1 of the reverse KL, sampled at this token alone: later tokens
  do not count (a discount of 0).
  """
  assert batch.teacher_logps is not None
  mask = batch.response_mask
  gap = jnp.where(mask, batch.old_logps - batch.teacher_logps, 0.0)
  metrics: Metrics = {"distill/reverse_kl": Mean.of(gap, mask)}
  if batch.teacher is not None:
    for i, name in enumerate(c.folders):
      own = Mean.of(gap, mask & (batch.teacher == i))
      metrics[f"distill/reverse_kl_{name}"] = own
  advantages = batch.advantages - c.coef * gap
  return dataclasses.replace(batch, advantages=advantages), metrics


def _options(
  out: TokenLogprobs, batch: TrainBatch, objective, max_length
) -> tuple[dict, Metrics]:
  """Keyword arguments of the loss; metrics of the reference and mismatch."""
  mask, numbers = batch.response_mask, objective.numbers
  reference, sampler = batch.reference_logps, batch.sampler_logps
  metrics: Metrics = {}
  penalty = weights = shift = None
  of_responses: jax.Array | float = 1.0  # the weights of whole ones
  if objective.has_reference and not objective.has_kl_in_reward:
    assert reference is not None
    estimator = objective.kl_estimator
    penalty = objective.kl_coef * losses.kl_penalty(
      out.logps,
      reference,
      mask,
      estimator=estimator,
      old_logps=batch.old_logps,
    )
  if objective.entropy_coef:
    bonus = objective.entropy_coef * out.entropy
    penalty = -bonus if penalty is None else penalty - bonus
  if options := objective.mismatch_options:
    assert sampler is not None
    weights, metrics = losses.mismatch_weights(
      batch.old_logps,
      sampler,
      mask,
      segment_ids=batch.response_segments,
      **options,
    )
    if options["unit"] == "sequence":
      of_responses = weights
  if threshold := objective.off_policy_mask_threshold:
    assert sampler is not None
    kept, masked = losses.off_policy_mask(
      out.logps,
      sampler,
      batch.advantages,
      mask,
      threshold=threshold,
      segment_ids=batch.response_segments,
    )
    weights = kept if weights is None else weights * kept
    of_responses *= kept
    metrics |= masked
  if objective.score_centering:
    centers, centered = _centers(out, batch, objective)
    centers *= of_responses
    penalty = centers if penalty is None else penalty + centers
    metrics |= centered
  if reference is not None:
    gap = losses.kl_penalty(out.logps, reference, mask)
    metrics["kl/reference"] = jax.lax.stop_gradient(Mean.of(gap, mask))
  arguments = objective.method.arguments
  options = objective.loss_numbers
  if "max_length" in arguments:  # a packed row is longer than a response
    options["max_length"] = max_length
  if objective.weighs_routers:
    moved = _router_shift(out, batch)
    if "router_shift" in arguments:
      options["router_shift"] = moved
    else:
      floor = numbers["router_shift_floor"]
      shift = losses.router_log_weight(moved, mask, floor=floor)
  options["terms"] = Terms(shift, weights, penalty, numbers.get("dual_clip"))
  return options, metrics


def _centers(
  out: TokenLogprobs, batch: TrainBatch, objective
) -> tuple[jax.Array, Metrics]:
  """A C of `score_centering`, with the correction of tokens if there is one."""
  assert out.head_logps is not None and batch.head_logps is not None
  numbers = objective.mismatch_options or {"unit": "token"}
  by_token = numbers.pop("unit") == "token"
  mean_score, metrics = losses.score_centering(
    out.head_logps,
    batch.head_logps,
    batch.response_mask,
    **numbers if by_token else {},
  )
  return batch.advantages * mean_score, metrics


def _router_losses(
  out: TokenLogprobs, batch: TrainBatch, objective
) -> tuple[jax.Array, Metrics]:
  """The sum to add to the loss of a micro-batch, and the losses.

  Both are means over the layers, and over the tokens of prompts and responses
  of the whole minibatch: padding alone does not count, as in transformers, TRL
  and Megatron.

  Departures: (1) transformers averages `f` and `P` over the layers before it
  multiplies them; here each layer is balanced by itself, as in Switch. (2) TRL
  averages the losses of micro-batches; here tokens weigh the same. Only `f` is
  still of a micro-batch, so the load-balancing loss depends on their size.
  """
  assert batch.loss_per_token is not None
  assert out.load_balance is not None and out.z_loss is not None
  real_BT = batch.segment_ids > 0
  balance, z = (x.mean(0) for x in (out.load_balance, out.z_loss))
  sums_BT = objective.router_aux_loss_coef * balance
  sums_BT += objective.router_z_loss_coef * z
  total = batch.loss_per_token[:, None] * jnp.where(real_BT, sums_BT, 0.0)
  metrics: Metrics = {
    "loss/router_aux": Mean.of(balance, real_BT),
    "loss/router_z": Mean.of(z, real_BT),
  }
  return total.sum(), jax.lax.stop_gradient(metrics)


def loss_per_token(
  batch: TrainBatch, objective: ObjectiveConfig, max_length: int
) -> jax.Array:
  """[M, A, rows]: what makes a sum over tokens a mean, of each minibatch.

  `train_step.gradient` divides all sums of a minibatch by the count of its
  policy loss. Means over other tokens first take this count over theirs. It
  comes from the loss itself, which counts what the mask has.
  """
  options = objective.loss_numbers
  arguments = objective.method.arguments

  def count(batch):
    zeros = jnp.zeros(batch.response_mask.shape)
    own = {"max_length": max_length, "router_shift": zeros}
    _, metrics = objective.method.loss(
      zeros,
      zeros,
      zeros,
      batch.response_mask,
      normalizer=1.0,
      segment_ids=batch.response_segments,
      **options | {name: own[name] for name in own if name in arguments},
    )
    return metrics["loss/policy"].count  # type: ignore[attr-defined]  # a Mean

  counts_M = jax.vmap(jax.vmap(count))(batch).sum(1)
  tokens_M = (batch.segment_ids > 0).sum((1, 2, 3))
  per_token_M = counts_M / jnp.maximum(tokens_M, 1)
  return jnp.broadcast_to(
    per_token_M[:, None, None], batch.segment_ids.shape[:3]
  )


def _router_shift(out: TokenLogprobs, batch: TrainBatch) -> jax.Array:
  assert batch.router_logps is not None
  new = _rows_first(out.router_logps)
  return policy_metrics.router_shift(new, batch.router_logps)


def _rows_first(x: jax.Array | None) -> jax.Array:
  """[L, B, ...] -> [B, L, ...], as in a `TrainBatch`."""
  assert x is not None  # the model has experts
  return x.swapaxes(0, 1)


def _routing_metrics(
  out: TokenLogprobs, batch: TrainBatch, objective
) -> Metrics:
  """How far the routers have moved since the old policy."""
  mask = batch.response_mask
  ratio = jnp.exp(-_router_shift(out, batch))
  metrics: Metrics = {"moe/router_shift_ratio": Mean.of(ratio, mask)}
  if objective.replay == "none":  # a replay uses the old experts
    assert batch.experts is not None
    flips = policy_metrics.expert_flips(
      _rows_first(out.experts), batch.experts, mask
    )
    metrics["moe/expert_flip_rate"] = policy_metrics.over_layers(flips)
    metrics["moe/layer_flip_rate"] = flips
  return metrics
