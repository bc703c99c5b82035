"""All weights trained, or low-rank adapters: pass@1, seconds, memory.

  python -m gspo_jax.model.hf.prepare_smollm2 --to=models/smollm2
  python -m benchmarks.lora --out=benchmarks/lora.json

Trains SmolLM2-135M-Instruct for the 10 iterations of studies/published_model,
and the embedded default for its 40, with GSPO, one seed each. The learning
rates of all weights are the one that the study chose, 3e-5, and the embedded
default's 3e-4; those of adapters are 3e-4 and 1e-3, and no other was tried.
The adapters' alpha is 32, the default. SmolLM2's weights are bfloat16 under
adapters, float32 where they are trained themselves. Seconds are medians over
the iterations. Memory is the largest resident set of the training process, as
Linux counts it. The record is written after each run.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import record, seeds

_EMBEDDED = "configs/tiny_cpu.py"
_SMOLLM2 = "studies/published_model/config.py"
_EVALUATE = {"eval.every": 10}
_RUNS = (
  (_SMOLLM2, {"model.lora.rank": 0, "optim.learning_rate": 3e-5} | _EVALUATE),
  (_SMOLLM2, {"model.lora.rank": 16, "optim.learning_rate": 3e-4} | _EVALUATE),
  (_EMBEDDED, {"model.lora.rank": 0, "optim.learning_rate": 3e-4}),
  (_EMBEDDED, {"model.lora.rank": 8, "optim.learning_rate": 1e-3}),
)  # config, keys


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  results = []
  for config, settings in _RUNS:
    with tempfile.TemporaryDirectory() as folder:
      run = seeds.train(config, Path(folder), **settings)
    results.append({"config": config} | run)
    found = {"runs planned": len(_RUNS), "results": results}
    record.finish("lora", found, args.out)


if __name__ == "__main__":
  main()
