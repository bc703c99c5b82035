"""Rotary position embeddings, and the ways to stretch them to longer texts.

Dimension key: B rows, T tokens, N heads, H rotated columns of a head: all, or
the first ones. The first of the H / 2 frequencies is 1; they decrease.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from gspo_jax.model import exact
from gspo_jax.model.rounding import recomputed, rounded, wide
from gspo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
  """Llama 3.1's frequencies (arXiv 2407.21783), by their periods in a text.

  Frequencies with fewer than `low` periods in `length` tokens are divided by
  `factor`; frequencies with more than `high` periods are unchanged; frequencies
  between are interpolated.
  """

  factor: float  # at least 1
  low: float  # above 0
  high: float  # above `low`
  length: int  # tokens of the texts before the stretch
  amplitude: ClassVar[float] = 1.0  # the factor of sines and cosines

  def __post_init__(self):
    if not (self.factor >= 1 and 0 < self.low < self.high and self.length > 0):
      raise UserError(
        f"model.rope_scaling={self}: expected factor >= 1, 0 < low < high and"
        " length > 0"
      )

  def scale(self, frequency_H, theta: float):
    del theta
    periods_H = self.length * frequency_H / (2 * jnp.pi)
    unscaled_H = (periods_H - self.low) / (self.high - self.low)
    return _interpolate(frequency_H, jnp.clip(unscaled_H, 0, 1), self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
  """YaRN (arXiv 2309.00071, sec. 3), as transformers 5 computes it.

  Frequencies with fewer than `beta_slow` periods in `length` tokens are divided
  by `factor`; frequencies with more than `beta_fast` periods are unchanged.
  Between them, the weight of the unchanged frequency is linear in its INDEX.
  """

  factor: float  # at least 1
  length: int  # tokens of the texts before the stretch
  beta_fast: float = 32.0  # at least `beta_slow`
  beta_slow: float = 1.0  # above 0
  # The factor of sines and cosines; None: `0.1 ln(factor) + 1` (eq. 22).
  attention_factor: float | None = None
  truncate: bool = True  # the first and last index between are rounded outwards
  # With MLA, scores are multiplied by the square of `yarn_mscale` of it.
  mscale_all_dim: float = 0.0  # 0: they are not

  def __post_init__(self):
    factor = self.attention_factor
    if not (
      self.factor >= 1
      and self.length > 0
      and 0 < self.beta_slow <= self.beta_fast
      and (factor is None or factor > 0)
    ):
      raise UserError(
        f"model.rope_scaling={self}: expected factor >= 1, length > 0,"
        " 0 < beta_slow <= beta_fast and attention_factor > 0 or None"
      )

  @property
  def amplitude(self) -> float:
    """The factor of sines and cosines."""
    if self.attention_factor is None:
      return yarn_mscale(self.factor)
    return self.attention_factor

  def scale(self, frequency_H, theta: float):
    half = frequency_H.shape[0]

    def index(periods):  # of the frequency with these periods in `length`
      turns = self.length / (periods * 2 * math.pi)
      return half * math.log(turns) / math.log(theta)

    first, last = index(self.beta_fast), index(self.beta_slow)
    if self.truncate:
      first, last = math.floor(first), math.ceil(last)
    # The bound is the width of the head, not the number of frequencies.
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first or 1e-3
    scaled_H = jnp.clip((jnp.arange(half) - first) / width, 0, 1)
    return _interpolate(frequency_H, 1 - scaled_H, self.factor)


RopeScaling = Llama3Scaling | YarnScaling


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
  """`0.1 mscale ln(factor) + 1`, YaRN's growth of queries and keys."""
  return 0.1 * mscale * math.log(factor) + 1.0


def _interpolate(frequency_H, unscaled_H, factor):
  return frequency_H * (unscaled_H + (1 - unscaled_H) / factor)


def angles(
  positions_BT: jax.Array,
  width: int,
  theta: float,
  scaling: RopeScaling | None,
) -> tuple[jax.Array, jax.Array]:
  """Sines and cosines [B, T, H / 2] float32, for `rotate`."""
  frequency_H = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  if scaling:
    frequency_H = scaling.scale(frequency_H, theta)
  if exact.is_on():
    sin_BTH, cos_BTH = _exact_sin_cos(positions_BT, frequency_H)
  else:
    angle_BTH = _angles(positions_BT, frequency_H)
    sin_BTH, cos_BTH = exact.noinline(_sin_cos)(angle_BTH)
  if not scaling or scaling.amplitude == 1.0:
    return sin_BTH, cos_BTH
  return scaling.amplitude * sin_BTH, scaling.amplitude * cos_BTH


def _angles(positions_BT, frequency_H):
  return positions_BT[..., None].astype(jnp.float32) * frequency_H


def _sin_cos(x):
  return jnp.sin(x), jnp.cos(x)


_exact_sin_cos = exact.by_tokens(
  lambda *args: _sin_cos(_angles(*args)), whole=1
)


@recomputed
def rotate_pairs(x_BTNH, sin_BTH, cos_BTH):
  """`rotate` of neighbours, (0, 1), (2, 3); they end H / 2 columns apart."""
  x = wide(x_BTNH)
  turned = _turned(x[..., 0::2], x[..., 1::2], sin_BTH, cos_BTH)
  return rounded(jnp.concatenate(turned, -1), x_BTNH.dtype)


@recomputed
def rotate(x_BTNH, sin_BTH, cos_BTH):
  """Rotary embedding, half-split (arXiv 2104.09864), in float32."""
  half, width = sin_BTH.shape[-1], x_BTNH.shape[-1]
  borders = [half] if width == 2 * half else [half, 2 * half]
  a, b, *others = jnp.split(wide(x_BTNH), borders, axis=-1)
  turned = _turned(a, b, sin_BTH, cos_BTH)
  return rounded(jnp.concatenate(turned + others, -1), x_BTNH.dtype)


def _turned(a, b, sin_BTH, cos_BTH):
  sin, cos = sin_BTH[:, :, None], cos_BTH[:, :, None]
  return [a * cos - b * sin, b * cos + a * sin]
