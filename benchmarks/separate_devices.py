"""Devices that take turns against a sampler with devices of its own.

  python -m benchmarks.separate_devices [--quick] [--out=FILE.json]

The embedded default after its cold start, on two virtual CPU devices: both
sample and train in turns, or one samples and one trains, with batches that are
sampled 0, 1 or 2 iterations ahead, and with a reward that takes 0, 20 or 200 ms
a response. Chains of 2 to 12 steps: responses of 17 to 87 tokens. Reported are
means over iterations of metrics.jsonl, without the first three, which compile
and fill the batches ahead, and the last ones, for which nothing is sampled.
No medians: where rewards take longest, every other iteration waits for those of
two batches.

iteration      seconds, and their ratio to turns with staleness 0
trainer waits  share of the iteration that the trainer waited for a batch
sampler waits  share of it that the sampler did not sample
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
from pathlib import Path

from benchmarks import record
from gspo_jax import train
from gspo_jax.configs import tiny_cpu

REWARD = "benchmarks.slow_reward.final:milliseconds={}"
WAYS = ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))  # own devices, staleness
_FIRST, _LAST = 4, 2  # iterations that are left out


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--quick", action="store_true", help="debug sizes")
  parser.add_argument("--slots", type=int, default=0, help="0: static sampler")
  parser.add_argument(
    "--milliseconds", type=int, nargs="+", help="of the reward; 0 20 200"
  )
  parser.add_argument("--out", type=Path, help="for the JSON")
  args = parser.parse_args()
  # JAX reads it when it first asks for the devices.
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
  waits = args.milliseconds or ((0, 1) if args.quick else (0, 20, 200))
  found = []
  with tempfile.TemporaryDirectory() as folder:
    for milliseconds in waits:
      first = None
      for devices, staleness in WAYS:
        row = _train(args, Path(folder), milliseconds, devices, staleness)
        first = first or row["iteration"]
        row["of turns"] = round(row["iteration"] / first, 2)
        found.append(row)
        print(json.dumps(row))
  record.finish("separate_devices", {"results": found}, args.out)


def _train(args, folder, milliseconds, devices, staleness) -> dict:
  """Trains, and sums up an iteration."""
  config = tiny_cpu.get_config("debug" if args.quick else "")
  config.num_steps = _FIRST + _LAST + 7  # an even number of them
  config.eval.every = 0
  config.checkpoint.every = config.num_steps
  if not args.quick:
    config.cold_start.steps, config.cold_start.gate = 300, 0.0
    config.data.source = "chain:steps=2|4|8|12,demonstrated=2|4|8|12"
    config.data.max_prompt_length, config.sampler.max_new_tokens = 40, 96
    config.data.prompts, config.learner.micro_batch_size = 16, 16
  config.reward.names = (REWARD.format(milliseconds),)
  config.continuous_batching.slots = args.slots
  config.sampler_mesh.devices = devices
  config.rollout.max_staleness = staleness
  shared = folder / "cold_start"
  shared.mkdir(exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder) as workdir:
    Path(workdir, "cold_start").symlink_to(shared)
    with contextlib.redirect_stdout(io.StringIO()):
      train.train_and_evaluate(config, workdir)
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  rows = [r for r in rows if _FIRST <= r["step"] <= config.num_steps - _LAST]
  mean = lambda key: statistics.fmean(row[key] for row in rows)
  iteration = mean("time/iteration")
  share = lambda key: round(mean(key) / iteration, 3)
  row = {
    "milliseconds": milliseconds,
    "sampler devices": devices,
    "staleness": staleness,
    "iteration": round(iteration, 3),
  }
  if devices:
    row["trainer waits"] = share("time/generate")
    row["sampler waits"] = round(1 - share("time/rollout"), 3)
  return row


if __name__ == "__main__":
  main()
