"""Distributions over a run: heat maps, and outlines of parts of the run."""

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.report.chart import (
  BOTTOM,
  HEIGHT,
  LEFT,
  TOP,
  WIDTH,
  Figure,
  frame,
  grid,
  picture,
  points_of,
  step_axis,
  text,
)
from gspo_jax.report.curve import columns
from gspo_jax.report.scale import Scale, number
from gspo_jax.report.workdir import Spread

_RIGHT = WIDTH - 12
_COLUMNS = 160
# Colours from small to large values, for the light and the dark page.
_LIGHT = [(251, 250, 247), (186, 212, 236), (74, 134, 199), (14, 40, 82)]
_DARK = [(22, 24, 28), (32, 66, 108), (84, 150, 220), (236, 245, 255)]


class Outline(NamedTuple):
  """One line: its label, the number of its colour, and its values [bins]."""

  label: str
  colour: int | str
  values: np.ndarray


def histogram_map(
  title: str, spread: Spread, note: str, marks: dict[str, float]
) -> Figure:
  """A heat map of histograms: steps to the right, bins upwards."""
  steps, sums, _ = columns(spread.steps, spread.values, _COLUMNS)
  bins = _used(sums, spread.edges)
  shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
  y = Scale(bins.start, bins.stop, HEIGHT - BOTTOM, TOP)
  # The square root makes small shares visible.
  parts = [_image(np.sqrt(shares[:, bins] / max(shares.max(), 1e-9)))]
  for name, value in marks.items():
    bin_of = place(value, spread.edges)
    if bins.start < bin_of < bins.stop:
      at = float(y(bin_of))
      parts.append(f'<path class="mark" d="M{LEFT} {at:.1f}H{_RIGHT}"/>')
      above = at > (TOP if value > 0 else HEIGHT - BOTTOM - 28) + 14
      parts.append(
        text(_RIGHT - 4, at + (-4 if above else 11), name, "end", "mark")
      )
  parts += [
    text(LEFT - 6, float(y(at)) + 3.5, label, "end")
    for at, label in _decades(spread.edges, bins)
  ]
  return _finish(
    title, steps, parts, note, "Distribution of the numbers at each step"
  )


def layer_map(title: str, spread: Spread, note: str, unit: str) -> Figure:
  """A heat map of one number for each layer: steps right, layers upwards."""
  steps, sums, counts = columns(spread.steps, spread.values, _COLUMNS)
  means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
  layers, largest = means.shape[1], means.max()
  y = Scale(0, layers, HEIGHT - BOTTOM, TOP)
  parts = [_image(means / (largest or 1.0))]
  for layer in sorted(
    {round(i) for i in np.linspace(0, layers - 1, min(layers, 6))}
  ):
    parts.append(text(LEFT - 6, float(y(layer + 0.5)) + 3.5, str(layer), "end"))
  summary = f"0 to {number(largest, unit)}, {layers} layers"
  note += f" Largest: {number(largest, unit)}. Layer 0 at the bottom."
  return _finish(title, steps, parts, note, summary)


def _finish(title, steps, parts, note, summary):
  # The label of a step lies in the middle of its column.
  axis = step_axis(Scale(steps[0] - 0.5, steps[-1] - 0.5, LEFT, _RIGHT))
  box = (
    f'<path class="box" d="M{LEFT} {TOP}H{_RIGHT}V{HEIGHT - BOTTOM}H{LEFT}Z"/>'
  )
  return Figure(
    frame(title, picture(title, summary, "".join(parts) + box + axis), note),
    None,
  )


def outlines(
  title: str, spreads: Sequence[Outline], edges: np.ndarray, note: str
) -> Figure:
  """Outlines of histograms: their values are counts between the edges."""
  shares = [o.values / max(o.values.sum(), 1) for o in spreads]
  bins = _used(np.stack(shares), edges)
  x = Scale(bins.start, bins.stop, LEFT, _RIGHT)
  y = Scale(
    0, 1.08 * (max(s.max() for s in shares) or 1.0), HEIGHT - BOTTOM, TOP
  )
  places = np.repeat(np.arange(bins.start, bins.stop + 1), 2)[1:-1]
  parts = [grid(y, LEFT, _RIGHT, "%")]
  for outline, share in zip(spreads, shares, strict=True):
    points = points_of(x(places), y(np.repeat(share[bins], 2)))
    parts.append(
      f'<g class="c{outline.colour}"><path class="line" d="M{points}"/></g>'
    )
  parts += [
    text(float(x(at)), HEIGHT - 8, label, "middle")
    for at, label in _decades(edges, bins)
  ]
  parts += _key(spreads)
  return Figure(frame(title, picture(title, "", "".join(parts)), note), None)


def profiles(
  title: str, spreads: Sequence[Outline], unit: str, note: str
) -> Figure:
  """Lines over the layers: the values are one number for each layer."""
  maxima = (np.nanmax(o.values, initial=0.0) for o in spreads)
  largest = max(maxima, default=0.0)
  last = max(len(o.values) for o in spreads) - 1
  room = 0 if last else 0.5
  x = Scale(-room, last + room, LEFT, _RIGHT)
  y = Scale(0, 1.08 * (largest or 1.0), HEIGHT - BOTTOM, TOP)
  parts = [grid(y, LEFT, _RIGHT, unit)]
  for _, colour, values in spreads:
    points = points_of(x(np.arange(len(values))), y(np.nan_to_num(values)))
    parts.append(f'<g class="c{colour}"><path class="line" d="M{points}"/></g>')
  for layer in x.whole_ticks():
    label = f"{layer}" if layer else "layer 0"
    parts.append(text(float(x(layer)), HEIGHT - 8, label, "middle"))
  return Figure(
    frame(title, picture(title, "", "".join(parts + _key(spreads))), note), None
  )


def _key(spreads) -> list[str]:
  return [
    f'<g class="c{colour}">'
    + text(_RIGHT - 4, TOP + 10 + 14 * i, label, "end", "label")
    + "</g>"
    for i, (label, colour, _) in enumerate(spreads)
  ]


def _used(counts: np.ndarray, edges: np.ndarray) -> slice:
  """The bins from -x to x with all counts, and one more on both sides."""
  filled = np.flatnonzero(counts.sum(axis=0))
  middle = (len(edges) - 1) // 2
  reach = max([abs(b - middle) for b in filled], default=4) + 1
  reach = min(max(reach, 4), middle)
  return slice(middle - reach, middle + reach + 1)


def place(value: float, edges: np.ndarray) -> float:
  """The place of a number in units of bins, logarithmic inside a bin."""
  i = int(
    np.clip(
      np.searchsorted(edges[1:-1], value, side="right"), 1, len(edges) - 3
    )
  )
  low, high = edges[i], edges[i + 1]
  if low * high <= 0:
    return i + (value - low) / (high - low)
  return i + np.log(value / low) / np.log(high / low)


def _decades(edges: np.ndarray, bins: slice) -> list[tuple[float, str]]:
  """(place, label) of 0 and of every second ±10^n."""
  middle = (bins.start + bins.stop) / 2
  labels = [(middle, "0")]
  for i in range(bins.start, bins.stop + 1):
    if 0 < i < len(edges) - 1:
      power = np.log10(abs(edges[i]))
      if (
        abs(power - round(power)) < 1e-6
        and round(power) % 2 == 0
        and abs(i - middle) > 3
      ):
        sign = "−" if edges[i] < 0 else ""
        labels.append(
          (i, sign + ("1" if round(power) == 0 else f"1e{round(power)}"))
        )
  return sorted(labels)


def _image(shades: np.ndarray) -> str:
  """Two images of shades [columns, rows] in 0..1: light page and dark page."""
  kinds = [("day", _LIGHT), ("night", _DARK)]
  kinds = [(k, base64.b64encode(png(shades, ramp))) for k, ramp in kinds]
  return "".join(
    f'<image class="{kind}" x="{LEFT}" y="{TOP}" width="{_RIGHT - LEFT}" '
    f'height="{HEIGHT - BOTTOM - TOP}" preserveAspectRatio="none" '
    f'href="data:image/png;base64,{data.decode()}"/>'
    for kind, data in kinds
  )


def png(shades: np.ndarray, ramp: Sequence[tuple[int, int, int]]) -> bytes:
  """Shades [columns, rows] in 0..1 as a PNG; row 0 is at the bottom."""
  rows = np.clip(shades, 0, 1).T[::-1]
  stops = np.linspace(0, 1, len(ramp))
  pixels = np.stack(
    [np.interp(rows, stops, c) for c in zip(*ramp, strict=True)], -1
  )
  pixels = np.round(pixels).astype(np.uint8).reshape(len(rows), -1)
  # Each row begins with its filter type, 0.
  data = np.pad(pixels, ((0, 0), (1, 0))).tobytes()
  header = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 2, 0, 0, 0)
  chunks = (
    (b"IHDR", header),
    (b"IDAT", zlib.compress(data, 9)),
    (b"IEND", b""),
  )
  return b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(body))
    + kind
    + body
    + struct.pack(">I", zlib.crc32(kind + body))
    for kind, body in chunks
  )
