"""Benchmarks: problems are put to a policy, and its responses are judged."""

from gspo_jax.evaluate.evaluator import evaluate

__all__ = ["evaluate"]
