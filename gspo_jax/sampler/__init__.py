"""Prompts become samples, by static or by continuous batching.

Other wings import `generate`, its arguments and its result from here, and the
modules `samples` (operations on Samples), `functions` (Sampler,
SamplerFunctions), `static`, `continuous` and `stop_strings`.
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
  "samples",
  "static",
  "stop_strings",
]
