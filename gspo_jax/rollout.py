"""Rollouts: answers beside their prompts, and how they are cut up to learn.

Dimension key: P prompts, G answers a prompt, B = P * G rows, S prompt slots,
R response slots, T = S + R, L layers, k experts a token, M minibatches.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.logprobs import token_logprobs
from gspo_jax.losses import Mean, Metrics
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
    advantages: [B] float32.
    experts: [B, L, R, k] unsigned, the old policy's routing; None for a dense
      model, or where no routing was recorded.
  """

  tokens: jax.Array
  positions: jax.Array
  mask: jax.Array
  response_mask: jax.Array
  old_logps: jax.Array
  advantages: jax.Array
  experts: jax.Array | None = None


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

  cuts = jax.tree.map(cut, dataclasses.replace(rollout, experts=None))
  if rollout.experts is None:
    return cuts
  # By the layer: a shuffle passes whole arrays between devices, and these are
  # the largest of a rollout.
  experts = jax.lax.map(cut, rollout.experts.swapaxes(0, 1))
  return dataclasses.replace(cuts, experts=jnp.moveaxis(experts, 0, 3))


def score(
  params: model.Params,
  cfg: model.ModelConfig,
  prompts: Prompts,
  samples: Samples,
  *,
  use_sampler: bool,
  micro_rows: int,
  temperature: float,
) -> tuple[Rollout, Metrics]:
  """Assembles a rollout and scores it with the trainer's own forward pass.

  The sampler's log-probs and the recomputed ones differ by rounding, and in
  bf16 by more than GSPO's clip range: the gap is the noise floor, and logged
  whichever of the two become `old_logps`.

  Args:
    params: the policy that sampled.
    cfg: the model; static.
    prompts: P prompts.
    samples: their answers.
    use_sampler: take the sampler's log-probs as the old ones; static.
    micro_rows: rows scored at a time; divides B; static.
    temperature: the sampler's; static.
  """
  batch = assemble(prompts, samples.tokens, samples.lengths)
  R = samples.tokens.shape[1]

  def score_rows(rows: Rollout):
    scored = token_logprobs(
      params,
      cfg,
      rows.tokens,
      rows.positions,
      rows.mask,
      response_length=R,
      temperature=temperature,
    )
    experts = None
    if cfg.num_experts:
      small = jnp.uint8 if cfg.num_experts <= 256 else jnp.uint16
      experts = scored.experts.swapaxes(0, 1).astype(small)
    return scored.logps, scored.entropy, experts, scored.dropped

  B = batch.tokens.shape[0]
  cut = lambda x: x.reshape(B // micro_rows, micro_rows, *x.shape[1:])
  cuts = constrain_rows(jax.tree.map(cut, batch), axis=1)
  *scored, dropped = jax.lax.map(score_rows, cuts)
  logps, entropy, experts = jax.tree.map(
    lambda x: x.reshape(B, *x.shape[2:]), scored
  )
  old = samples.logps if use_sampler else logps
  metrics = _noise_floor(logps, samples.logps, batch.response_mask)
  metrics["policy/entropy"] = _mean(entropy, batch.response_mask)
  if experts is not None:
    metrics["moe/load_max"] = _load_max(experts, batch.response_mask, cfg)
    metrics["moe/dropped"] = Mean(
      dropped.sum(dtype=jnp.float32), jnp.float32(1)
    )
  batch = dataclasses.replace(batch, old_logps=old, experts=experts)
  return batch, metrics


def _mean(x, mask) -> Mean:
  return Mean(jnp.where(mask, x, 0.0).sum(), mask.sum(dtype=jnp.float32))


def _noise_floor(recomputed_BR, sampled_BR, mask_BR) -> Metrics:
  """Gap of recomputed and sampled log-probs, per token and per sequence."""
  gap_BR = jnp.where(mask_BR, recomputed_BR - sampled_BR, 0.0)
  lengths_B = mask_BR.sum(1)
  gap_B = gap_BR.sum(1) / jnp.maximum(lengths_B, 1)
  return {
    "mismatch/token_abs_mean": _mean(jnp.abs(gap_BR), mask_BR),
    "mismatch/sequence_abs_mean": _mean(jnp.abs(gap_B), lengths_B > 0),
  }


def _load_max(experts_BLRk, mask_BR, cfg) -> Mean:
  """Tokens of the busiest expert over the mean, averaged over the layers."""
  L, E = cfg.num_layers, cfg.num_experts
  # Compared and summed: a TPU would scatter one number at a time.
  here_BLRkE = experts_BLRk[..., None] == jnp.arange(E)
  here_BLRkE &= mask_BR[:, None, :, None, None]
  load_LE = here_BLRkE.sum((0, 2, 3), dtype=jnp.float32)
  busiest_L = load_LE.max(1) / jnp.maximum(load_LE.mean(1), 1e-9)
  return Mean(busiest_L.sum(), jnp.float32(L))
