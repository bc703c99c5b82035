"""The head of a page with the results, its numbers, and its end, the config."""

import datetime
import json
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from gspo_jax.record.identity import flatten
from gspo_jax.report.charts import COLOURS, number
from gspo_jax.report.workdir import RunRecord


def title(runs: Sequence[RunRecord]) -> str:
  if len(runs) > 1:
    return f"{len(runs)} runs compared"
  return " · ".join(part for part in (runs[0].name, *_kind(runs[0])) if part)


def _kind(run: RunRecord) -> tuple[str, str]:
  """The method and the model, as the config names them."""
  model = run.config.get("model", {})
  name = model.get("checkpoint", "").rstrip("/").rpartition("/")[2]
  method = run.config.get("objective", {}).get("name", "")
  return method, name or model.get("variant", "")


def steps(run: RunRecord) -> str:
  """Steps so far; the files do not show whether a run was stopped."""
  total = run.config.get("num_steps")
  if total is None:
    return f"{run.last_step:,} steps"
  state = "finished" if run.last_step >= total else "running or stopped"
  return f"{run.last_step:,} of {total:,} steps, {state}"


def head(runs: Sequence[RunRecord]) -> str:
  """Heading, warnings, and the main results."""
  body = _compared(runs) if len(runs) > 1 else _tiles(runs[0])
  warnings = "".join(
    f"<li>{escape(w)}</li>" for r in runs for w in _warnings(r, len(runs) > 1)
  )
  warnings = f'<ul class="warnings">{warnings}</ul>' if warnings else ""
  below = (
    f"<p class=muted>{escape(steps(runs[0]))}</p>" if len(runs) == 1 else ""
  )
  return (
    f"<header><h1>{escape(title(runs))}</h1>{below}{warnings}{body}</header>"
  )


class _Result(NamedTuple):
  """A main result: its label, last value and first value ("" for none)."""

  label: str
  value: str
  first: str


def _results(run: RunRecord) -> list[_Result]:
  """The main results that the run has written."""
  results = []
  averages = [m for m in run.scalars if m.startswith("eval/avg@")]
  # Several where a run went on with another eval.samples.
  average = max(averages, key=lambda m: run.scalars[m].steps[-1], default="")
  for label, metric, unit in (
    ("avg@n, held out", average, ""),
    ("greedy, held out", "eval/greedy", ""),
    ("pass@1, held out", "eval/pass@1", "%"),
    ("reward", "reward/mean", ""),
    ("length", "response/length", "tokens"),
  ):
    if metric in run.scalars:
      many = len(run.scalars[metric].steps) > 1
      first = number(run.first(metric), "" if unit == "tokens" else unit)
      last = number(run.last(metric), unit)
      results.append(_Result(label, last, first if many else ""))
  if "time/iteration" in run.scalars:
    total = datetime.timedelta(seconds=round(run.seconds()))
    median = float(np.nanmedian(run.scalars["time/iteration"].values))
    results.append(_Result("time in iterations", str(total), ""))
    results.append(_Result("an iteration", f"{number(median)} s", ""))
  return results


def _tiles(run: RunRecord) -> str:
  tiles = "".join(
    f"<div><dt>{escape(label)}</dt><dd>"
    + (f'<span class="before">{first} → </span>' if first else "")
    + f"{value}</dd></div>"
    for label, value, first in _results(run)
  )
  return (
    f'<dl class="tiles">{tiles}</dl>'
    if tiles
    else "<p>No step is done yet.</p>"
  )


def _compared(runs: Sequence[RunRecord]) -> str:
  results = [{r.label: r for r in _results(run)} for run in runs]
  labels = list(dict.fromkeys(label for of in results for label in of))
  heads = ["run", "method", "model", "steps", *labels]
  body = ""
  for i, (run, of) in enumerate(zip(runs, results, strict=True)):
    cells = [*_kind(run), steps(run)]
    for label in labels:
      _, value, first = of.get(label, _Result(label, "-", ""))
      cells.append(f"{first} → {value}" if first else value)
    body += (
      f"<tr><th scope=row>{_swatch(i)}{escape(run.name)}</th>"
      + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
      + "</tr>"
    )
  heads = "".join(f"<th scope=col>{escape(h)}</th>" for h in heads)
  return (
    f"<div class=scroll><table class=runs><thead><tr>{heads}</tr></thead>"
    f"<tbody>{body}</tbody></table></div>"
  )


def _swatch(i: int) -> str:
  """The colour of a run."""
  return f'<i class="swatch" style="background:{COLOURS[i]}"></i>'


def legend(runs: Sequence[RunRecord]) -> str:
  """The colours of several runs; "" for one run, whose charts have legends."""
  if len(runs) == 1:
    return ""
  items = "".join(
    f"<span>{_swatch(i)}{escape(run.name)}</span>" for i, run in enumerate(runs)
  )
  return f'<div class="legend">{items}</div>'


def _warnings(run: RunRecord, named: bool) -> list[str]:
  of = f"{run.name}: " if named else ""
  warnings = []
  without = run.without_signal()
  if len(without):
    steps = len(run.scalars["reward/mixed_groups"].steps)
    warnings.append(
      f"{of}No signal at {len(without):,} of {steps:,} steps, first at step "
      f"{without[0]:,}: the rewards of no group differed (reward/mixed_groups "
      "is 0), so no response has an advantage"
    )
  for name, (at, values) in sorted(run.scalars.items()):
    missing = at[np.isnan(values)]
    if len(missing):
      times = f", {len(missing):,} times" if len(missing) > 1 else ""
      warnings.append(
        f"{of}{name} was not finite at step {missing[0]:,}{times}"
      )
  return warnings


def numbers(scalars: Sequence[str], runs: Sequence[RunRecord]) -> str:
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


def config(runs: Sequence[RunRecord]) -> str:
  """The config; for several runs first the keys that differ."""
  runs_with_config = [run for run in runs if run.config]
  if not runs_with_config:
    return ""
  flat = [flatten(run.config) for run in runs_with_config]
  if len(runs) == 1:
    return f"<div class=config>{_groups(runs[0].config)}</div>"
  keys = dict.fromkeys(key for of in flat for key in of)
  differ = [k for k in keys if len({json.dumps(of.get(k)) for of in flat}) > 1]
  names = [escape(run.name) for run in runs_with_config]
  heads = "".join(f"<th scope=col>{name}</th>" for name in names)
  rows = "".join(
    f"<tr><th scope=row>{escape(key)}</th>"
    + "".join(f"<td>{escape(_value(of.get(key)))}</td>" for of in flat)
    + "</tr>"
    for key in differ
  )
  different = (
    f"<div class=scroll><table><thead><tr><th scope=col>key</th>{heads}</tr>"
    f"</thead><tbody>{rows}</tbody></table></div>"
    if differ
    else "<p>All the same.</p>"
  )
  return different + "".join(
    f"<details><summary>All of {escape(run.name)}</summary>"
    f"<div class=config>{_groups(run.config)}</div></details>"
    for run in runs_with_config
  )


def _groups(tree: dict) -> str:
  alone = {k: v for k, v in tree.items() if not isinstance(v, dict)}
  groups = {"run": alone} | {
    k: v for k, v in tree.items() if isinstance(v, dict)
  }
  return "".join(
    f"<section><h3>{escape(name)}</h3><dl>"
    + "".join(
      f"<dt>{escape(key)}</dt><dd>{escape(_value(value))}</dd>"
      for key, value in flatten(group).items()
    )
    + "</dl></section>"
    for name, group in groups.items()
    if group
  )


def _value(value) -> str:
  return value if isinstance(value, str) and value else json.dumps(value)
