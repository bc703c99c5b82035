"""Evaluation of a policy: held-out problems of a run, and benchmarks.

Other wings take `held_out` and `estimators`. Users take `evaluator.evaluate`,
which `python -m gspo_jax.evaluate` calls, and its parts.
"""

__all__ = (
  "benchmarks",
  "estimators",
  "evaluator",
  "held_out",
  "policy_sampler",
  "summary",
)
