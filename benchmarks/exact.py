"""What `model.exact` costs: iterations with and without it, in turns.

  taskset -c 0 python -m benchmarks.exact [--quick] [--out=FILE.json]

An iteration has 64 responses of 64 tokens to prompts of 32, by continuous
batching, and four minibatches of packed rows; the weights are random. The
ordinary run computes old log-probs in a scoring pass ("logps"), the exact run
takes the sampler's. Seconds are those in which the process computed, the median
of the iterations. `gap` is the mean distance, in nats a token, of the log-probs
of sampler and trainer in the last iteration.
"""

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import record
from benchmarks.iteration import Iterations, medians
from gspo_jax.configs import tiny_cpu


class Case(NamedTuple):
  """A decoder of heads of width 32; of its experts a token takes two."""

  dtype: str
  width: int
  vocabulary: int
  experts: int = 0
  layers: int = 4
  prompts: int = 16
  tokens: int = 64
  variant: str = "tiny"


CASES = {
  "dense, width 128": Case("float32", 128, 512),
  "8 experts, width 128": Case("float32", 128, 512, experts=8),
  "dense, width 256": Case("float32", 256, 2048),
  "8 experts, width 256": Case("float32", 256, 2048, experts=8),
  "8 experts, width 128, bfloat16": Case("bfloat16", 128, 512, experts=8),
  "DeltaNet, width 128": Case(
    "float32", 128, 512, variant="tiny-qwen3.5-dense"
  ),
}
QUICK = {
  "dense": Case("float32", 64, 300, layers=1, prompts=4, tokens=8),
}


def config_of(case: Case, *, exact: bool):
  c = tiny_cpu.get_config()
  c.model.dtype, c.model.exact = case.dtype, exact
  c.model.variant = case.variant
  heads = case.width // 32
  c.model.update(
    {
      "vocab_size": case.vocabulary,
      "num_layers": case.layers,
      "embed_dim": case.width,
      "num_heads": heads,
      "num_kv_heads": heads // 2,
      "head_dim": 32,
      "linear_num_key_heads": heads // 2,
      "linear_num_value_heads": heads,
      "linear_key_head_dim": 32,
      "linear_value_head_dim": 32,
      "mlp_dim": case.width * 3 // (2 if case.experts else 1),
      "num_experts": case.experts,
      "experts_per_token": 2 if case.experts else 0,
    }
  )
  c.data.prompts, c.data.max_prompt_length = case.prompts, 32
  c.rollout.group_size = 4
  c.sampler.max_new_tokens = case.tokens
  c.learner.micro_batch_size = 4
  c.continuous_batching.slots = 4 * case.prompts
  return c


def measure(case: Case, repeats: int) -> dict:
  with contextlib.ExitStack() as stack:
    runs, first = {}, {}
    for name in ("ordinary", "exact"):
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      config = config_of(case, exact=name == "exact")
      run = Iterations(config, folder, clock=time.process_time)
      stack.enter_context(run.reward_pool)
      start = time.process_time()
      run(0)  # compiles
      first[name], runs[name] = time.process_time() - start, run
    rows = {name: [] for name in runs}
    for step in range(1, repeats + 1):
      for name, run in runs.items():
        rows[name].append(run(step))
  seconds = {name: medians(every) for name, every in rows.items()}
  for name, one in first.items():
    seconds[name]["first"] = one
  ordinary, exact = seconds["ordinary"], seconds["exact"]
  phases = "generate", "update", "iteration", "first"
  return {
    "seconds": {
      name: {phase: round(x, 3) for phase, x in one.items()}
      for name, one in seconds.items()
    },
    "times": {
      phase: round(exact[phase] / ordinary[phase], 2) for phase in phases
    },
    "gap": {
      name: run.metrics["mismatch/token_abs_mean"] for name, run in runs.items()
    },
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="one small case")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--repeats", type=int, default=5)
  args = parser.parse_args()
  cases, repeats = (QUICK, 1) if args.quick else (CASES, args.repeats)
  found = {name: measure(case, repeats) for name, case in cases.items()}
  record.finish("exact", {"cases": found}, args.out)


if __name__ == "__main__":
  main()
