"""Evaluation of a policy: held-out problems of a run, and benchmarks.

Other wings take these modules:
  held_out, estimators
Users take `evaluator.evaluate`, which `python -m gspo_jax.evaluate` calls:
  evaluator, benchmarks, policy_sampler, summary
"""
