"""Prompts become samples, by static or by continuous batching.

Other wings take from here `generate`, its arguments and its result, and from
its modules:
  samples: the operations on Samples, and FinishedResponse.
  functions: Sampler, the interface of both kinds, and SamplerFunctions.
  static, continuous: the two kinds, and how to build them.
  many_prompts: `sample_many`, any number of prompts in batches of one size,
    and `equal_batches`, that size.
  continuous_config: ContinuousBatchingConfig.
"""

from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  Prompts,
  SamplerConfig,
  Samples,
)
from gspo_jax.sampler.static import generate

__all__ = [
  "STOPPED",
  "TRUNCATED",
  "UNFINISHED",
  "Prompts",
  "SamplerConfig",
  "Samples",
  "continuous",
  "continuous_config",
  "functions",
  "generate",
  "many_prompts",
  "paged_decode",
  "samples",
  "static",
  "stop_strings",
]
