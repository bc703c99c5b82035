"""Seconds of an update on one CPU core, beside those of another checkout.

  taskset -c 1 python -m benchmarks.update [--quick] [--json]
    [--before=PATH of a checkout] [--case=NAME,NAME] [--repeats=7]

A forward and backward pass and AdamW, one minibatch in float32, of a small
model: 2 layers of width 128, 4 heads of 32 with 2 key-value heads, a vocabulary
of 512, and either an MLP of width 384 or the top 2 of 8 experts of width 128.
64 rows have 32 prompt and 64 response tokens, or 32 rows have 32 and 512. The
program is what `train` builds, `learner.update` with the sizes given as keys of
a variant that leaves the rest at its default, and no rematerialisation. All
responses have the most tokens, which are random.

Seconds are those in which the process computed (CPU time), which other
processes on the core change little. With --before, this file runs in a process
of each checkout. Both compile first; then they take turns, one update each.
`ratio` is that of the minima, this checkout's over the other's.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SIZES = {
  "vocab_size": 512,
  "num_layers": 2,
  "embed_dim": 128,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 32,
}
MODELS = {
  "dense": {"mlp_dim": 384},
  "moe": {"mlp_dim": 128, "num_experts": 8, "experts_per_token": 2},
}
# Prompts, responses to each, prompt tokens, response tokens.
SHAPES = {"64x32+64": (8, 8, 32, 64), "32x32+512": (4, 8, 32, 512)}
QUICK = {"64x32+64": (2, 4, 8, 16), "32x32+512": (2, 4, 8, 48)}
CASES = [f"{model} {shape}" for model in MODELS for shape in SHAPES]


def config_of(case: str, quick: bool):
  """All the keys of configs/common.py for a case."""
  from gspo_jax.configs import tiny_cpu

  kind, shape = case.split()
  prompts, group, width, tokens = (QUICK if quick else SHAPES)[shape]
  c = tiny_cpu.get_config()
  c.model.variant = "qwen3-0.6b"
  for name, value in (SIZES | MODELS[kind]).items():
    c.model[name] = value
  c.data.prompts, c.rollout.group_size = prompts, group
  c.data.max_prompt_length, c.sampler.max_new_tokens = width, tokens
  c.learner.minibatches, c.learner.micro_batch_size = 1, prompts * group
  c.cold_start.steps = 0
  return c


class Update:
  """Updates of a case, again and again with the same batch.

  Args:
    case: of `CASES`.
    quick: whether to take the sizes of `QUICK`.
  """

  def __init__(self, case: str, quick: bool):
    import jax

    from gspo_jax.program.config import parse
    from gspo_jax.program.functions import build_program
    from gspo_jax.runtime import sharding

    config = config_of(case, quick)
    self._mesh = sharding.make_mesh(jax.devices()[:1])
    program = build_program(parse(config), self._mesh)
    self._learner = program.learner
    # The update of a checkout from before packed rows shuffled its batch.
    self._key = () if _packs(program.learner) else (jax.random.key(0),)
    with jax.set_mesh(self._mesh):
      params = program.init_params(jax.random.key(0))
      self._state = self._learner.init_state(params)
      self._batch = _train_batch(self._learner, config)

  def __call__(self) -> float:
    """CPU seconds of an update; the first call compiles."""
    import jax

    start = time.process_time()
    with jax.set_mesh(self._mesh):
      self._state, self._batch, _ = jax.block_until_ready(
        self._learner.update(self._state, self._batch, *self._key)
      )
    return time.process_time() - start


def _packs(learner) -> bool:
  return hasattr(learner, "packing")


def _train_batch(learner, config):
  """A batch of random tokens and rewards, as an iteration makes it."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from gspo_jax.sampler.samples import TRUNCATED, Prompts, Samples

  rng, c = np.random.default_rng(0), config
  P, S = c.data.prompts, c.data.max_prompt_length
  B, R = P * c.rollout.group_size, c.sampler.max_new_tokens
  draw = lambda *shape: jnp.asarray(rng.integers(0, 256, shape), jnp.int32)
  prompts = Prompts(draw(P, S), jnp.full(P, S, jnp.int32))
  samples = Samples(
    tokens=draw(B, R),
    logps=jnp.full((B, R), -6.0),
    lengths=jnp.full(B, R, jnp.int32),
    finish=jnp.full(B, TRUNCATED, jnp.int8),
    slot_steps=jnp.int32(0),
  )
  args = (prompts, samples)
  if _packs(learner):
    lengths = np.full(P, S), np.full(B, R)
    args += (learner.pack(*lengths, jax.random.key(0)),)
  batch = learner.make_train_batch(*args)
  rewards = jnp.asarray(rng.integers(0, 2, B), jnp.float32)
  batch = learner.assign_advantages(batch, rewards, samples.finish)
  return jax.block_until_ready(batch)


def _serve() -> None:
  """Reads a case to prepare, or nothing for an update; answers in seconds."""
  update = None
  for line in sys.stdin:
    if asked := line.strip():
      update = Update(**json.loads(asked))
    print(json.dumps(update()), flush=True)


@dataclasses.dataclass(frozen=True)
class Checkout:
  """A process that runs the updates of a checkout."""

  process: subprocess.Popen

  @classmethod
  def start(cls, folder: Path) -> "Checkout":
    """Of the checkout in this folder."""
    process = subprocess.Popen(
      [sys.executable, str(Path(__file__).resolve()), "--serve"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      cwd=folder,
      env=os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"},
    )
    return cls(process)

  def ask(self, question: str = "") -> float:
    """Seconds of an update; of a new case if a question is given.

    Raises:
      RuntimeError: the process ended; what it printed says why.
    """
    self.process.stdin.write(question + "\n")
    self.process.stdin.flush()
    if answer := self.process.stdout.readline():
      return json.loads(answer)
    raise RuntimeError(f"{self.process.args} ended: expected seconds")


def measure(case: str, quick: bool, checkouts: dict, repeats: int) -> dict:
  """Seconds of a case for each checkout, and the ratio if there are two."""
  question = json.dumps({"case": case, "quick": quick})
  for checkout in checkouts.values():
    checkout.ask(question)  # compiles
  seconds = {name: [] for name in checkouts}
  for _ in range(repeats):
    for name, checkout in checkouts.items():
      seconds[name].append(checkout.ask())
  row = {"case": case}
  for name, every in seconds.items():
    row[name] = {"min": min(every), "median": statistics.median(every)}
  if "before" in row:
    row["ratio"] = row["after"]["min"] / row["before"]["min"]
    row["ratio_median"] = row["after"]["median"] / row["before"]["median"]
  return row


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="small batches")
  parser.add_argument("--json", action="store_true", help="print JSON alone")
  parser.add_argument("--before", type=Path, help="another checkout")
  parser.add_argument("--case", default=",".join(CASES))
  parser.add_argument("--repeats", type=int, default=7)
  parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve:
    return _serve()
  folders = {"before": args.before} if args.before else {}
  folders["after"] = Path(__file__).parent.parent
  checkouts = {n: Checkout.start(f.resolve()) for n, f in folders.items()}
  rows, repeats = [], 2 if args.quick else args.repeats
  for case in args.case.split(","):
    row = measure(case, args.quick, checkouts, repeats)
    rows.append(row)
    if not args.json:
      times = [f"{n} {row[n]['min']:.4f} s" for n in folders]
      ratio = [f"ratio {row['ratio']:.3f}"] if "ratio" in row else []
      print(" | ".join([case, *times, *ratio]), flush=True)
  print(json.dumps({"rows": rows}))
  for checkout in checkouts.values():
    checkout.process.stdin.close()
    checkout.process.wait()


if __name__ == "__main__":
  main()
