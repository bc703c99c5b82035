"""What a config costs on a TPU slice, compiled without a TPU."""

from gspo_jax.plan.planner import plan

__all__ = ["plan"]
