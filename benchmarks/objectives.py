"""Every objective on the embedded default, from the same cold start.

  python -m benchmarks.objectives --out=benchmarks/objectives
  python -m benchmarks.objectives --estimators --out=benchmarks/estimators

Twenty iterations each, every key but `objective.name` as in the config; with
`--estimators` GSPO with each advantage estimator. Writes OUT.json and prints
the table.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks import record
from benchmarks.seeds import train
from gspo_jax.losses import METHODS

# A critic of a tiny model learns at a higher rate than the default.
NAMES = [n if n != "ppo" else "ppo:critic_learning_rate=1e-3" for n in METHODS]
LENGTH = {"reward.names": "final_answer,length", "reward.weights": "1,.2"}
ESTIMATORS = (
  "grpo",
  "rloo",
  "reinforce_plus_plus",
  "reinforce_plus_plus_baseline",
  "max_rl",
  "pass_at_k:k=4",
)
ESTIMATED = [
  *({"objective.advantage_estimator": name} for name in ESTIMATORS),
  {"objective.advantage_estimator": "grpo", **LENGTH},
  {"objective.advantage_estimator": "gdpo", **LENGTH},
]
COLUMNS = (
  "pass@1 before",
  "pass@1 after",
  "pass@8 after",
  "response length",
  "seconds per iteration",
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default="configs/tiny_cpu.py")
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--names", nargs="+", default=NAMES)
  parser.add_argument("--estimators", action="store_true")
  parser.add_argument("--out", type=Path, required=True)
  args = parser.parse_args()
  results = []
  print("objective | " + " | ".join(COLUMNS))
  with tempfile.TemporaryDirectory() as folder:
    names = [{"objective.name": name} for name in args.names]
    for i, changes in enumerate(ESTIMATED if args.estimators else names):
      settings = {**changes, "num_steps": args.steps}
      # Its gate reads the rewards.
      shared = Path(folder, f"cold_start {settings.get('reward.names', '')}")
      workdir = Path(folder, str(i))
      for made in (workdir, shared):
        made.mkdir(exist_ok=True)
      (workdir / "cold_start").symlink_to(shared)
      result = train(args.config, workdir, **settings)
      rows = (workdir / "metrics.jsonl").read_text().splitlines()
      last = json.loads(rows[-1])
      result["pass@8 after"] = last["eval/pass@8"]
      result["response length"] = last["response/length"]
      results.append(result)
      row = " | ".join(f"{result[column]:g}" for column in COLUMNS)
      print(f"{', '.join(map(str, settings.values()))} | {row}", flush=True)
  out = args.out.with_suffix(".json")
  record.write("objectives", {"results": results}, out)


if __name__ == "__main__":
  main()
