"""Prompts become samples, by static or by continuous batching.

Other wings take from here `generate`, its arguments and its result, and from
its modules:
  samples: the operations on Samples, and FinishedResponse.
  functions: Sampler, one of both kinds, and SamplerFunctions.
  static, continuous: the two kinds, and how to build them.
  many_prompts: any number of prompts, in batches of one size.
  stop_strings: StopStrings, and the text of a response.
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
  "functions",
  "generate",
  "many_prompts",
  "samples",
  "static",
  "stop_strings",
]
