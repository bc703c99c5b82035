"""The optimizer, AdamW or Muon, and its learning rate schedule."""

import dataclasses

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from gspo_jax.model import parameters
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError, nearest

NAMES = ("adamw", "muon")
DECAYS = ("constant", "linear", "cosine")

# The logical axes of all arrays of a training state; Muon keeps three numbers.
STATE_AXES = parameters.AXES | {"ns_coeffs": ("whole",)}


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW or Muon, with warm-up, decay and clipping by global norm.

  Attributes:
    learning_rate: the peak of the schedule.
    warmup_steps: optimizer steps of linear warm-up from 0.
    total_steps: optimizer steps in all; `decay` ends with them.
    name: "adamw", or "muon": Muon (Jordan et al. 2024) for the matrices of the
      blocks, and AdamW for all other parameters. An expert's gate and up
      projection are stored side by side, and are one matrix.
    decay: from the peak, after the warm-up: "constant", "linear" or "cosine".
    min_lr_ratio: the end of `decay`, as a share of the peak.
    b1: decay of AdamW's first moment.
    b2: decay of AdamW's second moment.
    weight_decay: decoupled, on matrices only.
    clip_norm: largest global norm of the gradient.
  """

  learning_rate: float
  warmup_steps: int
  total_steps: int
  name: str = "adamw"
  decay: str = "constant"
  min_lr_ratio: float = 0.0
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.0
  clip_norm: float = 1.0

  def __post_init__(self):
    for key, names in (("name", NAMES), ("decay", DECAYS)):
      if (value := getattr(self, key)) not in names:
        raise UserError(f"optim.{key}={value!r}: {nearest(value, names)}")
    if self.decay == "constant" and self.min_lr_ratio:
      raise UserError(
        f"optim.min_lr_ratio={self.min_lr_ratio}: expected 0 with "
        "optim.decay='constant', which does not decay"
      )


def schedule(cfg: OptimConfig) -> optax.Schedule:
  """The learning rate at optimizer step t, counted from 0.

  A decay takes `total_steps - warmup_steps` steps; it would reach its end value
  at step `total_steps`, the first one that is not taken.
  """
  peak = cfg.learning_rate
  after = max(cfg.total_steps - cfg.warmup_steps, 1)
  if cfg.decay == "cosine":
    then = optax.cosine_decay_schedule(peak, after, alpha=cfg.min_lr_ratio)
  elif cfg.decay == "linear":
    then = optax.linear_schedule(peak, peak * cfg.min_lr_ratio, after)
  else:
    then = optax.constant_schedule(peak)
  if not cfg.warmup_steps:
    return then
  # It starts above 0, so that the first update moves the policy.
  warmup = lambda t: peak * (t + 1) / cfg.warmup_steps
  return optax.join_schedules([warmup, then], [cfg.warmup_steps])


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW or Muon."""
  rate = schedule(cfg)
  adamw = optax.adamw(
    rate,
    b1=cfg.b1,
    b2=cfg.b2,
    weight_decay=cfg.weight_decay,
    mask=_decays,
  )
  clip = optax.clip_by_global_norm(cfg.clip_norm)
  if cfg.name == "adamw":
    return optax.chain(clip, adamw)
  # Updates as large as AdamW's, for the same learning rate: arXiv 2502.16982,
  # sec. 2.2. The AdamW inside of `optax.contrib.muon` is not used: it has
  # Nesterov momentum, and decays norms.
  muon = optax.contrib.muon(
    rate,
    weight_decay=cfg.weight_decay,
    consistent_rms=0.2,
    muon_weight_dimension_numbers=_dimension_numbers,
  )
  parts = {"adamw": adamw, "muon": muon, "experts": _each_expert(muon)}
  return optax.chain(clip, optax.partition(parts, _labels))


def _labels(params):
  """The part of Muon that takes each parameter.

  AdamW takes embeddings, head, norms, biases, adapters, and the router, whose
  output is a choice.
  """

  def label(row):
    if not row.target:
      return "adamw"
    experts, _, _ = row.groups
    return "experts" if experts else "muon"

  return _by_row(label, params)


def _by_row(function, params):
  """The tree of `function(row)`, with the row of each parameter."""
  row = lambda keys: parameters.find(sharding.path_name(keys))
  return jax.tree.map_with_path(lambda keys, _: function(row(keys)), params)


def _each_expert(muon) -> optax.GradientTransformation:
  """Muon for arrays [L, E, D, F], each expert by itself.

  By itself it would join the axes of layers and experts, for which XLA gathers
  all experts on every device.
  """
  experts = lambda tree: jax.tree.map(lambda x: 1 if x.ndim > 3 else None, tree)

  def update(updates, state, params):
    if not jax.tree.leaves(updates):  # a dense model
      return updates, state
    given = experts(updates), experts(state), experts(params)
    return jax.vmap(muon.update, given, given[:2])(updates, state, params)

  return optax.GradientTransformation(muon.init, update)


def _dimension_numbers(params):
  """The axes of each matrix that Muon takes; None for other parameters.

  Axes before these are layers and experts, each with a matrix of its own.
  """

  def numbers(row):
    if not row.target:
      return None
    _, inputs, outputs = row.groups
    last = outputs[-1] + 1
    from_end = lambda axes: tuple(axis - last for axis in axes)
    return MuonDimensionNumbers(from_end(inputs), from_end(outputs))

  return _by_row(numbers, params)


def _decays(params):
  """True but for the scales of norms and biases."""
  return _by_row(lambda row: row.decays, params)
