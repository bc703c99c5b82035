"""Prompts become scored responses.

Others take `source.make_source`, `batch` (the containers and `iteration_keys`),
`scoring` (samples become responses with rewards) and
`metrics.rollout_metrics`.
"""

__all__ = ["batch", "metrics", "scoring", "source"]
