"""Prompts become scored responses.

Others take `source.make_source`, `batch` (its containers and `iteration_keys`),
`scoring` and `dynamic_sampling.metrics`.
"""

__all__ = ["batch", "dynamic_sampling", "scoring", "source"]
