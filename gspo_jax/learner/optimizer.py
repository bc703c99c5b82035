"""The optimizer, AdamW or Muon, and its learning rate schedule."""

import dataclasses
import functools

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from gspo_jax.model import parameters
from gspo_jax.runtime import sharding, spec
from gspo_jax.runtime.key import (
  POSITIVE,
  SHARE,
  UNDER_1,
  ZERO_OR_MORE,
  check,
  key,
)

# The logical axes of all arrays of a training state, Muon's coefficients
# included.
STATE_AXES = parameters.AXES | {"ns_coeffs": ("whole",)}


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW or Muon, with warm-up, decay and clipping by global norm."""

  name: str = key(
    "adamw",
    '"adamw", or "muon": Muon for the matrices of the blocks, AdamW for the '
    'rest. "adamw:b1=0.9,b2=0.95,eps=1e-8,weight_decay=0.0" are the defaults '
    "of both; only matrices decay.",
  )
  learning_rate: float = key(1e-6, "its peak", ZERO_OR_MORE)
  warmup_steps: int = key(0, "optimizer steps", ZERO_OR_MORE)
  decay: str = key(
    "constant",
    'after the warm-up, until `num_steps`: "constant", "linear" or "cosine"; '
    '"cosine:min_lr_ratio=0.1" ends at a tenth of the peak, in place of 0',
  )
  clip_norm: float = key(1.0, "largest global norm of the gradient", POSITIVE)
  freeze_moe_router: bool = key(
    False, "keep the routers as they are; a cold start still trains them"
  )
  total_steps: int = 1  # optimizer steps in all; `decay` ends with them

  def __post_init__(self):
    check(self, "optim")
    optimizer(self)  # checks the numbers in `name` and `decay`


def schedule(cfg: OptimConfig) -> optax.Schedule:
  """The learning rate at optimizer step t, counted from 0."""
  peak = cfg.learning_rate
  decay = spec.chosen("optim.decay", cfg.decay, _DECAYS)
  # It would reach its end value at step `total_steps`, one after the last.
  then = decay(peak, max(cfg.total_steps - cfg.warmup_steps, 1))
  if not cfg.warmup_steps:
    return then
  # It starts above 0, so that the first update moves the policy.
  warmup = lambda t: peak * (t + 1) / cfg.warmup_steps
  return optax.join_schedules([warmup, then], [cfg.warmup_steps])


def _linear(peak, steps, *, min_lr_ratio=0.0):
  SHARE.check("optim.decay: min_lr_ratio", min_lr_ratio)
  return optax.linear_schedule(peak, peak * min_lr_ratio, steps)


def _cosine(peak, steps, *, min_lr_ratio=0.0):
  SHARE.check("optim.decay: min_lr_ratio", min_lr_ratio)
  return optax.cosine_decay_schedule(peak, steps, alpha=min_lr_ratio)


_DECAYS = {
  "constant": lambda peak, steps: optax.constant_schedule(peak),
  "linear": _linear,
  "cosine": _cosine,
}


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW or Muon.

  Frozen routers have no part in the norm, no decay and no moments.
  """
  make = spec.chosen("optim.name", cfg.name, _OPTIMIZERS)
  clip = optax.clip_by_global_norm(cfg.clip_norm)
  chain = optax.chain(clip, make(schedule(cfg)))
  if not cfg.freeze_moe_router:
    return chain
  label = lambda row: "frozen" if row.router else "trained"
  parts = {"trained": chain, "frozen": optax.set_to_zero()}
  return optax.partition(parts, _by_row(label))


def _adamw(rate, *, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0):
  UNDER_1.check("optim.name: b1", b1)
  UNDER_1.check("optim.name: b2", b2)
  POSITIVE.check("optim.name: eps", eps)
  ZERO_OR_MORE.check("optim.name: weight_decay", weight_decay)
  decays = _by_row(lambda row: row.decays)  # but scales of norms and biases
  return optax.adamw(
    rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decays
  )


def _muon(rate, *, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0):
  """Muon (Jordan et al. 2024) for matrices, AdamW for other parameters."""
  adamw = _adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
  # Updates as large as AdamW's, for the same learning rate: arXiv 2502.16982,
  # sec. 2.2. The AdamW inside of `optax.contrib.muon` is not used: it has
  # Nesterov momentum, and decays norms.
  muon = optax.contrib.muon(
    rate,
    weight_decay=weight_decay,
    consistent_rms=0.2,
    muon_weight_dimension_numbers=_by_row(_dimension_numbers),
  )
  # Muon takes what is stored together as one: an expert's gate and up
  # projections, those of a gated DeltaNet.
  parts = {"adamw": adamw, "muon": muon, "experts": _each_expert(muon)}
  return optax.partition(parts, _by_row(_label))


_OPTIMIZERS = {"adamw": _adamw, "muon": _muon}


def _label(row):
  """The name of the optimizer of a parameter."""
  # Embeddings, head, norms, biases, adapters, and the router, whose output is a
  # choice.
  if not row.target:
    return "adamw"
  experts, _, _ = row.groups
  return "experts" if experts else "muon"


def _by_row(function):
  """Parameters -> the tree of `function(row)`, with the row of each."""
  row = lambda keys: parameters.find(sharding.path_name(keys))
  of_leaf = lambda keys, _: function(row(keys))
  return functools.partial(jax.tree.map_with_path, of_leaf)


def _each_expert(muon) -> optax.GradientTransformation:
  """Muon for arrays [L, E, D, F], one expert at a time."""
  # Muon alone would merge the axes of layers and experts; XLA would then gather
  # all experts on every device.
  experts = lambda tree: jax.tree.map(lambda x: 1 if x.ndim > 3 else None, tree)

  def update(updates, state, params):
    if not jax.tree.leaves(updates):  # a dense model
      return updates, state
    axes = experts(updates), experts(state), experts(params)
    return jax.vmap(muon.update, axes, axes[:2])(updates, state, params)

  return optax.GradientTransformation(muon.init, update)


def _dimension_numbers(row):
  """The axes of a parameter's matrices that Muon takes; None: no Muon."""
  if not row.target:
    return None
  _, inputs, outputs = row.groups
  last = outputs[-1] + 1
  from_end = lambda axes: tuple(axis - last for axis in axes)
  return MuonDimensionNumbers(from_end(inputs), from_end(outputs))
