"""Axes: ranges, round numbers and their labels."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float, unit: str = "", figures: int = 3) -> str:
  """A number with three digits and its unit; "-" for NaN. "%" for shares."""
  if value is None or math.isnan(value):
    return "-"
  if math.isinf(value):
    return "∞" if value > 0 else "−∞"
  if unit == "%":
    return f"{_digits(100 * value, figures)}%"
  return f"{_digits(value, figures)} {unit}".rstrip()


def tick(value: float, unit: str = "") -> str:
  """A round number with all its digits, so that no two labels are equal."""
  mantissa = f"{value:.11e}".partition("e")[0]
  digits = mantissa.lstrip("-").replace(".", "").rstrip("0")
  return number(value, unit, max(3, len(digits) + 1))


def _digits(value: float, figures: int) -> str:
  size = abs(value)
  if not size:
    return "0"
  if size >= 9999.5:
    scale, letter = next(
      (s, p) for s, p in _PREFIXES if size >= 0.9995 * s or p == "k"
    )
    text = _decimals(size / scale, figures) + letter
  elif size >= 9.995e-4:
    text = _decimals(size, figures)
  else:
    mantissa, exponent = f"{size:.{figures - 2}e}".split("e")
    text = f"{_without_zeros(mantissa)}e{int(exponent)}"
  return f"−{text}" if value < 0 else text


def _decimals(size: float, figures: int) -> str:
  return _without_zeros(f"{size:,.{max(0, figures - 1 - _magnitude(size))}f}")


def _without_zeros(text: str) -> str:
  return text.rstrip("0").rstrip(".") if "." in text else text


def _magnitude(size: float) -> int:
  return math.floor(math.log10(size) + 1e-9)


def duration(seconds: float) -> str:
  """A time as 41 s, 12 min, 3 h 05 min or 2 d 4 h."""
  if math.isnan(seconds):
    return "-"
  if seconds < 99.5:
    return f"{number(seconds)} s"
  minutes = round(seconds / 60)
  if minutes < 100:
    return f"{minutes} min"
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return f"{hours} h {minutes:02} min"
  return f"{hours // 24} d {hours % 24} h"


class Scale(NamedTuple):
  """Maps numbers to pixels.

  Attributes:
    low, high: the numbers at both ends.
    start, end: their pixels.
    log: whether the scale is logarithmic.
  """

  low: float
  high: float
  start: float
  end: float
  log: bool = False

  def __call__(self, values):
    """Pixels of the values, limited to the ends; NaN stays NaN."""
    values = np.clip(values, self.low, self.high)
    low, high = self.low, self.high
    if self.log:
      values, low, high = np.log(values), math.log(low), math.log(high)
    return self.start + (values - low) / (high - low) * (self.end - self.start)

  def ticks(self, count: int = 5) -> list[float]:
    """About `count` round numbers between the ends."""
    if self.log:
      return _log_ticks(self.low, self.high, count)
    step = _round_step((self.high - self.low) / count)
    first = math.ceil(self.low / step - 1e-9)
    last = math.floor(self.high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]

  def whole_ticks(self) -> list[int]:
    """Ticks that are whole numbers, for steps and layers."""
    return [round(t) for t in self.ticks(5) if t == round(t)]


def _round_step(least: float) -> float:
  decade = 10.0 ** math.floor(math.log10(least))
  return next(
    decade * m for m in (1, 2, 2.5, 5, 10) if decade * m >= least * 0.999
  )


def _log_ticks(low: float, high: float, count: int) -> list[float]:
  first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
  every = max(1, math.ceil((last - first) / count))
  mantissas = (1, 2, 5) if last - first <= 2 else (1,)
  ticks = [
    m * 10.0**e for e in range(first, last + 1, every) for m in mantissas
  ]
  return [t for t in ticks if low * 0.999 <= t <= high * 1.001]


def span(
  values: Sequence[float],
  start: float,
  end: float,
  *,
  log: bool,
  maximum: float = math.inf,
) -> Scale:
  """A scale from `start` to `end` for the values, with 0 if it is near.

  If all values are equal, it reaches from half to one and a half times the
  value, for the value 0 from 0 to 1; never beyond `maximum` (1 for shares).
  """
  values = np.asarray(values, float)
  values = values[np.isfinite(values)]
  positive = values[values > 0]
  # A range within a factor of 2 may contain no tick of a logarithmic scale.
  if log and len(positive) and positive.max() > 2 * positive.min():
    values = positive
    low, high = values.min() / 1.25, values.max() * 1.25
    return Scale(low, high, start, end, log=True)
  low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
  if 0 <= low <= high / 2:
    low = 0.0
  if high - low <= 1e-9 * abs(high):
    around = 0.5 * low, min(1.5 * high, max(high, maximum))
    low, high = sorted(around) if high else (0.0, 1.0)
  room = 0.06 * (high - low)
  return Scale(low if low == 0 else low - room, high + room, start, end)
