"""Quantised tensors of a Hugging Face folder, read as if they were floats.

A tensor has a name, a shape, the name of a dtype and slices. So have the views
here, over the codes and the scales that a folder stores in place of a tensor:

  fine-grained FP8 (DeepSeek, MiniMax, Qwen): NAME of 8-bit floats, and
    NAME_scale_inv, a scale for each block of 128 rows and 128 columns
  compressed-tensors by channel (GLM): NAME of 8-bit floats, and NAME_scale, a
    scale for each row
  MXFP4 (gpt-oss): NAME_blocks of 4-bit floats, two a byte, and NAME_scales, an
    exponent for each 32 of them

A slice reads only its own codes and scales.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gspo_jax.runtime.errors import UserError, either

_BYTES = np.arange(256)
# By code. A lookup takes half the time of ml_dtypes' cast.
_FLOAT8 = _BYTES.astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_BLOCK = 128
# By the end of the scale's name: the rows and columns of a block; None: all.
_FLOAT8_BLOCKS = {"_scale_inv": (_BLOCK, _BLOCK), "_scale": (1, None)}
# OCP Microscaling Formats 1.0, table 5 (E2M1): without and with the sign.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOAT4 = np.concatenate([_FLOAT4, -_FLOAT4])


def _two_of_four_bits() -> np.ndarray:
  """[exponent, byte]: two bfloat16 numbers, low bits first, as one uint32."""
  pairs = np.stack([_FLOAT4[_BYTES % 16], _FLOAT4[_BYTES // 16]], axis=-1)
  exponents = (_BYTES - 127).reshape(-1, 1, 1)  # E8M0, of the same document
  exact = np.ldexp(pairs.astype(np.float64), exponents)
  exact[255] = np.nan
  with np.errstate(over="ignore"):  # 4 * 2**127 is infinite
    return exact.astype(jnp.bfloat16).view(np.uint32)[..., 0]


_TWO_OF_FOUR_BITS = _two_of_four_bits()


class Float8(NamedTuple):
  """A float32 matrix: each 8-bit float times the scale of its block."""

  codes: Any
  scale: Any
  block: tuple[int, int]

  dtype = "F32"

  @property
  def shape(self) -> tuple[int, int]:
    return self.codes.shape

  def __getitem__(self, slices: tuple[slice, slice]) -> np.ndarray:
    x = _FLOAT8.take(self.codes[slices])
    inside, borders = [], []  # slices of the scales, and where they end in x
    for part, length, size in zip(slices, self.shape, self.block, strict=True):
      start, end, _ = part.indices(length)
      first, last = start // size, -(-end // size)
      inside.append(slice(first, last))
      edges = np.arange(first, last + 1) * size
      borders.append(edges.clip(start, end) - start)
    rows, columns = borders
    scale = self.scale[tuple(inside)].astype(np.float32)
    scale = scale.repeat(np.diff(columns), axis=1)
    for start, end, row in zip(rows[:-1], rows[1:], scale, strict=True):
      x[start:end] *= row
    return x


class Mxfp4(NamedTuple):
  """A bfloat16 array [experts, inputs, outputs].

  Stored are blocks [experts, outputs, inputs / 32, 16] and exponents without
  the last axis. All values are exact.
  """

  blocks: Any
  exponents: Any

  dtype = "BF16"

  @property
  def shape(self) -> tuple[int, int, int]:
    experts, outputs, groups, _ = self.blocks.shape
    return experts, 32 * groups, outputs

  def __getitem__(self, slices: tuple[slice, slice, slice]) -> np.ndarray:
    experts, inputs, outputs = slices
    start, end, _ = inputs.indices(self.shape[1])
    first = start // 32
    groups = slice(first, -(-end // 32))
    blocks = self.blocks[experts, outputs, groups, :]
    exponents = self.exponents[experts, outputs, groups]
    x = _TWO_OF_FOUR_BITS[exponents[..., None], blocks].view(jnp.bfloat16)
    x = x.reshape(*x.shape[:2], -1)[..., start - 32 * first : end - 32 * first]
    return x.swapaxes(1, 2)


def as_floats(folder, stored: Mapping[str, Any]) -> dict[str, Any]:
  """The tensors of a folder by name, with views in place of codes and scales.

  UserError if the scales of some codes are missing, or not as expected.
  """
  tensors = dict(stored)

  def take_scales(codes: str, name: str, shape: tuple, dtypes: tuple):
    scales, got = tensors.pop(name, None), "no such tensor"
    if scales:
      got = f"{scales.dtype} {scales.shape}"
    if not scales or scales.shape != shape or scales.dtype not in dtypes:
      raise UserError(
        f"{folder}: {codes} is quantised: expected {name} "
        f"{' or '.join(dtypes)} {shape}, got {got}"
      )
    return scales

  for name, codes in stored.items():
    if codes.dtype == "F8_E4M3" and len(codes.shape) == 2:
      # The names of a folder say which of the two it has.
      end = "_scale" if f"{name}_scale" in stored else "_scale_inv"
      sizes = zip(_FLOAT8_BLOCKS[end], codes.shape, strict=True)
      block = tuple(size or length for size, length in sizes)
      shape = tuple(map(math.ceil, np.divide(codes.shape, block)))
      scale = take_scales(name, name + end, shape, ("F32", "BF16"))
      tensors[name] = Float8(codes, scale, block)
    elif name.endswith("_blocks") and codes.dtype == "U8":
      base = name.removesuffix("_blocks")
      if len(codes.shape) != 4 or codes.shape[-1] != 16:
        raise UserError(
          f"{folder}: {name} {codes.shape}: expected (experts, outputs, inputs"
          " / 32, 16)"
        )
      shape = codes.shape[:-1]
      exponents = take_scales(name, f"{base}_scales", shape, ("U8",))
      tensors[base] = Mxfp4(tensors.pop(name), exponents)
  return tensors


def require_supported(path, config: Mapping | None) -> None:
  """UserError unless a config.json's `quantization_config` is one of these.

  Which modules are quantised is not read: the tensors say it.
  """
  for key, value, supported in () if config is None else _settings(config):
    if value not in supported:
      raise UserError(
        f"{path}: quantization_config.{key}={repr(value)[:80]}: expected "
        f"{either(supported)}"
      )


def _settings(config) -> Iterator[tuple]:
  """(key, value, supported values) of what decides how to read tensors."""
  method = config.get("quant_method")
  yield "quant_method", method, ("fp8", "mxfp4", "compressed-tensors")
  if method == "fp8":
    size = config.get("weight_block_size")
    yield "weight_block_size", size, ([_BLOCK, _BLOCK],)
    scheme = config.get("activation_scheme", "dynamic")
    yield "activation_scheme", scheme, ("dynamic",)
  if method == "compressed-tensors":
    yield "format", config.get("format"), ("float-quantized",)
    for name, group in config["config_groups"].items():
      key, weights = f"config_groups.{name}", group["weights"]
      yield f"{key}.weights.strategy", weights["strategy"], ("channel",)
      inputs = group.get("input_activations") or {"dynamic": True}
      yield f"{key}.input_activations.dynamic", inputs["dynamic"], (True,)
