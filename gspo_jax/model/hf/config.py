"""config.json of a Hugging Face checkpoint: to a ModelConfig, and back.

Some keys have changed their names: `num_local_experts` and `num_experts`,
`rope_theta` with `rope_scaling` and `rope_parameters`, `torch_dtype` and
`dtype`. All of them are read. The older ones are written, because releases 4
and 5 of transformers both load them.
"""

import dataclasses
import json
from pathlib import Path

from gspo_jax.model.config import ModelConfig, changed
from gspo_jax.runtime.errors import UserError, how_to_download

# By model_type: the fields of ModelConfig that it implies.
FAMILIES = {
  "qwen3": {},
  "qwen3_moe": {},
  "qwen2": {"attention_bias": True, "qk_norm": False},
  "llama": {"qk_norm": False},
}
_CLASSES = {
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "llama": "LlamaForCausalLM",
}
# By key: the values that ModelConfig supports. A missing key is supported.
_SUPPORTED = {
  "attention_bias": (False,),  # on the output projection, too
  "hidden_act": ("silu",),
  "mlp_bias": (False,),
  "n_shared_experts": (0,),
  "num_shared_experts": (0,),
  "partial_rotary_factor": (1,),
  "quantization_config": (),
  "shared_expert_intermediate_size": (0,),
  "use_sliding_window": (False,),
}
_SUPPORTED_MOE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_SCALING = (
  "factor",
  "low_freq_factor",
  "high_freq_factor",
  "original_max_position_embeddings",
)
# Fields that a config.json does not have: how we run the model.
_RUNTIME_FIELDS = ("dtype", "remat", "keep", "unroll")


def config_from_hf(folder: str | Path, **changes) -> ModelConfig:
  """The `ModelConfig` of the checkpoint in `folder`, with some fields changed.

  Args:
    folder: with a config.json of Qwen3, Qwen3-MoE, Qwen2 or Llama.
    **changes: fields of `ModelConfig`, such as `dtype` or `remat`.

  Raises:
    UserError: no such file, or a value that `ModelConfig` does not support.
  """
  path = Path(folder) / "config.json"
  raw = read(path)
  family = raw.get("model_type")
  if family not in FAMILIES:
    raise _unsupported(path, "model_type", family, sorted(FAMILIES))
  _require_supported(path, raw, family)
  get = lambda *names, **options: _number(path, raw, names, **options)
  moe = family == "qwen3_moe"
  heads, width = get("num_attention_heads"), get("hidden_size")
  # The default of Qwen3's class in transformers is 128 for any width.
  head_dim = 128 if family == "qwen3" else width // heads
  theta, scaling = _rope(path, raw)
  cfg = ModelConfig(
    vocab_size=get("vocab_size"),
    num_layers=get("num_hidden_layers"),
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=get("num_key_value_heads", default=heads),
    head_dim=get("head_dim", default=head_dim),
    mlp_dim=get("moe_intermediate_size" if moe else "intermediate_size"),
    num_experts=get("num_experts", "num_local_experts") if moe else 0,
    experts_per_token=get("num_experts_per_tok") if moe else 0,
    norm_topk_prob=bool(raw.get("norm_topk_prob")) if moe else True,
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=get("rms_norm_eps", kind=float),
    tie_embeddings=bool(raw.get("tie_word_embeddings")),
    dtype="float32" if _dtype(raw) == "float32" else "bfloat16",
    **FAMILIES[family],
  )
  return changed(cfg, **changes)


def read(path: Path) -> dict:
  """Reads a JSON object; raises UserError if the file holds none."""
  if not path.parent.is_dir():
    raise UserError(
      f"{str(path.parent)!r}: expected a checkpoint's folder"
      + how_to_download(path.parent)
    )
  try:
    raw = json.loads(path.read_text())
  except FileNotFoundError:
    raise UserError(f"{path}: no such file") from None
  except ValueError as error:
    raise UserError(f"{path}: not JSON: {error}") from None
  if not isinstance(raw, dict):
    raise UserError(f"{path}: expected a JSON object, got {raw!r:.40}")
  return raw


def _dtype(raw):
  return raw.get("torch_dtype") or raw.get("dtype")


def _unsupported(path, key, value, supported) -> UserError:
  """Without a nearest choice: another architecture is no typing mistake."""
  return UserError(
    f"{path}: {key}={value!r}: not supported; supported are: "
    f"{', '.join(supported)}"
  )


def _require_supported(path, raw, family):
  supported = dict(_SUPPORTED)
  if family == "qwen3_moe":
    supported |= _SUPPORTED_MOE
  if family == "qwen2":
    del supported["attention_bias"]  # Qwen2 never has one on the output
  for key, values in supported.items():
    if raw.get(key) is not None and raw[key] not in values:
      expected = f"expected {values[0]!r}" if values else "not supported"
      raise UserError(f"{path}: {key}={str(raw[key])[:80]}: {expected}")
  for kind in raw.get("layer_types") or ():
    if kind != "full_attention":
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


def _rope(path, raw):
  """(rope_theta, rope_scaling) of a ModelConfig."""
  rope = dict(raw.get("rope_scaling") or {})
  rope |= raw.get("rope_parameters") or {}
  theta = rope.get("rope_theta") or raw.get("rope_theta") or 1e4
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if rope.get("partial_rotary_factor", 1) != 1:
    raise UserError(f"{path}: partial_rotary_factor: expected 1")
  if kind == "default":
    return float(theta), None
  if kind != "llama3":
    raise _unsupported(path, "rope_type", kind, ("default", "llama3"))
  *factors, length = (
    _number(path, rope, [key], kind=float) for key in _SCALING
  )
  return float(theta), (*factors, int(length))


def config_to_hf(cfg: ModelConfig, dtype: str, like: str | Path | None) -> dict:
  """The config.json of a checkpoint of `cfg` whose tensors are `dtype`.

  Args:
    cfg: the model.
    dtype: of the tensors.
    like: a folder whose config.json is copied with `dtype` changed. None: a new
      one from `cfg`.

  Raises:
    UserError: no family of transformers has this architecture, or `like` is
      another model.
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
  raw = read(Path(like) / "config.json")
  key = "dtype" if "dtype" in raw else "torch_dtype"
  return raw | {key: dtype}


def _new_config(cfg):
  """Only the keys that the loading classes need, without special tokens."""
  family = _family(cfg)
  raw = {
    "architectures": [_CLASSES[family]],
    "model_type": family,
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
    # Llama's defaults are 1 and 2, which may be any tokens here.
    "bos_token_id": None,
    "eos_token_id": None,
  }
  if cfg.rope_scaling:
    scaling = dict(zip(_SCALING, cfg.rope_scaling, strict=True))
    raw["rope_scaling"] = {"rope_type": "llama3"} | scaling
    raw["max_position_embeddings"] = int(
      cfg.rope_scaling[0] * cfg.rope_scaling[3]
    )
  if cfg.num_experts:
    raw |= {
      "moe_intermediate_size": cfg.mlp_dim,
      "num_experts": cfg.num_experts,
      "num_experts_per_tok": cfg.experts_per_token,
      "norm_topk_prob": cfg.norm_topk_prob,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [],
    }
  return raw


def _family(cfg) -> str:
  families = {
    (True, False, True): "qwen3_moe",
    (False, False, True): "qwen3",
    (False, True, False): "qwen2",
    (False, False, False): "llama",
  }
  key = (bool(cfg.num_experts), cfg.attention_bias, cfg.qk_norm)
  if key not in families:
    raise UserError(
      f"no family of transformers has {cfg.num_experts=}, "
      f"{cfg.attention_bias=} and {cfg.qk_norm=}"
    )
  return families[key]
