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
from collections.abc import Callable

import jax
import numpy as np

from configs import tiny_cpu
from gspo_jax import program, sampler, sharding


def timed(function, *args):
  """What it returns, and the seconds until that is there."""
  began = time.monotonic()
  result = jax.block_until_ready(function(*args))
  return result, time.monotonic() - began


def prepare(config) -> Callable[[int], dict[str, float]]:
  """A function that goes through an iteration and gives seconds by phase."""
  P, S = config.data.prompts, config.data.max_prompt_length
  prompts = sampler.Prompts(np.zeros((P, S), np.int32), np.full(P, S, np.int32))
  advantages = np.random.default_rng(0).standard_normal(
    P * config.sampler.group_size
  )
  mesh = sharding.make_mesh(jax.devices()[:1])
  run = program.build(config, mesh)
  with jax.set_mesh(mesh):
    state = run.begin(run.init(jax.random.key(0)))

  def iterate(step: int) -> dict[str, float]:
    nonlocal state
    key = jax.random.key(step)
    with jax.set_mesh(mesh):
      samples, generate = timed(run.generate, state.params, prompts, key)
      (batch, _), score = timed(run.score, state.params, prompts, samples)
      batch = dataclasses.replace(batch, advantages=np.float32(advantages))
      (state, _), update = timed(run.update, state, batch, key)
    return {"generate": generate, "score": score, "update": update}

  return iterate


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
  """Of each phase and of the whole."""
  whole = [row | {"iteration": sum(row.values())} for row in rows]
  return {k: statistics.median(row[k] for row in whole) for k in whole[0]}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--repeats", type=int, default=10)
  repeats = parser.parse_args().repeats
  iterate = prepare(tiny_cpu.get_config())
  iterate(0)  # compiles
  seconds = medians([iterate(step) for step in range(1, repeats + 1)])
  print("phase | seconds | share")
  for name, value in seconds.items():
    print(f"{name} | {value:.3f} | {value / seconds['iteration']:.0%}")
  print(json.dumps(seconds))


if __name__ == "__main__":
  main()
