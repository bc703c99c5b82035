"""The objective that an update minimises, composed of `losses`.

Dimension key: B rows, R response tokens, L layers.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import losses, model
from gspo_jax.learner import experience, routing, train_batch, train_step
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import Mean, Metrics, Std, Terms

# The policy losses, by `objective.name`.
METHODS = {
  "gspo": losses.gspo_loss,
  "gspo_token": losses.gspo_token_loss,
  "grpo": losses.grpo_loss,
  "dr_grpo": losses.dr_grpo_loss,
  "dapo": losses.dapo_loss,
  "ppo": losses.ppo_loss,
  "gmpo": losses.gmpo_loss,
  # RSPO is GMPO with a router shift (`losses.rspo_loss`), and any method takes
  # a router shift by `Objective.shift_floor`.
  "rspo": losses.gmpo_loss,
  "cispo": losses.cispo_loss,
  "sapo": losses.sapo_loss,
}

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


class MismatchCorrection(NamedTuple):
  """Importance weights from the sampler to the old policy.

  Attributes:
    method: "tis" or "mis".
    unit: "token" or "sequence".
    cap: largest weight.
    floor: smallest weight that "mis" keeps.
  """

  method: str
  unit: str
  cap: float
  floor: float


@dataclasses.dataclass(frozen=True)
class Objective:
  """A policy loss and what is added to it; static under jit.

  Attributes:
    method: a policy loss of `losses`, with its clip range bound.
    dual_clip: c of arXiv 1912.09729; None for none.
    kl_coef: coefficient of the KL to the reference policy, in the loss.
    kl_estimator: "k2" or "k3".
    entropy_coef: coefficient of the entropy, which the loss raises.
    mismatch: how the mismatch of sampler and trainer is corrected; None: not.
    shift_floor: smallest weight of RSPO's router shift; None: no shift.
    replay: Routing Replay: "r2" sends tokens to the old policy's experts, "r3"
      to the sampler's; "none" lets the router choose.
    sampler_logps: whether the sampler's log-probs are the old ones.
    instruments: whether the metrics include histograms of ratios, and how far
      the routing moved.
  """

  method: Callable
  dual_clip: float | None = None
  kl_coef: float = 0.0
  kl_estimator: str = "k3"
  entropy_coef: float = 0.0
  mismatch: MismatchCorrection | None = None
  shift_floor: float | None = None
  replay: str = "none"
  sampler_logps: bool = False
  instruments: bool = True


def policy_loss(
  params: model.Params,
  batch: TrainBatch,
  is_old_policy: jax.Array | bool = False,
  *,
  cfg: model.ModelConfig,
  objective: Objective,
  temperature: float,
) -> train_step.LossOutput:
  """The objective on a micro-batch, a `train_step.Loss`.

  Args:
    params: the policy.
    batch: a micro-batch.
    is_old_policy: [] bool, whether the policy has not moved. Then the fields
      of the old policy come from this pass, and the ratio is 1.
    cfg: the model; static.
    objective: what to minimise; static.
    temperature: the sampler's; static.
  """
  is_old_policy = jnp.asarray(is_old_policy)
  routes = None if batch.experts is None else batch.experts.swapaxes(0, 1)
  out = train_batch.logprobs(
    params,
    cfg,
    batch,
    temperature=temperature,
    routes=routes,
    replay=objective.replay != "none",
    use_own_experts=None if objective.replay == "r3" else is_old_policy,
  )
  fields = _old_policy_fields(out, batch, objective)
  old = {
    k: jnp.where(is_old_policy, x, getattr(batch, k)) for k, x in fields.items()
  }
  old_metrics = {}
  if batch.sampler_logps is not None:
    old_metrics = experience.old_policy_metrics(out, batch, cfg)
  gap, has_tokens = experience.sequence_log_ratio(
    out.logps, batch.old_logps, batch
  )
  first_gap = Std.about_zero(jnp.expm1(gap), has_tokens)
  total, metrics = _objective(out, dataclasses.replace(batch, **old), objective)
  if not objective.instruments:
    metrics = _scalars(metrics)
    old_metrics = _scalars(old_metrics)
  return train_step.LossOutput(
    Mean(total, metrics["loss/policy"].count),
    metrics,
    fields,
    old_metrics,
    jax.lax.stop_gradient(first_gap),
  )


def _old_policy_fields(
  out: TokenLogprobs, batch: TrainBatch, objective
) -> dict:
  """Fields of `TrainBatch` from this pass, without gradient."""
  fields = {} if objective.sampler_logps else {"old_logps": out.logps}
  if batch.experts is not None and objective.replay != "r3":
    fields["experts"] = _rows_first(out.experts)
  if batch.router_logps is not None:
    fields["router_logps"] = _rows_first(out.router_logps)
  return jax.lax.stop_gradient(fields)


def _objective(
  out: TokenLogprobs, batch: TrainBatch, objective
) -> tuple[jax.Array, Metrics]:
  """The loss as a sum, and its metrics."""
  terms, metrics = _penalties_and_weights(out, batch, objective)
  if batch.reference_logps is not None:
    mask = batch.response_mask
    gap = losses.kl_penalty(out.logps, batch.reference_logps, mask)
    metrics["kl/reference"] = jax.lax.stop_gradient(
      Mean(gap.sum(), mask.sum(dtype=jnp.float32))
    )
  total, method_metrics = objective.method(
    out.logps,
    batch.old_logps,
    batch.advantages,
    batch.response_mask,
    normalizer=1.0,
    segment_ids=batch.response_segments,
    terms=terms,
  )
  metrics |= method_metrics
  if objective.instruments and batch.router_logps is not None:
    metrics |= _routing_metrics(out, batch, objective.replay != "none")
  return total, metrics


def _scalars(metrics: Metrics) -> Metrics:
  return {k: x for k, x in metrics.items() if k not in INSTRUMENTS}


def _penalties_and_weights(out: TokenLogprobs, batch: TrainBatch, objective):
  mask, metrics = batch.response_mask, {}
  penalty = weights = shift = None
  if objective.kl_coef:
    penalty = objective.kl_coef * losses.kl_penalty(
      out.logps,
      batch.reference_logps,
      mask,
      estimator=objective.kl_estimator,
    )
  if objective.entropy_coef:
    bonus = objective.entropy_coef * out.entropy
    penalty = -bonus if penalty is None else penalty - bonus
  if objective.mismatch:
    weights, metrics = losses.mismatch_weights(
      batch.old_logps,
      batch.sampler_logps,
      mask,
      segment_ids=batch.response_segments,
      **objective.mismatch._asdict(),
    )
  if objective.shift_floor is not None:
    moved = routing.shift(_rows_first(out.router_logps), batch.router_logps)
    shift = losses.router_log_weight(moved, mask, floor=objective.shift_floor)
  return Terms(shift, weights, penalty, objective.dual_clip), metrics


def _rows_first(x: jax.Array) -> jax.Array:
  """[L, B, ...] -> [B, L, ...], as in a `TrainBatch`."""
  return x.swapaxes(0, 1)


def _routing_metrics(
  out: TokenLogprobs, batch: TrainBatch, replay: bool
) -> Metrics:
  """How far the routers moved away from the old policy's."""
  mask = batch.response_mask
  moved = routing.shift(_rows_first(out.router_logps), batch.router_logps)
  count = mask.sum(dtype=jnp.float32)
  ratio = jnp.where(mask, jnp.exp(-moved), 0.0).sum()
  metrics = {"moe/router_shift_ratio": Mean(ratio, count)}
  if not replay:  # else the experts are the old ones by construction
    flips = routing.flips(_rows_first(out.experts), batch.experts, mask)
    metrics["moe/expert_flip_rate"] = routing.over_layers(flips)
    metrics["moe/layer_flip_rate"] = flips
  return metrics
