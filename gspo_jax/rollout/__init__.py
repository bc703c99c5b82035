"""Prompts become scored responses.

Others take `source.make_source`, `off_policy.OffPolicy` (the source that
samples ahead), `context` (what sources need, and `iteration_keys`), `batch`
(what they give), `scoring` (samples become responses with rewards),
`metrics.rollout_metrics`, `config.RolloutConfig`, `environment` (what an
environment is, and which a config names), `environment_pool` (runs them) and
`conversations` (samples of several turns). `environments` has those built in.
"""

__all__ = [
  "batch",
  "config",
  "context",
  "conversations",
  "environment",
  "environment_pool",
  "metrics",
  "off_policy",
  "scoring",
  "source",
]
