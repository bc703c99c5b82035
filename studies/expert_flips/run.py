"""How many experts an update flips, by learning rate, experts, top-k, depth.

  python -m studies.expert_flips.run

A flip is an expert of the old policy, at a token and layer, that the new policy
does not choose there; the rate is the share of all those chosen.
"""

from studies import arguments, intervals
from studies.runs import Run, Study, command

CLAIMED = 0.10  # after an update, in 48 layers: arXiv 2507.18071, sec. 5.3
UPDATES = 2  # an iteration; see config.py
MODEL = ("experts", "top", "layers")


def plan(quick: bool) -> list[dict]:
  models = [(e, k, 2) for e in (8, 32) for k in (1, 2, 4)] + [(8, 2, 8)]
  rates, seeds = ("1e-4", "3e-4", "1e-3"), range(3)
  if quick:
    models, rates, seeds = [(8, 2, 2)], ("1e-3",), range(2)
  return [
    dict(zip(MODEL, model, strict=True)) | {"rate": rate, "seed": seed}
    for seed in seeds
    for model in models
    for rate in rates
  ]


def measure(run: Run) -> dict:
  """After one update: the mean over iterations, and of each layer."""
  layers = [row["moe/layer_flip_rate"] for row in run.distributions]
  curve = run.curve("moe/expert_flip_rate")
  return {
    "flips": UPDATES * run.mean("moe/expert_flip_rate", 1, len(curve)),
    "first": UPDATES * curve[0][1],
    "by layer": [UPDATES * sum(r) / len(r) for r in zip(*layers, strict=True)],
    "curve": [[step, UPDATES * rate] for step, rate in curve],
    "load of the busiest expert": run.mean("moe/load_max", 1, len(curve)),
    "reward": run.curve("reward/mean"),
    "pass@1": run.curve("eval/pass@1"),
    "failure": run.failure,
  }


def summarize(results: list[dict]) -> list[dict]:
  """Of each model and rate, the means over seeds."""
  table = []
  setting = lambda r: tuple(r[key] for key in (*MODEL, "rate"))
  for one in dict.fromkeys(map(setting, results)):
    own = [r for r in results if setting(r) == one]
    table.append(
      dict(zip((*MODEL, "rate"), one, strict=True))
      | {
        "flips": intervals.mean([r["flips"] for r in own]),
        "first update": intervals.mean([r["first"] for r in own]),
        "by layer": [
          intervals.mean(rates)
          for rates in zip(*(r["by layer"] for r in own), strict=True)
        ],
      }
    )
  return table


def main() -> None:
  study = Study("expert_flips", __doc__)
  if not study.plot:
    results, planned = [], plan(study.quick)
    for one in planned:
      results.append(one | measure(study.train(arguments.write(**one))))
      study.write(planned=len(planned), table=summarize(results), runs=results)
  # Here, so that a run needs no matplotlib.
  from studies.expert_flips import figure

  figure.draw(study.read(), study.figure, CLAIMED)


if __name__ == "__main__":
  command(main)
