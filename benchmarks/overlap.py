"""What is gained by sampling while rewards are computed.

  python -m benchmarks.overlap [--quick] [--out=FILE.json]

Short runs of the embedded default from random weights, with a reward that takes
20 ms a response: static sampling, then rewards; continuous batching, where a
response is scored while others decode; and with the next batch sampled
meanwhile, one step off-policy. Reported is the mean iteration of
metrics.jsonl, without the first two, which compile, and the last, which samples
no next batch: where rewards take longest, every other iteration waits for those
of two batches.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks import record
from gspo_jax import train
from gspo_jax.configs import tiny_cpu

REWARD = "benchmarks.slow_reward.final:milliseconds={}"
PHASES = ("generate", "score", "update", "iteration")
_CONTINUOUS = {"continuous_batching.slots": 64}
WAYS = {
  "score, then learn": {},
  "score while others decode": _CONTINUOUS,
  "sample while scoring": {"rollout.max_staleness": 1},
  "both": _CONTINUOUS | {"rollout.max_staleness": 1},
}


def seconds(changes: dict, steps: int, sizes: str, wait: float) -> dict:
  """Mean seconds of each phase of a run."""
  config = tiny_cpu.get_config(sizes)
  config.num_steps = steps
  config.cold_start.steps = 0
  config.eval.prompts = config.data.prompts
  config.eval.samples = 2
  config.eval.every = steps
  config.reward.names = (REWARD.format(wait),)
  config.update_from_flattened_dict(changes)
  with tempfile.TemporaryDirectory() as folder:
    with contextlib.redirect_stdout(io.StringIO()):
      train.train_and_evaluate(config, folder)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines][3:-1]
  return {
    phase: statistics.fmean(row[f"time/{phase}"] for row in rows)
    for phase in PHASES
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="debug sizes")
  parser.add_argument("--out", type=Path, help="for the JSON")
  args = parser.parse_args()
  steps, sizes, wait = (4, "debug", 1) if args.quick else (11, "", 20)
  found = {
    name: seconds(changes, steps, sizes, wait) for name, changes in WAYS.items()
  }
  print("way | " + " | ".join(PHASES) + " | of the first")
  whole = found[next(iter(WAYS))]["iteration"]
  for name, row in found.items():
    values = " | ".join(f"{row[phase]:.2f}" for phase in PHASES)
    print(f"{name} | {values} | {row['iteration'] / whole:.2f}")
  record.finish("overlap", {"milliseconds": wait, "seconds": found}, args.out)


if __name__ == "__main__":
  main()
