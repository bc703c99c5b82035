"""The update: state and rollout in, state and metrics out; pure.

Dimension key: A micro-batches a minibatch, M minibatches.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspo_jax import model, rollout
from gspo_jax.losses import Mean, Metrics
from gspo_jax.rollout import Rollout
from gspo_jax.sampler import Samples

# (params, rows) -> (the loss, as a sum and what divides it, metrics). Sums and
# metrics are added over micro-batches.
Loss = Callable[[model.Params, Rollout], tuple[Mean, Metrics]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that training changes.

  Attributes:
    step: [] int32, calls of `update` so far.
    params: the policy, float32.
    opt_state: of the optax chain.
    reference: weights the policy is held to, in the model's dtype, or None.
    critic: of PPO, with an optimizer of its own, or None.
    waiting: answers that wait for the next iteration; in a checkpoint alone.
  """

  step: jax.Array
  params: model.Params
  opt_state: optax.OptState
  reference: model.Params | None = None
  critic: "TrainState | None" = None
  waiting: dict | Samples | None = None


class Learner(NamedTuple):
  """What an update needs besides arrays; all of it static under jit.

  Attributes:
    loss: what is minimised.
    optimizer: an optax transformation.
    minibatches: M, optimizer steps a rollout.
    micro_rows: rows of one forward and backward pass.
    group: rows that are shuffled together.
  """

  loss: Loss
  optimizer: optax.GradientTransformation
  minibatches: int
  micro_rows: int
  group: int


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
  state = dataclasses.replace(
    state, step=state.step + 1, params=params, opt_state=opt_state
  )
  return state, metrics


def gradient(
  params: model.Params, micro_batches: Rollout, learner: Learner
) -> tuple[model.Params, Metrics]:
  """The gradient of one minibatch, leaves [A, rows, ...].

  Sums are added over the micro-batches and divided once, by the count of the
  whole minibatch: A = 4 gives what A = 1 gives, up to rounding.
  """

  def total(params, rows):
    loss, metrics = learner.loss(params, rows)
    return loss.total, (loss.count, metrics)

  differentiate = jax.grad(total, has_aux=True)

  def add(sums, rows):
    new = differentiate(params, rows)
    # Without the barrier XLA on TPU trips over a fused accumulation.
    new = jax.lax.optimization_barrier(new)
    return jax.tree.map(jnp.add, sums, new), None

  first = jax.tree.map(lambda x: x[0], micro_batches)
  shapes = jax.eval_shape(differentiate, params, first)
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  (grads, (count, metrics)), _ = jax.lax.scan(add, zeros, micro_batches)
  grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1), grads)
  metrics["grad/norm"] = Mean(optax.tree.norm(grads), jnp.float32(1))
  return grads, metrics
