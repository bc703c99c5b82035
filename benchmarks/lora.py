"""All weights trained, or low-rank adapters: pass@1, seconds, memory.

  python -m gspo_jax.prepare_smollm2 --to=models/smollm2
  python -m benchmarks.lora --out=benchmarks/lora.json

Trains SmolLM2-135M-Instruct for the 10 iterations of studies/published_model,
and the embedded default for its 40, with GSPO, one seed each. All weights have
the learning rate that the study chose, and the embedded default's own;
adapters have ten and three times as high a one, and no other was tried. Their
alpha is 32, the default. SmolLM2's weights are bfloat16 under adapters, float32
where they are trained themselves. Seconds are medians over the iterations.
Memory is the largest resident set of the training process, as Linux counts it.
The record is written after each run.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import record, seeds

_EMBEDDED = "configs/tiny_cpu.py"
_SMOLLM2 = "studies/published_model/config.py:rate=3e-5"
_ADAPTERS = {
  _SMOLLM2: {"model.lora.rank": 16, "optim.learning_rate": 3e-4},
  _EMBEDDED: {"model.lora.rank": 8, "optim.learning_rate": 1e-3},
}
_SHARED = {_SMOLLM2: {"eval.every": 10}, _EMBEDDED: {}}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  results = []
  for config, adapters in _ADAPTERS.items():
    for settings in ({}, adapters):
      with tempfile.TemporaryDirectory() as folder:
        settings = _SHARED[config] | settings
        run = seeds.train(config, Path(folder), **settings)
      results.append({"config": config} | run)
      record.finish("lora", {"results": results}, args.out)


if __name__ == "__main__":
  main()
