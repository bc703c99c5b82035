"""Benchmarks: problems are put to a policy, and its responses judged."""
