"""What GSPO's narrow clip range makes of batches of older policies.

  python -m studies.staleness.run

GSPO clips a sequence's ratio at 3e-4. If old log-probs are recomputed, that
ratio starts at 1 however old the responses are; if they are the sampler's, it
starts where the policy has moved meanwhile. Fixed before the runs, for each
way and staleness:
- against fresh: the final pass@1 less that of the same seed with staleness 0
  and recomputed log-probs. Staleness is harmless where the whole 95 % interval
  is within -.05 to .05, and harmful where the paired t test says that it is
  below 0 (Holm over all nine).
The first batches are younger: the first policy samples those of the first
1 + staleness iterations. A run that broke off ends with a pass@1 of 0.

Added after those runs, and fixed before its own: `exact`, the sampler's
log-probs with `model.exact`, at a staleness of 1, 2 and 4. What is left of the
gap is then the age of the policy alone. The same criteria hold (Holm over its
rows).
"""

from studies import intervals, seeds
from studies.runs import Run
from studies.study import Study, command

STALENESS, OLD, EXACT = (1, 2, 4, 8), ("recompute", "sampler"), (1, 2, 4)
HARMLESS, AGAINST = (-0.05, 0.05), "against fresh"
MEANS = {
  "clipped tokens": "clip_frac/token",
  "gap of a sequence": "mismatch/sequence_abs_mean",
  "mean staleness": "rollout/staleness",
}


def plan(quick: bool) -> list[dict]:
  stale = (2,) if quick else STALENESS
  return [
    {"staleness": staleness, "old": old, "seed": seed}
    for seed in range(2 if quick else 5)
    for staleness in (0, *stale)
    for old in (*OLD, *(["exact"] if staleness in EXACT else []))
  ]


def measure(run: Run) -> dict:
  scores = [value for _, value in run.carried("eval/pass@1")]
  means = {name: run.mean(key) for name, key in MEANS.items()}
  return means | {
    "start": scores[0],
    "final": scores[-1],
    "reward": run.carried("reward/mean"),
    "failure": run.failure,
  }


def summarize(results: list[dict]) -> dict:
  """A row for each staleness and way, and the reward of each iteration."""
  fresh = seeds.of(results, staleness=0, old="recompute")
  table, curves = [], []
  for staleness in (0, *STALENESS):
    for old in (*OLD, "exact"):
      own = seeds.of(results, staleness=staleness, old=old)
      if own:
        where = {"staleness": staleness, "old": old}
        table.append(where | _row(own, fresh))
        points = seeds.curve(own.values(), "reward")
        curves.append(where | {"points": points})
  exact = [row for row in table if row["old"] == "exact"]
  others = [row for row in table[1:] if row["old"] != "exact"]
  for rows in (others, exact):
    intervals.judge([row[AGAINST] for row in rows])
  return {"table": table, "curves": curves}


def _row(own, fresh) -> dict:
  against = intervals.paired(*seeds.pairs(own, fresh, "final"))
  return {
    name: intervals.mean(seeds.values(own, name))
    for name in ("start", "final", *MEANS)
  } | {AGAINST: against | {"harmless": intervals.place(against, *HARMLESS)}}


def main(argv=None) -> None:
  study = Study("staleness", __doc__, argv)
  study.sweep(plan(study.quick), measure, summarize)


if __name__ == "__main__":
  command(main)
