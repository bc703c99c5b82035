"""Rollouts: answers beside their prompts, and how they are cut up to learn.

Dimension key: P prompts, G answers a prompt, B = P * G rows, S prompt slots,
R response slots, T = S + R, L layers, k experts a token, M minibatches.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspo_jax import model, routing
from gspo_jax.logprobs import TokenLogprobs, token_logprobs
from gspo_jax.losses import Histogram, Mean, Metrics
from gspo_jax.sampler import Prompts, Samples
from gspo_jax.sharding import constrain_rows


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
    sampler_logps: [B, R] float32, as the sampler reported them; None unless
      asked for, as what follows.
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


def minibatches(
  rollout: Rollout, key: jax.Array, *, count: int, group: int, micro: int
) -> Rollout:
  """Shuffles whole groups and cuts: leaves become [M, B/M/micro, micro, ...].

  A group stays together, so that its advantages cancel inside a minibatch.

  Args:
    rollout: B rows, the answers of a group side by side.
    key: of the shuffle.
    count: M; divides the number of groups.
    group: G.
    micro: rows of one forward pass; divides B / M.
  """
  groups = rollout.tokens.shape[0] // group
  order = jax.random.permutation(key, groups)

  def cut(x):
    x = x.reshape(groups, group, *x.shape[1:])[order]
    x = x.reshape(count, -1, micro, *x.shape[2:])
    return constrain_rows(x, axis=2)

  def cut_by_layer(x):
    return jnp.moveaxis(jax.lax.map(cut, x.swapaxes(0, 1)), 0, 3)

  # By the layer: a shuffle passes whole arrays between devices, and these are
  # the largest of a rollout.
  large = {"experts": rollout.experts, "router_logps": rollout.router_logps}
  rest = dataclasses.replace(rollout, **dict.fromkeys(large))
  return dataclasses.replace(
    jax.tree.map(cut, rest), **jax.tree.map(cut_by_layer, large)
  )


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


def score(
  params: model.Params,
  cfg: model.ModelConfig,
  prompts: Prompts,
  samples: Samples,
  *,
  use_sampler: bool,
  micro_rows: int,
  temperature: float,
  keep_sampler: bool = False,
) -> tuple[Rollout, Metrics]:
  """Assembles a rollout and scores it with the trainer's own forward pass.

  The sampler's log-probs and the recomputed ones differ by rounding, and in
  bf16 by more than GSPO's clip range: the gap is the noise floor, and logged
  whichever of the two become `old_logps`. Where the sampler recorded its
  experts, tokens are sent to those again, and the gap is the smaller for it.

  Args:
    params: the policy that sampled.
    cfg: the model; static.
    prompts: P prompts.
    samples: their answers.
    use_sampler: take the sampler's log-probs as the old ones; static.
    micro_rows: rows scored at a time; divides B; static.
    temperature: the sampler's; static.
    keep_sampler: keep the sampler's log-probs beside the old ones; static.
  """
  batch = assemble(prompts, samples.tokens, samples.lengths)
  batch = dataclasses.replace(batch, experts=samples.experts)
  scored, dropped = _score_all(params, cfg, batch, micro_rows, temperature)
  mask = batch.response_mask
  metrics = _noise_floor(scored.logps, samples.logps, mask)
  metrics["policy/entropy"] = _mean(scored.entropy, mask)
  if cfg.num_experts:
    metrics |= _routing_metrics(scored, mask, cfg)
    metrics["moe/dropped"] = Mean(dropped, jnp.float32(1))
  batch = dataclasses.replace(
    batch,
    old_logps=samples.logps if use_sampler else scored.logps,
    sampler_logps=samples.logps if keep_sampler else None,
    experts=scored.experts,
    router_logps=scored.router_logps,
  )
  return batch, metrics


def _score_all(params, cfg, batch: Rollout, micro_rows, temperature):
  """`token_logprobs` of all rows, a few at a time, under the recorded experts.

  Returns:
    Its result with rows on the first axis and layers on the second, without
    `dropped`; and those dropped in all, None for a dense model.
  """
  rows_first = lambda x: x.swapaxes(0, 1)

  def score_rows(rows: Rollout):
    routes = None if rows.experts is None else rows_first(rows.experts)
    scored = logprobs(
      params,
      cfg,
      rows,
      temperature=temperature,
      routes=routes,
      replay=routes is not None,
    )
    by_layer = scored.experts, scored.router_logps, scored.router_entropy
    by_layer = jax.tree.map(rows_first, by_layer)
    return TokenLogprobs(*scored[:2], *by_layer), scored.dropped

  scored, dropped = _in_micro_batches(score_rows, batch, micro_rows)
  dropped = jax.tree.map(lambda x: x.sum(dtype=jnp.float32), dropped)
  return _join(scored), dropped


def _mean(x, mask) -> Mean:
  return Mean(jnp.where(mask, x, 0.0).sum(), mask.sum(dtype=jnp.float32))


def _noise_floor(recomputed_BR, sampled_BR, mask_BR) -> Metrics:
  """Recomputed less sampled log-probs, per token and per sequence."""
  gap_BR = jnp.where(mask_BR, recomputed_BR - sampled_BR, 0.0)
  lengths_B = mask_BR.sum(1)
  gap_B = gap_BR.sum(1) / jnp.maximum(lengths_B, 1)
  answered_B = lengths_B > 0
  return {
    "mismatch/token_abs_mean": _mean(jnp.abs(gap_BR), mask_BR),
    "mismatch/token_gap": Histogram.of(gap_BR, mask_BR),
    "mismatch/sequence_abs_mean": _mean(jnp.abs(gap_B), answered_B),
    "mismatch/sequence_gap": Histogram.of(gap_B, answered_B),
  }


def _routing_metrics(scored: TokenLogprobs, mask_BR, cfg) -> Metrics:
  load = routing.load_max(scored.experts, mask_BR, cfg.num_experts)
  entropy = routing.entropy(scored.router_entropy, mask_BR)
  return {
    "moe/load_max": routing.over_layers(load),
    "moe/layer_load_max": load,
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
