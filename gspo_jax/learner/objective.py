"""The objective: what an update minimises, put together from `losses`.

Dimension key: B rows, R response slots, L layers.
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

# The losses that `objective.name` chooses from.
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
  """Weights for what lies between the sampler and the old policy.

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
  """A method, and what is added to it; static under jit.

  Attributes:
    method: a policy loss of `losses`, its clips bound.
    dual_clip: c of arXiv 1912.09729; None for none.
    kl_coef: of the KL to the reference policy, in the loss.
    kl_estimator: "k2" or "k3".
    entropy_coef: of the entropy, which is raised.
    mismatch: weights between sampler and trainer; None for none.
    shift_floor: smallest weight that RSPO's router shift gives; None: no shift.
    replay: "r2" sends tokens to the old policy's experts, "r3" to the
      sampler's (Routing Replay); "none" lets the router choose.
    sampler_logps: the sampler's log-probs are the old ones.
    instruments: measure how far the routing moved, and histograms of ratios.
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
  rows: TrainBatch,
  is_old_policy: jax.Array | bool = False,
  *,
  cfg: model.ModelConfig,
  objective: Objective,
  temperature: float,
) -> train_step.LossOutput:
  """The objective on some rows, as `train_step.update` takes it.

  Args:
    params: the policy.
    rows: some of a rollout's.
    is_old_policy: [] bool. True where the policy has not moved: this pass is
      then the old policy's, and the ratio is 1.
    cfg: the model; static.
    objective: what to minimise; static.
    temperature: the sampler's; static.
  """
  is_old_policy = jnp.asarray(is_old_policy)
  routes = None if rows.experts is None else rows.experts.swapaxes(0, 1)
  scored = train_batch.logprobs(
    params,
    cfg,
    rows,
    temperature=temperature,
    routes=routes,
    replay=objective.replay != "none",
    use_own_experts=None if objective.replay == "r3" else is_old_policy,
  )
  fields = _old_policy_fields(scored, rows, objective)
  old = {
    k: jnp.where(is_old_policy, x, getattr(rows, k)) for k, x in fields.items()
  }
  old_metrics = {}
  if rows.sampler_logps is not None:
    old_metrics = experience.old_policy_metrics(scored, rows, cfg)
  gap = experience.sequence_log_ratio(
    scored.logps, rows.old_logps, rows.response_mask
  )
  first_gap = Std.about_zero(jnp.expm1(gap), rows.response_mask.any(1))
  total, metrics = _objective(
    scored, dataclasses.replace(rows, **old), objective
  )
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
  scored: TokenLogprobs, rows: TrainBatch, objective
) -> dict:
  """Fields of `rows` from this pass, without gradient."""
  fields = {} if objective.sampler_logps else {"old_logps": scored.logps}
  if rows.experts is not None and objective.replay != "r3":
    fields["experts"] = _rows_first(scored.experts)
  if rows.router_logps is not None:
    fields["router_logps"] = _rows_first(scored.router_logps)
  return jax.lax.stop_gradient(fields)


def _objective(
  scored: TokenLogprobs, rows: TrainBatch, objective
) -> tuple[jax.Array, Metrics]:
  """The loss as a sum, of rows that know their old policy; and metrics."""
  terms, metrics = _penalties_and_weights(scored, rows, objective)
  if rows.reference_logps is not None:
    mask = rows.response_mask
    gap = losses.kl_penalty(scored.logps, rows.reference_logps, mask)
    metrics["kl/reference"] = jax.lax.stop_gradient(
      Mean(gap.sum(), mask.sum(dtype=jnp.float32))
    )
  total, method_metrics = objective.method(
    scored.logps,
    rows.old_logps,
    rows.advantages,
    rows.response_mask,
    normalizer=1.0,
    terms=terms,
  )
  metrics |= method_metrics
  if objective.instruments and rows.router_logps is not None:
    metrics |= _routing_metrics(scored, rows, objective.replay != "none")
  return total, metrics


def _scalars(metrics: Metrics) -> Metrics:
  return {k: x for k, x in metrics.items() if k not in INSTRUMENTS}


def _penalties_and_weights(scored: TokenLogprobs, rows: TrainBatch, objective):
  mask, metrics = rows.response_mask, {}
  penalty = weights = shift = None
  if objective.kl_coef:
    penalty = objective.kl_coef * losses.kl_penalty(
      scored.logps,
      rows.reference_logps,
      mask,
      estimator=objective.kl_estimator,
    )
  if objective.entropy_coef:
    bonus = objective.entropy_coef * scored.entropy
    penalty = -bonus if penalty is None else penalty - bonus
  if objective.mismatch:
    weights, metrics = losses.mismatch_weights(
      rows.old_logps, rows.sampler_logps, mask, **objective.mismatch._asdict()
    )
  if objective.shift_floor is not None:
    moved = routing.shift(_rows_first(scored.router_logps), rows.router_logps)
    shift = losses.router_log_weight(moved, mask, floor=objective.shift_floor)
  return Terms(shift, weights, penalty, objective.dual_clip), metrics


def _rows_first(x: jax.Array) -> jax.Array:
  """[L, B, ...] -> [B, L, ...]: how a rollout keeps what layers did."""
  return x.swapaxes(0, 1)


def _routing_metrics(
  scored: TokenLogprobs, rows: TrainBatch, replay: bool
) -> Metrics:
  """How far the routers went from the old policy's."""
  mask = rows.response_mask
  moved = routing.shift(_rows_first(scored.router_logps), rows.router_logps)
  count = mask.sum(dtype=jnp.float32)
  ratio = jnp.where(mask, jnp.exp(-moved), 0.0).sum()
  metrics = {"moe/router_shift_ratio": Mean(ratio, count)}
  if not replay:  # else the experts are the old ones, whatever the routers say
    flips = routing.flips(_rows_first(scored.experts), rows.experts, mask)
    metrics["moe/expert_flip_rate"] = routing.over_layers(flips)
    metrics["moe/layer_flip_rate"] = flips
  return metrics
