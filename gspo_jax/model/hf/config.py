"""config.json of a Hugging Face checkpoint: to a ModelConfig, and back.

Some keys have two names, such as `torch_dtype` and `dtype`. Both are read; the
older one is written, because releases 4 and 5 of transformers load it.
"""

import dataclasses

from etils import epath

from gspo_jax.model.config import ModelConfig, changed
from gspo_jax.model.hf.families import (
  FAMILIES,
  WITH_IMAGES,
  require_family,
  require_supported,
)
from gspo_jax.model.hf.rope import rope, rotary_dim, scaling_to_hf
from gspo_jax.model.hf.values import number
from gspo_jax.record import json_file
from gspo_jax.runtime.errors import (
  UserError,
  content_of,
  how_to_download,
  with_reason,
)

# Fields that a config.json does not have: how we run the model.
_RUNTIME_FIELDS = (
  *("dtype", "float32_head", "float32_router", "remat", "unroll", "lora"),
)
_DEFAULTS = {
  field.name: field.default for field in dataclasses.fields(ModelConfig)
}
_DTYPES = ("torch_dtype", "dtype")
_TIE = "tie_word_embeddings"
# Where a model of images has no key, unlike its language model's family.
_THETAS = {"qwen3_vl": 5e5, "qwen3_vl_moe": 5e5, "qwen2_5_vl": 1e6}
# As `Family.numbers`, of all families.
_NUMBERS = {
  "vocab_size": ("vocab_size", int, None),
  "num_hidden_layers": ("num_layers", int, None),
  "hidden_size": ("embed_dim", int, None),
  "num_attention_heads": ("num_heads", int, None),
  "rms_norm_eps": ("norm_eps", float, None),
}


def config_from_hf(folder: epath.PathLike, **changes) -> ModelConfig:
  """The `ModelConfig` of the checkpoint in `folder`, with some fields changed.

  Raises:
    UserError: no config.json of one of `FAMILIES`, or a value in it that
      `ModelConfig` does not support.
  """
  path = epath.Path(folder) / "config.json"
  raw = read(path)
  with content_of(str(path)):
    cfg = model_config(path, raw)
  return changed(cfg, **changes)


def reward_config(folder: epath.PathLike, **changes) -> ModelConfig:
  """The `ModelConfig` of a sequence classifier with one label.

  Raises:
    UserError: as `config_from_hf`, or it is no such classifier, or has experts.
  """
  cfg = config_from_hf(folder, classifier=True, **changes)
  path = epath.Path(folder) / "config.json"
  raw = read(path)
  found = raw.get("architectures")
  wanted = _architecture(raw["model_type"], cfg)
  if found != [wanted]:
    raise UserError(
      f"{path}: architectures={found!r:.80}: expected [{wanted!r}]"
    )
  # transformers writes the labels unless there are two.
  labels = raw.get("num_labels", len(raw.get("id2label") or "01"))
  if labels != 1:
    raise UserError(f"{path}: num_labels={labels}: expected 1, the score")
  if cfg.num_experts:
    raise UserError(
      f"{path}: model_type={raw['model_type']!r}: expected a dense model"
    )
  return cfg


def pad_token(folder: epath.PathLike) -> int | None:
  """The pad_token_id of config.json: a classifier skips it at the end."""
  return read(epath.Path(folder) / "config.json").get("pad_token_id")


def context_length(folder: epath.PathLike) -> int | None:
  """The maximum tokens of a text, from the config.json in `folder`.

  The larger of max_position_embeddings and the length to which a rotary scaling
  stretches texts; None: config.json has neither.
  """
  key, path = "max_position_embeddings", epath.Path(folder) / "config.json"
  scaling = config_from_hf(folder).rope_scaling
  raw = _language_model(path, read(path))
  lengths = [int(scaling.factor * scaling.length)] if scaling else []
  if raw.get(key) is not None:
    lengths.append(number(path, raw, [key]))
  return max(lengths, default=None)


def has_images(raw: dict) -> bool:
  """Whether a config.json is of a model of images and texts."""
  return raw.get("model_type") in WITH_IMAGES


def _language_model(path, raw) -> dict:
  """The keys of the language model."""
  if not has_images(raw):
    return raw
  kind = raw["model_type"]
  # Qwen2.5-VL is published without the key.
  text = raw.get("text_config", raw if kind == "qwen2_5_vl" else None)
  if not isinstance(text, dict):
    raise UserError(f"{path}: text_config={text!r:.80}: expected a JSON object")
  outer = _TIE, "quantization_config", *_DTYPES
  theta = {"rope_theta": _THETAS[kind]} if kind in _THETAS else {}
  merged = theta | {key: raw[key] for key in outer if key in raw} | text
  own = text.get("model_type") or kind
  merged["model_type"] = WITH_IMAGES[kind] if own.startswith(kind) else own
  merged |= {"norm_topk_prob": True} if kind == "qwen3_vl_moe" else {}
  if raw.get(_TIE) is not None:  # transformers takes this one
    merged[_TIE] = raw[_TIE] or (kind == "qwen2_5_vl" and text.get(_TIE))
  return merged


def model_config(path, raw) -> ModelConfig:
  raw = _language_model(path, raw)
  family = require_family(path, raw.get("model_type"))
  raw = family.defaults | raw
  require_supported(path, raw, family)
  get = lambda *names, **options: number(path, raw, names, **options)
  for key in family.required:
    get(key)
  heads, width = get("num_attention_heads"), get("hidden_size")
  head_dim = get("head_dim", default=width // heads)
  theta, scaling = rope(path, raw, family)
  dtype = next((raw[key] for key in _DTYPES if raw.get(key)), None)
  fields = {
    "num_kv_heads": get("num_key_value_heads", default=heads),
    "head_dim": head_dim,
    "rotary_dim": rotary_dim(path, raw, family, head_dim),
    "rope_theta": theta,
    "rope_scaling": scaling,
    "tie_embeddings": bool(raw.get(_TIE)),
    "dtype": "float32" if dtype == "float32" else "bfloat16",
  }
  numbers = _NUMBERS | family.numbers
  for key, (field, kind, default, *others) in numbers.items():
    fields[field] = get(key, *others, default=default, kind=kind)
  for key, (field, default) in family.flags.items():
    fields[field] = bool(default if raw.get(key) is None else raw[key])
  return ModelConfig(**fields | family.fields | family.read(path, raw))


def read(path: epath.Path) -> dict:
  """Reads a JSON file of a checkpoint's folder; UserError as `json_file`."""
  with with_reason(str(path)):
    if not path.parent.is_dir():
      raise UserError(
        f"{str(path.parent)!r}: expected a checkpoint's folder"
        + how_to_download(path.parent)
      )
  return json_file.read(path)


def _architecture(model_type: str, cfg: ModelConfig) -> str:
  """The class of transformers that loads a model."""
  name = require_family("config.json", model_type).loads_with
  if cfg.classifier:
    name = name.replace("ForCausalLM", "ForSequenceClassification")
  return name


def config_to_hf(
  cfg: ModelConfig, dtype: str, like: epath.PathLike | None
) -> dict:
  """The config.json of a checkpoint of `cfg` whose tensors are `dtype`.

  With `like`, a copy of that folder's config.json with `dtype` changed and
  without `quantization_config`. UserError if `like` is another model, or
  transformers lacks this architecture.
  """
  if like is None:
    name = family_name(cfg)
    if not name:
      others = [
        f"{field}={value}"
        for field, value in dataclasses.asdict(cfg).items()
        if field not in _RUNTIME_FIELDS and value != _DEFAULTS[field]
      ]
      raise UserError(f"no family of transformers has {', '.join(others)}")
    return _written(cfg, name) | {"torch_dtype": dtype}
  like_cfg = config_from_hf(like)
  for field in dataclasses.fields(cfg):
    a, b = getattr(like_cfg, field.name), getattr(cfg, field.name)
    if field.name not in _RUNTIME_FIELDS and a != b:
      raise UserError(
        f"like={str(like)!r} has {field.name}={a}, the model to save has {b}"
      )
  raw = read(epath.Path(like) / "config.json")
  parts = [raw, raw["text_config"]] if "text_config" in raw else [raw]
  for part in parts:
    part.pop("quantization_config", None)
    part |= {key: dtype for key in _DTYPES if key in part}
  if not any(key in part for part in parts for key in _DTYPES):
    raw["torch_dtype"] = dtype
  return raw


def family_name(cfg: ModelConfig) -> str | None:
  """The first family whose config.json, written and read, gives `cfg` back."""
  path = epath.Path("config.json")
  for name in FAMILIES:
    try:
      again = model_config(path, _written(cfg, name))
    except (UserError, ValueError):
      continue
    if _plain(again) == _plain(cfg):
      return name
  return None


def _plain(cfg: ModelConfig) -> ModelConfig:
  """`cfg` without what tensors and outputs do not depend on."""
  changes = {name: _DEFAULTS[name] for name in (*_RUNTIME_FIELDS, "classifier")}
  changes |= {
    "first": (),
    "pattern": cfg.layers,
    "dense_mlp_dim": cfg.dense_dim,
    "rotary_dim": cfg.rotary_width,
  }
  if not cfg.num_experts:
    changes |= {"experts_per_token": 0, "norm_topk_prob": True}
  if not cfg.layers_with("attention"):
    changes["qk_norm"] = False
  return dataclasses.replace(cfg, **changes)


def _written(cfg, name) -> dict:
  """Only the keys that the loading classes need, without special tokens."""
  family = FAMILIES[name]
  raw = {
    "architectures": [_architecture(name, cfg)],
    "model_type": name,
    "num_key_value_heads": cfg.num_kv_heads,
    "head_dim": cfg.head_dim,
    "intermediate_size": cfg.dense_dim,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,  # Qwen3's default; we have no limit
    "rope_theta": cfg.rope_theta,
    "rope_scaling": None,
    "tie_word_embeddings": cfg.tie_embeddings,
    # Some families have default ids, which may be any tokens here.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
  }
  if cfg.classifier:
    raw |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
  if scaling := cfg.rope_scaling:
    raw["rope_scaling"] = scaling_to_hf(scaling)
    # Some 4.x releases of transformers take this ratio for YaRN's factor.
    raw["max_position_embeddings"] = int(scaling.factor * scaling.length)
  if family.partial_rotary_factor:
    raw["partial_rotary_factor"] = cfg.rotary_width / cfg.head_dim
  rows = _NUMBERS | family.numbers | family.flags
  fields = {key: getattr(cfg, field) for key, (field, *_) in rows.items()}
  return raw | family.constants | fields | family.write(cfg)
