"""What it does to take the sampler's own log-probs as the old ones, in bf16.

  python -m studies.old_logps.run

Each run that takes the sampler's log-probs is compared with the one that
recomputes them, of the same method and from the same cold start: final pass@1
by the paired t test over seeds, at .05 over both methods (Holm).
"""

from studies import arguments, intervals
from studies.runs import Run, Study, command

METHODS, OLD = ("gspo", "grpo"), ("recompute", "sampler")
CLIPS = {"gspo": 3e-4, "grpo": 0.2}  # the lower ones, of gspo_jax/losses/
MEANS = {
  "clipped tokens": "clip_frac/token",
  "gap of a sequence": "mismatch/sequence_abs_mean",
  "gap of a token": "mismatch/token_abs_mean",
  "sequence ratio std": "ratio/sequence_std",
  "token ratio std": "ratio/token_std",
  "seconds an iteration": "time/iteration",
}
COMPARED = ("final", "clipped tokens")
CURVES = {
  "pass@1": "eval/pass@1",
  "reward": "reward/mean",
  "gap of a sequence": MEANS["gap of a sequence"],
  "gap of a token": MEANS["gap of a token"],
}


def plan(quick: bool) -> list[dict]:
  return [
    {"method": method, "old": old, "seed": seed}
    for seed in range(2 if quick else 4)
    for method in (("gspo",) if quick else METHODS)
    for old in OLD
  ]


def measure(run: Run) -> dict:
  found = {k: run.mean(key, 1, len(run.rows)) for k, key in MEANS.items()}
  curves = {name: run.curve(key) for name, key in CURVES.items()}
  # A run that broke off has no policy to test.
  final = 0.0 if run.failure else curves["pass@1"][-1][1]
  return found | {"final": final, "curves": curves, "failure": run.failure}


def summarize(results: list[dict]) -> list[dict]:
  """Of each method: both ways, and the sampler's less the recomputed."""
  table = []
  for method in METHODS:
    ways = {
      old: {
        r["seed"]: r
        for r in results
        if (r["method"], r["old"]) == (method, old)
      }
      for old in OLD
    }
    if not all(ways.values()):
      continue
    row = {"method": method, "clip range": CLIPS[method]}
    for old, own in ways.items():
      row[old] = {
        key: intervals.mean([r[key] for r in own.values()])
        for key in ("final", *MEANS)
      }
    recomputed, sampled = (ways[old] for old in OLD)
    both = sorted(recomputed.keys() & sampled.keys())
    row["sampler less recompute"] = {
      key: intervals.paired(
        *([w[s][key] for s in both] for w in (sampled, recomputed))
      )
      for key in COMPARED
    }
    table.append(row)
  intervals.judge([row["sampler less recompute"]["final"] for row in table])
  return table


def main() -> None:
  study = Study("old_logps", __doc__)
  if not study.plot:
    results, planned = [], plan(study.quick)
    for one in planned:
      results.append(one | measure(study.train(arguments.write(**one))))
      study.write(planned=len(planned), table=summarize(results), runs=results)
  # Here, so that a run needs no matplotlib.
  from studies.old_logps import figure

  figure.draw(study.read(), study.figure)


if __name__ == "__main__":
  command(main)
