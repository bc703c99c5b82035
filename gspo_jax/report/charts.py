"""Charts: which metrics share one, and how plotly draws it.

A metric is `section/name`. For one run, metrics of a section share a chart if
their names begin with the same word and they have the same unit. For several
runs, each metric has a chart.
"""

import fnmatch
import itertools
import re
from collections.abc import Iterable, Sequence
from html import escape, unescape
from typing import NamedTuple

import numpy as np
from plotly import colors, io
from plotly import graph_objects as go

from gspo_jax.report.workdir import RunRecord, Series, Spread

COLOURS = colors.qualitative.D3  # of lines; legible on light and dark pages
_MARK = {"color": "crimson", "width": 1, "dash": "dot"}  # a clip range
_POINTS = 1000  # of a line
_DOTS = 40  # lines with at most this many points show them as dots
_FIRST = ("eval", "reward", "response")  # sections; the others by name
# Patterns of the metrics that have a unit; "%" for shares.
_UNITS = {
  "%": (
    *("eval/pass@*", "clip_frac/*", "*/mixed_groups", "*fraction*", "*_share"),
    *("reward/failed", "response/truncated", "response/useful_steps"),
    *("ratio/moved", "mismatch/c*", "mismatch/off_policy", "*_differ"),
    *("throughput/goodput", "moe/*flip_rate"),
    *("conversation/tool_use", "conversation/tool_errors"),
  ),
  "nats": (
    *("kl/*", "distill/*", "*entropy", "ratio/*_log", "mismatch/*_gap"),
    "mismatch/*_abs_mean",
  ),
  "tokens": (
    *("response/length", "response/acceptance_length"),
    "conversation/*_tokens",
    *("dynamic_sampling/tokens_*ed",),
  ),
  "s": ("time/*",),
}
# Metrics with a logarithmic axis: their order of magnitude matters.
_LOGARITHMIC = ("*_std", "*_abs_mean", "*norm")


class Plot(NamedTuple):
  figure: go.Figure
  summary: str  # what the figure shows, for screen readers
  note: str = ""  # text below the figure

  @property
  def title(self) -> str:
    return unescape(self.figure.layout.title.text)


def sections(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
  """Metric names by section; "other" has names without a section."""
  names = {name for run in runs for name in (*run.scalars, *run.spreads)}
  by_section = {section: [] for section in _FIRST}
  for name in sorted(names, key=_natural):
    section, slash, _ = name.partition("/")
    by_section.setdefault(section if slash else "other", []).append(name)
  return {section: group for section, group in by_section.items() if group}


def _natural(name: str) -> list:
  """Sort key that puts pass@8 before pass@16."""
  head, *digits = re.split(r"(\d+)$", name)
  return [head, *map(int, digits[:1])]


def unit(name: str) -> str:
  """The unit of a metric; "%" for a share; "" for none."""
  return next((u for u, names in _UNITS.items() if _is(name, names)), "")


def _is(name: str, patterns: Iterable[str]) -> bool:
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def of_section(names: Sequence[str], runs: Sequence[RunRecord]) -> list[Plot]:
  """The plots of the metrics of a section.

  A metric that never changes has a plot only if it shares a chart with one that
  changes. The table of all numbers has every metric.
  """
  groups = {}
  for name in names:
    if any(name in run.scalars for run in runs):
      first_word = re.match(r"([^/]*/)?[^_@/]*", name)[0]
      groups.setdefault((first_word, unit(name)), []).append(name)
  plots = []
  for (first_word, _), group in groups.items():
    if all(_is_constant(name, runs) for name in group):
      continue
    if len(runs) == 1:
      title = first_word if len(group) > 1 else group[0]
      plots.append(_curves(title, group, runs))
    else:
      plots += [_curves(name, [name], runs) for name in group]
  for name in names:
    if any(name in run.spreads for run in runs):
      plots.append(_outlines(name, runs))
  return plots


def _is_constant(name: str, runs: Sequence[RunRecord]) -> bool:
  series = [run.scalars[name].values for run in runs if name in run.scalars]
  values = np.concatenate(series)
  return len(values) > 2 and len(set(values.tolist())) == 1


def number(value: float, unit: str = "") -> str:
  """Three digits and the unit; "-" for NaN; "%" for shares."""
  if np.isnan(value):
    return "-"
  if unit == "%":
    return f"{number(100 * value)}%"
  text = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
  return f"{text} {unit}".rstrip()


def _curves(
  title: str, names: Sequence[str], runs: Sequence[RunRecord]
) -> Plot:
  """Lines over the steps: metrics of one run, or one metric of several."""
  several = len(runs) > 1
  lines = {
    run.name if several else name.partition("/")[2] or name: (
      COLOURS[(i if several else j) % len(COLOURS)],
      run.scalars[name],
    )
    for i, run in enumerate(runs)
    for j, name in enumerate(names)
    if name in run.scalars
  }
  figure = _figure(title, unit(names[0]))
  all_series = [series for _, series in lines.values()]
  few = all(len(series.steps) <= _DOTS for series in all_series)
  for label, (colour, series) in lines.items():
    steps, values = thin(series)
    figure.add_scatter(
      x=steps,
      y=values.astype(np.float32),
      name=_plain(label),
      # Markers, because a number between two gaps has no line.
      mode="lines+markers" if few or np.isnan(values).any() else "lines",
      line={"color": colour},
      marker={"size": 5 if few else 3},
      showlegend=not several and len(names) > 1,
    )
  ends = [int(series.steps[i]) for series in all_series for i in (0, -1)]
  # A chart of curves shows the absolute values of log-ratios.
  marks = {name: abs(at) for name, at in _marks(runs, names[0]).items()}
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
  # Skip the first step, which compiles.
  skip = names[0].startswith("time/")
  values = [x.values[int(skip and len(x.steps) > 2) :] for x in all_series]
  values = np.concatenate([*values, list(marks.values())])
  figure.update_xaxes(**_whole("step", min(ends), max(ends)))
  figure.update_yaxes(**_vertical(values, _is(names[0], _LOGARITHMIC), skip))
  text = lambda value: number(value, unit(names[0]))
  summary = "; ".join(
    f"{label} {text(series.finite()[0])} to {text(series.finite()[-1])}"
    for label, (_, series) in lines.items()
  )
  return Plot(figure, summary)


def _vertical(values: np.ndarray, logarithmic: bool, tight: bool) -> dict:
  """The axis, with 0 if 0 is near; `tight`: lines may leave its range."""
  values = values[~np.isnan(values)]
  low, high = (values.min(), values.max()) if len(values) else (0.0, 0.0)
  if tight:  # plotly would show all values
    room = 0.06 * (high - low) or 0.5 * high or 1.0
    return {"range": [max(low - room, 0), high + room]}
  least = min(values[values > 0], default=high)
  # A logarithmic axis within a factor of 2 may have no tick.
  if logarithmic and high > 2 * least:
    ticks = "D2" if high < 50 * least else None
    return {"type": "log", "tickformat": "~g", "dtick": ticks}
  near = low >= 0 and (low <= high / 2 or low == high)
  return {"rangemode": "tozero" if near else "normal"}


def thin(series: Series) -> Series:
  """The smallest and largest value of each stretch, and one NaN if any."""
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


def _marks(runs: Sequence[RunRecord], metric: str) -> dict[str, float]:
  """The clip range of a metric's log-ratios; {} if none, or if runs differ."""
  about = re.fullmatch(
    r"(?:ratio|mismatch)/(token|sequence)_(?:log|gap|abs_mean)", metric
  )
  if not about:
    return {}
  clips = [run.clips(about[1]) for run in runs]
  return clips[0] if all(c == clips[0] for c in clips) else {}


def _outlines(name: str, runs: Sequence[RunRecord]) -> Plot:
  """A distribution: lines over bins, as shares, or over the layers.

  For one run, the means over the first, middle and last tenth of the steps. For
  several runs, the mean over the last tenth.
  """
  spreads = {run.name: run.spreads.get(name) for run in runs}
  edges = next(spread.edges for spread in spreads.values() if spread)
  if len(runs) == 1:
    (spread,) = spreads.values()
    lines, title = _tenths(spread), name
  else:
    lines = {
      run_name: _tenths(spread)["last"] if spread else None
      for run_name, spread in spreads.items()
    }
    title = f"{name}: last tenth of the steps"
  lines = {
    label: (COLOURS[i], values)
    for i, (label, values) in enumerate(lines.items())
    if values is not None and (edges is None or len(values) == len(edges) - 1)
  }
  if edges is None:
    layers = max(len(values) for _, values in lines.values())
    used, places = slice(None), np.arange(layers)
    axis, marks, shape = _whole("layer", 0, layers - 1), {}, "linear"
    figure, note = _figure(title, unit(name)), ""
  else:
    used = _used(np.stack([values for _, values in lines.values()]), edges)
    places, axis = _bins(edges)[used], _decades(edges, used)
    marks, shape = _marks(runs, name), "hvh"
    figure = _figure(title, "%")
    note = "Share of the numbers in a bin, four bins a decade."
  for label, (colour, values) in lines.items():
    shares = values if edges is None else values / max(values.sum(), 1)
    figure.add_scatter(
      x=places[: len(values)],
      y=shares[used].astype(np.float32),
      name=_plain(label),
      mode="lines+markers" if len(places) == 1 else "lines",
      line={"color": colour, "shape": shape},
    )
  for value in marks.values():
    at = _place(value, edges, used)
    if 0 <= at < len(places):
      figure.add_vline(at, line=_MARK)
  figure.update_layout(showlegend=len(runs) == 1)
  figure.update_xaxes(**axis)
  figure.update_yaxes(rangemode="tozero")
  return Plot(figure, ", ".join(lines), note)


def _tenths(spread: Spread) -> dict[str, np.ndarray]:
  """Means over the first, middle, last tenth of the steps; 0 if all are NaN."""
  n = len(spread.steps)
  tenth = max(1, n // 10)
  starts = {(n - tenth) // 2: "middle", 0: "first"} | {n - tenth: "last"}
  means = {}
  for start, label in sorted(starts.items()):
    values = spread.values[start : start + tenth]
    counts = np.maximum((~np.isnan(values)).sum(axis=0), 1)
    means[label] = np.nansum(values, axis=0) / counts
  return means


def _used(counts: np.ndarray, edges: np.ndarray) -> slice:
  """The bins from -x to x with all counts, plus one on both sides."""
  filled = np.flatnonzero(counts.sum(axis=0))
  middle = (len(edges) - 1) // 2
  reach = max([abs(b - middle) for b in filled], default=4) + 1
  reach = min(max(reach, 4), middle)
  return slice(middle - reach, middle + reach + 1)


def _bins(edges: np.ndarray) -> np.ndarray:
  names = [f"{a:.2g} to {b:.2g}" for a, b in itertools.pairwise(edges)]
  names[0], names[-1] = f"below {edges[1]:.2g}", f"above {edges[-2]:.2g}"
  return np.array(names)


def _place(value: float, edges: np.ndarray, used: slice) -> float:
  at = np.interp(value, edges[1:-1], np.arange(1, len(edges) - 1))
  return float(at - used.start - 0.5)


def _decades(edges: np.ndarray, used: slice) -> dict:
  """An axis of bins with labels at 0 and at every second ±10^n."""
  labels = {_place(0, edges, used): "0"}
  for power in range(-12, 13, 2):
    for sign in (1, -1):
      at = _place(sign * 10.0**power, edges, used)
      inside = 0 <= at <= used.stop - used.start - 1
      # Labels must not touch.
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
  """An axis of whole numbers; the first label has the name."""
  axis = {"tickprefix": f"{name} "}
  if last - first < 6:  # no fractions
    axis["dtick"] = 1
  if first == last:  # no other numbers
    axis["range"] = [first - 0.9, first + 0.9]
  return axis


def _plain(text: str) -> str:
  # plotly reads tags.
  return escape(text, quote=False)


def _figure(title: str, unit: str) -> go.Figure:
  if unit not in ("", "%"):
    title = f"{title} ({unit})"
  return go.Figure(
    layout={
      "template": "none",
      "title": {"text": _plain(title)},
      "yaxis": {
        "tickformat": "~%" if unit == "%" else ",~g",
        "hoverformat": ",.3~p" if unit == "%" else ",.5~g",
      },
    }
  )


def template(base: str, ink: str, paper: str) -> go.layout.Template:
  """The style of all figures; `ink` and `paper` are text and background."""
  result = go.layout.Template(io.templates[base])
  result.layout.update(
    height=270,
    paper_bgcolor=paper,
    plot_bgcolor=paper,
    font={"color": ink, "size": 11, "family": "system-ui, sans-serif"},
    title={"font": {"size": 13, "weight": 600}, "x": 0, "pad": {"l": 12}},
    margin={"l": 12, "r": 14, "t": 40, "b": 12},
    hovermode="x unified",
    hoverlabel={"namelength": -1},
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
  return result
