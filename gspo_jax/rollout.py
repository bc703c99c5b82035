"""Rollouts: answers beside their prompts, and how they are cut up to learn.

Dimension key: P prompts, G answers a prompt, B = P * G rows, S prompt slots,
R response slots, T = S + R, L layers, k experts a token, M minibatches.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import model, routing
from gspo_jax.logprobs import TokenLogprobs, token_logprobs
from gspo_jax.losses import Histogram, Mean, Metrics, Std
from gspo_jax.model.moe import number_type
from gspo_jax.runtime.sharding import constrain_rows
from gspo_jax.sampler.samples import Prompts, Samples


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
  """What an update learns from. The response is the last R slots of a row.

  Attributes:
    tokens: [B, T] int32.
    positions: [B, T] int32.
    mask: [B, T] bool, false at padding.
    response_mask: [B, R] bool, the tokens that the policy chose.
    old_logps: [B, R] float32, under the policy that is improved upon.
    advantages: [B] float32, or [B, R] where each token has its own.
    experts: [B, L, T, k] unsigned, the routing that an update may replay: the
      sampler's where it was recorded, else the old policy's. None for a dense
      model.
    router_logps: [B, L, R, k] float32, what the old policy's routers gave those
      experts at the tokens that predict the response; None as `experts`.
    sampler_logps: [B, R] float32, as the sampler reported them; None for
      demonstrations, as what follows unless the objective reads it.
    reference_logps: [B, R] float32, under the reference policy.
    values: [B, R] float32, of the old critic.
    returns: [B, R] float32, what the critic should have said.
  """

  tokens: jax.Array
  positions: jax.Array
  mask: jax.Array
  response_mask: jax.Array
  old_logps: jax.Array
  advantages: jax.Array
  experts: jax.Array | None = None
  router_logps: jax.Array | None = None
  sampler_logps: jax.Array | None = None
  reference_logps: jax.Array | None = None
  values: jax.Array | None = None
  returns: jax.Array | None = None


def assemble(
  prompts: Prompts, responses: jax.Array, lengths: jax.Array
) -> Rollout:
  """Puts responses [B, R] after their prompts [P, S]; B is a multiple of P.

  Log-probs and advantages are zeros until they are known.
  """
  B, R = responses.shape
  group = B // prompts.tokens.shape[0]
  repeat = lambda x: jnp.repeat(x, group, axis=0)
  response_mask = jnp.arange(R) < lengths[:, None]
  after = repeat(prompts.lengths)[:, None] + jnp.arange(R)
  join = lambda a, b: jnp.concatenate([repeat(a), b], axis=1)
  return Rollout(
    tokens=join(prompts.tokens, responses),
    positions=join(prompts.positions, after),
    mask=join(prompts.mask, response_mask),
    response_mask=response_mask,
    old_logps=jnp.zeros((B, R)),
    advantages=jnp.zeros(B),
  )


class Cut(NamedTuple):
  """How a rollout is shuffled and cut into minibatches and micro-batches.

  Whole groups are shuffled, so that the advantages of a group cancel inside a
  minibatch.

  Attributes:
    order: [P], the groups in their new order.
    count: M, minibatches; divides P; static.
    micro: rows of one forward pass; divides B / M; static.
  """

  order: jax.Array
  count: int
  micro: int

  def split(self, rollout: Rollout) -> Rollout:
    """Leaves [B, ...] become [M, B/M/micro, micro, ...]."""

    def cut(x):
      groups = x.reshape(len(self.order), -1, *x.shape[1:])[self.order]
      cuts = groups.reshape(self.count, -1, self.micro, *x.shape[1:])
      return constrain_rows(cuts, axis=2)

    return _by_layer(cut, rollout, layers=1, cut_layers=3)

  def join(self, fields: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The inverse of `split`, for some fields by their names."""
    back = jnp.argsort(self.order)

    def uncut(x):
      groups = x.reshape(len(back), -1, *x.shape[3:])[back]
      return constrain_rows(groups.reshape(-1, *x.shape[3:]), axis=0)

    return _by_layer(uncut, fields, layers=3, cut_layers=1)


# The largest arrays of a rollout, which have an axis of layers. A shuffle
# passes whole arrays between devices, so these are shuffled layer by layer.
_LARGE = ("experts", "router_logps")


def _by_layer(function, fields, *, layers, cut_layers):
  """Maps `function`; where there is an axis of layers, one layer at a time."""
  whole = isinstance(fields, Rollout)
  given = vars(fields) if whole else fields

  def apply(name, x):
    if name not in _LARGE:
      return jax.tree.map(function, x)
    one_by_one = jax.lax.map(function, jnp.moveaxis(x, layers, 0))
    return jnp.moveaxis(one_by_one, 0, cut_layers)

  made = {k: None if x is None else apply(k, x) for k, x in given.items()}
  return Rollout(**made) if whole else made


def logprobs(
  params: model.Params, cfg: model.ModelConfig, rows: Rollout, **how
) -> TokenLogprobs:
  """`token_logprobs` of the responses of these rows; `how`: its keywords."""
  return token_logprobs(
    params,
    cfg,
    rows.tokens,
    rows.positions,
    rows.mask,
    response_length=rows.response_mask.shape[1],
    **how,
  )


@dataclasses.dataclass(frozen=True)
class Fields:
  """Which fields a `Rollout` has beyond those of any; static under jit.

  Attributes:
    sampler_logps: `old_logps` are the sampler's, not recomputed.
    experts: the old policy's experts, unless the sampler recorded its own.
    router_logps: what the old routers gave them.
    reference: the log-probs of a reference policy.
    critic: values and returns, and an advantage for each token.
  """

  sampler_logps: bool = False
  experts: bool = False
  router_logps: bool = False
  reference: bool = False
  critic: bool = False


def of_samples(
  prompts: Prompts,
  samples: Samples,
  cfg: model.ModelConfig,
  fields: Fields,
) -> Rollout:
  """The rollout of some samples, with zeros for what is not known yet.

  All fields that will be known are there from the start, so that one compiled
  program takes the rollout before and after it is scored.

  Args:
    prompts: P prompts.
    samples: their G responses each.
    cfg: the model; static.
    fields: what the update reads; static.
  """
  batch = assemble(prompts, samples.tokens, samples.lengths)
  (B, T), R = batch.tokens.shape, samples.tokens.shape[1]
  zeros = lambda wanted: jnp.zeros((B, R)) if wanted else None
  L, k = cfg.num_layers, cfg.experts_per_token
  experts = samples.experts
  if experts is None and fields.experts and cfg.num_experts:
    experts = jnp.zeros((B, L, T, k), number_type(cfg.num_experts))
  return dataclasses.replace(
    batch,
    old_logps=samples.logps if fields.sampler_logps else batch.old_logps,
    advantages=jnp.zeros((B, R) if fields.critic else B),
    experts=experts,
    router_logps=jnp.zeros((B, L, R, k))
    if fields.router_logps and cfg.num_experts
    else None,
    sampler_logps=samples.logps,
    reference_logps=zeros(fields.reference),
    values=zeros(fields.critic),
    returns=zeros(fields.critic),
  )


class Pass(NamedTuple):
  """What a forward pass over some rows gives a learner.

  Attributes:
    loss: as a sum, and what divides it.
    metrics: of the update.
    old: fields of `Rollout`, [rows, ...], as this pass has them; those of the
      old policy as long as the policy has not moved.
    measured: metrics of the old policy, where this pass is its own.
    repeated: root mean square of exp(mean(x - o)) - 1 over sequences: x of
      this pass and o as the rows have them, even where this pass is the old
      policy's own.
  """

  loss: Mean
  metrics: Metrics
  old: dict[str, jax.Array] = {}  # noqa: RUF012
  measured: Metrics = {}  # noqa: RUF012
  repeated: Std | None = None


def measure(
  scored: TokenLogprobs, rows: Rollout, cfg: model.ModelConfig
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


def sequence_gap(new_BR, old_BR, mask_BR):
  """Mean over a response's tokens of new less old log-probs, [B]."""
  gap_BR = jnp.where(mask_BR, new_BR - old_BR, 0.0)
  return gap_BR.sum(1) / jnp.maximum(mask_BR.sum(1), 1)


def _mismatch(recomputed_BR, sampled_BR, mask_BR) -> Metrics:
  """Recomputed less sampled log-probs, per token and per sequence."""
  gap_BR = jnp.where(mask_BR, recomputed_BR - sampled_BR, 0.0)
  gap_B = sequence_gap(recomputed_BR, sampled_BR, mask_BR)
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


def appraise(
  rollout: Rollout,
  cfg: model.ModelConfig,
  *,
  reference: model.Params | None,
  values: Callable[[Rollout], jax.Array] | None,
  micro_rows: int,
  temperature: float,
) -> Rollout:
  """The rollout with what a reference policy and a critic say of it.

  Args:
    rollout: B rows.
    cfg: the model; static.
    reference: weights of the reference policy, or None.
    values: rows -> [rows, R], a critic's values, or None.
    micro_rows: rows at a time; divides B; static.
    temperature: the sampler's; static.
  """

  def of_rows(rows: Rollout):
    said = {}
    if reference is not None:
      scored = logprobs(reference, cfg, rows, temperature=temperature)
      said["reference_logps"] = scored.logps
    if values is not None:
      said["values"] = values(rows)
    return said

  said = _join(_in_micro_batches(of_rows, rollout, micro_rows))
  return dataclasses.replace(rollout, **said)


def _in_micro_batches(function, rollout: Rollout, micro_rows: int):
  """`function` of a few rows at a time: leaves [B / micro_rows, ...]."""
  B = rollout.tokens.shape[0]
  cut = lambda x: x.reshape(B // micro_rows, micro_rows, *x.shape[1:])
  cuts = constrain_rows(jax.tree.map(cut, rollout), axis=1)
  return jax.lax.map(function, cuts)


def _join(tree):
  """Leaves [n, micro_rows, ...] as rows again."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
