"""GSPO in JAX. This face imports jax alone and touches no device."""

from gspo_jax.advantages import group_relative_advantages
from gspo_jax.losses import (
  dapo_loss,
  dr_grpo_loss,
  grpo_loss,
  gspo_loss,
  gspo_token_loss,
)

__all__ = [
  "dapo_loss",
  "dr_grpo_loss",
  "group_relative_advantages",
  "grpo_loss",
  "gspo_loss",
  "gspo_token_loss",
]
__version__ = "0.1.0"
