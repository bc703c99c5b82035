"""The families of models: what a config.json of each says, and how to write it.

A family is an architecture of transformers.
"""

from collections.abc import Callable
from typing import NamedTuple

from etils import epath

from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.hf import quantised
from gspo_jax.model.hf.rope import scaling_to_hf
from gspo_jax.model.hf.values import number, unsupported
from gspo_jax.runtime.errors import UserError


class Family(NamedTuple):
  """An architecture of transformers."""

  loads_with: str  # its class for language models
  fields: dict  # the fields of ModelConfig that it implies
  # The keys of its number of experts and of their hidden width.
  experts: tuple[str, str] | None = None
  rope_theta: float = 1e4  # where config.json has none
  supported: dict | None = None  # as `_SUPPORTED`, for this family
  names: str = ""  # of its tensors, see `parameters.Parameter.other_names`
  # The rotated share of a head where config.json has none; None: always all.
  partial_rotary_factor: float | None = None
  # Keys that must be there: without them transformers takes a number of the
  # published model.
  required: tuple[str, ...] = ()
  # (path, config.json) -> more fields of ModelConfig, and the inverse.
  read: Callable[[epath.Path, dict], dict] = lambda path, raw: {}
  write: Callable[[ModelConfig], dict] = lambda cfg: {}


def _read_glm(path, raw):
  width = number(path, raw, ["moe_intermediate_size"])
  shared = number(path, raw, ["n_shared_experts"])
  first = raw.get("first_k_dense_replace", 1)
  if not isinstance(first, int) or first < 0:
    raise UserError(
      f"{path}: first_k_dense_replace={first!r}: expected int, at least 0"
    )
  return {
    "first": (Layer(experts=False),) * first,
    "pattern": (Layer(),),
    "dense_mlp_dim": number(path, raw, ["intermediate_size"]),
    "shared_dim": width * shared,
    "attention_bias": bool(raw.get("attention_bias")),
    "qk_norm": bool(raw.get("use_qk_norm")),
    "norm_topk_prob": raw.get("norm_topk_prob") in (None, True),
  } | _grouped_router(path, raw)


def _grouped_router(path, raw):
  """DeepSeek-V3's router (arXiv 2412.19437, sec. 2.1.2)."""
  kinds = {"routed_scaling_factor": float, "n_group": int, "topk_group": int}
  return {
    key: number(path, raw, [key], default=1, kind=kind)
    for key, kind in kinds.items()
  }


def _write_glm(cfg):
  return {
    "intermediate_size": cfg.dense_dim,
    "n_shared_experts": cfg.shared_dim // cfg.mlp_dim,
    "first_k_dense_replace": len(cfg.first),
    "use_qk_norm": cfg.qk_norm,
    "routed_scaling_factor": cfg.routed_scaling_factor,
    "n_group": cfg.n_group,
    "topk_group": cfg.topk_group,
    "num_nextn_predict_layers": 0,
    "attention_bias": cfg.attention_bias,
  }


def _read_olmoe(path, raw):
  heads, width = raw.get("num_attention_heads"), raw.get("hidden_size")
  if raw.get("head_dim") and raw["head_dim"] * heads != width:
    raise UserError(
      f"{path}: head_dim={raw['head_dim']}: expected hidden_size={width} /"
      f" num_attention_heads={heads}, which is OLMoE's"
    )
  return {}


def _read_minimax(path, raw):
  kinds = raw.get("attn_type_list") or [1]
  if set(kinds) != {1}:
    raise UserError(
      f"{path}: attn_type_list: expected 1, full attention, for every layer"
    )
  return {}


def _read_gpt_oss(path, raw):
  window = number(path, raw, ["sliding_window"])
  layers = number(path, raw, ["num_hidden_layers"])
  alternating = ["sliding_attention", "full_attention"] * (layers // 2)
  if (raw.get("layer_types") or alternating) != alternating:
    raise UserError(
      f"{path}: layer_types: expected 'sliding_attention' and 'full_attention' "
      f"in turns, {layers} of them"
    )
  # Without these keys transformers takes the YaRN of the published model.
  if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
    raise UserError(f"{path}: rope_scaling is missing")
  return {
    "pattern": (Layer(window=window), Layer()),
    "swiglu_limit": number(
      path, raw, ["swiglu_limit"], default=7.0, kind=float
    ),
  }


def _write_gpt_oss(cfg):
  windowed, full = cfg.pattern
  if cfg.first:
    raise UserError("gpt-oss has no first layers that differ from the others")
  names = {windowed: "sliding_attention", full: "full_attention"}
  return {
    "sliding_window": windowed.window,
    "layer_types": [names[layer] for layer in cfg.layers],
    "swiglu_limit": cfg.swiglu_limit,
    "attention_bias": True,
    # With None transformers takes the YaRN of the published model.
    "rope_scaling": scaling_to_hf(cfg.rope_scaling)
    if cfg.rope_scaling
    else {"rope_type": "default"},
  }


def _read_qwen2_moe(path, raw):
  key = "shared_expert_intermediate_size"
  return {"shared_dim": number(path, raw, [key])}


# Every layer has experts.
_ALL_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
# By model_type.
FAMILIES = {
  "qwen3": Family("Qwen3ForCausalLM", {}),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    {},
    experts=("num_experts", "moe_intermediate_size"),
    supported={key: (value,) for key, value in _ALL_LAYERS.items()},
    write=lambda cfg: _ALL_LAYERS,
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    {"attention_bias": True, "qk_norm": False},
    supported={"attention_bias": (False, True)},  # never on the output
  ),
  "qwen2_moe": Family(
    "Qwen2MoeForCausalLM",
    {"attention_bias": True, "qk_norm": False, "shared_gate": True},
    experts=("num_experts", "moe_intermediate_size"),
    supported={
      **{key: (value,) for key, value in _ALL_LAYERS.items()},
      "attention_bias": (False, True),
      "qkv_bias": (True,),
      "shared_expert_intermediate_size": None,
    },
    names="qwen2_moe",
    read=_read_qwen2_moe,
    write=lambda cfg: (
      {"shared_expert_intermediate_size": cfg.shared_dim} | _ALL_LAYERS
    ),
  ),
  "llama": Family("LlamaForCausalLM", {"qk_norm": False}),
  "olmoe": Family(
    "OlmoeForCausalLM",
    {"qk_norm_over_heads": True},
    experts=("num_experts", "intermediate_size"),
    supported={"clip_qkv": (), "sliding_window": ()},
    read=_read_olmoe,
  ),
  "mixtral": Family(
    "MixtralForCausalLM",
    {"qk_norm": False, "norm_topk_prob": True},
    experts=("num_local_experts", "intermediate_size"),
    rope_theta=1e6,
    supported={"router_jitter_noise": (0,), "sliding_window": ()},
    names="mixtral",
  ),
  "glm4_moe": Family(
    "Glm4MoeForCausalLM",
    {"scoring_func": "sigmoid", "choice_bias": True},
    experts=("n_routed_experts", "moe_intermediate_size"),
    supported={
      "attention_bias": (False, True),  # never on the output
      "n_shared_experts": None,
    },
    partial_rotary_factor=0.5,
    required=("head_dim", "num_key_value_heads"),
    read=_read_glm,
    write=_write_glm,
  ),
  "minimax_m2": Family(
    "MiniMaxM2ForCausalLM",
    {
      "scoring_func": "sigmoid",
      "choice_bias": True,
      "qk_norm_over_heads": True,
      "norm_topk_prob": True,
    },
    experts=("num_local_experts", "intermediate_size"),
    rope_theta=5e6,
    supported={
      "router_jitter_noise": (0,),
      "scoring_func": ("sigmoid",),
      "use_qk_norm": (True,),
      "qk_norm_type": ("per_layer",),
      "use_routing_bias": (True,),
      "shared_intermediate_size": (0,),
      "rotary_dim": None,
    },
    names="mixtral",
    partial_rotary_factor=1.0,
    read=_read_minimax,
    write=lambda cfg: {
      "rotary_dim": cfg.rotary_width,
      # What servers read that run the model's own code.
      "scoring_func": "sigmoid",
      "use_routing_bias": True,
      "use_qk_norm": True,
      "qk_norm_type": "per_layer",
    },
    required=("head_dim", "num_key_value_heads"),
  ),
  "gpt_oss": Family(
    "GptOssForCausalLM",
    {
      "attention_bias": True,
      "output_bias": True,
      "sinks": True,
      "qk_norm": False,
      "norm_topk_prob": True,
      "router_bias": True,
      "expert_bias": True,
      "norm_rounds_last": True,
    },
    experts=("num_local_experts", "intermediate_size"),
    rope_theta=1.5e5,
    supported={
      "attention_bias": (True,),
      "swiglu_alpha": (1.702,),
      "layer_types": None,
    },
    names="gpt_oss",
    required=("head_dim", "num_key_value_heads"),
    read=_read_gpt_oss,
    write=_write_gpt_oss,
  ),
}
_DELTA_NET = (
  "gated delta-net layers, an output gate of attention, and norms by 1 + weight"
)
# What ModelConfig lacks, by the start of a model_type.
_MISSING = {
  "deepseek_v3": "latent attention",
  "qwen3_5": _DELTA_NET,
  "qwen3_next": _DELTA_NET,
}
# By key of any family: the supported values, or None where `read` checks them.
# A key may also be missing.
_SUPPORTED = {
  "attention_bias": (False,),  # on the output projection, too
  "hidden_act": ("silu",),
  "mlp_bias": (False,),
  "n_shared_experts": (0,),
  "num_shared_experts": (0,),
  "shared_expert_intermediate_size": (0,),
  "use_sliding_window": (False,),
}


def require_family(path, model_type) -> Family:
  """UserError, with what is missing, unless it is one of `FAMILIES`."""
  if model_type in FAMILIES:
    return FAMILIES[model_type]
  error = unsupported(path, "model_type", model_type, sorted(FAMILIES))
  for name, missing in _MISSING.items():
    if str(model_type).startswith(name):
      error = UserError(f"{error}; missing for it: {missing}")
  raise error


def require_supported(path, raw, family: Family) -> None:
  """UserError if a value means what `ModelConfig` lacks."""
  quantised.require_supported(path, raw.get("quantization_config"))
  supported = _SUPPORTED | (family.supported or {})
  for key, values in supported.items():
    if values is None or raw.get(key) is None or raw[key] in values:
      continue
    expected = f"expected {values[0]!r}" if values else "not supported"
    raise UserError(f"{path}: {key}={str(raw[key])[:80]}: {expected}")
  for kind in raw.get("layer_types") or ():
    if kind != "full_attention" and "layer_types" not in supported:
      raise UserError(
        f"{path}: layer_types holds {kind!r}: expected 'full_attention'"
      )
