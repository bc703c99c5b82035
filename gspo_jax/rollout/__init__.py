"""Prompts become scored responses.

Other wings take: `source.make_source`; `off_policy.OffPolicy`; `context` and
`batch` (input and output of sources); `scoring`; `metrics.rollout_metrics`;
`config.RolloutConfig`; `environment` and `environment_pool`; `conversations`
and `agents`; `episode`; `player`; `reward_model`. `environments` has the
built-in ones.
"""

__all__ = [
  "agents",
  "batch",
  "config",
  "context",
  "conversations",
  "environment",
  "environment_pool",
  "episode",
  "metrics",
  "off_policy",
  "player",
  "reward_model",
  "scoring",
  "source",
]
