"""The keys of config.json about rotary embeddings."""

import dataclasses

from gspo_jax.model.hf.values import number, unsupported
from gspo_jax.model.rotary import (
  Llama3Scaling,
  RopeScaling,
  YarnScaling,
  yarn_mscale,
)
from gspo_jax.runtime.errors import UserError, nearest


def _keys(raw) -> dict:
  # `mrope_section` and `mrope_interleaved` say which frequencies turn by a
  # token's place in an image. In a text all turn by the same place.
  keys = dict(raw.get("rope_scaling") or {})
  keys |= raw.get("rope_parameters") or {}
  return keys


def rope(path, raw, family) -> tuple[float, RopeScaling | None]:
  """The base of the frequencies, and their scaling."""
  rope = _keys(raw)
  if kinds := [name for name, x in rope.items() if isinstance(x, dict)]:
    raise UserError(
      f"{path}: rope_parameters are of {', '.join(kinds)}: expected one set "
      "for all layers"
    )
  theta = rope.get("rope_theta") or raw.get("rope_theta") or family.rope_theta
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind not in ("default", "mrope", *family.scalings):
    raise unsupported(path, "rope_type", kind, ("default", *family.scalings))
  own = dataclasses.fields(_SCALINGS[kind][0]) if kind in _SCALINGS else ()
  known = _COMMON | {_NAMES.get(field.name, field.name) for field in own}
  for key in rope.keys() - known:
    if rope[key] is not None:
      raise UserError(
        f"{path}: {key}={rope[key]!r:.80} of rope_scaling: not read with"
        f" rope_type={kind!r}, {nearest(key, known)}"
      )
  if not own:
    return float(theta), None
  # Transformers takes the first of these places.
  max_length = raw.get("max_position_embeddings")
  lengths = raw.get(_LENGTH), rope.get(_LENGTH), max_length
  rope[_LENGTH] = next((n for n in lengths if n is not None), None)
  get = lambda key, **options: number(path, rope, [key], **options)
  scaling, arguments = _SCALINGS[kind]
  arguments = arguments(get, rope, max_length)
  try:
    return float(theta), scaling(*arguments)
  except UserError as error:
    raise UserError(f"{path}: {error}") from None


def rotary_dim(path, raw, family, head_dim) -> int | None:
  """The rotated columns of a head; None: all."""
  default = family.partial_rotary_factor or 1.0
  share = raw.get("partial_rotary_factor", default)
  share = _keys(raw).get("partial_rotary_factor", share)
  if "rotary_dim" in family.supported and raw.get("rotary_dim"):
    share = number(path, raw, ["rotary_dim"]) / head_dim
  if share in (None, 1):  # transformers reads null as all
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
  value = lambda key, default=None: get(key, kind=float, default=default)
  factor = value("factor", max_length and max_length / length)
  attention_factor = None
  if rope.get("attention_factor") is not None:
    attention_factor = value("attention_factor")
  elif rope.get("mscale") and rope.get("mscale_all_dim"):
    mscales = value("mscale"), value("mscale_all_dim")
    over, under = (yarn_mscale(factor, mscale) for mscale in mscales)
    attention_factor = over / under
  betas = value("beta_fast", 32.0), value("beta_slow", 1.0)
  truncate = bool(rope.get("truncate", True))
  all_dim = value("mscale_all_dim") if rope.get("mscale_all_dim") else 0.0
  return factor, length, *betas, attention_factor, truncate, all_dim


_LENGTH = "original_max_position_embeddings"
_SCALINGS = {"llama3": (Llama3Scaling, _llama3), "yarn": (YarnScaling, _yarn)}
# Keys of fields, and those of any kind.
_NAMES = {"low": "low_freq_factor", "high": "high_freq_factor"}
_NAMES["length"] = _LENGTH
_COMMON = {
  *("rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale"),
  *("mrope_section", "mrope_interleaved", "max_position_embeddings"),
}


def scaling_to_hf(scaling: RopeScaling) -> dict:
  kind = "llama3" if isinstance(scaling, Llama3Scaling) else "yarn"
  raw = {_NAMES.get(k, k): v for k, v in dataclasses.asdict(scaling).items()}
  for optional in ("attention_factor", "mscale_all_dim"):
    if not raw.get(optional):
      raw.pop(optional, None)
  return {"rope_type": kind} | raw
