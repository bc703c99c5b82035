"""config.json of a Hugging Face checkpoint: to a ModelConfig, and back.

Some keys have two names, such as `torch_dtype` and `dtype`. Both are read; the
older one is written, because releases 4 and 5 of transformers load it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from etils import epath

from gspo_jax.model.config import Layer, ModelConfig, changed
from gspo_jax.model.hf import quantised
from gspo_jax.model.rotary import Llama3Scaling, YarnScaling, yarn_mscale
from gspo_jax.record import json_file
from gspo_jax.runtime.errors import (
  UserError,
  content_of,
  how_to_download,
  with_reason,
)

_EVERY_LAYER_HAS_EXPERTS = {
  "decoder_sparse_step": (1,),
  "mlp_only_layers": ([],),
}


class _Family(NamedTuple):
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
  # Keys for which the class in transformers has defaults of its own.
  required: tuple[str, ...] = ()
  # (path, config.json) -> more fields of ModelConfig, and the inverse.
  read: Callable[[epath.Path, dict], dict] = lambda path, raw: {}
  write: Callable[[ModelConfig], dict] = lambda cfg: {}


def _read_glm(path, raw):
  width = _number(path, raw, ["moe_intermediate_size"])
  shared = _number(path, raw, ["n_shared_experts"])
  first = raw.get("first_k_dense_replace", 1)
  if not isinstance(first, int) or first < 0:
    raise UserError(
      f"{path}: first_k_dense_replace={first!r}: expected int, at least 0"
    )
  return {
    "first": (Layer(experts=False),) * first,
    "pattern": (Layer(),),
    "dense_mlp_dim": _number(path, raw, ["intermediate_size"]),
    "shared_dim": width * shared,
    "attention_bias": bool(raw.get("attention_bias")),
    "qk_norm": bool(raw.get("use_qk_norm")),
    "norm_topk_prob": raw.get("norm_topk_prob") in (None, True),
  } | _grouped_router(path, raw)


def _grouped_router(path, raw):
  """DeepSeek-V3's router (arXiv 2412.19437, sec. 2.1.2)."""
  number = lambda key, kind=int: _number(path, raw, [key], default=1, kind=kind)
  return {
    "routed_scaling_factor": number("routed_scaling_factor", float),
    "n_group": number("n_group"),
    "topk_group": number("topk_group"),
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
  window = _number(path, raw, ["sliding_window"])
  layers = _number(path, raw, ["num_hidden_layers"])
  alternating = ["sliding_attention", "full_attention"] * (layers // 2)
  if (raw.get("layer_types") or alternating) != alternating:
    raise UserError(
      f"{path}: layer_types: expected 'sliding_attention' and 'full_attention' "
      f"in turns, {layers} of them"
    )
  # transformers would take a YaRN of its own.
  if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
    raise UserError(f"{path}: rope_scaling is missing")
  return {
    "pattern": (Layer(window=window), Layer()),
    "swiglu_limit": _number(
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
    # None would be the class' own YaRN.
    "rope_scaling": _scaling_to_hf(cfg.rope_scaling)
    if cfg.rope_scaling
    else {"rope_type": "default"},
  }


def _read_qwen2_moe(path, raw):
  key = "shared_expert_intermediate_size"
  return {"shared_dim": _number(path, raw, [key])}


# By model_type.
FAMILIES = {
  "qwen3": _Family("Qwen3ForCausalLM", {}),
  "qwen3_moe": _Family(
    "Qwen3MoeForCausalLM",
    {},
    experts=("num_experts", "moe_intermediate_size"),
    supported=_EVERY_LAYER_HAS_EXPERTS,
    write=lambda cfg: {"decoder_sparse_step": 1, "mlp_only_layers": []},
  ),
  "qwen2": _Family(
    "Qwen2ForCausalLM",
    {"attention_bias": True, "qk_norm": False},
    supported={"attention_bias": (False, True)},  # never on the output
  ),
  "qwen2_moe": _Family(
    "Qwen2MoeForCausalLM",
    {"attention_bias": True, "qk_norm": False, "shared_gate": True},
    experts=("num_experts", "moe_intermediate_size"),
    supported=_EVERY_LAYER_HAS_EXPERTS
    | {
      "attention_bias": (False, True),
      "qkv_bias": (True,),
      "shared_expert_intermediate_size": None,
    },
    names="qwen2_moe",
    read=_read_qwen2_moe,
    write=lambda cfg: {
      "shared_expert_intermediate_size": cfg.shared_dim,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [],
    },
  ),
  "llama": _Family("LlamaForCausalLM", {"qk_norm": False}),
  "olmoe": _Family(
    "OlmoeForCausalLM",
    {"qk_norm_over_heads": True},
    experts=("num_experts", "intermediate_size"),
    supported={"clip_qkv": (), "sliding_window": ()},
    read=_read_olmoe,
  ),
  "mixtral": _Family(
    "MixtralForCausalLM",
    {"qk_norm": False, "norm_topk_prob": True},
    experts=("num_local_experts", "intermediate_size"),
    rope_theta=1e6,
    supported={"router_jitter_noise": (0,), "sliding_window": ()},
    names="mixtral",
  ),
  "glm4_moe": _Family(
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
  "minimax_m2": _Family(
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
  "gpt_oss": _Family(
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
# Fields that a config.json does not have: how we run the model.
_RUNTIME_FIELDS = ("dtype", "remat", "unroll", "lora")


def config_from_hf(folder: epath.PathLike, **changes) -> ModelConfig:
  """The `ModelConfig` of the checkpoint in `folder`, with some fields changed.

  Raises:
    UserError: no config.json of one of `FAMILIES`, or a value in it that
      `ModelConfig` does not support.
  """
  path = epath.Path(folder) / "config.json"
  raw = read(path)
  with content_of(str(path)):
    cfg = _model_config(path, raw)
  return changed(cfg, **changes)


def context_length(folder: epath.PathLike) -> int | None:
  """The maximum tokens of a text, from the config.json in `folder`.

  The larger of max_position_embeddings and the length to which a rotary scaling
  stretches texts; None: config.json has neither.
  """
  key, path = "max_position_embeddings", epath.Path(folder) / "config.json"
  raw, scaling = read(path), config_from_hf(folder).rope_scaling
  lengths = [int(scaling.factor * scaling.length)] if scaling else []
  if raw.get(key) is not None:
    lengths.append(_number(path, raw, [key]))
  return max(lengths, default=None)


def _model_config(path, raw) -> ModelConfig:
  model_type = raw.get("model_type")
  family = _require_family(path, model_type)
  _require_supported(path, raw, family)
  get = lambda *names, **options: _number(path, raw, names, **options)
  for key in family.required:
    get(key)
  heads, width = get("num_attention_heads"), get("hidden_size")
  # The default of Qwen3's class in transformers is 128 for any width.
  head_dim = 128 if model_type == "qwen3" else width // heads
  head_dim = get("head_dim", default=head_dim)
  theta, scaling = _rope(path, raw, family)
  dtype = raw.get("torch_dtype") or raw.get("dtype")
  fields = family.fields | family.read(path, raw)
  if family.experts:
    number, expert_width = family.experts
    fields = {
      "mlp_dim": get(expert_width),
      "num_experts": get(number, "num_experts", "num_local_experts"),
      "experts_per_token": get("num_experts_per_tok"),
      "norm_topk_prob": bool(raw.get("norm_topk_prob")),
    } | fields
  else:
    fields["mlp_dim"] = get("intermediate_size")
  return ModelConfig(
    vocab_size=get("vocab_size"),
    num_layers=get("num_hidden_layers"),
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=get("num_key_value_heads", default=heads),
    head_dim=head_dim,
    rotary_dim=_rotary_dim(path, raw, family, head_dim),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=get("rms_norm_eps", kind=float),
    tie_embeddings=bool(raw.get("tie_word_embeddings")),
    dtype="float32" if dtype == "float32" else "bfloat16",
    **fields,
  )


def read(path: epath.Path) -> dict:
  """Reads a JSON file of a checkpoint's folder; UserError as `json_file`."""
  with with_reason(str(path)):
    if not path.parent.is_dir():
      raise UserError(
        f"{str(path.parent)!r}: expected a checkpoint's folder"
        + how_to_download(path.parent)
      )
  return json_file.read(path)


def _unsupported(path, key, value, supported) -> UserError:
  """No nearest choice: another architecture is not a typing mistake."""
  return UserError(
    f"{path}: {key}={value!r}: not supported; supported are: "
    f"{', '.join(supported)}"
  )


def _require_family(path, model_type) -> _Family:
  if model_type in FAMILIES:
    return FAMILIES[model_type]
  error = _unsupported(path, "model_type", model_type, sorted(FAMILIES))
  for name, missing in _MISSING.items():
    if str(model_type).startswith(name):
      error = UserError(f"{error}; missing for it: {missing}")
  raise error


def _require_supported(path, raw, family):
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


def _number(path, raw, names, *, default=None, kind=int):
  value = next((raw[n] for n in names if raw.get(n) is not None), default)
  if value is None:
    raise UserError(f"{path}: {' or '.join(names)} is missing")
  ok = isinstance(value, (int, kind)) and not isinstance(value, bool)
  if not ok or value <= 0:
    raise UserError(
      f"{path}: {names[0]}={value!r}: expected {kind.__name__} above 0"
    )
  return kind(value)


def _rope(path, raw, family):
  rope = dict(raw.get("rope_scaling") or {})
  rope |= raw.get("rope_parameters") or {}
  if kinds := [name for name, x in rope.items() if isinstance(x, dict)]:
    raise UserError(
      f"{path}: rope_parameters are of {', '.join(kinds)}: expected one set "
      "for all layers"
    )
  theta = rope.get("rope_theta") or raw.get("rope_theta") or family.rope_theta
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind == "default":
    return float(theta), None
  if kind not in _SCALINGS:
    raise _unsupported(path, "rope_type", kind, ("default", *_SCALINGS))
  # Transformers takes the first of these places.
  max_length = raw.get("max_position_embeddings")
  lengths = raw.get(_LENGTH), rope.get(_LENGTH), max_length
  rope[_LENGTH] = next((n for n in lengths if n is not None), None)
  get = lambda key, **options: _number(path, rope, [key], **options)
  scaling, arguments = _SCALINGS[kind]
  arguments = arguments(get, rope, max_length)
  try:
    return float(theta), scaling(*arguments)
  except UserError as error:
    raise UserError(f"{path}: {error}") from None


def _rotary_dim(path, raw, family, head_dim) -> int | None:
  """The rotated columns of a head; None: all."""
  given = (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})
  default = family.partial_rotary_factor or 1.0
  share = raw.get("partial_rotary_factor", default)
  share = given.get("partial_rotary_factor", share)
  if "rotary_dim" in (family.supported or {}) and raw.get("rotary_dim"):
    share = _number(path, raw, ["rotary_dim"]) / head_dim
  if share is None:  # which transformers reads as all
    return None
  if share == 1:
    return None
  if family.partial_rotary_factor is None:
    raise UserError(f"{path}: partial_rotary_factor={share}: expected 1")
  return int(head_dim * share)


def _llama3(get, rope, max_length):
  del rope, max_length
  keys = "factor", "low_freq_factor", "high_freq_factor"
  length = int(get(_LENGTH, kind=float))
  return *(get(key, kind=float) for key in keys), length


def _yarn(get, rope, max_length):
  length = int(get(_LENGTH, kind=float))
  number = lambda key, default=None: get(key, kind=float, default=default)
  factor = number("factor", max_length and max_length / length)
  attention_factor = None
  if rope.get("attention_factor") is not None:
    attention_factor = number("attention_factor")
  elif rope.get("mscale") and rope.get("mscale_all_dim"):
    mscales = number("mscale"), number("mscale_all_dim")
    over, under = (yarn_mscale(factor, mscale) for mscale in mscales)
    attention_factor = over / under
  betas = number("beta_fast", 32.0), number("beta_slow", 1.0)
  truncate = bool(rope.get("truncate", True))
  return factor, length, *betas, attention_factor, truncate


_LENGTH = "original_max_position_embeddings"
_SCALINGS = {"llama3": (Llama3Scaling, _llama3), "yarn": (YarnScaling, _yarn)}


def _scaling_to_hf(scaling) -> dict:
  if isinstance(scaling, Llama3Scaling):
    return {
      "rope_type": "llama3",
      "factor": scaling.factor,
      "low_freq_factor": scaling.low,
      "high_freq_factor": scaling.high,
      _LENGTH: scaling.length,
    }
  raw = dataclasses.asdict(scaling)
  raw[_LENGTH] = raw.pop("length")
  if raw["attention_factor"] is None:
    del raw["attention_factor"]
  return {"rope_type": "yarn"} | raw


def config_to_hf(
  cfg: ModelConfig, dtype: str, like: epath.PathLike | None
) -> dict:
  """The config.json of a checkpoint of `cfg` whose tensors are `dtype`.

  With `like`, a copy of that folder's config.json with `dtype` changed and
  without `quantization_config`. UserError if `like` is another model, or
  transformers lacks this architecture.
  """
  if like is None:
    return _new_config(cfg) | {"torch_dtype": dtype}
  like_cfg = config_from_hf(like)
  for field in dataclasses.fields(cfg):
    a, b = getattr(like_cfg, field.name), getattr(cfg, field.name)
    if field.name not in _RUNTIME_FIELDS and a != b:
      raise UserError(
        f"like={str(like)!r} has {field.name}={a}, the model to save has {b}"
      )
  raw = read(epath.Path(like) / "config.json")
  raw.pop("quantization_config", None)
  key = "dtype" if "dtype" in raw else "torch_dtype"
  return raw | {key: dtype}


def _new_config(cfg) -> dict:
  """Only the keys that the loading classes need, without special tokens."""
  name = family_name(cfg)
  if not name:
    plain = {field.name: field.default for field in dataclasses.fields(cfg)}
    others = [
      f"{name}={value}"
      for name, value in dataclasses.asdict(cfg).items()
      if name not in _RUNTIME_FIELDS and value != plain[name]
    ]
    raise UserError(f"no family of transformers has {', '.join(others)}")
  return _written(cfg, name)


def family_name(cfg: ModelConfig) -> str | None:
  """The first family whose config.json, written and read, gives `cfg` back."""
  path = epath.Path("config.json")
  for name in FAMILIES:
    try:
      again = _model_config(path, _written(cfg, name))
    except (UserError, ValueError):
      continue
    if _plain(again) == _plain(cfg):
      return name
  return None


def _plain(cfg: ModelConfig) -> ModelConfig:
  """`cfg` without what tensors and outputs do not depend on."""
  changes = {
    "dtype": "float32",
    "remat": "none",
    "unroll": None,
    "lora": None,
    "first": (),
    "pattern": cfg.layers,
    "dense_mlp_dim": cfg.dense_dim,
    "rotary_dim": cfg.rotary_width,
  }
  if not cfg.num_experts:
    changes |= {"experts_per_token": 0, "norm_topk_prob": True}
  return dataclasses.replace(cfg, **changes)


def _written(cfg, name) -> dict:
  family = FAMILIES[name]
  raw = {
    "architectures": [family.loads_with],
    "model_type": name,
    "vocab_size": cfg.vocab_size,
    "num_hidden_layers": cfg.num_layers,
    "hidden_size": cfg.embed_dim,
    "num_attention_heads": cfg.num_heads,
    "num_key_value_heads": cfg.num_kv_heads,
    "head_dim": cfg.head_dim,
    "intermediate_size": cfg.mlp_dim,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,  # Qwen3's default; we have no limit
    "rope_theta": cfg.rope_theta,
    "rope_scaling": None,
    "rms_norm_eps": cfg.norm_eps,
    "tie_word_embeddings": cfg.tie_embeddings,
    # Some families have default ids, which may be any tokens here.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
  }
  if scaling := cfg.rope_scaling:
    raw["rope_scaling"] = _scaling_to_hf(scaling)
    # Some 4.x releases of transformers take this ratio for YaRN's factor.
    raw["max_position_embeddings"] = int(scaling.factor * scaling.length)
  if family.partial_rotary_factor:
    raw["partial_rotary_factor"] = cfg.rotary_width / cfg.head_dim
  if family.experts:
    number, width = family.experts
    raw |= {
      number: cfg.num_experts,
      width: cfg.mlp_dim,
      "num_experts_per_tok": cfg.experts_per_token,
    }
    if "norm_topk_prob" not in family.fields:
      raw["norm_topk_prob"] = cfg.norm_topk_prob
  return raw | family.write(cfg)
