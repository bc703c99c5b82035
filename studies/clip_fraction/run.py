"""How many tokens GSPO and GRPO clip, by learning rate, and which learns more.

  python -m studies.clip_fraction.run

A token is clipped where its gradient is zero because its ratio, or in GSPO its
sequence's, left the range on the side that its advantage pulls to. Of the four
minibatches of an iteration the first has ratio 1 everywhere, so that a share of
3/4 is the most there can be.

Fixed before the runs, for each learning rate:
- many more: GSPO's share over GRPO's, seed by seed, in logs. The claim is 115.
  Where the interval, of 95 % for all rates together (Bonferroni), lies wholly
  above 10, it reproduces in kind; wholly below, it does not.
- learns better: final pass@1, GSPO's less GRPO's, by the paired t test at .05
  over all rates (Holm).
A run that broke off counts with the iterations it had, and a pass@1 of 0.
"""

import math

from studies import intervals, seeds
from studies.runs import Run
from studies.study import Study, command

METHODS, RATES = ("gspo", "grpo"), ("1e-4", "3e-4", "1e-3")
CLAIMED = {  # of tokens, arXiv 2507.18071, sec. 5.2
  "gspo": 0.15,
  "grpo": 0.0013,
}
TENFOLD = 10, math.inf
# About one token of the 150,000 of a run, in place of none: it has a logarithm,
# and the quotient is too small rather than too large.
LEAST = 1e-5
KEYS = {
  "clipped tokens": "clip_frac/token",
  "sequence ratio std": "ratio/sequence_std",
  "token ratio std": "ratio/token_std",
}


def plan(quick: bool) -> list[dict]:
  return [
    {"method": method, "rate": rate, "seed": seed}
    for seed in range(2 if quick else 4)
    for rate in (("3e-4",) if quick else RATES)
    for method in METHODS
  ]


def measure(run: Run) -> dict:
  curve = run.carried("eval/pass@1")
  share = run.mean("clip_frac/token")
  return {name: run.mean(key) for name, key in KEYS.items()} | {
    "log of clipped": math.log(max(share, LEAST)),  # of NaN it is NaN
    "final": curve[-1][1],
    "pass@1": curve,
    "clipped by iteration": run.curve("clip_frac/token"),
    "failure": run.failure,
  }


def summarize(results: list[dict]) -> dict:
  """Of each rate, both methods, and GSPO against GRPO."""
  table = []
  for rate in dict.fromkeys(r["rate"] for r in results):
    own = {m: seeds.of(results, method=m, rate=rate) for m in METHODS}
    if all(own.values()):
      table.append({"rate": rate} | _compared(own))
  intervals.judge([row["pass@1, gspo less grpo"] for row in table])
  return {"claimed": CLAIMED, "table": table}


def _compared(own) -> dict:
  row = {
    method: {
      name: intervals.mean(seeds.values(runs, name))
      for name in ("final", *KEYS)
    }
    | {"broke off": sum(bool(r["failure"]) for r in runs.values())}
    for method, runs in own.items()
  }
  pairs = lambda key: seeds.pairs(own["gspo"], own["grpo"], key)
  logs = intervals.paired(*pairs("log of clipped"), level=1 - 0.05 / len(RATES))
  times = {key: math.exp(logs[key]) for key in ("mean", "low", "high")}
  return row | {
    "clipped, gspo over grpo": times
    | {"tenfold": intervals.place(times, *TENFOLD)},
    "pass@1, gspo less grpo": intervals.paired(*pairs("final")),
  }


def main(argv=None) -> None:
  study = Study("clip_fraction", __doc__, argv)
  study.sweep(plan(study.quick), measure, summarize)


if __name__ == "__main__":
  command(main)
