"""The policy: a Qwen3 decoder as functions over a plain dict of arrays."""

from gspo_jax.model.config import KEPT, VARIANTS, ModelConfig, variant
from gspo_jax.model.transformer import (
  HiddenStates,
  Output,
  Params,
  forward,
  hidden_states,
  init,
  output_matrix,
  prefill,
  project_logits,
  unembed,
  unstack_layers,
)

__all__ = [
  "KEPT",
  "VARIANTS",
  "HiddenStates",
  "ModelConfig",
  "Output",
  "Params",
  "forward",
  "hidden_states",
  "init",
  "output_matrix",
  "prefill",
  "project_logits",
  "unembed",
  "unstack_layers",
  "variant",
]
