"""A config of a study, small enough for a test."""

from ml_collections import ConfigDict

from configs import common


def shrink(c: ConfigDict) -> ConfigDict:
  """`common.shrink`, with a cold start to share, and the model's own shape."""
  variant, dtype = c.model.variant, c.model.dtype
  common.shrink(c)
  c.model.variant, c.model.dtype = variant, dtype
  c.cold_start.steps = 100  # just enough for a right answer now and then
  c.cold_start.check_every = 50
  c.cold_start.learning_rate = 4e-3
  c.cold_start.warmup_steps = 10
  c.cold_start.gate = 0.0
  c.cold_start.batch = 16
  c.cold_start.chain_steps = (1,)
  c.eval.every = 1
  return c
