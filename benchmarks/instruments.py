"""What `log.instruments` cost an iteration of the embedded default.

  python -m benchmarks.instruments

Iterations with and without them alternate in one process, so that whatever else
the machine does falls on both; medians and their ratio. The host's part counts:
to fetch what was measured and to write it into the files of a run.
"""

import argparse
import json
import tempfile

from benchmarks.iteration import medians, prepare
from configs import tiny_cpu


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--repeats", type=int, default=15)
  parser.add_argument("--quick", action="store_true", help="debug sizes, once")
  args = parser.parse_args()
  repeats = 1 if args.quick else args.repeats
  with tempfile.TemporaryDirectory() as folder:
    rows = _alternate("debug" if args.quick else "", repeats, folder)
  seconds = {name: medians(every) for name, every in rows.items()}
  print("phase | with | without | ratio")
  for phase, value in seconds["with"].items():
    without = seconds["without"][phase]
    print(f"{phase} | {value:.3f} | {without:.3f} | {value / without:.3f}")
  print(json.dumps(seconds))


def _alternate(sizes: str, repeats: int, folder: str) -> dict[str, list]:
  """Seconds by phase of each iteration, with and without."""
  iterate, rows = {}, {"with": [], "without": []}
  for name in rows:
    config = tiny_cpu.get_config(sizes)
    config.log.instruments = name == "with"
    iterate[name] = prepare(config, f"{folder}/{name}")
    iterate[name](0)  # compiles
  for step in range(1, repeats + 1):
    for name, once in iterate.items():
      rows[name].append(once(step))
  return rows


if __name__ == "__main__":
  main()
