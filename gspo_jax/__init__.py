"""GSPO in JAX: the losses and advantages, for any trainer.

`import gspo_jax` touches no device. jax is imported when a loss is asked for:
the processes that score answers never need it.
"""

import importlib

_ROOMS = {
  "Terms": "losses",
  "cispo_loss": "losses",
  "dapo_loss": "losses",
  "dr_grpo_loss": "losses",
  "generalized_advantages": "advantages",
  "gmpo_loss": "losses",
  "group_relative_advantages": "advantages",
  "grpo_loss": "losses",
  "gspo_loss": "losses",
  "gspo_token_loss": "losses",
  "kl_penalty": "losses",
  "mismatch_weights": "losses",
  "ppo_loss": "losses",
  "router_log_weight": "losses",
  "rspo_loss": "losses",
  "sapo_loss": "losses",
  "value_loss": "losses",
  "whiten": "advantages",
}

__all__ = list(_ROOMS)
__version__ = "0.1.0"


def __getattr__(name: str):
  if name in _ROOMS.values():
    return importlib.import_module(f"gspo_jax.{name}")
  if name not in _ROOMS:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"gspo_jax.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
  return sorted(globals() | _ROOMS)
