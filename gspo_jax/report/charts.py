"""The charts of a subject as plotly figures, for one run or for several."""

import itertools
from collections.abc import Sequence
from html import escape, unescape
from typing import NamedTuple

import numpy as np
from plotly import colors, io
from plotly import graph_objects as go

from gspo_jax.report.subjects import (
  Chart,
  Numbers,
  Spreads,
  Subject,
  matched,
)
from gspo_jax.report.workdir import RunRecord, Series, Spread

COLOURS = colors.qualitative.D3  # of lines; legible on the light and dark page
_MARK = {"color": "crimson", "width": 1, "dash": "dot"}  # of a clip range
_POINTS = 1000  # of a line
_COLUMNS = 160  # of a heat map
_DOTS = 40  # lines with at most so many points show them as dots


class Plot(NamedTuple):
  """A figure, and what the page writes around it.

  Attributes:
    figure: without a template; the page sets that of its colour scheme.
    note: text below the figure.
    summary: what the figure shows, for screen readers.
    warning: whether the note is a warning.
  """

  figure: go.Figure
  note: str
  summary: str
  warning: bool = False

  @property
  def title(self) -> str:
    """Of the figure, as plain text."""
    return unescape(self.figure.layout.title.text)


class SubjectPlots(NamedTuple):
  """A section of the page.

  Attributes:
    plots: warnings first.
    constant: "name value" of each scalar that never changed.
    scalars: names of all scalars of the subject, for its table.
  """

  plots: list[Plot]
  constant: list[str]
  scalars: list[str]


def of_subject(
  subject: Subject, runs: Sequence[RunRecord], taken: set[str]
) -> SubjectPlots:
  """The plots of a subject.

  Args:
    subject: its charts are made of the metrics that match their patterns.
    runs: one or more.
    taken: metrics of earlier subjects; those of this one are added.
  """
  plots, still, scalars = [], [], []
  for chart in subject.charts:
    if isinstance(chart, Spreads):
      plots += _spreads(chart, runs, taken)
      continue
    names = {name for run in runs for name in run.scalars}
    labels = matched(chart.metrics, names, taken)
    taken.update(labels)
    scalars += labels
    if isinstance(chart, Numbers):
      continue
    constant = {name for name in labels if _is_constant(name, runs)}
    if not chart.each and len(constant) < len(labels):
      constant = set()  # a constant line means something beside other lines
    if chart.no_signal and any(len(run.without_signal()) for run in runs):
      chart = chart._replace(note=chart.no_signal)
      warnings = _curves(chart, runs, labels)
      plots = [p._replace(warning=True) for p in warnings] + plots
      continue
    still += [_last_value(name, runs, chart.unit) for name in sorted(constant)]
    moving = {k: v for k, v in labels.items() if k not in constant}
    plots += _curves(chart, runs, moving)
  return SubjectPlots(plots, still, scalars)


def _is_constant(name: str, runs: Sequence[RunRecord]) -> bool:
  """Whether a scalar has one value in all runs, more than twice."""
  values = np.concatenate(
    [r.scalars[name].values for r in runs if name in r.scalars]
  )
  return len(values) > 2 and len(set(values.tolist())) == 1


def _last_value(name: str, runs: Sequence[RunRecord], unit: str) -> str:
  run = next(run for run in runs if name in run.scalars)
  return f"{name} {number(run.last(name), unit)}"


def number(value: float, unit: str = "") -> str:
  """A number with three digits and its unit; "-" for NaN. "%" for shares."""
  if np.isnan(value):
    return "-"
  if unit == "%":
    return f"{number(100 * value)}%"
  text = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
  return f"{text} {unit}".rstrip()


def _curves(
  chart: Chart, runs: Sequence[RunRecord], labels: dict[str, str]
) -> list[Plot]:
  """One plot of all metrics for one run; one a metric for several runs."""
  if len(runs) == 1 and labels and not chart.each:
    return [_curve(chart, runs, chart.title, labels)]
  plots = []
  for name, label in labels.items():
    alone = len(labels) == 1 and not chart.each
    title = (
      chart.title
      if alone
      else name
      if chart.each
      else f"{chart.title}: {label}"
    )
    plots.append(_curve(chart, runs, title, {name: label}))
  return plots


def _curve(
  chart: Chart, runs: Sequence[RunRecord], title: str, labels: dict[str, str]
) -> Plot:
  """Lines over the steps."""
  several = len(runs) > 1
  found = [  # label, colour and points of each line
    (run.name, i, run.scalars[name])
    if several
    else (label, j, run.scalars[name])
    for i, run in enumerate(runs)
    for j, (name, label) in enumerate(labels.items())
    if name in run.scalars
  ]
  figure = _figure(title, chart.unit)
  few = all(len(series.steps) <= _DOTS for _, _, series in found)
  for label, colour, series in found:
    steps, values = thin(series)
    figure.add_scatter(
      x=steps,
      y=values.astype(np.float32),
      name=_plain(label),
      # A number between two gaps would have no line.
      mode="lines+markers" if few or np.isnan(values).any() else "lines",
      line={"color": COLOURS[colour % len(COLOURS)]},
      marker={"size": 5 if few else 3},
      showlegend=not several and len(labels) > 1,
    )
  ends = [int(series.steps[i]) for _, _, series in found for i in (0, -1)]
  # The chart shows absolute values.
  marks = {name: abs(at) for name, at in _marks(runs, chart.clips).items()}
  for name, at in marks.items():
    figure.add_scatter(
      x=[min(ends), max(ends)],
      y=[at, at],
      name=f"{name} {number(at)}",
      mode="lines",
      line=_MARK,
      showlegend=True,
      hoverinfo="skip",
    )
  skip = [int(chart.skip_first and len(s.steps) > 2) for _, _, s in found]
  values = [s.values[n:] for n, (_, _, s) in zip(skip, found, strict=True)]
  figure.update_xaxes(**_whole("step", min(ends), max(ends)))
  figure.update_yaxes(
    **_vertical(chart, np.concatenate([*values, list(marks.values())]))
  )
  summary = "; ".join(
    f"{label} {number(first, chart.unit)} to {number(last, chart.unit)}"
    for label, first, last in (
      (label, *_ends(series.values)) for label, _, series in found
    )
  )
  return Plot(figure, chart.note, summary)


def _ends(values: np.ndarray) -> tuple[float, float]:
  """The first and the last finite value."""
  finite = values[~np.isnan(values)]
  return (finite[0], finite[-1]) if len(finite) else (np.nan, np.nan)


def _vertical(chart: Chart, values: np.ndarray) -> dict:
  """The vertical axis: logarithmic, or with 0 if that is near."""
  values = values[~np.isnan(values)]
  low, high = (values.min(), values.max()) if len(values) else (0.0, 0.0)
  if chart.skip_first:  # plotly would show all values
    room = 0.06 * (high - low) or 0.5 * high or 1.0
    return {"range": [max(low - room, 0), high + room]}
  least = min(values[values > 0], default=high)
  # Within a factor of 2 a logarithmic axis may have no tick.
  if chart.log and high > 2 * least:
    ticks = "D2" if high < 50 * least else None
    return {"type": "log", "tickformat": "~g", "dtick": ticks}
  near = low >= 0 and (low <= high / 2 or low == high)
  return {"rangemode": "tozero" if near else "normal"}


def thin(series: Series) -> Series:
  """A long series reduced to few of its points, without hiding a spike.

  Each of equally many steps keep their smallest and largest value, and a NaN.
  """
  steps, values = series
  if len(steps) <= _POINTS:
    return series
  keep = {0, len(steps) - 1}
  for part in np.array_split(np.arange(len(steps)), _POINTS // 2):
    missing = np.isnan(values[part])
    keep |= set(part[missing][:1])
    if not missing.all():
      keep |= {
        part[np.nanargmin(values[part])],
        part[np.nanargmax(values[part])],
      }
  at = sorted(keep)
  return Series(steps[at], values[at])


def _marks(runs: Sequence[RunRecord], unit: str) -> dict[str, float]:
  """The clip range of a unit; {} if the runs have different ones."""
  clips = [run.clips(unit) for run in runs]
  return clips[0] if all(c == clips[0] for c in clips) else {}


def _spreads(
  chart: Spreads, runs: Sequence[RunRecord], taken: set[str]
) -> list[Plot]:
  names = {name for run in runs for name in run.spreads}
  labels = matched(chart.metrics, names, taken)
  taken.update(labels)
  marks = _marks(runs, chart.clips)
  plots = []
  for name, label in labels.items():
    title = label if chart.metrics.get(name) or " " in label else name
    found = [(i, r) for i, r in enumerate(runs) if name in r.spreads]
    edges = found[0][1].spreads[name].edges
    if len(runs) == 1:
      spread = runs[0].spreads[name]
      plots.append(_heat_map(chart, title, spread, marks))
      title = f"{title}: begin and end"
      lines = [_Outline(n, i, v) for i, (n, v) in enumerate(_tenths(spread))]
    else:
      title = f"{title}: last tenth of the steps"
      lines = [
        _Outline(run.name, i, _tenths(run.spreads[name])[-1][1])
        for i, run in found
      ]
    plots.append(_outlines(chart.unit, title, lines, edges, marks))
    if len(runs) == 1:
      plots[-1].figure.update_layout(showlegend=True)
  return plots


class _Outline(NamedTuple):
  """A line of `_outlines`: its label, its colour and its values [bins]."""

  label: str
  colour: int
  values: np.ndarray


def _tenths(spread: Spread) -> list[tuple[str, np.ndarray]]:
  """The mean over a tenth of the steps at the begin, middle and end."""
  n = len(spread.steps)
  tenth = max(1, n // 10)
  starts = {(n - tenth) // 2: "middle", 0: "first"} | {n - tenth: "last"}
  return [
    (label, _mean(spread.values[start : start + tenth]))
    for start, label in sorted(starts.items())
  ]


def _mean(values: np.ndarray) -> np.ndarray:
  """Of [N, bins] over N, without NaN; 0 where all are."""
  counts = np.maximum((~np.isnan(values)).sum(axis=0), 1)
  return np.nansum(values, axis=0) / counts


def _heat_map(
  chart: Spreads, title: str, spread: Spread, marks: dict[str, float]
) -> Plot:
  """Steps to the right; upwards the bins of a histogram, or the layers."""
  n = len(spread.steps)
  width = -(-n // _COLUMNS)  # steps in a column
  parts = np.split(np.arange(n), range(width, n, width))
  values = np.stack([_mean(spread.values[part]) for part in parts])
  if spread.edges is None:
    ys, unit = np.arange(values.shape[1]), chart.unit
    axis = _whole("layer", 0, len(ys) - 1)
    note = f"{chart.note} Layer 0 at the bottom.".lstrip()
    z, bar = values, {"tickformat": "~%" if unit == "%" else ",~g"}
  else:
    used = _used(values, spread.edges)
    ys, unit = _bins(spread.edges)[used], "%"
    axis, note = _decades(spread.edges, used), chart.note
    values = values / np.maximum(values.sum(axis=1, keepdims=True), 1)
    values = values[:, used]
    # The square root makes small shares visible.
    ticks = np.array([0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1])
    z, bar = np.sqrt(values), {"tickvals": np.sqrt(ticks)}
    bar["ticktext"] = [number(tick, "%") for tick in ticks]
  figure = _figure(title, unit)
  figure.add_heatmap(
    x=np.array([spread.steps[part].mean() for part in parts]),
    y=ys,
    z=z.T.astype(np.float32),
    customdata=values.T.astype(np.float32),
    zmin=0,
    zmax=float(z.max()) or 1,
    colorbar=bar,
    hovertemplate="step %{x:,.0f}, "
    f"%{{y}}: %{{customdata:{_format(unit)}}}<extra></extra>",
  )
  for name, value in marks.items():
    at = _place(value, spread.edges, used)
    if not 0 <= at < len(ys):
      continue
    figure.add_hline(
      at,
      line=_MARK,
      annotation={"text": f"{name} {number(value)}", "showarrow": False},
      annotation_position="top right" if value > 0 else "bottom right",
    )
  figure.update_layout(hovermode="closest")
  figure.update_xaxes(**_whole("step", spread.steps[0], spread.steps[-1]))
  figure.update_yaxes(tickformat="", hoverformat="", **axis)
  return Plot(figure, note, f"0 to {number(values.max(), unit)}")


def _outlines(
  unit: str,
  title: str,
  lines: Sequence[_Outline],
  edges: np.ndarray | None,
  marks: dict[str, float],
) -> Plot:
  """Lines over the bins of histograms, as shares, or over the layers."""
  note, shape = "", "linear"
  if edges is None:
    layers = max(len(line.values) for line in lines)
    used, xs = slice(None), np.arange(layers)
    axis = _whole("layer", 0, layers - 1)
  else:
    lines = [
      line._replace(values=line.values / max(line.values.sum(), 1))
      for line in lines
      if len(line.values) == len(edges) - 1
    ]
    used = _used(np.stack([line.values for line in lines]), edges)
    xs, axis = _bins(edges)[used], _decades(edges, used)
    unit, shape = "%", "hvh"
    note = "Share of the numbers in a bin, four bins a decade."
  figure = _figure(title, unit)
  for label, colour, values in lines:
    figure.add_scatter(
      x=xs[: len(values)],
      y=values[used].astype(np.float32),
      name=_plain(label),
      mode="lines+markers" if len(xs) == 1 else "lines",
      line={"color": COLOURS[colour % len(COLOURS)], "shape": shape},
    )
  for value in marks.values() if edges is not None else ():
    at = _place(value, edges, used)
    if 0 <= at < len(xs):
      figure.add_vline(at, line=_MARK)
  figure.update_layout(showlegend=False)
  figure.update_xaxes(**axis)
  figure.update_yaxes(rangemode="tozero")
  return Plot(figure, note, ", ".join(line.label for line in lines))


def _used(counts: np.ndarray, edges: np.ndarray) -> slice:
  """The bins from -x to x with all counts, and one more on both sides."""
  filled = np.flatnonzero(counts.sum(axis=0))
  middle = (len(edges) - 1) // 2
  reach = max([abs(b - middle) for b in filled], default=4) + 1
  reach = min(max(reach, 4), middle)
  return slice(middle - reach, middle + reach + 1)


def _bins(edges: np.ndarray) -> np.ndarray:
  """The name of each bin."""
  names = [f"{a:.2g} to {b:.2g}" for a, b in itertools.pairwise(edges)]
  names[0], names[-1] = f"below {edges[1]:.2g}", f"above {edges[-2]:.2g}"
  return np.array(names)


def _place(value: float, edges: np.ndarray, used: slice) -> float:
  """The place of a number on an axis of the bins `used`."""
  at = np.interp(value, edges[1:-1], np.arange(1, len(edges) - 1))
  return float(at - used.start - 0.5)


def _decades(edges: np.ndarray, used: slice) -> dict:
  """An axis of bins with labels at 0 and at every second ±10^n."""
  labels = {_place(0, edges, used): "0"}
  for power in range(-12, 13, 2):
    for sign in (1, -1):
      at = _place(sign * 10.0**power, edges, used)
      inside = 0 <= at <= used.stop - used.start - 1
      # A label beside another would touch it.
      near = any(abs(at - other) < 4 for other in labels)
      if inside and not near:
        text = "1" if power == 0 else f"10<sup>{power}</sup>"
        labels[at] = text if sign > 0 else f"−{text}"
  return {
    "type": "category",
    "tickvals": list(labels),
    "ticktext": list(labels.values()),
    "tickangle": 0,
  }


def _whole(name: str, first: int, last: int) -> dict:
  """An axis of whole numbers, the first of them with the name."""
  axis = {"tickprefix": f"{name} "}
  if last - first < 6:  # no fractions
    axis["dtick"] = 1
  if first == last:  # no other numbers
    axis["range"] = [first - 0.9, first + 0.9]
  return axis


def _format(unit: str) -> str:
  """The d3 format of numbers below the pointer."""
  return ",.3~p" if unit == "%" else ",.5~g"


def _plain(text: str) -> str:
  """Text in which plotly finds no tags."""
  return escape(text, quote=False)


def _figure(title: str, unit: str) -> go.Figure:
  """An empty figure."""
  if unit not in ("", "%"):
    title = f"{title} ({unit})"
  return go.Figure(
    layout={
      "template": "none",
      "title": {"text": _plain(title)},
      "yaxis": {
        "tickformat": "~%" if unit == "%" else ",~g",
        "hoverformat": _format(unit),
      },
    }
  )


def template(base: str, ink: str, scale: Sequence[str]) -> go.layout.Template:
  """What all figures of a colour scheme share.

  Args:
    base: name of a template of plotly.
    ink: colour of text.
    scale: colours of heat maps, from 0, which is the background, upwards.
  """
  paper = scale[0]
  result = go.layout.Template(io.templates[base])
  result.layout.update(
    height=270,
    paper_bgcolor=paper,
    plot_bgcolor=paper,
    font={"color": ink, "size": 11, "family": "system-ui, sans-serif"},
    title={
      "font": {"size": 13, "weight": 600},
      "x": 0,
      "pad": {"l": 12},
    },
    margin={"l": 12, "r": 14, "t": 40, "b": 12},
    hovermode="x unified",
    hoverlabel={"namelength": -1},
    annotationdefaults={"bgcolor": paper, "font": {"size": 10}},
    legend={"orientation": "h", "yref": "container", "y": 0, "x": 0},
    xaxis={
      "showtickprefix": "first",
      "separatethousands": True,
      "nticks": 6,
      "showgrid": False,
      "zeroline": False,
      "ticklabelstandoff": 5,
    },
    yaxis={"nticks": 6, "automargin": True},
  )
  result.data.scatter = [go.Scatter(line_width=1.6, cliponaxis=False)]
  result.data.heatmap = [
    go.Heatmap(
      colorscale=list(scale),
      colorbar={"thickness": 8, "outlinewidth": 0, "nticks": 5},
    )
  ]
  return result
