"""How many experts an update flips, by learning rate, experts, top-k, depth.

  python -m studies.expert_flips.run

A flip is an expert of the old policy, at a token and layer, that the new policy
does not choose there; the rate is the share of all those chosen.

One thing is changed at a time. Fixed before the runs:
- about 10 %: a setting is as claimed where its interval, of 95 % for all
  settings together (Bonferroni), lies wholly within 5 to 20 %; below or above,
  where it lies wholly there.
- more in deeper models: eight layers less two, all else alike, by the paired t
  test at .05.
A run that broke off counts with the iterations it had; one without any is left
out, and counted.
"""

from studies import intervals, seeds
from studies.runs import Run
from studies.study import Study, command

CLAIMED = 0.10  # after an update, in 48 layers: arXiv 2507.18071, sec. 5.3
ABOUT = 0.05, 0.20
UPDATES = 2  # an iteration; see config.py
BASE = {"experts": 8, "top": 2, "layers": 2, "rate": "3e-4"}
SETTINGS = [
  BASE,
  *({**BASE, "rate": rate} for rate in ("1e-4", "1e-3")),
  {**BASE, "layers": 8},
  *({**BASE, "top": top} for top in (1, 4)),
  *({**BASE, "experts": 32, "top": top} for top in (1, 2)),
]


def plan(quick: bool) -> list[dict]:
  return [
    {**setting, "seed": seed}
    for seed in range(2 if quick else 3)
    for setting in (SETTINGS[:2] if quick else SETTINGS)
  ]


def measure(run: Run) -> dict:
  """After one update: the mean over iterations, and of each layer."""
  layers = [row["moe/layer_flip_rate"] for row in run.distributions]
  curve = run.curve("moe/expert_flip_rate")
  return {
    "flips": UPDATES * run.mean("moe/expert_flip_rate"),
    "by layer": [UPDATES * sum(r) / len(r) for r in zip(*layers, strict=True)],
    "curve": [[step, UPDATES * rate] for step, rate in curve],
    "load of the busiest expert": run.mean("moe/load_max"),
    "reward": run.mean("reward/mean"),
    "failure": run.failure,
  }


def summarize(results: list[dict]) -> dict:
  """Of each setting, the means over seeds; and what depth does."""
  table = []
  for setting in SETTINGS:
    own = seeds.of(results, **setting)
    if own:
      flips = seeds.values(own, "flips")
      level = 1 - 0.05 / len(SETTINGS)
      layers = [r["by layer"] for r in own.values() if r["by layer"]]
      table.append(
        setting
        | {
          "flips": intervals.mean(flips),
          "about 10 %": intervals.place(intervals.mean(flips, level), *ABOUT),
          "by layer": [
            intervals.mean(rates) for rates in zip(*layers, strict=True)
          ],
          "broke off": sum(bool(r["failure"]) for r in own.values()),
        }
      )
  deep, shallow = (seeds.of(results, **BASE | {"layers": n}) for n in (8, 2))
  depth = intervals.paired(*seeds.pairs(deep, shallow, "flips"))
  intervals.judge([depth])
  return {
    "claimed": CLAIMED,
    "table": table,
    "eight layers less two": depth,
  }


def main(argv=None) -> None:
  study = Study("expert_flips", __doc__, argv)
  study.sweep(plan(study.quick), measure, summarize)


if __name__ == "__main__":
  command(main)
