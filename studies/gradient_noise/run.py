"""How noisy a group's gradient is, by the length of its answers.

  python -m studies.gradient_noise.run

An old policy, saved by a run of GSPO, answers held-out questions; a new one, 0,
4 or 16 updates on in the same run, is differentiated. Half of a group's answers
are right, by lot, so that advantages are +1 and -1, none is deserved, and the
expected gradient at ratio 1 is 0. Answers have one length each time:
- whole: no stop token is drawn before they are n tokens long;
- windows: all have 512 tokens, and only n in a row, at random, count.

With g a group's gradient of a loss and g1 that with all ratios set to 1:
- noise, E|g - E g|^2, the trace of the covariance over groups, by that of g1;
- added, sqrt(E|g - g1|^2 / E|g1|^2): what ratios, and clipping, put into it.
The loss without its clip range has what ratios alone put into it.
"""

import json
import time
from pathlib import Path
from typing import NamedTuple

import jax

from gspo_jax import sharding
from studies import arguments, intervals, runs, saved
from studies.gradient_noise import figure, gradients, points, quantities
from studies.gradient_noise.config import get_config


class Plan(NamedTuple):
  """How much is measured.

  Attributes:
    seeds: of the runs.
    lengths: of the answers, in tokens.
    old: the iteration after which the policy answers.
    moved: iterations, of four updates each, from it to the new policies.
    windows: the one of them at which windows are looked at.
    pairs: of groups, for each length.
  """

  seeds: tuple[int, ...]
  lengths: tuple[int, ...]
  old: int
  moved: tuple[int, ...]
  windows: int
  pairs: int


FULL = Plan((0, 1, 2), (16, 32, 64, 128, 256, 512), 4, (1, 4), 1, 32)
QUICK = Plan((0,), (4, 8), 1, (1,), 1, 8)


def measure(plan: Plan, workdir: Path, configs: dict) -> dict:
  """All that is measured of one run: {(answers, moved): {length: Point}}."""
  found, longest = {}, max(plan.lengths)
  mesh = sharding.make_mesh(**configs[longest].mesh)
  with jax.set_mesh(mesh):
    for n in plan.lengths:
      bench = points.bench(configs[n], workdir, mesh)
      drawn = list(bench.draw(plan.old, plan.pairs))
      for moved in (0, *plan.moved):
        # Of ratios that are all 1 a few are enough.
        some = drawn if moved else drawn[:1]
        point = bench.point(some, plan.old + moved)
        found.setdefault(("whole", moved), {})[n] = point
    # The last bench is that of the longest answers; each length costs as much
    # as they do, so one batch has to do.
    found["windows", plan.windows] = {
      n: bench.point(points.windows(drawn[:1], n), plan.old + plan.windows)
      for n in plan.lengths
    }
  return found


def describe(found: dict) -> dict:
  """As JSON: each point's quantities, and how they go with length."""
  rows, slopes = [], []
  for (answers, moved), by_length in found.items():
    where = {"answers": answers, "moved": moved}
    for n, point in by_length.items():
      rows.append(where | {"length": n} | quantities.describe(*point))
    if moved:
      grams = {n: point.grams for n, point in by_length.items()}
      slopes.append(where | quantities.exponents(grams))
  return {"rows": rows, "exponents": slopes}


def measured(plan: Plan, seed: int, workdir: Path, quick: int) -> dict:
  """`describe` of one run; kept in its workdir."""
  kept, asked = workdir / "measured.json", json.dumps(plan)
  if kept.exists():
    record = json.loads(kept.read_text())
    if record["plan"] == asked:
      return record["found"]
  configs = {
    n: get_config(arguments.write(seed=seed, length=n, quick=quick))
    for n in plan.lengths
  }
  began = time.monotonic()
  found = describe(measure(plan, workdir, configs))
  found["measuring seconds"] = round(time.monotonic() - began)
  runs.write(kept, {"plan": asked, "found": found})
  return found


def summarize(results: list[dict]) -> list[dict]:
  """Exponents: means over seeds, with Student's intervals."""
  table = []
  for i, first in enumerate(results[0]["exponents"]):
    every = [r["exponents"][i] for r in results]
    mean = lambda quantity, name, every=every: intervals.mean(
      [e[quantity][name]["mean"] for e in every]
    )
    table.append(
      {key: first[key] for key in ("answers", "moved")}
      | {q: {m: mean(q, m) for m in gradients.METHODS} for q in quantities.ALL}
    )
  return table


def main() -> None:
  study = runs.Study("gradient_noise", __doc__)
  plan = QUICK if study.quick else FULL
  results = []
  for seed in () if study.plot else plan.seeds:
    argument = arguments.write(seed=seed)
    run = study.train(argument)
    workdir = saved.workdir(study, argument)
    found = measured(plan, seed, workdir, int(study.quick))
    curve = {"seed": seed, "pass@1": run.curve("eval/pass@1")}
    results.append(curve | found)
    study.write(
      planned=len(plan.seeds),
      plan=plan._asdict(),
      exponents=summarize(results),
      runs=results,
    )
  figure.draw(study.read(), study.figure)


if __name__ == "__main__":
  main()
