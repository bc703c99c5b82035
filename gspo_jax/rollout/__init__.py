"""Prompts become scored responses.

Others take `source.make_source`, `batch` (the containers and `iteration_keys`),
`scoring` (samples become responses with rewards), `metrics.rollout_metrics`,
`environment` (what an environment is, and which a config names) and
`conversations` (samples of several turns). `games` has embedded environments.
"""

__all__ = [
  "batch",
  "conversations",
  "environment",
  "metrics",
  "scoring",
  "source",
]
