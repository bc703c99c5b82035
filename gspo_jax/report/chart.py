"""Line charts as SVG, with what a pointer reads out of them as plain data."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from gspo_jax.report.curve import Curve
from gspo_jax.report.scale import Scale, number, span, tick

WIDTH, HEIGHT = 400, 210
LEFT, TOP, BOTTOM = 46, 12, 26
_LABELS, _BARE = 98, 12  # the right margin, with and without labels in it
COLOURS = 8  # of the page's lines, that can be told apart
_DOTS = 40  # a line of fewer points shows them


class Line(NamedTuple):
  """A curve with its label, and its colour's number."""

  label: str
  colour: int
  curve: Curve


class Figure(NamedTuple):
  """A finished chart: its HTML, and what the pointer reads (None: nothing)."""

  html: str
  data: dict | None


def line_chart(
  title: str,
  lines: Sequence[Line],
  *,
  unit: str = "",
  note: str = "",
  log: bool = False,
  labels: bool = True,
  marks: dict[str, float] | None = None,
  first_is_odd: bool = False,
) -> Figure:
  """Numbers over steps.

  Args:
    title: what is shown.
    lines: with at least one point.
    unit: "%" for shares, which are written in percent.
    note: how to read it.
    log: whether the vertical axis shows decades.
    labels: whether lines are named at their ends; else by a legend elsewhere.
    marks: horizontal lines by name.
    first_is_odd: whether the axis may cut the first step off (it compiles).
  """
  marks = marks or {}
  ends = [line.curve.steps[i] for line in lines for i in (0, -1)]
  right = WIDTH - (_LABELS if labels else _BARE)
  # A lone step lies in the middle, and the axis names no other.
  room = 0.5 if min(ends) == max(ends) else 0
  x = Scale(min(ends) - room, max(ends) + room, LEFT, right)
  seen = [_extent(line.curve, first_is_odd) for line in lines]
  y = span(
    np.concatenate([*seen, list(marks.values())]),
    HEIGHT - BOTTOM,
    TOP,
    log=log,
    most=1.0 if unit == "%" else np.inf,
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
    "s": [_readable(line) for line in lines],
  }
  return Figure(frame(title, svg, note), data)


def _extent(curve: Curve, first_is_odd: bool) -> np.ndarray:
  skip = int(first_is_odd and len(curve.steps) > 2)
  return np.concatenate([curve.low[skip:], curve.high[skip:]])


def picture(title: str, summary: str, content: str) -> str:
  """An SVG that says in words what it shows."""
  return (
    f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    f'aria-label="{escape(title)}. {escape(summary)}">{content}</svg>'
  )


def frame(title: str, svg: str, note: str) -> str:
  note = f"<p>{escape(note)}</p>" if note else ""
  return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{note}</figure>"


def warning(figure: Figure) -> Figure:
  """The figure in the colour of warnings."""
  html = figure.html.replace("<figure>", '<figure class="warning">', 1)
  return figure._replace(html=html)


def grid(y: Scale, left: float, right: float, unit: str) -> str:
  """Lines across, and the numbers of the vertical axis."""
  parts, unit = [], "%" if unit == "%" else ""
  for value in y.ticks(4):
    at = float(y(value))
    parts.append(f'<path class="grid" d="M{left} {at:.1f}H{right}"/>')
    parts.append(text(left - 6, at + 3.5, tick(value, unit), "end"))
  return "".join(parts)


def step_axis(x: Scale) -> str:
  """Steps below a chart."""
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
    # The first one below its line: two clips lie close together.
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
  """Indices of the stretches without a gap."""
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
  """Name and last value beside the end of each line, none on another."""
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
  """Ascending places, moved as little as keeps them `gap` apart."""
  places = list(places)
  for i, at in enumerate(places):
    places[i] = max(at, low if i == 0 else places[i - 1] + gap)
  for i in reversed(range(len(places))):
    most = high if i == len(places) - 1 else places[i + 1] - gap
    places[i] = min(places[i], most)
  return places


def _summary(lines: Sequence[Line], unit: str) -> str:
  said = []
  for line in lines:
    finite = line.curve.middle[~np.isnan(line.curve.middle)]
    ends = (finite[0], line.curve.last) if len(finite) else ()
    ends = [number(float(end), unit) for end in ends]
    said.append(f"{line.label} {' to '.join(ends) or 'not finite'}")
  return "; ".join(said)


def _readable(line: Line) -> dict:
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
  """For JSON: NaN as null, four digits."""
  return [None if np.isnan(v) else float(f"{v:.4g}") for v in values]
