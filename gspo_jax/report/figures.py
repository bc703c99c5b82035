"""The charts of a subject, of one run or of several over one another."""

from collections.abc import Sequence
from html import escape

import numpy as np

from gspo_jax.report import heat
from gspo_jax.report.chart import COLOURS, Figure, Line, line_chart, warning
from gspo_jax.report.curve import thin
from gspo_jax.report.scale import number
from gspo_jax.report.subjects import (
  Chart,
  Numbers,
  Spreads,
  Subject,
  matched,
)
from gspo_jax.report.workdir import RunRecord

_POINTS = 240  # of a line, where one run has the page for itself


def of_subject(
  subject: Subject, runs: Sequence[RunRecord], taken: set[str]
) -> tuple[list[Figure], list[str], list[str]]:
  """Takes the subject's metrics out of what is left.

  Returns:
    Figures, warnings first; "name value" of each scalar that never changed; the
    scalars of this subject, for its table.
  """
  figures, still, scalars = [], [], []
  for chart in subject.charts:
    if isinstance(chart, Spreads):
      figures += _spreads(chart, runs, taken)
      continue
    names = {name for run in runs for name in run.scalars}
    found = matched(chart.metrics, names, taken)
    taken.update(found)
    scalars += found
    if isinstance(chart, Numbers):
      continue
    constant = {name for name in found if _constant(name, runs)}
    if not chart.each and len(constant) < len(found):
      constant = set()  # beside lines that move they say something
    if chart.no_signal and any(len(run.without_signal()) for run in runs):
      told = chart._replace(note=chart.no_signal)
      figures = [warning(f) for f in _charts(told, runs, found)] + figures
      continue
    still += [_still(name, runs, chart.unit) for name in sorted(constant)]
    moving = {k: v for k, v in found.items() if k not in constant}
    figures += _charts(chart, runs, moving)
  return figures, still, scalars


def _constant(name: str, runs: Sequence[RunRecord]) -> bool:
  """Whether it has one value, seen more than twice and in all runs."""
  values = np.concatenate(
    [r.scalars[name].values for r in runs if name in r.scalars]
  )
  return len(values) > 2 and len(set(values.tolist())) == 1


def _still(name: str, runs: Sequence[RunRecord], unit: str) -> str:
  run = next(run for run in runs if name in run.scalars)
  return f"{name} {number(run.last(name), unit)}"


def _charts(
  chart: Chart, runs: Sequence[RunRecord], found: dict[str, str]
) -> list[Figure]:
  if len(runs) == 1 and found and not chart.each:
    return [_chart(chart, runs, chart.title, list(found.items()))]
  made = []
  for name, label in found.items():
    alone = len(found) == 1 and not chart.each
    title = (
      chart.title
      if alone
      else name
      if chart.each
      else f"{chart.title}: {label}"
    )
    made.append(_chart(chart, runs, title, [(name, label)]))
  return made


def _chart(chart: Chart, runs, title: str, found) -> Figure:
  points = max(60, _POINTS // len(runs))
  several, lines = len(runs) > 1, []
  for i, run in enumerate(runs):
    for j, (name, label) in enumerate(found):
      if name in run.scalars:
        curve = thin(run.scalars[name], points)
        named = (run.name, i % COLOURS) if several else (label, j % COLOURS)
        lines.append(Line(*named, curve))
  return line_chart(
    title,
    lines,
    unit=chart.unit,
    note=chart.note,
    log=chart.log,
    labels=not several,
    # The chart is of sizes.
    marks={name: abs(at) for name, at in _marks(runs, chart.clips).items()},
    first_is_odd=chart.first_is_odd,
  )


def _marks(runs: Sequence[RunRecord], unit: str) -> dict[str, float]:
  """The clip range of a unit, where all runs have the same."""
  clips = [run.clips(unit) for run in runs]
  return clips[0] if all(c == clips[0] for c in clips) else {}


def _spreads(
  chart: Spreads, runs: Sequence[RunRecord], taken: set[str]
) -> list[Figure]:
  names = {name for run in runs for name in run.spreads}
  found = matched(chart.metrics, names, taken)
  taken.update(found)
  marks = _marks(runs, chart.clips)
  figures = []
  for name, label in found.items():
    title = label if chart.metrics.get(name) or " " in label else name
    having = [(i, run) for i, run in enumerate(runs) if name in run.spreads]
    figures += _spread(chart, name, title, having, marks, len(runs) == 1)
  return figures


def _spread(chart, name, title, having, marks, alone) -> list[Figure]:
  spreads = [run.spreads[name] for _, run in having]
  edges = spreads[0].edges
  if alone:
    shown = [
      (label, colour, _mean(spreads[0].values[part]))
      for label, colour, part in _parts(len(spreads[0].steps))
    ]
    over = (
      heat.layer_map(title, spreads[0], chart.note, chart.unit)
      if edges is None
      else heat.histogram_map(title, spreads[0], chart.note, marks)
    )
    figures = [over]
  else:
    shown = [
      (
        run.name,
        i % COLOURS,
        _mean(run.spreads[name].values[_tenth(run, name)]),
      )
      for i, run in having
    ]
    figures = []
  if edges is None:
    when = "first, middle, last" if alone else "last tenth of the steps"
    return [
      *figures,
      heat.profiles(f"{title}: {when}", shown, chart.unit, ""),
    ]
  when = "begin and end" if alone else "last tenth of the steps"
  note = "Share of the numbers in a bin, four bins a decade."
  same = [s for s in shown if len(s[2]) == len(edges) - 1]
  return [*figures, heat.outlines(f"{title}: {when}", same, edges, note)]


def _mean(values: np.ndarray) -> np.ndarray:
  counts = np.maximum((~np.isnan(values)).sum(axis=0), 1)
  return np.nansum(values, axis=0) / counts


def _parts(n: int):
  """Label, colour and place of the begin, the middle and the end of a run."""
  tenth = max(1, n // 10)
  parts = [
    ("first", "-first", slice(0, tenth)),
    ("middle", "-middle", slice((n - tenth) // 2, (n - tenth) // 2 + tenth)),
    ("last", "-last", slice(n - tenth, n)),
  ]
  return parts[-1:] if n == 1 else parts[::2] if n == 2 else parts


def _tenth(run: RunRecord, name: str) -> slice:
  n = len(run.spreads[name].steps)
  return slice(n - max(1, n // 10), n)


def table(scalars: Sequence[str], runs: Sequence[RunRecord]) -> str:
  """First, last, least and largest of each scalar, in each run."""
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
    for h in ("first", "last", "least", "largest", "rows")
  )
  return (
    "<details><summary>Numbers</summary><div class=scroll><table><thead><tr>"
    f"<th scope=col>metric</th>{of}{heads}</tr></thead><tbody>{''.join(rows)}"
    "</tbody></table></div></details>"
  )
