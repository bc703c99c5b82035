"""The optimizer, AdamW, and its learning rate schedule."""

import dataclasses

import jax
import optax

from gspo_jax.runtime.errors import UserError, nearest

DECAYS = ("constant", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW with warm-up and clipping by global norm.

  Attributes:
    learning_rate: the peak of the schedule.
    warmup_steps: optimizer steps of linear warm-up from 0.
    total_steps: optimizer steps in all; `decay` ends there.
    decay: "constant", or "cosine" down to a tenth of the peak.
    b1: decay of the first moment.
    b2: decay of the second moment.
    weight_decay: decoupled, on matrices only.
    clip_norm: largest global norm of the gradient.
  """

  learning_rate: float
  warmup_steps: int
  total_steps: int
  decay: str = "constant"
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.0
  clip_norm: float = 1.0

  def __post_init__(self):
    if self.decay not in DECAYS:
      raise UserError(f"decay={self.decay!r}: {nearest(self.decay, DECAYS)}")


def schedule(cfg: OptimConfig) -> optax.Schedule:
  """The learning rate at optimizer step t, counted from 0."""
  peak = cfg.learning_rate
  if cfg.decay == "cosine":
    after = max(cfg.total_steps - cfg.warmup_steps, 1)
    then = optax.cosine_decay_schedule(peak, after, alpha=0.1)
  else:
    then = optax.constant_schedule(peak)
  if not cfg.warmup_steps:
    return then
  # It starts above 0, so that the first update moves the policy.
  warmup = lambda t: peak * (t + 1) / cfg.warmup_steps
  return optax.join_schedules([warmup, then], [cfg.warmup_steps])


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW."""
  return optax.chain(
    optax.clip_by_global_norm(cfg.clip_norm),
    optax.adamw(
      schedule(cfg),
      b1=cfg.b1,
      b2=cfg.b2,
      weight_decay=cfg.weight_decay,
      mask=_is_matrix,
    ),
  )


def _is_matrix(params):
  """True but for the scales of norms and biases, which do not decay."""
  is_vector = lambda path: path[-1].key.endswith(("scale", "bias"))
  return jax.tree.map_with_path(lambda path, _: not is_vector(path), params)
