"""What the ids of truncated sampling cost an iteration of the embedded default.

  python -m benchmarks.kept_ids

Iterations with sampler.top_p=.9 that keep up to 64 ids of each token, and that
keep none (off-policy), alternate in one process, so that whatever else the
machine does falls on both; medians and their ratio.
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
  for kept in (64, 0):
    config = tiny_cpu.get_config("debug" if args.quick else "")
    config.sampler.update({"top_p": 0.9, "kept_ids": kept})
    configs[str(kept)] = config
  seconds = alternate(configs, repeats=1 if args.quick else args.repeats)
  print("phase | 64 ids | none | ratio")
  for phase, value in seconds["64"].items():
    none = seconds["0"][phase]
    print(f"{phase} | {value:.3f} | {none:.3f} | {value / none:.3f}")
  print(json.dumps(seconds))


if __name__ == "__main__":
  main()
