"""Seconds to the first iteration of a run, with an empty and a filled cache.

  python -m benchmarks.quick_start --out=benchmarks/quick_start.json
  python -m benchmarks.quick_start --before=../older

Starts the command in turns with an empty compilation cache and with the one
that this filled, until the row of iteration 1 is written, and then ends it.
`--before` is a checkout of another revision, which takes its turns; a revision
without `--compilation_cache` gets JAX's variable. Medians of the repeats:

seconds   from the start of the process to the row
cpu       user and system time of the process and its workers until then
compiled  programs that it compiled
"""

import argparse
import collections
import os
import re
import shutil
import signal
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
  parser.add_argument("--config", default="configs/tiny_cpu.py:debug")
  parser.add_argument("--before", type=Path)
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  checkouts = {"now": seeds.ROOT} | (
    {"before": args.before.resolve()} if args.before else {}
  )
  found = collections.defaultdict(list)
  with tempfile.TemporaryDirectory() as folder:
    for _ in range(args.repeats):
      for name, checkout in checkouts.items():
        cache = Path(folder) / "cache"
        for state in ("empty", "filled"):
          workdir = Path(folder) / "run"
          found[f"{name}, {state}"].append(
            _start(checkout, args.config, workdir, cache)
          )
          shutil.rmtree(workdir)
        shutil.rmtree(cache)
  table = {
    name: {
      key: round(statistics.median(row[key] for row in rows), 1)
      for key in rows[0]
    }
    for name, rows in found.items()
  }
  record.finish(
    "quick_start",
    {"config": args.config, "repeats": args.repeats} | table,
    args.out,
  )


def _start(checkout: Path, config: str, workdir: Path, cache: Path) -> dict:
  """Trains up to the first iteration: what the module's docstring lists."""
  metrics, log = workdir / "metrics.jsonl", cache.with_name("log")
  began = time.monotonic()
  with log.open("w") as printed:
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "gspo_jax.main", f"--config={config}"),
        f"--workdir={workdir}",
      ],
      cwd=checkout,
      env=os.environ
      | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DEBUG_LOG_MODULES": "jax._src.compiler",
        "PYTHONPATH": str(checkout),
      },
      stdout=printed,
      stderr=subprocess.STDOUT,
    )
    # An evaluation writes the first row, before iteration 1.
    while not metrics.exists() or '"step": 1,' not in metrics.read_text():
      if process.poll() is not None:
        raise RuntimeError(log.read_text())
      time.sleep(0.02)
    seconds, cpu = time.monotonic() - began, _cpu_seconds(process.pid)
    process.send_signal(signal.SIGTERM)
    process.wait()
  misses = re.findall("PERSISTENT COMPILATION CACHE MISS", log.read_text())
  return {"seconds": seconds, "cpu": cpu, "compiled": len(misses)}


def _cpu_seconds(pid: int) -> float:
  """User and system time of a process, and of those that it started."""
  total = 0.0
  for stat in Path("/proc").glob("[0-9]*/stat"):
    try:
      fields = stat.read_text().rpartition(")")[2].split()
    except OSError:  # it ended
      continue
    if str(pid) in (stat.parent.name, fields[1]):
      total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
  return total


if __name__ == "__main__":
  main()
