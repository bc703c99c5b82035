"""What `log.instruments` cost an iteration of the embedded default.

  python -m benchmarks.instruments

Iterations with and without them alternate in one process, so that whatever else
the machine does falls on both; medians and their ratio. The host's part counts:
to fetch what was measured and to write it into the files of a run.
"""

import argparse
import json

from benchmarks.iteration import alternate
from gspo_jax.configs import tiny_cpu


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--repeats", type=int, default=15)
  parser.add_argument("--quick", action="store_true", help="debug sizes, once")
  args = parser.parse_args()
  configs = {}
  for name in ("with", "without"):
    configs[name] = tiny_cpu.get_config("debug" if args.quick else "")
    configs[name].log.instruments = name == "with"
  seconds = alternate(configs, repeats=1 if args.quick else args.repeats)
  print("phase | with | without | ratio")
  for phase, value in seconds["with"].items():
    without = seconds["without"][phase]
    print(f"{phase} | {value:.3f} | {without:.3f} | {value / without:.3f}")
  print(json.dumps(seconds))


if __name__ == "__main__":
  main()
