"""Evaluation of a policy, on the held-out problems of a run and on benchmarks.

Other wings take `held_out`, the rewards on a run's held-out problems, and
`estimators`, which say what is correct. Users take `evaluator.evaluate`, which
`python -m gspo_jax.evaluate` calls, and `benchmarks`, `policy_sampler` and
`summary`, its parts.
"""

__all__ = (
  "benchmarks",
  "estimators",
  "evaluator",
  "held_out",
  "policy_sampler",
  "summary",
)
