"""Seconds of a restart that trains one iteration, by compilation cache.

  python -m benchmarks.restart --out=benchmarks/restart.json
  python -m benchmarks.restart --config=configs/smollm2_cpu.py

Trains one iteration, which fills JAX's persistent compilation cache. Then the
run is resumed for one more, in turns with an empty cache and with the filled
one. Programs that compile in under a second are cached, too, which JAX leaves
out by default. Medians of the repeats:

first_update  seconds from the start of the process to the end of its iteration
compiled      programs that it compiled
cached        programs that it read from the cache
"""

import argparse
import json
import os
import re
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
      for key in rows[0]
    }
    for name, rows in found.items()
  }
  record.finish(
    "restart",
    {"config": args.config, "repeats": args.repeats} | table,
    args.out,
  )


def _train(config: str, workdir: Path, cache: Path, *, steps: int) -> dict:
  """Trains up to an iteration: what the docstring of the module lists."""
  began = time.time()
  printed = subprocess.run(
    [
      *(sys.executable, "-m", "gspo_jax.main", f"--config={config}"),
      *(f"--config.num_steps={steps}", "--config.eval.every=0"),
      f"--workdir={workdir}",
    ],
    cwd=seeds.ROOT,
    env=os.environ
    | {
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_DEBUG_LOG_MODULES": "jax._src.compiler",
    },
    stderr=subprocess.PIPE,
    text=True,
    check=True,
  ).stderr
  last = (workdir / "metrics.jsonl").read_text().splitlines()[-1]
  return {
    "first_update": json.loads(last)["time/unix"] - began,
    "compiled": len(re.findall("PERSISTENT COMPILATION CACHE MISS", printed)),
    "cached": len(re.findall("Persistent compilation cache hit", printed)),
  }


if __name__ == "__main__":
  main()
