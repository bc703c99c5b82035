"""Seconds of a restart that trains one iteration, by compilation cache.

  python -m benchmarks.restart --out=benchmarks/restart.json
  python -m benchmarks.restart --config=configs/smollm2_cpu.py

Trains one iteration, which fills JAX's persistent compilation cache. Then the
run is resumed for one more, in turns with an empty cache and with the filled
one. Medians of the repeats: `process`, from its start to its end, and
`iteration`, its `time/iteration`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record, seeds


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", default="configs/tiny_cpu.py")
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  found = {"empty": [], "filled": []}
  with tempfile.TemporaryDirectory() as folder:
    run, filled, empty = (Path(folder) / n for n in ("run", "filled", "empty"))
    _train(args.config, run, filled, steps=1)
    for _ in range(args.repeats):
      for name, cache in (("empty", empty), ("filled", filled)):
        resumed = shutil.copytree(run, Path(folder) / "resumed")
        found[name].append(_train(args.config, resumed, cache, steps=2))
        shutil.rmtree(resumed)
      shutil.rmtree(empty)
  table = {
    name: {
      key: round(statistics.median(row[key] for row in rows), 1)
      for key in ("process", "iteration")
    }
    for name, rows in found.items()
  }
  record.finish(
    "restart",
    {"config": args.config, "repeats": args.repeats, "seconds": table},
    args.out,
  )


def _train(config: str, workdir: Path, cache: Path, *, steps: int) -> dict:
  """Trains up to an iteration: seconds of the process and of the last one."""
  began = time.monotonic()
  subprocess.run(
    [
      *(sys.executable, "-m", "gspo_jax.main", f"--config={config}"),
      *(f"--config.num_steps={steps}", "--config.eval.every=0"),
      f"--workdir={workdir}",
    ],
    cwd=seeds.ROOT,
    env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
    check=True,
  )
  seconds = time.monotonic() - began
  last = (workdir / "metrics.jsonl").read_text().splitlines()[-1]
  return {"process": seconds, "iteration": json.loads(last)["time/iteration"]}


if __name__ == "__main__":
  main()
