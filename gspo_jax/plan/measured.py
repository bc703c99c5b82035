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

  `seconds` has medians beside what was expected. A run's "score" has the host's
  part in it: packing, and the wait for rewards. With `derates` the sides would
  be equal: `hbm` by the sampler's time, `kernels` by the learner's. A share
  above 1 beats the time at best; None: the run beats what no share changes.
  """
  median = lambda name: statistics.median(row[name] for row in rows)
  # With its own devices, `time/generate` is the wait for the sampler.
  sampler = "time/rollout" if "time/rollout" in rows[0] else "time/generate"
  generate, score, update, whole = map(median, (sampler, *_TIMES[1:]))
  of, derates = expected["seconds_of"], expected["derates"]
  sampling = sum(of[part] for part in of if part not in LEARNING)

  def share(name, late):
    added = sum(expected["added"][name].values())
    at_full_rate = added / (1 / derates[name] - 1)
    seconds = at_full_rate + added + late
    return at_full_rate / seconds if seconds > 0 else None

  scoring = of["score"] + of["host"]
  late = score + update - scoring - of["update"]
  return {
    "iterations": len(rows),
    "seconds": {
      "generate": (generate, sampling),
      "score": (score, scoring),
      "update": (update, of["update"]),
      "iteration": (whole, expected["seconds"]),
    },
    "derates": {
      "hbm": share("hbm", generate - sampling),
      "kernels": share("kernels", late),
    },
  }
