"""What recorded ids cost an iteration of the embedded default.

  python -m benchmarks.kept_ids

Iterations alternate in one process, so that whatever else the machine does
falls on all; medians, and their ratios:
  sampler.top_p=.9 without ids (off-policy), and with up to 64 ids a token;
  no truncation, and with objective.score_centering=64.
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
  top_p = {"sampler.top_p": 0.9}
  keys = {
    "top_p": top_p | {"sampler.kept_ids": 0},
    "top_p, 64 ids": top_p | {"sampler.kept_ids": 64},
    "all": {},
    "all, centered": {"objective.score_centering": 64},
  }
  configs = {}
  for name, values in keys.items():
    configs[name] = tiny_cpu.get_config("debug" if args.quick else "")
    configs[name].update_from_flattened_dict(values)
  seconds = alternate(configs, repeats=1 if args.quick else args.repeats)
  print("phase", *keys, "ids", "centering", sep=" | ")
  for phase in seconds["all"]:
    a, b, c, d = (seconds[name][phase] for name in keys)
    times = *(f"{x:.3f}" for x in (a, b, c, d)), f"{b / a:.3f}", f"{d / c:.3f}"
    print(phase, *times, sep=" | ")
  print(json.dumps(seconds))


if __name__ == "__main__":
  main()
