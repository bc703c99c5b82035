"""Prompts become scored responses.

Others take `source.make_source`, `off_policy.OffPolicy` (the source that
samples ahead), `batch` (the containers and `iteration_keys`), `scoring`
(samples become responses with rewards), `metrics.rollout_metrics`,
`config.RolloutConfig`, `environment` (what an environment is, and which a
config names) and `conversations` (samples of several turns). `environments` has
those built in.
"""

__all__ = [
  "batch",
  "config",
  "conversations",
  "environment",
  "metrics",
  "off_policy",
  "scoring",
  "source",
]
