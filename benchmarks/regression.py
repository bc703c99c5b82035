"""Is this checkout slower than another commit?

  python -m benchmarks.regression --against=COMMIT [--rounds=3] [--cases=A,B]

Both commits take turns on one core, in the environment that calls this. A
separate process measures each case, through names that stay: `generate`,
`train_and_evaluate` and `python -m gspo_jax.main`. A key that a commit's config
lacks is left out there. Seconds are medians of the rounds. A round divides the
seconds of this checkout by the seconds of the commit; the ratio is the median
of these quotients. Above 1 this checkout is slower. --quick is one round of few
calls and iterations.

generate    the public function: 64 responses of 64 tokens to prompts of 32
iteration   the same sizes in a run; its phases
long tail   continuous batching: one of 30 tokens ends a response of at most 256
async turns conversations of up to four turns that do not wait for each other;
            the environment answers at once
first call  `main` with an empty compilation cache until its second iteration

Random weights of the embedded default's size, in float32.
"""

import argparse
import collections
import contextlib
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record

_PHASES = ("time/iteration", "time/generate", "time/update")
# Changes of configs/tiny_cpu.py.
_SIZES = {
  "data.prompts": 8,
  "data.max_prompt_length": 32,
  "rollout.group_size": 8,
  "cold_start.steps": 0,
  "eval.every": 0,
  "checkpoint.every": 1000,
}
_RUNS = {
  "iteration": _SIZES,
  "long tail": _SIZES
  | {
    "sampler.max_new_tokens": 256,
    "sampler.stop": tuple("aehlprwz"),
    "continuous_batching.slots": 16,
  },
  "async turns": _SIZES
  | {
    "sampler.max_new_tokens": 320,
    "sampler.stop": tuple("aehlprwz"),
    "continuous_batching.slots": 16,
    "rollout.environment": "benchmarks.async_turns.Sleeps:mean=0.0",
    "rollout.mode": "async",
    "reward.names": (),
    "reward.weights": (),
    "reward.workers": 1,
  },
}
_CASES = ("generate", *_RUNS, "first call")


def known(changes: dict, config) -> dict:
  """The changes of keys that the config has."""
  found = {}
  for key, value in changes.items():
    with contextlib.suppress(AttributeError):
      operator.attrgetter(key)(config)
      found[key] = value
  return found


def run(changes: dict, quick: bool) -> dict[str, float]:
  """Median seconds of the phases of an iteration, without the first three."""
  from gspo_jax.configs import tiny_cpu
  from gspo_jax.train import train_and_evaluate

  c = tiny_cpu.get_config()
  c.update_from_flattened_dict(known(changes, c))
  c.num_steps = 6 if quick else 12
  with tempfile.TemporaryDirectory() as folder:
    train_and_evaluate(c, folder)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines][3:]
  return {k: statistics.median(row[k] for row in rows) for k in _PHASES}


def generate(quick: bool) -> dict[str, float]:
  """Median seconds of a call, without the first."""
  import jax
  import numpy as np

  from gspo_jax import model, sampler

  cfg = model.variant("tiny")
  params = model.init(jax.random.key(0), cfg)
  tokens = np.ones((8, 32), np.int32)
  prompts = sampler.Prompts(tokens, np.full(8, 32, np.int32))
  sampling = sampler.SamplerConfig(8, 64, stop_ids=(257,), pad_id=256)
  call = jax.jit(
    lambda params, prompts, key: sampler.generate(
      params, cfg, prompts, key, sampler=sampling
    )
  )
  took = []
  for seed in range(3 if quick else 8):
    start = time.monotonic()
    jax.block_until_ready(call(params, prompts, jax.random.key(seed)))
    took.append(time.monotonic() - start)
  return {"seconds": statistics.median(took[1:])}


def first_call() -> dict[str, float]:
  """Seconds of a whole process of two iterations that compiles all."""
  from gspo_jax.configs import tiny_cpu

  changes = known(_SIZES, tiny_cpu.get_config()) | {"num_steps": 2}
  with tempfile.TemporaryDirectory() as folder:
    start = time.monotonic()
    subprocess.run(
      [
        *(sys.executable, "-m", "gspo_jax.main", f"--workdir={folder}/run"),
        f"--config={os.environ['PYTHONPATH']}/configs/tiny_cpu.py",
        *(f"--config.{key}={value}" for key, value in changes.items()),
      ],
      env=os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"},
      stdout=subprocess.DEVNULL,
      check=True,
    )
    return {"seconds": time.monotonic() - start}


def _measure(case: str, checkout: Path, quick: bool) -> dict[str, float]:
  """The case, by a process that imports gspo_jax from this checkout."""
  core = max(os.sched_getaffinity(0))
  done = subprocess.run(
    [sys.executable, __file__, f"--case={case}", *["--quick"] * quick],
    env=os.environ
    | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    cwd=checkout,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
    preexec_fn=lambda: os.sched_setaffinity(0, {core}),
  )
  return json.loads(done.stdout.splitlines()[-1])


def compare(cases, before: Path, rounds: int, quick: bool) -> dict[str, dict]:
  """What both take, and the ratio, by case and phase."""
  took = collections.defaultdict(list)
  for _ in range(rounds):
    for case in cases:
      now, old = (
        _measure(case, checkout, quick) for checkout in (record.ROOT, before)
      )
      for phase, seconds in now.items():
        took[f"{case}, {phase}"].append((seconds, old[phase]))
  median = statistics.median
  return {
    name: {
      "now": median(a for a, _ in pairs),
      "before": median(b for _, b in pairs),
      "ratio": round(median(a / b for a, b in pairs), 3),
    }
    for name, pairs in took.items()
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--against", help="a commit, tag or branch")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--cases", default=",".join(_CASES))
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--case", help="measures this case, in this process")
  args = parser.parse_args()
  if args.case:
    alone = {"generate": lambda: generate(args.quick), "first call": first_call}
    one = alone.get(args.case, lambda: run(_RUNS[args.case], args.quick))
    print(json.dumps(one()))
    return
  if not args.against:
    parser.error("--against: expected a commit")
  git = ["git", "-C", str(record.ROOT), "worktree"]
  with tempfile.TemporaryDirectory() as folder:
    before = Path(folder) / "before"
    subprocess.run([*git, "add", "--detach", before, args.against], check=True)
    try:
      rounds = 1 if args.quick else args.rounds
      found = compare(args.cases.split(","), before, rounds, args.quick)
    finally:
      subprocess.run([*git, "remove", "--force", before], check=True)
  for name, row in found.items():
    print(f"{name}: {row['now']:.4f} s, {row['before']:.4f} s, {row['ratio']}")
  results = {"against": args.against, "results": found}
  record.finish("regression", results, args.out)


if __name__ == "__main__":
  main()
