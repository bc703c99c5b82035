"""The charts of a subject, for one run or for several."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from gspo_jax.report import heat
from gspo_jax.report.chart import (
  COLOURS,
  Axis,
  Figure,
  Line,
  line_chart,
  warning,
)
from gspo_jax.report.curve import thin
from gspo_jax.report.scale import number
from gspo_jax.report.subjects import (
  Chart,
  Numbers,
  Spreads,
  Subject,
  matched,
)
from gspo_jax.report.workdir import RunRecord, Spread

_POINTS = 240  # of a line, on the page of one run


class SubjectFigures(NamedTuple):
  """A section of the page.

  Attributes:
    figures: warnings first.
    constant: "name value" of each scalar that never changed.
    scalars: names of all scalars of the subject, for its table.
  """

  figures: list[Figure]
  constant: list[str]
  scalars: list[str]


def of_subject(
  subject: Subject, runs: Sequence[RunRecord], taken: set[str]
) -> SubjectFigures:
  """The figures of a subject.

  Args:
    subject: its charts are made of the metrics that match their patterns.
    runs: one or more.
    taken: metrics of earlier subjects; those of this one are added.
  """
  figures, still, scalars = [], [], []
  for chart in subject.charts:
    if isinstance(chart, Spreads):
      figures += _spreads(chart, runs, taken)
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
      figures = [warning(f) for f in _charts(chart, runs, labels)] + figures
      continue
    still += [_last_value(name, runs, chart.unit) for name in sorted(constant)]
    moving = {k: v for k, v in labels.items() if k not in constant}
    figures += _charts(chart, runs, moving)
  return SubjectFigures(figures, still, scalars)


def _is_constant(name: str, runs: Sequence[RunRecord]) -> bool:
  """Whether a scalar has one value in all runs, more than twice."""
  values = np.concatenate(
    [r.scalars[name].values for r in runs if name in r.scalars]
  )
  return len(values) > 2 and len(set(values.tolist())) == 1


def _last_value(name: str, runs: Sequence[RunRecord], unit: str) -> str:
  run = next(run for run in runs if name in run.scalars)
  return f"{name} {number(run.last(name), unit)}"


def _charts(
  chart: Chart, runs: Sequence[RunRecord], labels: dict[str, str]
) -> list[Figure]:
  """One figure of all metrics for one run; one a metric for several runs."""
  if len(runs) == 1 and labels and not chart.each:
    return [_chart(chart, runs, chart.title, labels)]
  figures = []
  for name, label in labels.items():
    alone = len(labels) == 1 and not chart.each
    title = (
      chart.title
      if alone
      else name
      if chart.each
      else f"{chart.title}: {label}"
    )
    figures.append(_chart(chart, runs, title, {name: label}))
  return figures


def _chart(
  chart: Chart,
  runs: Sequence[RunRecord],
  title: str,
  labels: dict[str, str],
) -> Figure:
  points = max(60, _POINTS // len(runs))
  several, lines = len(runs) > 1, []
  for i, run in enumerate(runs):
    for j, (name, label) in enumerate(labels.items()):
      if name in run.scalars:
        curve = thin(run.scalars[name], points)
        lines.append(
          Line(run.name, i % COLOURS, curve)
          if several
          else Line(label, j % COLOURS, curve)
        )
  return line_chart(
    title,
    lines,
    Axis(chart.unit, chart.log, chart.skip_first),
    note=chart.note,
    labels=not several,
    # The chart shows absolute values.
    marks={name: abs(at) for name, at in _marks(runs, chart.clips).items()},
  )


def _marks(runs: Sequence[RunRecord], unit: str) -> dict[str, float]:
  """The clip range of a unit; {} if the runs have different ones."""
  clips = [run.clips(unit) for run in runs]
  return clips[0] if all(c == clips[0] for c in clips) else {}


def _spreads(
  chart: Spreads, runs: Sequence[RunRecord], taken: set[str]
) -> list[Figure]:
  names = {name for run in runs for name in run.spreads}
  labels = matched(chart.metrics, names, taken)
  taken.update(labels)
  marks = _marks(runs, chart.clips)
  figures = []
  for name, label in labels.items():
    title = label if chart.metrics.get(name) or " " in label else name
    if len(runs) == 1:
      figures += _spread(chart, title, runs[0].spreads[name], marks)
    else:
      figures.append(_compared_spreads(chart, name, title, runs))
  return figures


def _spread(
  chart: Spreads, title: str, spread: Spread, marks: dict[str, float]
) -> list[Figure]:
  """Of one run: a map over all steps, and outlines of some parts of it."""
  outlines = [
    heat.Outline(label, colour, _mean(spread.values[part]))
    for label, colour, part in _parts(len(spread.steps))
  ]
  if spread.edges is None:
    title_of_outlines = f"{title}: first, middle, last"
    return [
      heat.layer_map(title, spread, chart.note, chart.unit),
      heat.profiles(title_of_outlines, outlines, chart.unit, ""),
    ]
  return [
    heat.histogram_map(title, spread, chart.note, marks),
    heat.outlines(
      f"{title}: begin and end", outlines, spread.edges, _OUTLINES_NOTE
    ),
  ]


def _compared_spreads(
  chart: Spreads, name: str, title: str, runs: Sequence[RunRecord]
) -> Figure:
  """Of several runs: an outline of the end of each."""
  outlines = [
    heat.Outline(run.name, i % COLOURS, _mean(_last_tenth(run.spreads[name])))
    for i, run in enumerate(runs)
    if name in run.spreads
  ]
  edges = next(run.spreads[name].edges for run in runs if name in run.spreads)
  title = f"{title}: last tenth of the steps"
  if edges is None:
    return heat.profiles(title, outlines, chart.unit, "")
  outlines = [o for o in outlines if len(o.values) == len(edges) - 1]
  return heat.outlines(title, outlines, edges, _OUTLINES_NOTE)


_OUTLINES_NOTE = "Share of the numbers in a bin, four bins a decade."


def _mean(values: np.ndarray) -> np.ndarray:
  counts = np.maximum((~np.isnan(values)).sum(axis=0), 1)
  return np.nansum(values, axis=0) / counts


class _Part(NamedTuple):
  """A part of the steps of a run, with its label and CSS colour class."""

  label: str
  colour: str
  steps: slice


def _parts(n: int) -> list[_Part]:
  """A tenth of N steps at the begin, in the middle and at the end."""
  tenth = max(1, n // 10)
  middle = (n - tenth) // 2
  parts = [
    _Part("first", "-first", slice(0, tenth)),
    _Part("middle", "-middle", slice(middle, middle + tenth)),
    _Part("last", "-last", slice(n - tenth, n)),
  ]
  return parts[-1:] if n == 1 else parts[::2] if n == 2 else parts


def _last_tenth(spread: Spread) -> np.ndarray:
  return spread.values[-max(1, len(spread.steps) // 10) :]


def table(scalars: Sequence[str], runs: Sequence[RunRecord]) -> str:
  """First, last, smallest and largest value of each scalar in each run."""
  rows = []
  for name in sorted(set(scalars)):
    for run in runs:
      if name not in run.scalars:
        continue
      values = run.scalars[name].values
      finite = values[~np.isnan(values)]
      cells = [number(run.first(name)), number(run.last(name))]
      cells += [
        number(v) for v in ((finite.min(), finite.max()) if len(finite) else ())
      ] or ["-", "-"]
      cells += [f"{len(values):,}"]
      of = f"<td>{escape(run.name)}</td>" if len(runs) > 1 else ""
      rows.append(
        f"<tr><th scope=row>{escape(name)}</th>{of}"
        + "".join(f"<td class=n>{c}</td>" for c in cells)
        + "</tr>"
      )
  of = "<th scope=col>run</th>" if len(runs) > 1 else ""
  heads = "".join(
    f"<th scope=col class=n>{h}</th>"
    for h in ("first", "last", "smallest", "largest", "steps")
  )
  return (
    "<details><summary>Numbers</summary><div class=scroll><table><thead><tr>"
    f"<th scope=col>metric</th>{of}{heads}</tr></thead><tbody>{''.join(rows)}"
    "</tbody></table></div></details>"
  )
