"""Prompts become scored responses.

Other wings take these modules:
  source         `make_source`
  off_policy     OffPolicy
  context, batch  input and output of sources
  scoring        samples get rewards
  metrics        `rollout_metrics`
  config         RolloutConfig
  environment, environment_pool, conversations, agents, episode, player
  reward_model   a classifier that scores on the devices
`environments` has the built-in ones.
"""
