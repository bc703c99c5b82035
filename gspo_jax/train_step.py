"""The update: state and rollout in, state and metrics out; pure.

Dimension key: B rows, R response slots, L layers, k experts a token, M
minibatches, A micro-batches a minibatch.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspo_jax import model, rollout
from gspo_jax.logprobs import token_logprobs
from gspo_jax.losses import Mean, Metrics
from gspo_jax.rollout import Rollout

# (logps, old_logps, advantages, mask, *, normalizer) -> (loss, metrics), where
# metrics["loss/policy"] carries the loss's own denominator as its count.
Objective = Callable[..., tuple[jax.Array, Metrics]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that training changes.

  Attributes:
    step: [] int32, calls of `update` so far.
    params: the policy, float32.
    opt_state: of the optax chain.
  """

  step: jax.Array
  params: model.Params
  opt_state: optax.OptState


class Learner(NamedTuple):
  """What an update needs besides arrays; all of it static under jit.

  Attributes:
    cfg: the model.
    objective: a loss of `gspo_jax.losses`, or one of the same shape of call.
    optimizer: an optax transformation.
    minibatches: M, optimizer steps a rollout.
    micro_rows: rows of one forward and backward pass.
    group: rows that are shuffled together.
    temperature: the sampler's.
  """

  cfg: model.ModelConfig
  objective: Objective
  optimizer: optax.GradientTransformation
  minibatches: int
  micro_rows: int
  group: int
  temperature: float = 1.0


def begin(
  params: model.Params, *, optimizer: optax.GradientTransformation
) -> TrainState:
  """A policy that nothing has changed yet, with its optimizer."""
  return TrainState(jnp.int32(0), params, optimizer.init(params))


def update(
  state: TrainState, batch: Rollout, key: jax.Array, *, learner: Learner
) -> tuple[TrainState, Metrics]:
  """M optimizer steps over a rollout of B rows.

  Returns:
    The new state, and metrics added up over the minibatches.
  """
  batches = rollout.minibatches(
    batch,
    key,
    count=learner.minibatches,
    group=learner.group,
    micro=learner.micro_rows,
  )

  def descend(carry, micro_batches):
    params, opt_state = carry
    grads, metrics = gradient(params, micro_batches, learner)
    updates, opt_state = learner.optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), metrics

  start = (state.params, state.opt_state)
  (params, opt_state), metrics = jax.lax.scan(descend, start, batches)
  metrics = jax.tree.map(lambda x: x.sum(0), metrics)
  return TrainState(state.step + 1, params, opt_state), metrics


def gradient(
  params: model.Params, micro_batches: Rollout, learner: Learner
) -> tuple[model.Params, Metrics]:
  """The gradient of one minibatch, leaves [A, rows, ...].

  Sums are added over the micro-batches and divided once, by the count of the
  whole minibatch: A = 4 gives what A = 1 gives, up to rounding.
  """
  differentiate = jax.grad(_loss_sum, has_aux=True)

  def add(total, micro_batch):
    new = differentiate(params, micro_batch, learner)
    # Without the barrier XLA on TPU trips over a fused accumulation.
    new = jax.lax.optimization_barrier(new)
    return jax.tree.map(jnp.add, total, new), None

  first = jax.tree.map(lambda x: x[0], micro_batches)
  shapes = jax.eval_shape(
    lambda p, b: differentiate(p, b, learner), params, first
  )
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  (grads, metrics), _ = jax.lax.scan(add, zeros, micro_batches)
  count = jnp.maximum(metrics["loss/policy"].count, 1)
  grads = jax.tree.map(lambda g: g / count, grads)
  metrics["grad/norm"] = Mean(optax.tree.norm(grads), jnp.float32(1))
  return grads, metrics


def _loss_sum(params, batch: Rollout, learner: Learner):
  scored = token_logprobs(
    params,
    learner.cfg,
    batch.tokens,
    batch.positions,
    batch.mask,
    response_length=batch.response_mask.shape[1],
    temperature=learner.temperature,
  )
  loss, metrics = learner.objective(
    scored.logps,
    batch.old_logps,
    batch.advantages,
    batch.response_mask,
    normalizer=1.0,
  )
  if batch.experts is not None:
    new = scored.experts.swapaxes(0, 1)
    metrics["moe/expert_flip_rate"] = _flips(
      new, batch.experts, batch.response_mask
    )
  return loss, metrics


def _flips(new_BLRk, old_BLRk, mask_BR) -> Mean:
  """Share of the old policy's experts that the new policy does not choose."""
  kept = (old_BLRk[..., :, None] == new_BLRk[..., None, :]).any(-1)
  where = mask_BR[:, None, :, None]
  lost = jnp.where(where, ~kept, False).sum(dtype=jnp.float32)
  L, k = new_BLRk.shape[1], new_BLRk.shape[3]
  return Mean(lost, mask_BR.sum(dtype=jnp.float32) * L * k)
