"""Prompts become samples."""

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
  "generate",
]
