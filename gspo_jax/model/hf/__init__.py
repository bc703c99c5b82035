"""Hugging Face checkpoints: loading, saving and their config.json.

Other wings use the names in `__all__`.
"""

from gspo_jax.model.hf.checkpoint import load_hf, require_new, save_hf
from gspo_jax.model.hf.config import config_from_hf

__all__ = ["config_from_hf", "load_hf", "require_new", "save_hf"]
