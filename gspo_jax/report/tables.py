"""Heading and results of a page, the numbers, and the config."""

import datetime
import json
from collections.abc import Sequence
from html import escape

import numpy as np

from gspo_jax.record.identity import flatten
from gspo_jax.report.charts import COLOURS, number
from gspo_jax.report.workdir import RunRecord


def title(runs: Sequence[RunRecord]) -> str:
  if len(runs) > 1:
    return f"{len(runs)} runs compared"
  return " · ".join(part for part in (runs[0].name, *_kind(runs[0])) if part)


def _kind(run: RunRecord) -> tuple[str, str]:
  model = run.config.get("model", {})
  name = model.get("checkpoint", "").rstrip("/").rpartition("/")[2]
  method = run.config.get("objective", {}).get("name", "")
  return method, name or model.get("variant", "")


def steps(run: RunRecord) -> str:
  """Steps so far; the files do not tell whether a run was stopped."""
  total = run.config.get("num_steps")
  if total is None:
    return f"{run.last_step:,} steps"
  state = "finished" if run.last_step >= total else "running or stopped"
  return f"{run.last_step:,} of {total:,} steps, {state}"


def head(runs: Sequence[RunRecord]) -> str:
  warnings = "".join(
    f"<li>{escape(w)}</li>" for r in runs for w in _warnings(r, len(runs) > 1)
  )
  html = f"<h1>{escape(title(runs))}</h1>"
  if len(runs) == 1:
    html += f"<p class=muted>{escape(steps(runs[0]))}</p>"
  if warnings:
    html += f'<ul class="warnings">{warnings}</ul>'
  html += _compared(runs) if len(runs) > 1 else _tiles(runs[0])
  return f"<header>{html}</header>"


def _results(run: RunRecord) -> dict[str, tuple[str, str]]:
  """Label -> last value and first value (or "") of the main results."""
  results = {}
  averages = [m for m in run.scalars if m.startswith("eval/avg@")]
  # There are several if eval.samples changed during the run.
  average = max(averages, key=lambda m: run.scalars[m].steps[-1], default="")
  for label, metric, unit in (
    ("avg@n, held out", average, ""),
    ("greedy, held out", "eval/greedy", ""),
    ("pass@1, held out", "eval/pass@1", "%"),
    ("reward", "reward/mean", ""),
    ("length", "response/length", "tokens"),
  ):
    if metric in run.scalars:
      values, first = run.scalars[metric].finite(), ""
      if len(run.scalars[metric].steps) > 1:
        first = number(values[0], "" if unit == "tokens" else unit)
      results[label] = number(values[-1], unit), first
  if "time/iteration" in run.scalars:
    times = run.scalars["time/iteration"].values
    total = datetime.timedelta(seconds=round(np.nansum(times)))
    results["time in iterations"] = str(total), ""
    results["an iteration"] = f"{number(np.nanmedian(times))} s", ""
  return results


def _tiles(run: RunRecord) -> str:
  tiles = ""
  for label, (value, first) in _results(run).items():
    before = f'<span class="before">{first} → </span>' if first else ""
    tiles += f"<div><dt>{escape(label)}</dt><dd>{before}{value}</dd></div>"
  if not tiles:
    return "<p>No step is done yet.</p>"
  return f'<dl class="tiles">{tiles}</dl>'


def _compared(runs: Sequence[RunRecord]) -> str:
  results = [_results(run) for run in runs]
  labels = list(dict.fromkeys(label for part in results for label in part))
  body = ""
  for i, (run, by_label) in enumerate(zip(runs, results, strict=True)):
    cells = [*_kind(run), steps(run)]
    for label in labels:
      value, first = by_label.get(label, ("-", ""))
      cells.append(f"{first} → {value}" if first else value)
    body += f"<tr><th scope=row>{_swatch(i)}{escape(run.name)}</th>"
    body += "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
  heads = _heads("run", "method", "model", "steps", *labels)
  return _table(heads, body, " class=runs")


def _heads(*texts: str, kind: str = "") -> str:
  return "".join(f"<th scope=col{kind}>{escape(text)}</th>" for text in texts)


def _table(heads: str, rows: str, kind: str = "") -> str:
  return (
    f"<div class=scroll><table{kind}><thead><tr>{heads}</tr></thead>"
    f"<tbody>{rows}</tbody></table></div>"
  )


def _swatch(i: int) -> str:
  return f'<i class="swatch" style="background:{COLOURS[i]}"></i>'


def legend(runs: Sequence[RunRecord]) -> str:
  """The colours of several runs; "" for one, whose charts have legends."""
  if len(runs) == 1:
    return ""
  items = "".join(
    f"<span>{_swatch(i)}{escape(run.name)}</span>" for i, run in enumerate(runs)
  )
  return f'<div class="legend">{items}</div>'


def _warnings(run: RunRecord, named: bool) -> list[str]:
  warnings = []
  without = run.without_signal()
  if len(without):
    steps = len(run.scalars["reward/mixed_groups"].steps)
    warnings.append(
      f"No signal at {len(without):,} of {steps:,} steps, first at step "
      f"{without[0]:,}: the rewards of no group differed (reward/mixed_groups "
      "is 0), so no response has an advantage"
    )
  for name, (at, values) in sorted(run.scalars.items()):
    missing = at[np.isnan(values)]
    if len(missing):
      times = f", {len(missing):,} times" if len(missing) > 1 else ""
      warnings.append(f"{name} was not finite at step {missing[0]:,}{times}")
  return [f"{run.name}: {w}" if named else w for w in warnings]


def numbers(metrics: Sequence[str], runs: Sequence[RunRecord]) -> str:
  rows = ""
  for name in sorted(metrics):
    for run in runs:
      if name not in run.scalars:
        continue
      values = run.scalars[name].finite()
      ends = values[0], values[-1], values.min(), values.max()
      cells = map(number, ends)
      of_run = f"<td>{escape(run.name)}</td>" if len(runs) > 1 else ""
      count = len(run.scalars[name].steps)
      rows += f"<tr><th scope=row>{escape(name)}</th>{of_run}" + "".join(
        f"<td class=n>{cell}</td>" for cell in (*cells, f"{count:,}")
      )
      rows += "</tr>"
  if not rows:
    return ""
  columns = ("first", "last", "smallest", "largest", "steps")
  heads = _heads("metric", *["run"] * (len(runs) > 1))
  table = _table(heads + _heads(*columns, kind=" class=n"), rows)
  return (
    "<details><summary>First, last, smallest and largest value</summary>"
    f"{table}</details>"
  )


def config(runs: Sequence[RunRecord]) -> str:
  """The config; for several runs first the keys that differ."""
  runs_with_config = [run for run in runs if run.config]
  if not runs_with_config:
    return ""
  if len(runs) == 1:
    return f"<div class=config>{_groups(runs[0].config)}</div>"
  configs = [flatten(run.config) for run in runs_with_config]
  rows = ""
  for key in dict.fromkeys(key for each in configs for key in each):
    values = [each.get(key) for each in configs]
    if len(set(map(json.dumps, values))) > 1:
      cells = "".join(f"<td>{escape(_value(value))}</td>" for value in values)
      rows += f"<tr><th scope=row>{escape(key)}</th>{cells}</tr>"
  html = "<p>All the same.</p>"
  if rows:
    heads = _heads("key", *(run.name for run in runs_with_config))
    html = _table(heads, rows)
  for run in runs_with_config:
    html += (
      f"<details><summary>All of {escape(run.name)}</summary>"
      f"<div class=config>{_groups(run.config)}</div></details>"
    )
  return html


def _groups(tree: dict) -> str:
  """The keys by section; keys without a section are first."""
  sections = {k: v for k, v in tree.items() if isinstance(v, dict)}
  alone = {k: v for k, v in tree.items() if k not in sections}
  html = ""
  for name, section in ({"run": alone} | sections).items():
    if section:
      keys = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(_value(value))}</dd>"
        for key, value in flatten(section).items()
      )
      html += f"<section><h3>{escape(name)}</h3><dl>{keys}</dl></section>"
  return html


def _value(value) -> str:
  return value if isinstance(value, str) and value else json.dumps(value)
