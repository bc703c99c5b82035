"""What it does to take the sampler's own log-probs as the old ones, in bf16.

  python -m studies.old_logps.run

The harm is the final pass@1 of a run that takes the sampler's log-probs less
that of the one that recomputes them, of the same method and cold start. Fixed
before the runs:
- GSPO may take them: the whole 95 % interval of its harm is within -.05 to .05.
- GRPO needs to recompute: its harm is negative, by the paired t test at .05.
- GSPO needs it less: GRPO's harm less GSPO's, seed by seed, is negative by the
  paired t test, at .05 for both tests together (Holm).
A run that broke off ends with a pass@1 of 0.
"""

from studies import intervals, seeds
from studies.runs import Run
from studies.study import Study, command

METHODS, OLD = ("gspo", "grpo"), ("recompute", "sampler")
CLIPS = {"gspo": 3e-4, "grpo": 0.2}  # the lower ones, of gspo_jax/losses/
HARMLESS = -0.05, 0.05
MEANS = {
  "clipped tokens": "clip_frac/token",
  "gap of a sequence": "mismatch/sequence_abs_mean",
  "gap of a token": "mismatch/token_abs_mean",
  "sequence ratio std": "ratio/sequence_std",
  "token ratio std": "ratio/token_std",
  "seconds an iteration": "time/iteration",
}
GAPS = {name: key for name, key in MEANS.items() if name.startswith("gap")}


def plan(quick: bool) -> list[dict]:
  return [
    {"method": method, "old": old, "seed": seed}
    for seed in range(2 if quick else 4)
    for method in METHODS
    for old in OLD
  ]


def measure(run: Run) -> dict:
  scores = {
    "pass@1": run.carried("eval/pass@1"),
    "reward": run.carried("reward/mean"),
  }
  gaps = {name: run.curve(key) for name, key in GAPS.items()}
  means = {name: run.mean(key) for name, key in MEANS.items()}
  return means | {
    "final": scores["pass@1"][-1][1],
    "curves": scores | gaps,
    "failure": run.failure,
  }


def summarize(results: list[dict]) -> dict:
  """Of each method both ways and the harm; and GRPO's less GSPO's."""
  table, harms = [], {}
  for method in METHODS:
    ways = {old: seeds.of(results, method=method, old=old) for old in OLD}
    harms[method] = {
      seed: {"harm": ways["sampler"][seed]["final"] - r["final"]}
      for seed, r in ways["recompute"].items()
      if seed in ways["sampler"]
    }
    if harms[method]:
      table.append(_row(method, ways))
  pair = seeds.pairs(harms["grpo"], harms["gspo"], "harm")
  less = intervals.paired(*pair)
  own = [row["harm"] for row in table if row["method"] == "grpo"]
  intervals.judge([*own, less])
  return {"table": table, "grpo's harm less gspo's": less}


def _row(method, ways) -> dict:
  row = {"method": method, "clip range": CLIPS[method]}
  for old, own in ways.items():
    row[old] = {
      name: intervals.mean(seeds.values(own, name))
      for name in ("final", *MEANS)
    }
  pairs = lambda key: seeds.pairs(ways["sampler"], ways["recompute"], key)
  harm = intervals.paired(*pairs("final"))
  return row | {
    "harm": harm | {"harmless": intervals.place(harm, *HARMLESS)},
    "more clipped": intervals.paired(*pairs("clipped tokens")),
  }


def main(argv=None) -> None:
  study = Study("old_logps", __doc__, argv)
  study.sweep(plan(study.quick), measure, summarize)


if __name__ == "__main__":
  command(main)
