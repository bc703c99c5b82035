"""The top of a page, what a run is and came to; and the end, its config."""

import json
from collections.abc import Sequence
from html import escape

import numpy as np

from gspo_jax.report.chart import COLOURS
from gspo_jax.report.scale import duration, number
from gspo_jax.report.workdir import RunRecord
from gspo_jax.runtime.identity import flatten


def title(runs: Sequence[RunRecord]) -> str:
  if len(runs) > 1:
    return f"{len(runs)} runs compared"
  return " · ".join(part for part in (runs[0].name, *_kind(runs[0])) if part)


def _kind(run: RunRecord) -> tuple[str, str]:
  """Its method and its model, as the config names them."""
  model = run.config.get("model", {})
  name = model.get("checkpoint", "").rstrip("/").rpartition("/")[2]
  method = run.config.get("objective", {}).get("name", "")
  return method, name or model.get("variant", "")


def steps(run: RunRecord) -> str:
  """How far it came; a run that goes on looks like one that was stopped."""
  total = run.config.get("num_steps")
  if total is None:
    return f"{run.last_step:,} steps"
  state = "finished" if run.last_step >= total else "running or stopped"
  return f"{run.last_step:,} of {total:,} steps, {state}"


def head(runs: Sequence[RunRecord]) -> str:
  """Heading, what went wrong, and what to know at once."""
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


def _facts(run: RunRecord) -> list[tuple[str, str, str]]:
  """(label, value, value before) of what matters most, where it is known."""
  facts = []
  for label, metric, unit in (
    ("pass@1, held out", "eval/pass@1", "%"),
    ("greedy, held out", "eval/greedy", "%"),
    ("reward", "reward/mean", ""),
    ("length", "response/length", "tokens"),
  ):
    if metric in run.scalars:
      many = len(run.scalars[metric].steps) > 1
      before = number(run.first(metric), "" if unit == "tokens" else unit)
      facts.append(
        (label, number(run.last(metric), unit), before if many else "")
      )
  if "time/iteration" in run.scalars:
    facts.append(("time in iterations", duration(run.seconds()), ""))
    median = float(np.nanmedian(run.scalars["time/iteration"].values))
    facts.append(("an iteration", f"{number(median)} s", ""))
  return facts


def _tiles(run: RunRecord) -> str:
  tiles = "".join(
    f"<div><dt>{escape(label)}</dt><dd>"
    + (f'<span class="before">{before} → </span>' if before else "")
    + f"{value}</dd></div>"
    for label, value, before in _facts(run)
  )
  return (
    f'<dl class="tiles">{tiles}</dl>'
    if tiles
    else "<p>No step is done yet.</p>"
  )


def _compared(runs: Sequence[RunRecord]) -> str:
  facts = [
    {label: (value, before) for label, value, before in _facts(run)}
    for run in runs
  ]
  labels = list(dict.fromkeys(label for of in facts for label in of))
  heads = ["run", "method", "model", "steps", *labels]
  body = ""
  for i, (run, of) in enumerate(zip(runs, facts, strict=True)):
    cells = [*_kind(run), steps(run)]
    for label in labels:
      value, before = of.get(label, ("-", ""))
      cells.append(f"{before} → {value}" if before else value)
    body += (
      f'<tr><th scope=row><i class="swatch c{i % COLOURS}"></i>'
      f"{escape(run.name)}</th>"
      + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
      + "</tr>"
    )
  heads = "".join(f"<th scope=col>{escape(h)}</th>" for h in heads)
  return (
    f"<div class=scroll><table class=runs><thead><tr>{heads}</tr></thead>"
    f"<tbody>{body}</tbody></table></div>"
  )


def legend(runs: Sequence[RunRecord]) -> str:
  """Names by colour, which stays in sight; "" where lines are labelled."""
  if len(runs) == 1:
    return ""
  items = "".join(
    f'<span><i class="swatch c{i % COLOURS}"></i>{escape(run.name)}</span>'
    for i, run in enumerate(runs)
  )
  return f'<div class="legend">{items}</div>'


def _warnings(run: RunRecord, named: bool) -> list[str]:
  of = f"{run.name}: " if named else ""
  said = []
  without = run.without_signal()
  if len(without):
    steps = len(run.scalars["reward/mixed_groups"].steps)
    said.append(
      f"{of}No signal at {len(without):,} of {steps:,} steps, first at step "
      f"{without[0]:,}: the rewards of no group differed (reward/mixed_groups "
      "is 0) and gave no answer an advantage"
    )
  for name, (at, values) in sorted(run.scalars.items()):
    missing = at[np.isnan(values)]
    if len(missing):
      times = f", {len(missing):,} times" if len(missing) > 1 else ""
      said.append(f"{of}{name} was not finite at step {missing[0]:,}{times}")
  return said


def config(runs: Sequence[RunRecord]) -> str:
  """Keys and values; of several runs, those that differ come first."""
  known = [run for run in runs if run.config]
  if not known:
    return ""
  flat = [flatten(run.config) for run in known]
  if len(runs) == 1:
    return f"<div class=config>{_groups(known[0].config)}</div>"
  keys = dict.fromkeys(key for of in flat for key in of)
  differ = [k for k in keys if len({json.dumps(of.get(k)) for of in flat}) > 1]
  heads = "".join(f"<th scope=col>{escape(run.name)}</th>" for run in known)
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
    for run in known
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
