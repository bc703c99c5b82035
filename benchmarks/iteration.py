"""Where an RL iteration of the embedded default spends its time on a CPU.

  python -m benchmarks.iteration

Times generate, score and update on random weights, and the writing of what they
measured; the median of each counts. Verification on the host is not in it: it
runs while the device scores.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np

from configs import tiny_cpu
from gspo_jax import metrics, program, sampler, sharding


def timed(function, *args):
  """What it returns, and the seconds until that is there."""
  began = time.monotonic()
  result = jax.block_until_ready(function(*args))
  return result, time.monotonic() - began


def prepare(config, workdir: str) -> Callable[[int], dict[str, float]]:
  """A function that goes through an iteration and gives seconds by phase."""
  P, S = config.data.prompts, config.data.max_prompt_length
  prompts = sampler.Prompts(np.zeros((P, S), np.int32), np.full(P, S, np.int32))
  advantages = np.random.default_rng(0).standard_normal(
    P * config.sampler.group_size
  )
  writer = metrics.Writer(workdir, total_steps=1, resume_step=0)
  mesh = sharding.make_mesh(jax.devices()[:1])
  run = program.build(config, mesh)
  with jax.set_mesh(mesh):
    state = run.begin(run.init(jax.random.key(0)))

  def iterate(step: int) -> dict[str, float]:
    nonlocal state
    key = jax.random.key(step)
    with jax.set_mesh(mesh):
      samples, generate = timed(run.generate, state.params, prompts, key)
      (batch, scored), score = timed(run.score, state.params, prompts, samples)
      batch = dataclasses.replace(batch, advantages=np.float32(advantages))
      (state, learnt), update = timed(run.update, state, batch, key)
    _, write = timed(_write, writer, step, scored | learnt)
    phases = {"generate": generate, "score": score, "update": update}
    return phases | {"write": write}

  return iterate


def _write(writer: metrics.Writer, step: int, measured: dict) -> None:
  """From the device into the files of a run; its stdout is kept back."""
  with contextlib.redirect_stdout(io.StringIO()):
    writer.write(step, *metrics.finish(measured))


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
  """Of each phase and of the whole."""
  whole = [row | {"iteration": sum(row.values())} for row in rows]
  return {k: statistics.median(row[k] for row in whole) for k in whole[0]}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--repeats", type=int, default=10)
  repeats = parser.parse_args().repeats
  with tempfile.TemporaryDirectory() as workdir:
    iterate = prepare(tiny_cpu.get_config(), workdir)
    iterate(0)  # compiles
    seconds = medians([iterate(step) for step in range(1, repeats + 1)])
  print("phase | seconds | share")
  for name, value in seconds.items():
    print(f"{name} | {value:.3f} | {value / seconds['iteration']:.0%}")
  print(json.dumps(seconds))


if __name__ == "__main__":
  main()
