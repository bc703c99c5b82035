"""The named models: published ones, and small ones for two cores."""

import dataclasses

from gspo_jax.model.config import Layer, ModelConfig, changed
from gspo_jax.model.hf.families import FAMILIES
from gspo_jax.model.rotary import Llama3Scaling, YarnScaling
from gspo_jax.runtime.errors import UserError, nearest

# The embedded default (see tasks/chain.py): it learns in minutes on two cores.
# Its vocabulary is the 256 bytes, padding and end of text.
_TINY = ModelConfig(
  vocab_size=258,
  num_layers=2,
  embed_dim=64,
  num_heads=4,
  num_kv_heads=4,
  head_dim=16,
  mlp_dim=64,
  num_experts=8,
  experts_per_token=2,
  rope_theta=1e4,
  remat="none",
)

# For text on two cores: configs/gsm8k_small.py.
_SMALL = dataclasses.replace(
  _TINY,
  vocab_size=2048,
  num_layers=4,
  embed_dim=128,
  num_kv_heads=2,
  head_dim=32,
  mlp_dim=128,
  num_experts=4,
  tie_embeddings=True,
)


def _qwen3(
  layers, width, heads, kv_heads, mlp, *, family="qwen3", **changes
) -> ModelConfig:
  """A model of the family, whose other fields are Qwen3's."""
  sizes = {"vocab_size": 151_936, "head_dim": 128}
  sizes |= FAMILIES[family].fields | changes
  return ModelConfig(
    num_layers=layers,
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=kv_heads,
    mlp_dim=mlp,
    **sizes,
  )


def _llama(*sizes, **changes) -> ModelConfig:
  fields = {"family": "llama", "norm_eps": 1e-5}
  return _qwen3(*sizes, **fields | changes)


def _llama3(*sizes, rope_factor, **changes) -> ModelConfig:
  return _llama(
    *sizes,
    vocab_size=128_256,
    rope_theta=5e5,
    rope_scaling=Llama3Scaling(rope_factor, 1.0, 4.0, 8192),
    **changes,
  )


def _smollm2(*sizes, rope_theta) -> ModelConfig:
  return _llama(
    *sizes,
    vocab_size=49_152,
    head_dim=64,
    rope_theta=rope_theta,
    tie_embeddings=True,
  )


_QWEN3_30B = _qwen3(48, 2048, 32, 4, 768, num_experts=128, experts_per_token=8)
_QWEN3_235B = _qwen3(
  94, 4096, 64, 4, 1536, num_experts=128, experts_per_token=8
)


def _glm(*sizes, first, **changes) -> ModelConfig:
  fields = {
    "family": "glm4_moe",
    "vocab_size": 151_552,
    "first": (Layer(experts=False),) * first,
    "pattern": (Layer(),),
    "experts_per_token": 8,
    "attention_bias": True,
    "rotary_dim": 64,
    "norm_eps": 1e-5,
  }
  return _qwen3(*sizes, **fields | changes)


def _minimax(*sizes, **changes) -> ModelConfig:
  fields = {
    "family": "minimax_m2",
    "vocab_size": 200_064,
    "experts_per_token": 8,
    "rotary_dim": 64,
    "rope_theta": 5e6,
  }
  return _qwen3(*sizes, **fields | changes)


def _gpt_oss(*sizes, window=128, **changes) -> ModelConfig:
  fields = {
    "family": "gpt_oss",
    "vocab_size": 201_088,
    "head_dim": 64,
    "pattern": (Layer(window=window), Layer()),
    "experts_per_token": 4,
    "swiglu_limit": 7.0,
    "rope_theta": 1.5e5,
    "rope_scaling": YarnScaling(32.0, 4096, truncate=False),
    "norm_eps": 1e-5,
  }
  return _qwen3(*sizes, **fields | changes)


def _qwen3_next(*sizes, experts=True, delta_nets=3, **changes) -> ModelConfig:
  """`delta_nets` gated DeltaNets, then attention, and so on."""
  layers = (Layer(mixer="delta_net"),) * delta_nets + (Layer(),)
  fields = {
    "family": "qwen3_next" if experts else "qwen3_5_text",
    "head_dim": 256,
    "pattern": tuple(
      dataclasses.replace(layer, experts=experts) for layer in layers
    ),
    "rope_theta": 1e7,
    "rotary_dim": 64,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
  }
  return _qwen3(*sizes, **fields | changes)


def _qwen3_5(*sizes, **changes) -> ModelConfig:
  return _qwen3_next(*sizes, **{"vocab_size": 248_320} | changes)


def _deepseek(layers, width, heads, mlp, *, first, **changes) -> ModelConfig:
  fields = {
    "family": "deepseek_v3",
    "head_dim": 192,
    "first": (Layer(mixer="mla", experts=False),) * first,
    "pattern": (Layer(mixer="mla"),),
    "rotary_dim": 64,
    "rope_interleave": True,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
  }
  sizes = layers, width, heads, heads, mlp
  return _qwen3(*sizes, **fields | changes)


# As the tiny model, for trying a family on two cores.
_TINY_SIZES = {
  "vocab_size": 258,
  "head_dim": 16,
  "num_experts": 8,
  "experts_per_token": 2,
  "rope_theta": 1e4,
  "remat": "none",
}

_TINY_DELTA = _TINY_SIZES | {
  "rotary_dim": 4,
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
  "linear_key_head_dim": 16,
  "linear_value_head_dim": 16,
}
_QWEN3_5_35B = _qwen3_5(
  *(40, 2048, 16, 2, 512),
  num_experts=256,
  experts_per_token=8,
  shared_dim=512,
)

# Sizes are from config.json of each published checkpoint. Layers, heads,
# experts and tying of Qwen3 are also in tables 1 and 2 of arXiv 2505.09388.
VARIANTS = {
  "tiny": _TINY,
  "small": _SMALL,
  "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tie_embeddings=True),
  "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tie_embeddings=True),
  "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tie_embeddings=True),
  "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
  "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
  "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
  "qwen3-30b-a3b": _QWEN3_30B,
  "qwen3-30b-a3b-2507": dataclasses.replace(_QWEN3_30B, rope_theta=1e7),
  "qwen3-235b-a22b": _QWEN3_235B,
  "qwen3-235b-a22b-2507": dataclasses.replace(_QWEN3_235B, rope_theta=5e6),
  "qwen3-coder-30b-a3b": dataclasses.replace(_QWEN3_30B, rope_theta=1e7),
  "qwen3-coder-480b-a35b": _qwen3(
    *(62, 6144, 96, 8, 2560),
    num_experts=160,
    experts_per_token=8,
    rope_theta=1e7,
  ),
  "qwen2.5-0.5b": _qwen3(
    *(24, 896, 14, 2, 4864), family="qwen2", head_dim=64, tie_embeddings=True
  ),
  "qwen2.5-1.5b": _qwen3(
    *(28, 1536, 12, 2, 8960), family="qwen2", tie_embeddings=True
  ),
  "qwen2.5-7b": _qwen3(
    *(28, 3584, 28, 4, 18944), family="qwen2", vocab_size=152_064
  ),
  "llama3.2-1b": _llama3(
    *(16, 2048, 32, 8, 8192), rope_factor=32.0, head_dim=64, tie_embeddings=True
  ),
  "llama3.1-8b": _llama3(32, 4096, 32, 8, 14336, rope_factor=8.0),
  "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, rope_theta=1e5),
  "smollm2-360m": _smollm2(32, 960, 15, 5, 2560, rope_theta=1e5),
  "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, rope_theta=1.3e5),
  "olmoe-1b-7b": _qwen3(
    *(16, 2048, 16, 16, 1024),
    family="olmoe",
    vocab_size=50_304,
    num_experts=64,
    experts_per_token=8,
    norm_topk_prob=False,
    rope_theta=1e4,
    norm_eps=1e-5,
  ),
  "mixtral-8x7b": _llama(
    *(32, 4096, 32, 8, 14336),
    family="mixtral",
    vocab_size=32_000,
    num_experts=8,
    experts_per_token=2,
  ),
  "qwen1.5-moe-a2.7b": _qwen3(
    *(24, 2048, 16, 16, 1408),
    family="qwen2_moe",
    num_experts=60,
    experts_per_token=4,
    norm_topk_prob=False,
    shared_dim=5632,
  ),
  "glm-4.5-air": _glm(
    *(46, 4096, 96, 8, 1408),
    first=1,
    dense_mlp_dim=10_944,
    num_experts=128,
    shared_dim=1408,
    qk_norm=False,
  ),
  # GLM-4.6 and 4.7 have the same sizes.
  "glm-4.5": _glm(
    *(92, 5120, 96, 8, 1536),
    first=3,
    dense_mlp_dim=12_288,
    num_experts=160,
    shared_dim=1536,
    routed_scaling_factor=2.5,
  ),
  "minimax-m2": _minimax(62, 3072, 48, 8, 1536, num_experts=256),
  "gpt-oss-20b": _gpt_oss(24, 2880, 64, 8, 2880, num_experts=32),
  "gpt-oss-120b": _gpt_oss(36, 2880, 64, 8, 2880, num_experts=128),
  # Qwen3.6 has the sizes of Qwen3.5.
  "qwen3.5-35b-a3b": _QWEN3_5_35B,
  "qwen3.6-35b-a3b": _QWEN3_5_35B,
  "qwen3.5-0.8b": _qwen3_5(
    *(24, 1024, 8, 2, 3584),
    experts=False,
    linear_num_value_heads=16,
    tie_embeddings=True,
  ),
  "qwen3.5-4b": _qwen3_5(
    *(32, 2560, 16, 4, 9216), experts=False, tie_embeddings=True
  ),
  "qwen3.5-9b": _qwen3_5(32, 4096, 16, 4, 12288, experts=False),
  "qwen3.5-27b": _qwen3_5(
    64, 5120, 24, 4, 17408, experts=False, linear_num_value_heads=48
  ),
  "qwen3.5-122b-a10b": _qwen3_5(
    *(48, 3072, 32, 2, 1024),
    num_experts=256,
    experts_per_token=8,
    shared_dim=1024,
    linear_num_value_heads=64,
  ),
  "qwen3-next-80b-a3b": _qwen3_next(
    *(48, 2048, 16, 2, 512),
    num_experts=512,
    experts_per_token=10,
    shared_dim=512,
  ),
  "moonlight-16b-a3b": _deepseek(
    *(27, 2048, 16, 1408),
    first=1,
    vocab_size=163_840,
    dense_mlp_dim=11_264,
    num_experts=64,
    experts_per_token=6,
    shared_dim=2816,
    routed_scaling_factor=2.446,
    rope_theta=5e4,
    norm_eps=1e-5,
  ),
  "glm-4.7-flash": _deepseek(
    *(47, 2048, 20, 1536),
    first=1,
    vocab_size=154_880,
    head_dim=256,
    dense_mlp_dim=10_240,
    num_experts=64,
    experts_per_token=4,
    shared_dim=1536,
    routed_scaling_factor=1.8,
    q_lora_rank=768,
    v_head_dim=256,
    norm_eps=1e-5,
  ),
  # DeepSeek-R1 has the same sizes.
  "deepseek-v3": _deepseek(
    *(61, 7168, 128, 2048),
    first=3,
    vocab_size=129_280,
    dense_mlp_dim=18_432,
    num_experts=256,
    experts_per_token=8,
    shared_dim=2048,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    q_lora_rank=1536,
    rope_theta=1e4,
    rope_scaling=YarnScaling(
      40.0, 4096, attention_factor=1.0, mscale_all_dim=1.0
    ),
  ),
  # Kimi-K2-Instruct-0905.
  "kimi-k2": _deepseek(
    *(61, 7168, 64, 2048),
    first=1,
    vocab_size=163_840,
    dense_mlp_dim=18_432,
    num_experts=384,
    experts_per_token=8,
    shared_dim=2048,
    routed_scaling_factor=2.827,
    q_lora_rank=1536,
    rope_theta=5e4,
    rope_scaling=YarnScaling(
      64.0, 4096, beta_fast=1.0, attention_factor=1.0, mscale_all_dim=1.0
    ),
  ),
  "tiny-qwen3.5": _qwen3_5(
    *(2, 64, 4, 2, 64), delta_nets=1, shared_dim=64, **_TINY_DELTA
  ),
  "tiny-qwen3.5-dense": _qwen3_5(
    *(2, 64, 4, 2, 128),
    delta_nets=1,
    experts=False,
    **_TINY_DELTA | {"num_experts": 0, "experts_per_token": 0},
  ),
  "tiny-moonlight": _deepseek(
    *(3, 64, 4, 64),
    first=1,
    dense_mlp_dim=128,
    shared_dim=64,
    rotary_dim=8,
    kv_lora_rank=32,
    v_head_dim=16,
    **_TINY_SIZES,
  ),
  "tiny-glm-4.5": _glm(
    *(3, 64, 4, 4, 64),
    first=1,
    dense_mlp_dim=128,
    shared_dim=64,
    rotary_dim=8,
    **_TINY_SIZES,
  ),
  "tiny-minimax-m2": _minimax(2, 64, 4, 2, 64, rotary_dim=8, **_TINY_SIZES),
  "tiny-gpt-oss": _gpt_oss(*(2, 64, 4, 2, 64), window=8, **_TINY_SIZES),
}


def variant(name: str, **changes) -> ModelConfig:
  """The named variant with some fields changed.

  Raises:
    UserError: an unknown name or field, or an invalid value.
  """
  if name not in VARIANTS:
    raise UserError(f"model.variant={name!r}: {nearest(name, VARIANTS)}")
  return changed(VARIANTS[name], **changes)
