"""Prompts become samples, by static or by continuous batching.

Other wings take from here `generate`, its arguments and its result, and from
its modules:
  samples: the operations on Samples, and FinishedResponse.
  continuous: ContinuousSampler and `build_continuous_sampler`.
  many_prompts: `sample_many`, any number of prompts in batches of one size,
    and `equal_batches`, that size.
  continuous_config: ContinuousBatchingConfig.
  functions: Sampler, the interface of both, and SamplerFunctions.
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
  "decode_params",
  "functions",
  "generate",
  "many_prompts",
  "paged_decode",
  "samples",
  "stop_strings",
]
