"""Whether GRPO is unstable on experts where GSPO and its kin are not.

  python -m studies.stability.run

Fixed before the runs. A run has collapsed if it ends with a held-out pass@1
more than .05 under its start's, if the reward of its last five iterations is
under half of that of its best five in a row, or if a number ceases to be
finite. Such a run broke off; from there on its scores count as 0.

A method differs from GRPO in a regime
- in accuracy, if the paired t test of the final pass@1 over seeds says so at
  .05, adjusted for the four methods there (Holm); beside it stands the
  difference that would have been found with a chance of .8;
- in stability, if Fisher's exact test of the numbers of collapsed runs does,
  adjusted likewise. With five seeds only five against none can: the claim, GRPO
  collapses and the others do not, is a strong one.

All methods of a seed start from one policy and are given the same problems,
and the first seed is run in full before the second.
"""

from scipy import stats

from studies import intervals, seeds
from studies.runs import Run
from studies.stability.config import METHODS, REGIMES
from studies.study import Study, command

BELOW_START, BELOW_BEST, WINDOW = 0.05, 0.5, 5  # what a collapse is
BASE = "grpo"
MEANS = {
  "clipped tokens": "clip_frac/token",
  "experts flipped": "moe/expert_flip_rate",
  # How far from the rollout's policy the updates were.
  "token ratio std": "ratio/token_std",
  "kl of old and new": "kl/old_new",
}


def plan(quick: bool) -> list[dict]:
  return [
    {"regime": regime, "method": method, "seed": seed}
    for seed in range(2 if quick else 5)
    for regime in (("routing",) if quick else REGIMES)
    for method in (("grpo", "grpo+r2") if quick else METHODS)
  ]


def collapse(scores: list[float], rewards: list[float], failure: str) -> str:
  """Why a run has collapsed; "" if it has not.

  Args:
    scores: held-out pass@1, the first of the policy before RL.
    rewards: of the iterations.
    failure: why it broke off, if it did.
  """
  if failure:
    return failure
  if scores[-1] < scores[0] - BELOW_START:
    return f"pass@1 ended at {scores[-1]:.3f}, from {scores[0]:.3f}"
  windows = [
    sum(rewards[i : i + WINDOW]) / WINDOW
    for i in range(len(rewards) - WINDOW + 1)
  ]
  if windows and windows[-1] < BELOW_BEST * max(windows):
    return f"reward ended at {windows[-1]:.3f}, after {max(windows):.3f}"
  return ""


def measure(run: Run) -> dict:
  scores = [value for _, value in run.carried("eval/pass@1")]
  reward = run.carried("reward/mean")
  rewards = [value for _, value in reward]
  return {
    "reward": reward,
    "start": scores[0],
    "final": scores[-1],
    "collapse": collapse(scores, rewards, run.failure),
    **{name: run.mean(key) for name, key in MEANS.items()},
    "largest gradient": max((v for _, v in run.curve("grad/norm")), default=0),
    "seconds an iteration": run.mean("time/iteration"),
  }


def summarize(results: list[dict]) -> dict:
  return {"table": compare(results), "curves": curves(results)}


def compare(results: list[dict]) -> list[dict]:
  """A row for each regime and method: how it ends, and against GRPO."""
  table = []
  for regime in REGIMES:
    every = {m: seeds.of(results, regime=regime, method=m) for m in METHODS}
    rows = [
      {"regime": regime, "method": method} | _compared(own, every[BASE])
      for method, own in every.items()
      if own
    ]
    others = [row for row in rows if row["method"] != BASE]
    intervals.judge([row["against grpo"] for row in others])
    adjusted = intervals.holm([row["collapses p"] for row in others])
    for row, p in zip(others, adjusted, strict=True):
      row["collapses p of all"] = p
    table += rows
  return table


def _compared(own, base) -> dict:
  names = ("start", "final", *MEANS)
  collapsed = [
    [sum(bool(r["collapse"]) == way for r in side.values()) for way in (1, 0)]
    for side in (own, base)
  ]
  return {name: intervals.mean(seeds.values(own, name)) for name in names} | {
    "collapses": collapsed[0][0],
    "collapses p": float(stats.fisher_exact(collapsed).pvalue),
    "against grpo": intervals.paired(*seeds.pairs(own, base, "final")),
  }


def curves(results: list[dict]) -> list[dict]:
  """The reward of each regime and method, intervals over seeds."""
  found = []
  for regime in REGIMES:
    for method in METHODS:
      own = seeds.of(results, regime=regime, method=method).values()
      if points := seeds.curve(own, "reward"):
        where = {"regime": regime, "method": method}
        found.append(where | {"points": points})
  return found


def main(argv=None) -> None:
  study = Study("stability", __doc__, argv)
  study.sweep(plan(study.quick), measure, summarize)


if __name__ == "__main__":
  command(main)
