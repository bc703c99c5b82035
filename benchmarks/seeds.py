"""Held-out accuracy before and after RL, for several seeds of one config.

  python -m benchmarks.seeds --out=benchmarks/tiny_cpu

Runs `python -m gspo_jax.main` once a seed, in fresh workdirs, one after the
other, and writes OUT.json (a table and the curves) and OUT.png.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record
from benchmarks.record import ROOT


def train(config: str, workdir: Path, **settings) -> dict:
  """Trains in `workdir`, or goes on there: its table row and curve."""
  began = time.monotonic()
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", "gspo_jax.main", f"--config={config}"),
      *(f"--config.{key}={value}" for key, value in settings.items()),
      f"--workdir={workdir.absolute()}",
      # A run with a named folder takes no kept cold start.
      f"--compilation_cache={ROOT / '.jax_cache'}",
    ],
    cwd=ROOT,
  )
  try:
    # ru_maxrss is never less than the peak of the process that calls this.
    _, status, usage = os.wait4(process.pid, 0)
  except BaseException:
    process.terminate()  # it saves what it has
    process.wait()
    raise
  process.returncode = os.waitstatus_to_exitcode(status)
  if process.returncode:
    raise subprocess.CalledProcessError(process.returncode, process.args)
  seconds = time.monotonic() - began
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  median = lambda key: statistics.median(r[key] for r in rows[1:])
  curve = lambda key: [[r["step"], r[key]] for r in rows if key in r]
  return {
    **settings,
    "seconds": round(seconds, 1),
    "seconds of iterations": round(sum(r["time/iteration"] for r in rows[1:])),
    "pass@1 before": rows[0]["eval/pass@1"],
    "pass@1 after": rows[-1]["eval/pass@1"],
    "greedy before": rows[0]["eval/greedy"],
    "greedy after": rows[-1]["eval/greedy"],
    "seconds per iteration": round(median("time/iteration"), 2),
    "seconds per update": round(median("time/update"), 2),
    "largest resident set, GiB": round(usage.ru_maxrss / 2**20, 2),  # of KiB
    "sampler tokens/s": round(median("throughput/sampler_tokens_per_second")),
    "reward": curve("reward/mean"),
    "pass@1": curve("eval/pass@1"),
  }


def draw(results: list[dict], path: Path) -> None:
  """Reward of each iteration, and held-out pass@1, a colour a seed."""
  import matplotlib as mpl

  mpl.use("Agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
  objectives = {result.get("objective.name") for result in results}
  for colour, result in enumerate(results):
    style = {"color": f"C{colour}"}
    label = f"seed {result['seed']}"
    if len(objectives) > 1:
      label = f"{result['objective.name']}, {label}"
    axes.plot(*zip(*result["reward"], strict=True), alpha=0.35, **style)
    axes.plot(
      *zip(*result["pass@1"], strict=True), marker="o", label=label, **style
    )
  axes.set(xlabel="RL iteration", ylabel="accuracy", ylim=(0, 1))
  axes.set_title("held-out pass@1 (dots) and training reward (faint)")
  axes.grid(alpha=0.3)
  axes.legend(loc="lower right")
  figure.savefig(path, dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default="configs/tiny_cpu.py")
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
  parser.add_argument("--out", type=Path, required=True)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    results = [
      train(args.config, Path(folder) / str(seed), seed=seed)
      for seed in args.seeds
    ]
  record.write("seeds", {"results": results}, args.out.with_suffix(".json"))
  draw(results, args.out.with_suffix(".png"))
  columns = [k for k in results[0] if k not in ("reward", "pass@1")]
  print(" | ".join(columns))
  for result in results:
    print(" | ".join(f"{result[k]:g}" for k in columns))


if __name__ == "__main__":
  main()
