"""Line charts as SVG, with their numbers as data for the pointer."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from gspo_jax.report.curve import Curve
from gspo_jax.report.scale import Scale, number, span, tick

WIDTH, HEIGHT = 400, 210
LEFT, TOP, BOTTOM = 46, 12, 26
_LABELS, _BARE = 98, 12  # the right margin, with and without labels in it
COLOURS = 8  # of lines; more could not be distinguished
_DOTS = 40  # a line with at most so many points shows them as dots


class Line(NamedTuple):
  """A curve with its label and the number of its colour."""

  label: str
  colour: int
  curve: Curve


class Figure(NamedTuple):
  """The HTML of a chart, and the numbers for the pointer (None for none)."""

  html: str
  data: dict | None


class Axis(NamedTuple):
  """The vertical axis of a chart.

  Attributes:
    unit: "%" for shares, which are written in percent.
    log: whether it is logarithmic.
    skip_first: whether it ignores the first step, which compiles.
  """

  unit: str = ""
  log: bool = False
  skip_first: bool = False


_LINEAR = Axis()


def line_chart(
  title: str,
  lines: Sequence[Line],
  axis: Axis = _LINEAR,
  *,
  note: str = "",
  labels: bool = True,
  marks: dict[str, float] | None = None,
) -> Figure:
  """A chart of numbers over steps.

  Args:
    title: of the chart.
    lines: each with at least one point.
    axis: the vertical one.
    note: text below the chart.
    labels: whether each line has its label at its end, not in a legend.
    marks: horizontal lines, name -> value.
  """
  marks, unit = marks or {}, axis.unit
  ends = [line.curve.steps[i] for line in lines for i in (0, -1)]
  right = WIDTH - (_LABELS if labels else _BARE)
  # A single step lies in the middle and is the only one on the axis.
  room = 0.5 if min(ends) == max(ends) else 0
  x = Scale(min(ends) - room, max(ends) + room, LEFT, right)
  shown = [_extent(line.curve, axis.skip_first) for line in lines]
  y = span(
    np.concatenate([*shown, list(marks.values())]),
    HEIGHT - BOTTOM,
    TOP,
    log=axis.log,
    maximum=1.0 if unit == "%" else np.inf,
  )
  parts = [grid(y, LEFT, right, unit), step_axis(x), *_marks(marks, x, y)]
  parts += [_path(line, x, y) for line in lines]
  if labels:
    parts += _end_labels(lines, right, y, unit)
  svg = picture(title, _summary(lines, unit), "".join(parts))
  data = {
    "x": [float(v) for v in x[:4]],
    "y": [float(v) for v in y],
    "u": unit,
    "s": [_pointer_data(line) for line in lines],
  }
  return Figure(frame(title, svg, note), data)


def _extent(curve: Curve, skip_first: bool) -> np.ndarray:
  skip = int(skip_first and len(curve.steps) > 2)
  return np.concatenate([curve.low[skip:], curve.high[skip:]])


def picture(title: str, summary: str, content: str) -> str:
  """An SVG with a description for screen readers."""
  return (
    f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    f'aria-label="{escape(title)}. {escape(summary)}">{content}</svg>'
  )


def frame(title: str, svg: str, note: str) -> str:
  note = f"<p>{escape(note)}</p>" if note else ""
  return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{note}</figure>"


def warning(figure: Figure) -> Figure:
  """The figure, coloured as a warning."""
  html = figure.html.replace("<figure>", '<figure class="warning">', 1)
  return figure._replace(html=html)


def grid(y: Scale, left: float, right: float, unit: str) -> str:
  """Horizontal grid lines and the numbers of the vertical axis."""
  parts, unit = [], "%" if unit == "%" else ""
  for value in y.ticks(4):
    at = float(y(value))
    parts.append(f'<path class="grid" d="M{left} {at:.1f}H{right}"/>')
    parts.append(text(left - 6, at + 3.5, tick(value, unit), "end"))
  return "".join(parts)


def step_axis(x: Scale) -> str:
  """The steps below a chart."""
  parts = [text(x.start - 6, HEIGHT - 8, "step", "end")]
  for step in x.whole_ticks():
    parts.append(text(float(x(step)), HEIGHT - 8, f"{step:,}", "middle"))
  return "".join(parts)


def text(
  x: float, y: float, content: str, anchor: str = "start", kind: str = ""
) -> str:
  kind = f' class="{kind}"' if kind else ""
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>'
    f"{escape(content)}</text>"
  )


def _marks(marks: dict[str, float], x: Scale, y: Scale) -> list[str]:
  parts = []
  for i, (name, value) in enumerate(marks.items()):
    at = float(y(value))
    parts.append(
      f'<path class="mark" d="M{x.start:.0f} {at:.1f}H{x.end:.0f}"/>'
    )
    # The first name goes below its line: the two clip bounds are close.
    shift = 11 if i == 0 and len(marks) > 1 else -4
    parts.append(
      text(x.start + 4, at + shift, f"{name} {number(value)}", kind="mark")
    )
  return parts


def _path(line: Line, x: Scale, y: Scale) -> str:
  curve, parts = line.curve, []
  xs, ys = x(curve.steps), y(curve.middle)
  for piece in _pieces(~np.isnan(ys)):
    points = points_of(xs[piece], ys[piece])
    if curve.thinned:
      upper = points_of(xs[piece], y(curve.high[piece]))
      lower = points_of(xs[piece][::-1], y(curve.low[piece])[::-1])
      parts.append(f'<path class="band" d="M{upper}L{lower}Z"/>')
    parts.append(f'<path class="line" d="M{points}"/>')
    if len(curve.steps) <= _DOTS or len(piece) == 1:
      parts += [
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2"/>'
        for a, b in zip(xs[piece], ys[piece], strict=True)
      ]
  return f'<g class="c{line.colour}">{"".join(parts)}</g>'


def _pieces(finite: np.ndarray) -> list[np.ndarray]:
  """The indices of each run of finite values."""
  where = np.flatnonzero(finite)
  return (
    np.split(where, np.flatnonzero(np.diff(where) > 1) + 1)
    if len(where)
    else []
  )


def points_of(xs: np.ndarray, ys: np.ndarray) -> str:
  return " ".join(f"{a:.1f} {b:.1f}" for a, b in zip(xs, ys, strict=True))


def _end_labels(
  lines: Sequence[Line], right: float, y: Scale, unit: str
) -> list[str]:
  """Label and last value beside the end of each line, without overlap."""
  lasts = []
  for line in lines:
    finite = line.curve.middle[~np.isnan(line.curve.middle)]
    if len(finite):
      lasts.append((float(y(finite[-1])), line, line.curve.last))
  lasts.sort(key=lambda last: last[0])
  places = spaced([at for at, _, _ in lasts], 25, TOP + 6, HEIGHT - BOTTOM - 8)
  return [
    f'<g class="c{line.colour}">'
    + text(right + 8, at, line.label, kind="label")
    + text(right + 8, at + 12, number(value, unit), kind="value")
    + "</g>"
    for at, (_, line, value) in zip(places, lasts, strict=True)
  ]


def spaced(
  places: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
  """Ascending places, moved as little as possible to be `gap` apart."""
  places = list(places)
  for i, at in enumerate(places):
    places[i] = max(at, low if i == 0 else places[i - 1] + gap)
  for i in reversed(range(len(places))):
    limit = high if i == len(places) - 1 else places[i + 1] - gap
    places[i] = min(places[i], limit)
  return places


def _summary(lines: Sequence[Line], unit: str) -> str:
  parts = []
  for line in lines:
    finite = line.curve.middle[~np.isnan(line.curve.middle)]
    ends = (finite[0], line.curve.last) if len(finite) else ()
    ends = [number(float(end), unit) for end in ends]
    parts.append(f"{line.label} {' to '.join(ends) or 'not finite'}")
  return "; ".join(parts)


def _pointer_data(line: Line) -> dict:
  curve = line.curve
  data = {
    "n": line.label,
    "c": line.colour,
    "x": curve.steps.tolist(),
    "v": short(curve.middle),
  }
  if curve.thinned:
    data |= {"a": short(curve.low), "b": short(curve.high)}
  return data


def short(values: np.ndarray) -> list[float | None]:
  """Values for JSON: four digits, NaN as null."""
  return [None if np.isnan(v) else float(f"{v:.4g}") for v in values]
