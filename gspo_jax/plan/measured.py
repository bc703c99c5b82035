"""A run's times beside the expected ones, and the derates that explain them."""

import statistics

from gspo_jax.plan.iteration.cost import LEARNING
from gspo_jax.record import json_lines
from gspo_jax.runtime.errors import UserError, prefixed

_TIMES = "time/generate", "time/score", "time/update", "time/iteration"


def read(path: str) -> list[dict]:
  """The iterations of a run's metrics.jsonl but the first, which compiles."""
  with prefixed(f"--measured={path}"):
    rows = [line.record for line in json_lines.read(path, drop_partial=True)]
  rows = [row for row in rows if all(row.get(name) for name in _TIMES)][1:]
  if not rows:
    raise UserError(
      f"--measured={path}: expected a run's metrics.jsonl with two iterations "
      f"or more of {', '.join(_TIMES)}"
    )
  return rows


def compare(rows: list[dict], expected: dict) -> dict:
  """Compares the iterations of a run with the `expected` part of a report.

  A part is a median. `derates` has those with which the expected seconds are
  the measured ones: the sampler's parts decide `hbm`, the learner's `kernels`,
  and the rest of an iteration `host`. None: no value does.
  """
  # With its own devices, `time/generate` is the wait for the sampler.
  generate = lambda row: row.get("time/rollout") or row["time/generate"]
  median = lambda of: statistics.median(map(of, rows))
  measured = {"generate": median(generate)} | {
    name.removeprefix("time/"): median(lambda row, name=name: row[name])
    for name in _TIMES[1:]
  }
  seconds_of, total = expected["seconds_of"], expected["seconds"]
  of = {part: (part,) for part in LEARNING} | {
    "generate": tuple(part for part in seconds_of if part not in LEARNING)
  }
  seconds = {part: sum(seconds_of[x] for x in of[part]) for part in of}
  seconds["iteration"] = total
  late = {part: measured[part] - seconds[part] for part in measured}
  fit = lambda name, *parts: _fit(
    expected["derates"][name],
    sum(expected["added"][name].get(x, 0.0) for p in parts for x in of[p]),
    sum(late[part] for part in parts),
  )
  # What is no part of an iteration is the host's.
  rest = late["iteration"] - sum(
    late[p] for p in ("generate", "score", "update")
  )
  return {
    "iterations": len(rows),
    "seconds": {p: (measured[p], seconds[p]) for p in measured},
    "derates": {
      "hbm": fit("hbm", "generate"),
      "kernels": fit("kernels", "score", "update"),
      "host": expected["derates"]["host"] * (1 + rest / seconds["host"]),
    },
  }


def _fit(derate: float, added: float, late: float) -> float | None:
  """The share that adds `late` more seconds than `derate` adds."""
  at_full_rate = added / (1 / derate - 1)
  seconds = at_full_rate / derate + late
  return at_full_rate / seconds if seconds > 0 else None
