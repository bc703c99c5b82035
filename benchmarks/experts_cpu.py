"""Updates and generation on a CPU with few and with many experts.

  taskset -c 0 python -m benchmarks.experts_cpu [--quick] [--out=FILE.json]

Two Qwen3-MoE in float32 that differ in the number of experts alone, 8 and 128,
so that a token multiplies by equally many numbers: four layers of width 128,
four experts of width 64 a token. An iteration is that of benchmarks/iteration,
with 64 responses of at most 64 tokens to prompts of 32, and one optimizer step
in micro-batches of 16 rows. The weights are random.

Seconds are CPU time, the least of the repeats; both models take turns. `times`
is those with many experts over those with few.
"""

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import jax

from benchmarks import record
from benchmarks.iteration import Iterations
from gspo_jax import model
from gspo_jax.configs import tiny_cpu
from gspo_jax.model import hf

EXPERTS = 8, 128
PHASES = "generate", "update"
SIZES = {
  "num_layers": 4,
  "embed_dim": 128,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 32,
  "mlp_dim": 64,
  "experts_per_token": 4,
  "dtype": "float32",
}


def config_of(folder: str, quick: bool):
  """All the keys of configs/common.py for the checkpoint in a folder."""
  c = tiny_cpu.get_config("debug" if quick else "")
  c.model.checkpoint, c.data.tokenizer = folder, "bytes"
  c.learner.minibatches = 1
  if not quick:
    c.data.prompts, c.rollout.group_size = 16, 4
    c.data.max_prompt_length, c.sampler.max_new_tokens = 32, 64
  return c


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="debug sizes, once")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--repeats", type=int, default=8)
  args = parser.parse_args()
  seconds = {}
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    iterate = {}
    for experts in EXPERTS:
      cfg = model.variant("tiny", num_experts=experts, **SIZES)
      checkpoint = f"{folder}/{experts}"
      hf.save_hf(model.init(jax.random.key(0), cfg), cfg, checkpoint)
      iterate[experts] = Iterations(
        config_of(checkpoint, args.quick),
        f"{checkpoint}/run",
        packed=False,
        clock=time.process_time,
      )
      stack.enter_context(iterate[experts].reward_pool)
    for step in range(2 if args.quick else args.repeats + 1):
      for experts, once in iterate.items():
        found = once(step)
        if step:  # the first one compiles
          seconds.setdefault(experts, []).append(found)
  least = {
    experts: {phase: min(row[phase] for row in rows) for phase in PHASES}
    for experts, rows in seconds.items()
  }
  few, many = (least[experts] for experts in EXPERTS)
  times = {phase: round(many[phase] / few[phase], 2) for phase in PHASES}
  print("phase | 8 experts, s | 128 experts, s | times")
  for phase in PHASES:
    print(f"{phase} | {few[phase]:.3f} | {many[phase]:.3f} | {times[phase]}")
  record.finish("experts_cpu", {"seconds": least, "times": times}, args.out)


if __name__ == "__main__":
  main()
