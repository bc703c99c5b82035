"""The families whose layers differ or whose experts have biases, small."""

import pytest

from gspo_jax import model

_SIZES = {
  "vocab_size": 24,
  "embed_dim": 16,
  "num_kv_heads": 2,
  "head_dim": 8,
  "mlp_dim": 8,
  "dtype": "float32",
}
FAMILIES = {
  "glm-4.5": model.variant(
    "tiny-glm-4.5",
    num_layers=4,
    dense_mlp_dim=12,
    shared_dim=8,
    rotary_dim=4,
    routed_scaling_factor=2.5,
    **_SIZES,
  ),
  "minimax-m2": model.variant("tiny-minimax-m2", rotary_dim=4, **_SIZES),
  "gpt-oss": model.variant(
    "tiny-gpt-oss",
    num_layers=4,
    pattern=(model.Layer(window=3), model.Layer()),
    swiglu_limit=0.5,
    **_SIZES,
  ),
}
# All layers of MiniMax-M2 are alike, as those of the models in other tests.
each_family = pytest.mark.parametrize(
  "name",
  ["glm-4.5", "gpt-oss", pytest.param("minimax-m2", marks=pytest.mark.slow)],
)
