"""Hugging Face checkpoints, their config.json, and adapters of PEFT."""

from gspo_jax.model.hf.checkpoint import load_hf, save_hf
from gspo_jax.model.hf.config import (
  config_from_hf,
  context_length,
  pad_token,
  reward_config,
)
from gspo_jax.model.hf.folder import require_new
from gspo_jax.model.hf.peft import load_peft, save_peft

__all__ = [
  "config_from_hf",
  "context_length",
  "load_hf",
  "load_peft",
  "pad_token",
  "require_new",
  "reward_config",
  "save_hf",
  "save_peft",
]
