"""Where an RL iteration of the embedded default spends its time on a CPU.

  python -m benchmarks.iteration [--quick] [--out=FILE.json]
    [--workdir=runs/tiny] [--slots=64]

With the static sampler, and with refill over so many slots; iterations of both
alternate, and the median of each phase counts. The phases, each waited for:
generate; score, the verification by the reward pool; logps, the old log-probs
and the advantages; update; and write, from the device into the files of a run.
In a run verification goes on beside the log-probs, and so costs less than here.

The weights are random, and nearly all their answers as long as they may be; or
those of a run of the same config, --workdir.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks import record
from configs import tiny_cpu
from gspo_jax.data import datasets, pipeline
from gspo_jax.losses import EDGES
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rollout import scoring
from gspo_jax.runtime import metric_writer, multihost, sharding
from gspo_jax.sampler.samples import Prompts


def timed(function, *args):
  """What it returns, and the seconds until that is there."""
  began = time.monotonic()
  result = jax.block_until_ready(function(*args))
  return result, time.monotonic() - began


def pool(config) -> RewardPool:
  """The processes that reward answers; a context manager."""
  c = config.reward
  return RewardPool(c.names, c.weights, workers=c.workers, seconds=c.seconds)


def prepare(
  config, folder: str, scorer: RewardPool, workdir: str = ""
) -> Callable[[int], dict[str, float]]:
  """A function that goes through an iteration and gives seconds by phase.

  Args:
    config: all the keys of configs/common.py.
    folder: for the files of a run.
    scorer: a `pool` of the config.
    workdir: of a run, for its weights; without it they are random.
  """
  mesh = sharding.make_mesh(jax.devices()[:1])
  run, rows = (
    build_program(parse(config), mesh),
    sharding.batch_sharding(mesh),
  )
  questions = datasets.load(config).held_out
  batch = pipeline.take(questions, run.prompt_config, config.data.prompts)
  prompts = multihost.to_global(Prompts(batch["tokens"], batch["length"]), rows)
  writer = metric_writer.MetricWriter(
    folder, total_steps=1, resume_step=0, edges=EDGES
  )
  with jax.set_mesh(mesh):
    fresh = run.init_params(jax.random.key(0))
    params = load_params.load(config, run, workdir) if workdir else fresh
    state = run.learner.init_state(params)

  def verify(samples):
    answers = scoring.decode_responses(samples, batch, run.tokenizer)
    group = config.rollout.group_size
    return scoring.score_responses(scorer, answers, group, samples.lengths)()

  def score(samples, marks, key):
    nonlocal state
    rollout, scored = run.learner.make_train_batch(prompts, samples), {}
    if run.learner.needs_old_logprobs:
      state, rollout, scored = run.learner.compute_old_logprobs(
        state, rollout, key
      )
    rewards = multihost.to_global(marks.total.reshape(-1), rows)
    return run.learner.assign_advantages(
      rollout, rewards, samples.finish
    ), scored

  def iterate(step: int) -> dict[str, float]:
    nonlocal state
    key, seconds = jax.random.key(step), {}
    with jax.set_mesh(mesh):
      samples, seconds["generate"] = timed(
        run.sampler.generate, state.params, prompts, key
      )
      marks, seconds["score"] = timed(verify, samples)
      (rollout, scored), seconds["logps"] = timed(score, samples, marks, key)
      (state, _, learnt), seconds["update"] = timed(
        run.learner.update, state, rollout, key
      )
    _, seconds["write"] = timed(_write, writer, step, scored, learnt)
    return seconds

  return iterate


def _write(
  writer: metric_writer.MetricWriter, step: int, *measured: dict
) -> None:
  """From the device into the files of a run; its stdout is kept back."""
  with contextlib.redirect_stdout(io.StringIO()):
    writer.write(step, *metric_writer.to_scalars(*measured))


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
  """Of each phase and of the whole."""
  whole = [row | {"iteration": sum(row.values())} for row in rows]
  return {k: statistics.median(row[k] for row in whole) for k in whole[0]}


def alternate(
  configs: dict, repeats: int, workdir: str = ""
) -> dict[str, dict[str, float]]:
  """Median seconds by phase of an iteration of each of these configs."""
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    iterate = {}
    for name, config in configs.items():
      scorer = stack.enter_context(pool(config))
      iterate[name] = prepare(config, f"{folder}/{name}", scorer, workdir)
      iterate[name](0)  # compiles
    rows = {name: [] for name in configs}
    for step in range(1, repeats + 1):
      for name, once in iterate.items():
        rows[name].append(once(step))
  return {name: medians(every) for name, every in rows.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="debug sizes, once")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--workdir", default="", help="of a run, for its weights")
  parser.add_argument("--slots", type=int, default=64)
  parser.add_argument("--repeats", type=int, default=10)
  args = parser.parse_args()
  configs = {
    name: tiny_cpu.get_config("debug" if args.quick else "")
    for name in ("static", "refill")
  }
  configs["refill"].continuous_batching.slots = 8 if args.quick else args.slots
  repeats = 1 if args.quick else args.repeats
  seconds = alternate(configs, repeats, args.workdir)
  print("phase | static, s | share | refill, s | share")
  for phase in seconds["static"]:
    cells = [
      f"{found[phase]:.3f} | {found[phase] / found['iteration']:.0%}"
      for found in seconds.values()
    ]
    print(" | ".join([phase, *cells]))
  record.finish("iteration", {"seconds": seconds}, args.out)


if __name__ == "__main__":
  main()
