"""Where an RL iteration of the embedded default spends its time on a CPU.

  python -m benchmarks.iteration

Times generate, score and update on random weights; the median of each counts.
Verification on the host is not in it: it runs while the device scores.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import numpy as np

from configs import tiny_cpu
from gspo_jax import program, sampler, sharding


def timed(function, *args):
  """What it returns, and the seconds until that is there."""
  began = time.monotonic()
  result = jax.block_until_ready(function(*args))
  return result, time.monotonic() - began


def iterate(repeats: int) -> dict[str, float]:
  """Median seconds of each phase, the first iteration (compiling) left out."""
  config = tiny_cpu.get_config()
  P, S = config.data.prompts, config.data.max_prompt_length
  prompts = sampler.Prompts(np.zeros((P, S), np.int32), np.full(P, S, np.int32))
  advantages = np.random.default_rng(0).standard_normal(
    P * config.sampler.group_size
  )
  mesh = sharding.make_mesh()
  seconds = {"generate": [], "score": [], "update": []}
  with jax.set_mesh(mesh):
    run = program.build(config, mesh)
    state = run.begin(run.init(jax.random.key(0)))
    for step in range(repeats + 1):
      key = jax.random.key(step)
      samples, generate = timed(run.generate, state.params, prompts, key)
      (batch, _), score = timed(run.score, state.params, prompts, samples)
      batch = dataclasses.replace(batch, advantages=np.float32(advantages))
      (state, _), update = timed(run.update, state, batch, key)
      for name, value in zip(seconds, (generate, score, update), strict=True):
        seconds[name].append(value)
  return {name: statistics.median(s[1:]) for name, s in seconds.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--repeats", type=int, default=10)
  seconds = iterate(parser.parse_args().repeats)
  whole = sum(seconds.values())
  print("phase | seconds | share")
  for name, value in seconds.items():
    print(f"{name} | {value:.3f} | {value / whole:.0%}")
  print(json.dumps(seconds | {"iteration": whole}))


if __name__ == "__main__":
  main()
