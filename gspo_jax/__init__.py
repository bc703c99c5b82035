"""GSPO in JAX: the losses and advantages, for any trainer.

`import gspo_jax` touches no device. jax is imported when a loss is asked for:
the processes that score answers never need it.
"""

import importlib

# Without the policy losses, which `losses.policy` lists.
_MODULE_OF = {
  "Terms": "losses",
  "gdpo_advantages": "losses.advantages",
  "generalized_advantages": "losses.advantages",
  "group_relative_advantages": "losses.advantages",
  "kl_penalty": "losses",
  "max_rl_advantages": "losses.advantages",
  "mismatch_weights": "losses",
  "off_policy_mask": "losses",
  "score_centering": "losses",
  "pass_at_k_advantages": "losses.advantages",
  "reinforce_plus_plus_advantages": "losses.advantages",
  "rloo_advantages": "losses.advantages",
  "router_log_weight": "losses",
  "value_loss": "losses",
  "whiten": "losses.advantages",
}

__version__ = "0.2.0"


def __getattr__(name: str):
  if name == "__all__":
    policy = importlib.import_module("gspo_jax.losses.policy")
    return [*_MODULE_OF, *policy.__all__]
  is_policy_loss = name.endswith("_loss") and name in __getattr__("__all__")
  if name not in _MODULE_OF and not is_policy_loss:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = _MODULE_OF.get(name, "losses.policy")
  return getattr(importlib.import_module(f"gspo_jax.{module}"), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__getattr__("__all__")})
