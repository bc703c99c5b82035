"""The policy: a decoder as functions over a plain dict of arrays.

Other wings use the names in `__all__`, `experts.SLACK` and `moe.number_type`.
"""

from gspo_jax.model.config import (
  KEPT,
  Layer,
  LoraConfig,
  ModelConfig,
  PolicyConfig,
)
from gspo_jax.model.parameters import shapes, shardings
from gspo_jax.model.rotary import Llama3Scaling, YarnScaling
from gspo_jax.model.target_logps import target_logps
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
  scores,
  unembed,
  unstack_layers,
)
from gspo_jax.model.variants import VARIANTS, variant

__all__ = [
  "KEPT",
  "VARIANTS",
  "HiddenStates",
  "Layer",
  "Llama3Scaling",
  "LoraConfig",
  "ModelConfig",
  "Output",
  "Params",
  "PolicyConfig",
  "YarnScaling",
  "attention",
  "cache",
  "exact_attention",
  "experts",
  "forward",
  "gpu",
  "hf",
  "hidden_states",
  "init",
  "lora",
  "moe",
  "output_matrix",
  "paged_cache",
  "paged_kernel",
  "parameters",
  "prefill",
  "project_logits",
  "rounding",
  "scores",
  "shapes",
  "shardings",
  "target_logps",
  "unembed",
  "unstack_layers",
  "variant",
]
