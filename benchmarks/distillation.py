"""On-policy distillation against GSPO on rewards, from one cold start.

  python -m benchmarks.distillation --out=benchmarks/distillation.json

The teacher has twice the width of the embedded default, and imitates
demonstrations without wrong steps. The student is the embedded default after
its own cold start, whose demonstrations have wrong steps. It then learns from
the teacher alone, by each of `--names`, or by GSPO from rewards alone. All else
is as in configs/tiny_cpu.py. Held-out pass@1 by iteration; seconds are of runs
that may have shared the machine.
"""

import argparse
import tempfile
from pathlib import Path

from ml_collections import ConfigDict

from benchmarks import record
from benchmarks.seeds import train
from gspo_jax.configs import tiny_cpu

COLUMNS = ("pass@1 before", "pass@1 after", "seconds per iteration")


def get_config(mode: str = "") -> ConfigDict:
  """mode: "teacher" or "student"."""
  c = tiny_cpu.get_config()
  c.eval.every = 10
  if mode == "teacher":
    c.model.embed_dim = c.model.mlp_dim = 128
    c.model.head_dim = 32
    c.data.source = "chain:noise=0"
    c.cold_start.gate = 0.0
    c.num_steps = c.eval.every = 10
  return c


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--names", nargs="+", default=["gspo_token", "dapo"])
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--teacher", type=Path, help="a workdir; else trains one")
  parser.add_argument("--out", type=Path, required=True)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    teacher = args.teacher or Path(folder, "teacher")
    results = [
      train("benchmarks/distillation.py:teacher", teacher) | {"run": "teacher"}
    ]
    for seed in args.seeds:
      results += _students(folder, teacher, seed, args)
  record.finish("distillation", {"results": results}, args.out)


def _students(folder: str, teacher: Path, seed: int, args) -> list[dict]:
  """The run on rewards, and one from the teacher by each method."""
  found, shared = [], Path(folder, str(seed))
  shared.mkdir()
  distilled = {"objective.distillation.teachers": teacher.absolute()}
  runs = {"gspo on rewards": {"objective.name": "gspo"}} | {
    f"{name} from the teacher": {"objective.name": name} | distilled
    for name in args.names
  }
  for run, settings in runs.items():
    workdir = Path(folder, f"{run} {seed}")
    workdir.mkdir()
    (workdir / "cold_start").symlink_to(shared)
    result = train(
      "benchmarks/distillation.py:student",
      workdir,
      seed=seed,
      num_steps=args.steps,
      **settings,
    )
    result.pop("objective.distillation.teachers", None)
    found.append({"run": run} | result)
    row = " | ".join(f"{result[column]:g}" for column in COLUMNS)
    print(f"{run}, seed {seed} | {row}", flush=True)
  return found


if __name__ == "__main__":
  main()
