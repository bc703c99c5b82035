"""GSPO in JAX: the losses and advantages, for any trainer.

`import gspo_jax` touches no device. jax is imported when a loss is asked for:
the processes that score answers never need it.
"""

import importlib

_MODULE_OF = {
  "Terms": "losses",
  "cispo_loss": "losses",
  "ctpo_loss": "losses",
  "dapo_loss": "losses",
  "dppo_kl_loss": "losses",
  "dppo_tv_loss": "losses",
  "dr_grpo_loss": "losses",
  "gdpo_advantages": "losses.advantages",
  "generalized_advantages": "losses.advantages",
  "gmpo_loss": "losses",
  "group_relative_advantages": "losses.advantages",
  "grpo_loss": "losses",
  "gspo_loss": "losses",
  "gspo_token_loss": "losses",
  "kl_penalty": "losses",
  "luspo_loss": "losses",
  "max_rl_advantages": "losses.advantages",
  "mismatch_weights": "losses",
  "off_policy_mask": "losses",
  "pass_at_k_advantages": "losses.advantages",
  "ppo_loss": "losses",
  "reinforce_plus_plus_advantages": "losses.advantages",
  "rloo_advantages": "losses.advantages",
  "router_log_weight": "losses",
  "rspo_loss": "losses",
  "sapo_loss": "losses",
  "value_loss": "losses",
  "vespo_loss": "losses",
  "whiten": "losses.advantages",
}

__all__ = list(_MODULE_OF)
__version__ = "0.2.0"


def __getattr__(name: str):
  if name not in _MODULE_OF:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"gspo_jax.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
  return sorted(globals() | _MODULE_OF)
