"""Every objective on the embedded default, from the same cold start.

  python -m benchmarks.objectives --out=benchmarks/objectives

Twenty iterations each, every key but `objective.name` as in the config; writes
OUT.json and prints the table.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

from benchmarks.seeds import train
from gspo_jax.losses import METHODS

# A critic of a tiny model learns at a higher rate than the default.
NAMES = [n if n != "ppo" else "ppo:critic_learning_rate=1e-3" for n in METHODS]
COLUMNS = ("pass@1 before", "pass@1 after", "seconds per iteration")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default="configs/tiny_cpu.py")
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--names", nargs="+", default=NAMES)
  parser.add_argument("--out", type=Path, required=True)
  args = parser.parse_args()
  results = []
  print("objective | " + " | ".join(COLUMNS))
  with tempfile.TemporaryDirectory() as folder:
    for name in args.names:
      settings = {
        "objective.name": name,
        "num_steps": args.steps,
      }
      workdir, shared = Path(folder, name), Path(folder, "cold_start")
      for made in (workdir, shared):
        made.mkdir(exist_ok=True)
      (workdir / "cold_start").symlink_to(shared)
      result = train(args.config, workdir, **settings)
      results.append(result)
      row = " | ".join(f"{result[column]:g}" for column in COLUMNS)
      print(f"{name} | {row}", flush=True)
  record = {
    "command": f"python -m benchmarks.objectives --out={args.out}",
    "machine": f"{os.cpu_count()} x {platform.machine()}",
    "results": results,
  }
  args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
  main()
