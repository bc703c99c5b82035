"""Prompts become scored responses.

Others take `source.make_source`, `off_policy.OffPolicy` (the source that
samples ahead), `batch` (the containers and `iteration_keys`), `scoring`
(samples become responses with rewards) and `metrics.rollout_metrics`.
"""

__all__ = ["batch", "metrics", "off_policy", "scoring", "source"]
