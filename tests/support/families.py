"""Small models: two plain ones, and families whose layers or experts differ."""

import dataclasses

import pytest

from gspo_jax import model

# Sizes that differ, and a small theta, so that a misplaced one has an effect.
DENSE = model.variant(
  "tiny",
  vocab_size=23,
  embed_dim=16,
  num_kv_heads=2,
  head_dim=6,
  mlp_dim=12,
  num_experts=0,
  experts_per_token=0,
  rope_theta=50.0,
  unroll=1,
  dtype="float32",
)
MOE = dataclasses.replace(DENSE, num_experts=5, experts_per_token=2)
SIZES = {
  "vocab_size": 24, "embed_dim": 16, "num_kv_heads": 2, "head_dim": 8,
  "mlp_dim": 8, "dtype": "float32",
}  # fmt: skip
FAMILIES = {
  "glm-4.5": model.variant(
    "tiny-glm-4.5",
    num_layers=4,
    dense_mlp_dim=12,
    shared_dim=8,
    rotary_dim=4,
    routed_scaling_factor=2.5,
    **SIZES,
  ),
  "minimax-m2": model.variant("tiny-minimax-m2", rotary_dim=4, **SIZES),
  "gpt-oss": model.variant(
    "tiny-gpt-oss",
    num_layers=4,
    pattern=(model.Layer(window=3), model.Layer()),
    swiglu_limit=0.5,
    **SIZES,
  ),
  "qwen3.5": model.variant(
    "tiny",
    num_layers=4,
    pattern=(model.Layer(mixer="delta_net"), model.Layer()),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=6,
    rotary_dim=2,
    output_gate=True,
    shared_dim=8,
    shared_gate=True,
    norm_plus_one=True,
    norm_rounds_last=True,
    # Else the norm of small outputs of a DeltaNet multiplies rounding errors.
    norm_eps=1e-2,
    **SIZES,
  ),
  "deepseek-v3": model.variant(
    "tiny",
    num_layers=3,
    first=(model.Layer(mixer="mla", experts=False),),
    pattern=(model.Layer(mixer="mla"),),
    q_lora_rank=10,
    kv_lora_rank=12,
    rotary_dim=4,
    v_head_dim=6,
    rope_interleave=True,
    rope_scaling=model.YarnScaling(4.0, 8, mscale_all_dim=1.0),
    dense_mlp_dim=12,
    shared_dim=8,
    scoring_func="sigmoid",
    choice_bias=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    **SIZES | {"num_kv_heads": 4},
  ),
}
# Each kind of layer once, where no scan is needed.
SHORT = FAMILIES | {
  name: dataclasses.replace(FAMILIES[name], num_layers=2)
  for name in ("gpt-oss", "qwen3.5")
}


def family(name, *others):
  """A parameter of a test; slow but for the one with most kinds of layers."""
  marks = () if name == "qwen3.5" else pytest.mark.slow
  return pytest.param(*(others or (name,)), marks=marks, id=name)


each_family = pytest.mark.parametrize("name", [*map(family, FAMILIES)])
