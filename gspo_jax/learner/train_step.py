"""The update, and the old log-probs by the same compiled program.

Dimension key: M minibatches, A most micro-batches of a minibatch.

Old log-probs must come from the forward pass of the update. In bfloat16 two
programs round differently, and the difference exceeds GSPO's clip range. So
`update`, compiled once, does both. With `apply_updates` false it runs the
forward passes and returns their log-probs; with `apply_updates` true it also
computes gradients. Until the policy moves, the ratio is exactly 1, unless the
sampler's log-probs are the old ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from gspo_jax import model
from gspo_jax.learner.train_batch import MICRO_BATCHES, PackedBatch, TrainBatch
from gspo_jax.losses import Mean, Metrics, Std
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import Tree
from gspo_jax.sampler.samples import Samples

# The named scope of conditionals that only an update computes; `plan` finds
# their work by it.
BACKWARD = "backward"


class LossOutput(NamedTuple):
  """The result of a forward pass over a micro-batch."""

  loss: Mean  # its sum, and the count that divides it
  metrics: Metrics  # of the update
  # Fields of `TrainBatch`, [rows, ...], from this pass. Until the policy moves,
  # they and the metrics below belong to the old policy.
  old_policy_fields: dict[str, jax.Array] = {}  # noqa: RUF012
  old_policy_metrics: Metrics = {}  # noqa: RUF012
  # RMS over responses of (sequence ratio - 1), against the `old_logps` stored
  # in the batch. 0 if two passes over the same weights agree bit for bit.
  first_minibatch_gap: Std | None = None


# What `update` minimises: (params, a micro-batch, is_old_policy) -> output.
# is_old_policy, [] bool, is true until the policy moves. The fields of the old
# policy then come from this pass.
Loss = Callable[[model.Params, TrainBatch, jax.Array], LossOutput]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  step: jax.Array  # [] int32, updates so far
  params: model.Params  # float32, trained: the policy's weights, or adapters
  opt_state: optax.OptState
  # The frozen weights below adapters, in `cfg.dtype`. None without adapters,
  # and in a checkpoint.
  base: model.Params | None = None
  # The reference policy's copy of `params` in `cfg.dtype`. {} with LoRA if the
  # reference is the base model; None if there is no KL.
  reference: model.Params | None = None
  critic: TrainState | None = None  # PPO's, with an optimizer
  # Responses for the next iteration; only in a checkpoint.
  pending_rollouts: dict | Samples | None = None

  @property
  def policy(self) -> model.Params:
    """The weights to run the policy with, and its adapters."""
    return with_base(self.base, self.params)


def with_base(base: model.Params | None, params: model.Params) -> model.Params:
  """The weights to run: `params`, which are adapters if there is a base."""
  return params if base is None else model.lora.join(base, params)


class Learner(NamedTuple):
  """The settings of an update; static under jit."""

  loss: Loss
  optimizer: optax.GradientTransformation
  has_old_logps: bool = False  # whether the batch has them before an update
  # Whether a pass for old log-probs also covers the first minibatch, for which
  # `update` could compute them.
  recompute_first_minibatch: bool = False


# (policy with its adapters) -> the first state; donates the policy.
InitState = Callable[[model.Params], TrainState]


def init_state(
  policy: model.Params, *, optimizer: optax.GradientTransformation
) -> TrainState:
  """The state before the first update; with adapters, only they are trained."""
  base, adapters = model.lora.split(policy)
  if not adapters:
    return TrainState(jnp.int32(0), policy, optimizer.init(policy))
  return TrainState(jnp.int32(0), adapters, optimizer.init(adapters), base)


def update(
  state: TrainState,
  batch: PackedBatch,
  *,
  learner: Learner,
  apply_updates: jax.Array | bool = True,
) -> tuple[TrainState, PackedBatch, Metrics]:
  """M optimizer steps over a batch; or only its old log-probs.

  The first minibatch needs no old log-probs: the update's forward pass gives
  them. A pass for old log-probs still runs one of its micro-batches. The update
  compares the two passes in `ratio/first_minibatch_std`, which is 0 if they
  agree bit for bit. `apply_updates` is [] bool; a Python True compiles no
  conditional.

  Without an update the returned batch has the old policy's fields of all
  minibatches but the first. Metrics are sums over minibatches; metrics of both
  calls add up.
  """
  rows, counts = batch

  def minibatch(m, carry):
    params, opt_state, old, sums = carry
    micro_batches = jax.tree.map(lambda x: x[m], rows)
    grads, new, metrics = gradient(
      params,
      micro_batches,
      learner,
      base=state.base,
      count=counts[m],
      apply_updates=apply_updates,
      first=m == 0,
    )
    keep = lambda all_, one: all_.at[m].set(
      jnp.where(apply_updates, all_[m], one)
    )
    old = jax.tree.map(keep, old, new)

    def step():
      updates, state = learner.optimizer.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), state

    params, opt_state = _run_in_place(apply_updates, step, (params, opt_state))
    return params, opt_state, old, jax.tree.map(jnp.add, sums, metrics)

  first = jax.tree.map(lambda x: x[0], rows)
  _, old_shapes, metrics = jax.eval_shape(
    lambda params, base, rows: gradient(params, rows, learner, base=base),
    state.params,
    state.base,
    first,
  )
  start = (
    state.params,
    state.opt_state,
    {name: getattr(rows, name) for name in old_shapes},
    _zeros(metrics),
  )
  params, opt_state, old, metrics = jax.lax.fori_loop(
    0, len(counts), minibatch, start
  )
  if apply_updates is not True:
    batch = batch._replace(rows=dataclasses.replace(rows, **old))
  state = dataclasses.replace(
    state,
    step=state.step + jnp.int32(apply_updates),
    params=params,
    opt_state=opt_state,
  )
  return state, batch, metrics


def run_if(
  apply_updates: jax.Array | bool, function: Callable[[], Tree], otherwise: Tree
) -> Tree:
  """`function()` if `apply_updates`, else `otherwise`, at no cost."""
  if apply_updates is True:
    return function()
  with jax.named_scope(BACKWARD):
    return jax.lax.cond(apply_updates, function, lambda: otherwise)


def _run_in_place(apply_updates, function, otherwise):
  """`run_if` of a cheap function of `otherwise`, without a copy on a GPU.

  A conditional there copies what it passes on: parameters and two moments. Here
  the function runs in any case, and nothing more is kept.
  """
  if apply_updates is True or sharding.platform() != "gpu":
    return run_if(apply_updates, function, otherwise)
  choose = lambda new, old: jnp.where(apply_updates, new, old)
  return jax.tree.map(choose, function(), otherwise)


def _add_if(apply_updates, total, function):
  """`total + function()` if `apply_updates`, else `total`."""
  # Without the barrier XLA on TPU trips over a fused accumulation.
  add = lambda new: jax.tree.map(
    jnp.add, total, jax.lax.optimization_barrier(new)
  )
  if sharding.platform() == "gpu":  # see `_run_in_place`
    return add(run_if(apply_updates, function, _zeros(total)))
  return run_if(apply_updates, lambda: add(function()), total)


def gradient(
  params: model.Params,
  micro_batches: TrainBatch,
  learner: Learner,
  *,
  base: model.Params | None = None,
  count: jax.Array | None = None,
  apply_updates: jax.Array | bool = True,
  first: jax.Array | bool = False,
) -> tuple[model.Params, dict[str, jax.Array], Metrics]:
  """Gradient, `LossOutput.old_policy_fields` and metrics of a minibatch.

  Micro-batches have leaves [A, rows, ...]. The first `count` ([] int32; None:
  all) are summed and divided once, by the count of the whole minibatch: A = 4
  gives what A = 1 gives, up to rounding. `first`, [] bool, marks the first
  minibatch of a batch. Without `apply_updates` the gradient is zero. Devices
  along the mesh axis `data`, which may be slices, add up once, at the end.
  """
  count = jnp.asarray(len(micro_batches.tokens)) if count is None else count
  rows = PartitionSpec(None, "data")
  whole = PartitionSpec()
  always = apply_updates is True
  add_up = sharding.sum_over_data(
    functools.partial(_sums, learner=learner, always=always),
    (whole, whole, rows, whole, whole, whole),
    rows,
  )
  applying, first = jnp.asarray(apply_updates), jnp.asarray(first)
  (grads, divisor, metrics), old = add_up(
    params, base, micro_batches, count, applying, first
  )
  grads = jax.tree.map(lambda g: g / jnp.maximum(divisor, 1), grads)
  norm = Mean(optax.tree.norm(grads), jnp.float32(1))
  metrics["grad/norm"] = _only(applying, norm)
  return grads, old, metrics


def _sums(
  params, base, micro_batches, count, applying, first, *, learner, always
):
  """((gradient, its divisor, metrics), fields): of `gradient`, not divided."""
  A = len(micro_batches.tokens)
  loss = jax.jit(learner.loss)  # traced once
  apply_updates = always or applying  # True compiles no conditional
  is_old_policy = first | ~applying

  def add(j, carry):
    grads, divisor, old, sums = carry
    micro_batch = jax.tree.map(lambda x: x[j], micro_batches)

    def total(params):
      policy = with_base(base, params)
      out = loss(policy, micro_batch, is_old_policy)
      return out.loss.total, out

    _, pull, out = jax.vjp(total, params, has_aux=True)

    grads = _add_if(apply_updates, grads, lambda: pull(jnp.float32(1))[0])
    old = jax.tree.map(
      lambda all_, one: all_.at[j].set(one), old, out.old_policy_fields
    )
    metrics = _counted_once(out, learner, applying, first, j == count - 1)
    sums = jax.tree.map(jnp.add, sums, metrics)
    return grads, divisor + out.loss.count, old, sums

  one = jax.tree.map(lambda x: x[0], micro_batches)
  policy = with_base(base, params)
  out = jax.eval_shape(loss, policy, one, is_old_policy)
  metrics = jax.eval_shape(
    lambda out: _counted_once(out, learner, applying, first, first), out
  )
  stack = lambda s: jnp.zeros((A, *s.shape), s.dtype)
  start = (
    _zeros(params),
    _zeros(out.loss.count),
    jax.tree.map(stack, out.old_policy_fields),
    _zeros(metrics),
  )
  begin: jax.Array | int = 0
  if not learner.recompute_first_minibatch:
    # One micro-batch of the first minibatch is enough to compare two passes.
    begin = jnp.where(first & ~applying, jnp.maximum(count - 1, 0), 0)
  with jax.named_scope(MICRO_BATCHES):
    grads, divisor, old, metrics = jax.lax.fori_loop(begin, count, add, start)
  return (grads, divisor, metrics), old


def _counted_once(
  out: LossOutput, learner, apply_updates, first, last
) -> Metrics:
  """Metrics of a call; both calls together count each row once."""
  metrics = _only(apply_updates, out.metrics)
  metrics |= _only(apply_updates == first, out.old_policy_metrics)
  if out.first_minibatch_gap is not None:
    gap = out.first_minibatch_gap
    if not learner.has_old_logps:  # the batch has none to compare with
      gap = _zeros(gap)._replace(count=gap.count)
    gap = _only(apply_updates & first & last, gap)
    metrics["ratio/first_minibatch_std"] = gap
  return metrics


def _only(condition, tree):
  """The tree where `condition`, else zeros."""
  return jax.tree.map(lambda x: jnp.where(condition, x, 0), tree)


def _zeros(tree):
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
