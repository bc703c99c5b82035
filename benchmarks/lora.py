"""All weights trained, or low-rank adapters: pass@1, seconds, memory.

  python -m gspo_jax.prepare_smollm2 --to=models/smollm2
  python -m benchmarks.lora --out=benchmarks/lora.json
  python -m benchmarks.lora --task=embedded

Trains the embedded default, and SmolLM2-135M-Instruct for 10 iterations of 64
responses, with GSPO and all else alike; SmolLM2's learning rate for all weights
is the one that studies/published_model chose, and that of its adapters is ten
times as high, as is usual; no other was tried. Seconds are medians over the
iterations without the first. Memory is the largest resident set of the training
process, as Linux counts it.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import record, seeds

_TASKS = {
  "embedded": (
    "configs/tiny_cpu.py",
    {},
    {
      "all weights": {},
      "adapters": {"model.lora.rank": 8, "optim.learning_rate": 1e-3},
    },
  ),
  "smollm2": (
    "configs/smollm2_cpu.py",
    {
      "num_steps": 10,
      "eval.every": 10,
      "data.prompts": 8,
      "learner.minibatches": 4,
      "learner.micro_batch_size": 2,
    },
    {
      "all weights": {"optim.learning_rate": 3e-5},
      "adapters": {"model.lora.rank": 16, "optim.learning_rate": 3e-4},
    },
  ),
}  # config, what all have, what each has


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--task", choices=_TASKS, help="one alone")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  results = []
  for task in [args.task] if args.task else _TASKS:
    config, shared, kinds = _TASKS[task]
    for kind, settings in kinds.items():
      with tempfile.TemporaryDirectory() as folder:
        run = seeds.train(config, Path(folder), **shared, **settings)
      results.append({"task": task, "trained": kind} | run)
  record.finish("lora", {"results": results}, args.out)


if __name__ == "__main__":
  main()
