"""The policy: a Qwen3 decoder as functions over a plain dict of arrays."""

from gspo_jax.model.config import KEPT, VARIANTS, ModelConfig, variant
from gspo_jax.model.transformer import (
  Encoded,
  Output,
  Params,
  encode,
  forward,
  head,
  init,
  prefill,
  project,
  unembed,
  unstack,
)

__all__ = [
  "KEPT",
  "VARIANTS",
  "Encoded",
  "ModelConfig",
  "Output",
  "Params",
  "encode",
  "forward",
  "head",
  "init",
  "prefill",
  "project",
  "unembed",
  "unstack",
  "variant",
]
