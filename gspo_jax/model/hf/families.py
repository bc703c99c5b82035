"""The families of models: what a config.json of each says, and how to write it.

A family is an architecture of transformers.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from etils import epath

from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.hf import quantised
from gspo_jax.model.hf.rope import scaling_to_hf
from gspo_jax.model.hf.values import number, unsupported
from gspo_jax.record import json_file
from gspo_jax.runtime.errors import UserError, either

_DENSE = {"intermediate_size": ("mlp_dim", int, None)}


class Family(NamedTuple):
  """An architecture of transformers."""

  loads_with: str  # its class for language models
  fields: dict  # the fields of ModelConfig that it implies
  # By key of a number above 0: its field of ModelConfig, its type, the default,
  # and other names of the key that are read, too.
  numbers: Mapping = MappingProxyType(_DENSE)
  # By key of a flag: its field, and the default, also of null.
  flags: Mapping = MappingProxyType({})
  rope_theta: float = 1e4  # where config.json has none
  scalings: tuple[str, ...] = ("llama3", "yarn")  # of rotary embeddings
  supported: Mapping = MappingProxyType({})  # as `_SUPPORTED`
  # The only supported values of keys that an export has, because servers read
  # them that run the model's own code.
  constants: Mapping = MappingProxyType({})
  # Of its tensors, the first that a parameter has in its `other_names`.
  names: tuple[str, ...] = ()
  # The rotated share of a head where config.json has none; None: always all.
  partial_rotary_factor: float | None = None
  # Keys that must be there: without them transformers takes a number of the
  # published model.
  required: tuple[str, ...] = ()
  # What transformers takes for keys that are not there.
  defaults: Mapping = MappingProxyType({})
  # (path, config.json) -> more fields of ModelConfig, and the inverse.
  read: Callable[[epath.Path, dict], dict] = lambda path, raw: {}
  write: Callable[[ModelConfig], dict] = lambda cfg: {}


def _read_deepseek_experts(path, raw, mixer="attention"):
  """DeepSeek-V3's layers and shared expert (arXiv 2412.19437, sec. 2.1.2)."""
  first = raw.get("first_k_dense_replace", 1)
  if not isinstance(first, int) or first < 0:
    raise UserError(
      f"{path}: first_k_dense_replace={first!r}: expected int, at least 0"
    )
  dense = Layer(experts=False, mixer=mixer)
  if first >= number(path, raw, ["num_hidden_layers"]):
    width = number(path, raw, ["intermediate_size"])
    none = {"num_experts": 0, "n_group": 1, "topk_group": 1}
    return none | {"pattern": (dense,), "mlp_dim": width}
  width = number(path, raw, ["moe_intermediate_size"])
  shared = number(path, raw, ["n_shared_experts"])
  return {
    "first": (dense,) * first,
    "pattern": (Layer(mixer=mixer),),
    "dense_mlp_dim": number(path, raw, ["intermediate_size"]),
    "shared_dim": width * shared,
  }


def _write_deepseek_experts(cfg):
  return {
    "n_shared_experts": cfg.shared_dim // cfg.mlp_dim,
    "first_k_dense_replace": len(cfg.first),
    "num_nextn_predict_layers": 0,
  }


def _read_mla(path, raw):
  if raw.get("first_k_dense_replace") is None:
    raise UserError(f"{path}: first_k_dense_replace is missing")
  width = lambda key: number(path, raw, [key])
  rope = width("qk_rope_head_dim")
  # Without these keys transformers takes numbers of DeepSeek-V3.
  if "q_lora_rank" not in raw:
    raise UserError(f"{path}: q_lora_rank is missing; null: no latent")
  is_plain = raw["q_lora_rank"] is None
  return {
    "q_lora_rank": 0 if is_plain else width("q_lora_rank"),
    "head_dim": width("qk_nope_head_dim") + rope,
    "rotary_dim": rope,
    "rope_interleave": bool(raw.get("rope_interleave", True)),
  } | _read_deepseek_experts(path, raw, "mla")


def _write_mla(cfg):
  return _write_deepseek_experts(cfg) | {
    "q_lora_rank": cfg.q_lora_rank or None,
    "qk_nope_head_dim": cfg.head_dim - cfg.rotary_width,
    "qk_rope_head_dim": cfg.rotary_width,
    "head_dim": cfg.rotary_width,  # what transformers writes
    "rope_interleave": cfg.rope_interleave,
  }


def _read_glm_lite(path, raw):
  count = number(path, raw, ["num_hidden_layers"])
  kinds = {"dense": False, "sparse": True}
  default = ["dense"] + ["sparse"] * (count - 1)
  sparse = _layers(path, raw, "mlp_layer_types", default, kinds)
  first = sparse.index(True) if any(sparse) else count
  dense = raw.get("first_k_dense_replace")  # what servers read
  dense = first if dense is None else dense
  if dense != first or not all(sparse[first:]):
    raise UserError(
      f"{path}: mlp_layer_types: expected 'dense' for the first layers,"
      f" as many as first_k_dense_replace={dense!r}, then 'sparse'"
    )
  return _read_mla(path, raw | {"first_k_dense_replace": first})


def _write_glm_lite(cfg):
  kinds = ["sparse" if layer.experts else "dense" for layer in cfg.layers]
  return _write_mla(cfg) | {"mlp_layer_types": kinds}


def _layers(path, raw, key, default, kinds: dict) -> tuple:
  """What a list of names says of each layer."""
  count = number(path, raw, ["num_hidden_layers"])
  names = raw.get(key) or default
  if len(names) != count or not set(names) <= set(kinds):
    raise UserError(
      f"{path}: {key}: expected {either(kinds)} for each of the {count} layers"
    )
  return tuple(kinds[name] for name in names)


_LINEAR, _FULL = "linear_attention", "full_attention"


def _read_hybrid(path, raw):
  """Layers of gated DeltaNets and of attention."""
  experts = "num_experts_per_tok" in FAMILIES[raw["model_type"]].numbers
  interval = number(path, raw, ["full_attention_interval"], default=4)
  kinds = {
    _LINEAR: Layer(experts=experts, mixer="delta_net"),
    _FULL: Layer(experts=experts),
  }
  return _pattern(path, raw, [_LINEAR] * (interval - 1) + [_FULL], kinds)


def _pattern(path, raw, turns: list, kinds: dict, key="layer_types"):
  """The shortest pattern of the layers' kinds, by default `turns`."""
  count = number(path, raw, ["num_hidden_layers"])
  default = [turns[i % len(turns)] for i in range(count)]
  layers = _layers(path, raw, key, default, kinds)
  patterns = (layers[:k] for k in range(1, count + 1) if count % k == 0)
  pattern = next(x for x in patterns if x * (count // len(x)) == layers)
  return {"pattern": pattern}


def _write_hybrid(cfg):
  names = {"delta_net": _LINEAR, "attention": _FULL}
  return {"layer_types": [names.get(layer.mixer) for layer in cfg.layers]}


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


def _read_window(path, raw):
  """One window in all layers, or none."""
  if raw["sliding_window"] is None:
    return {}
  window = number(path, raw, ["sliding_window"])
  return {"pattern": (Layer(window=window, experts=False),)}


def _read_dots1(path, raw):
  """Without the windows of the layers from `max_window_layers` on."""
  layers = number(path, raw, ["num_hidden_layers"])
  first = number(path, raw, ["max_window_layers"])
  has_windows = raw["sliding_window"] is not None and first < layers
  if has_windows and not raw.get("layer_types"):
    raise UserError(
      f"{path}: max_window_layers={first}: expected at least {layers}, for no "
      "layer here has a window"
    )
  return _read_deepseek_experts(path, raw)


def _read_smollm3(path, raw):
  """Layers with (1) and without (0) rotary embeddings."""
  interval = number(path, raw, ["no_rope_layer_interval"], default=4)
  kinds = {x: Layer(experts=False, rotary=bool(x)) for x in (0, 1)}
  turns = [1] * (interval - 1) + [0]
  return _pattern(path, raw, turns, kinds, "no_rope_layers")


_SLIDING = "sliding_attention"


def _read_gpt_oss(path, raw):
  window = number(path, raw, ["sliding_window"])
  # Without these keys transformers takes the YaRN of the published model.
  if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
    raise UserError(f"{path}: rope_scaling is missing")
  kinds = {_SLIDING: Layer(window=window), _FULL: Layer()}
  return _pattern(path, raw, [_SLIDING, _FULL], kinds)


def _write_gpt_oss(cfg):
  windows = [layer.window for layer in cfg.layers]
  return {
    "sliding_window": max(filter(None, windows), default=128),
    "layer_types": [_SLIDING if window else _FULL for window in windows],
    # With None transformers takes the YaRN of the published model.
    "rope_scaling": scaling_to_hf(cfg.rope_scaling)
    if cfg.rope_scaling
    else {"rope_type": "default"},
  }


# Every layer has experts.
_ALL_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_SHARED = {"shared_expert_intermediate_size": ("shared_dim", int, None)}
_NORMED = {"norm_topk_prob": ("norm_topk_prob", True)}
_NOT_NORMED = {"norm_topk_prob": ("norm_topk_prob", False)}


def _experts(count, width="moe_intermediate_size"):
  """Rows of `Family.numbers`, for experts in every layer."""
  others = "num_experts", "num_local_experts"
  return {
    count: ("num_experts", int, None, *others),
    width: ("mlp_dim", int, None),
    "num_experts_per_tok": ("experts_per_token", int, None),
  }


def _numbers(*names, kind=int, default=None):
  """Rows of `Family.numbers` whose keys are the fields."""
  return {name: (name, kind, default) for name in names}


def _router(default):
  scale = _numbers("routed_scaling_factor", kind=float, default=default)
  return scale | _numbers("n_group", "topk_group", default=default)


_LINEAR_NUMBERS = _numbers(
  *("linear_num_key_heads", "linear_num_value_heads"),
  *("linear_key_head_dim", "linear_value_head_dim"),
) | _numbers("linear_conv_kernel_dim", default=4)
_HYBRID_FIELDS = {
  "output_gate": True,
  "norm_plus_one": True,
  "norm_rounds_last": True,
}
_HYBRID = {"attn_output_gate": True}
_QWEN3_NEXT = Family(
  "Qwen3NextForCausalLM",
  _HYBRID_FIELDS | {"shared_gate": True, "linear_fused": True},
  supported={"layer_types": None},
  constants=_HYBRID | _ALL_LAYERS,
  names=("qwen2_moe",),
  partial_rotary_factor=0.25,
  required=("head_dim", "num_key_value_heads"),
  numbers=_experts("num_experts") | _LINEAR_NUMBERS | _SHARED,
  flags=_NORMED,
  read=_read_hybrid,
  write=_write_hybrid,
)
_DEEPSEEK = Family(
  "DeepseekV3ForCausalLM",
  {"scoring_func": "sigmoid", "choice_bias": True, "qk_norm": False},
  supported={"n_shared_experts": None},
  constants={
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
  },
  required=("num_key_value_heads",),
  numbers=_experts("n_routed_experts")
  | _router(None)
  | _numbers("kv_lora_rank", "v_head_dim"),
  flags=_NORMED,
  read=_read_mla,
  write=_write_mla,
)
_LLAMA = Family("LlamaForCausalLM", {"qk_norm": False})
_WIDE_LLAMA = _LLAMA._replace(
  defaults={"head_dim": 128},
  supported={"qkv_bias": (False,), "bias": (False,), "clip_qkv": ()},
)
_MISTRAL = _LLAMA._replace(
  loads_with="MistralForCausalLM",
  defaults={"sliding_window": 4096},
  read=_read_window,
  write=lambda cfg: {"sliding_window": cfg.layers[0].window},
)
_GLM = Family(
  "Glm4MoeForCausalLM",
  {"scoring_func": "sigmoid", "choice_bias": True},
  supported={"n_shared_experts": None},
  partial_rotary_factor=0.5,
  required=("head_dim", "num_key_value_heads"),
  numbers=_experts("n_routed_experts") | _router(1),
  flags={
    **_NORMED,
    "attention_bias": ("attention_bias", False),  # never on the output
    "use_qk_norm": ("qk_norm", False),
  },
  read=_read_deepseek_experts,
  write=_write_deepseek_experts,
)
# By model_type.
FAMILIES = {
  "qwen3": Family("Qwen3ForCausalLM", {}, defaults={"head_dim": 128}),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    {},
    constants=_ALL_LAYERS,
    numbers=_experts("num_experts"),
    flags=_NOT_NORMED,
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    {"attention_bias": True, "qk_norm": False},
    supported={"attention_bias": (False, True)},  # never on the output
  ),
  "qwen2_moe": Family(
    "Qwen2MoeForCausalLM",
    {"attention_bias": True, "qk_norm": False, "shared_gate": True},
    supported={"attention_bias": (False, True), "qkv_bias": (True,)},
    constants=_ALL_LAYERS,
    names=("qwen2_moe",),
    numbers=_experts("num_experts") | _SHARED,
    flags=_NOT_NORMED,
  ),
  "llama": _LLAMA,
  "internlm3": _WIDE_LLAMA,
  "iquestcoder": _WIDE_LLAMA,
  "mistral": _MISTRAL,
  "phi3": _MISTRAL._replace(
    loads_with="Phi3ForCausalLM",
    defaults={"sliding_window": None},
    partial_rotary_factor=1.0,
    scalings=(),  # its class takes "yarn" for LongRoPE
    names=("phi3",),
  ),
  "seed_oss": _LLAMA._replace(
    loads_with="SeedOssForCausalLM",
    required=("head_dim", "num_key_value_heads"),
    flags={
      "attention_bias": ("attention_bias", True),
      "attention_out_bias": ("output_bias", False),
    },
  ),
  "smollm3": _LLAMA._replace(
    loads_with="SmolLM3ForCausalLM",
    required=("num_key_value_heads",),
    defaults={"tie_word_embeddings": True},
    rope_theta=2e6,
    read=_read_smollm3,
    write=lambda cfg: {"no_rope_layers": [int(x.rotary) for x in cfg.layers]},
  ),
  "olmoe": Family(
    "OlmoeForCausalLM",
    {"qk_norm_over_heads": True},
    numbers=_experts("num_experts", "intermediate_size"),
    flags=_NOT_NORMED,
    supported={"clip_qkv": (), "sliding_window": ()},
    read=_read_olmoe,
  ),
  "mixtral": Family(
    "MixtralForCausalLM",
    {"qk_norm": False, "norm_topk_prob": True},
    numbers=_experts("num_local_experts", "intermediate_size"),
    rope_theta=1e6,
    supported={"router_jitter_noise": (0,), "sliding_window": ()},
    names=("mixtral",),
  ),
  "glm4_moe": _GLM,
  "dots1": _GLM._replace(
    loads_with="Dots1ForCausalLM",
    partial_rotary_factor=None,
    required=("num_key_value_heads",),
    flags=_NOT_NORMED,
    defaults={
      "first_k_dense_replace": 0,
      "max_window_layers": 62,
      "sliding_window": 4096,
    },
    read=_read_dots1,
  ),
  "minimax_m2": Family(
    "MiniMaxM2ForCausalLM",
    {
      "scoring_func": "sigmoid",
      "choice_bias": True,
      "qk_norm_over_heads": True,
      "norm_topk_prob": True,
    },
    numbers=_experts("num_local_experts", "intermediate_size"),
    rope_theta=5e6,
    supported={
      "router_jitter_noise": (0,),
      "shared_intermediate_size": (0,),
      "rotary_dim": None,
    },
    constants={
      "scoring_func": "sigmoid",
      "use_qk_norm": True,
      "qk_norm_type": "per_layer",
      "use_routing_bias": True,
    },
    names=("mixtral",),
    partial_rotary_factor=1.0,
    read=_read_minimax,
    write=lambda cfg: {"rotary_dim": cfg.rotary_width},
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
    rope_theta=1.5e5,
    supported={"swiglu_alpha": (1.702,), "layer_types": None},
    constants={"attention_bias": True},
    names=("gpt_oss",),
    required=("head_dim", "num_key_value_heads"),
    numbers=_experts("num_local_experts", "intermediate_size")
    | _numbers("swiglu_limit", kind=float, default=7.0),
    read=_read_gpt_oss,
    write=_write_gpt_oss,
  ),
  "qwen3_5_moe_text": _QWEN3_NEXT._replace(
    loads_with="Qwen3_5MoeForCausalLM",
    fields=_HYBRID_FIELDS | {"shared_gate": True, "norm_topk_prob": True},
    flags={},
    supported=_QWEN3_NEXT.supported | {"norm_topk_prob": (True,)},
  ),
  "qwen3_next": _QWEN3_NEXT,
  "qwen3_5_text": _QWEN3_NEXT._replace(
    loads_with="Qwen3_5ForCausalLM",
    fields=_HYBRID_FIELDS,
    numbers=_DENSE | _LINEAR_NUMBERS,
    flags={},
    constants=_HYBRID,
    names=(),
  ),
  "deepseek_v3": _DEEPSEEK,
  "kimi_k2": _DEEPSEEK,
  "sarvam_mla": _DEEPSEEK,
  "glm4_moe_lite": _DEEPSEEK._replace(
    loads_with="Glm4MoeLiteForCausalLM",
    read=_read_glm_lite,
    write=_write_glm_lite,
  ),
}
# Models of images and texts: the language model of each, which has the keys of
# `text_config`.
WITH_IMAGES = {
  "qwen3_5": "qwen3_5_text",
  "qwen3_5_moe": "qwen3_5_moe_text",
  "qwen3_vl": "qwen3",
  "qwen3_vl_moe": "qwen3_moe",
  "qwen2_5_vl": "qwen2",
  "mistral3": "mistral",
}
# By model_type: what other causal language models of transformers have.
_FILE = Path(__file__).with_name("refused.json")
_WHAT = json_file.read(_FILE).items()
_REFUSED = {name: what for what, names in _WHAT for name in names.split()}
# By key of any family: the supported values, or None where `read` checks them.
# A key may also be missing, or be a number or a flag of a family.
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
  """UserError unless it is one of `FAMILIES`."""
  if model_type in FAMILIES:
    return FAMILIES[model_type]
  if what := _REFUSED.get(model_type):
    raise UserError(
      f"{path}: model_type={model_type!r}: not supported: it has {what}"
    )
  supported = sorted({*FAMILIES, *WITH_IMAGES})
  raise unsupported(path, "model_type", model_type, supported)


def require_supported(path, raw, family: Family) -> None:
  """UserError if a value means what `ModelConfig` lacks."""
  quantised.require_supported(path, raw.get("quantization_config"))
  constants = {key: (value,) for key, value in family.constants.items()}
  rows = dict.fromkeys(family.flags, (False, True))
  rows |= dict.fromkeys(family.numbers)
  supported = _SUPPORTED | rows | family.supported | constants
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
