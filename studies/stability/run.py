"""Whether GRPO is unstable on experts where GSPO and its kin are not.

  python -m studies.stability.run

Fixed before the runs: a run has collapsed if it ends with a held-out pass@1
more than .05 under its start's, or under half of its own highest, or at a
number that is not finite. A method differs from GRPO in a regime if the paired
t test of the final pass@1 over seeds says so at .05, adjusted for the four
methods there (Holm).

All methods of a seed start from one policy and are asked the same questions,
and the first seed is run in full before the second.
"""

from studies import arguments, intervals
from studies.runs import Run, Study, command
from studies.stability.config import METHODS, REGIMES

BELOW_START, BELOW_PEAK = 0.05, 0.5  # what a collapse is
BASE = "grpo"


def plan(quick: bool) -> list[dict]:
  return [
    {"regime": regime, "method": method, "seed": seed}
    for seed in range(2 if quick else 5)
    for regime in (("routing",) if quick else REGIMES)
    for method in (("grpo", "grpo+r2") if quick else METHODS)
  ]


def collapse(curve: list[list[float]], failure: str) -> str:
  """Why a run with this curve of pass@1 has collapsed; "" if it has not."""
  values = [value for _, value in curve]
  if failure:
    return failure
  if values[-1] < values[0] - BELOW_START:
    return f"ended at {values[-1]:.3f}, from {values[0]:.3f}"
  if values[-1] < BELOW_PEAK * max(values):
    return f"ended at {values[-1]:.3f}, after {max(values):.3f}"
  return ""


def measure(run: Run) -> dict:
  curve = run.curve("eval/pass@1")
  whole = 1, len(run.rows)
  return {
    "start": curve[0][1],
    # A run that broke off has no policy to test.
    "final": 0.0 if run.failure else curve[-1][1],
    "collapse": collapse(curve, run.failure),
    "pass@1": curve,
    "reward": run.curve("reward/mean"),
    "clipped tokens": run.mean("clip_frac/token", *whole),
    "experts flipped": run.mean("moe/expert_flip_rate", *whole),
    "token ratio std": run.mean("ratio/token_std", *whole),
    "largest gradient": max((v for _, v in run.curve("grad/norm")), default=0),
    "seconds an iteration": run.mean("time/iteration", 2, len(run.rows)),
  }


def _of(results, regime, method) -> dict[int, dict]:
  """By seed."""
  return {
    r["seed"]: r
    for r in results
    if (r["regime"], r["method"]) == (regime, method)
  }


def compare(results: list[dict]) -> list[dict]:
  """A row for each regime and method: how it ends, and against GRPO."""
  table = []
  for regime in REGIMES:
    base = _of(results, regime, BASE)
    every = {method: _of(results, regime, method) for method in METHODS}
    rows = [
      {"regime": regime, "method": method} | _compared(own, base)
      for method, own in every.items()
      if own
    ]
    others = [row for row in rows if row["method"] != BASE]
    intervals.judge([row["against grpo"] for row in others])
    table += rows
  return table


def _compared(own, base) -> dict:
  every = list(own.values())
  both = sorted(own.keys() & base.keys())
  return {
    key: intervals.mean([r[key] for r in every])
    for key in ("start", "final", "clipped tokens", "experts flipped")
  } | {
    "collapses": sum(bool(r["collapse"]) for r in every),
    "against grpo": intervals.paired(
      *([side[seed]["final"] for seed in both] for side in (own, base))
    ),
  }


def curves(results: list[dict]) -> list[dict]:
  """Of each regime and method, intervals over seeds, by iteration."""
  found = []
  for regime in REGIMES:
    for method in METHODS:
      own = _of(results, regime, method).values()
      for key in ("pass@1", "reward"):
        by_step = {}
        for step, value in (point for r in own for point in r[key]):
          by_step.setdefault(step, []).append(value)
        found.append(
          {
            "regime": regime,
            "method": method,
            "of": key,
            "points": [
              [s, intervals.mean(v)] for s, v in sorted(by_step.items())
            ],
          }
        )
  return [row for row in found if row["points"]]


def main() -> None:
  study = Study("stability", __doc__)
  if not study.plot:
    results, planned = [], plan(study.quick)
    for one in planned:
      results.append(one | measure(study.train(arguments.write(**one))))
      study.write(
        planned=len(planned),
        table=compare(results),
        curves=curves(results),
        runs=results,
      )
  # Here, so that a run needs no matplotlib.
  from studies.stability import figure

  figure.draw(study.read(), study.figure)


if __name__ == "__main__":
  command(main)
