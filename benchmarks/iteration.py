"""Where an RL iteration of the embedded default spends its time on a CPU.

  python -m benchmarks.iteration [--quick] [--out=FILE.json]
    [--workdir=runs/tiny] [--slots=64] [--long_tails]

With the static sampler, and with continuous batching over --slots slots;
iterations of both alternate, and the median of each phase counts. Each phase is
waited for: generate; score, the rewards; logps, the old log-probs and the
advantages; update; and write, from the device into the files of a run. In a run
the rewards are computed beside the log-probs, and so cost less than here.

The program is what `train` builds. The weights are random, so that nearly all
responses have the most tokens; or those of a run of the same config, --workdir.

With --long_tails the responses have 1 to 240 tokens: their median is a tenth of
that, and 5 % have all. The static sampler then stands for everything off, with
one response a row of the update; continuous batching for everything on, with
packed rows in micro-batches of 4.
"""

import argparse
import contextlib
import functools
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from benchmarks import lengths, record
from gspo_jax.configs import tiny_cpu
from gspo_jax.data import pipeline
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.learner import packing
from gspo_jax.program import experiment, load_params
from gspo_jax.program.config import parse
from gspo_jax.record import metric_writer
from gspo_jax.rollout import scoring
from gspo_jax.rollout.batch import prompts_on_device
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import finished_responses


def timed(function, *args, clock=time.monotonic):
  """The result of a call, and the seconds until it is there."""
  start = clock()
  result = jax.block_until_ready(function(*args))
  return result, clock() - start


class Iterations:
  """Iterations of a config, phase by phase.

  Attributes:
    reward_pool: to be entered before the first call.
    prompts: of each iteration.
    samples: of the last one.
    metrics: of the last one, the scalars.

  Args:
    config: all the keys of configs/common.py.
    folder: for the files of a run.
    workdir: of a run, for its weights; without it they are random.
    long_tails: whether the lengths of responses have a long tail.
    packed: whether responses share rows.
    clock: returns seconds.
  """

  def __init__(
    self,
    config,
    folder: str,
    workdir: str = "",
    *,
    long_tails: bool = False,
    packed: bool = True,
    clock: Callable[[], float] = time.monotonic,
  ):
    parsed, mesh = parse(config), sharding.make_mesh(jax.devices()[:1])
    self._mesh, self._rows = mesh, sharding.batch_sharding(mesh)
    run = experiment.prepare(parsed, folder, mesh)
    self._program, self.reward_pool = run.program, run.reward_pool
    self._group_size = parsed.rollout.group_size
    self._batch = pipeline.take(
      run.datasets.held_out, run.program.prompt_config, parsed.data.prompts
    )
    self._packed = packed
    self._timed = functools.partial(timed, clock=clock)
    if long_tails:
      _set_lengths(self._batch, parsed.sampler.max_new_tokens)
    self.prompts = prompts_on_device(self._batch, self._rows)
    self._writer = metric_writer.MetricWriter(
      folder, total_steps=1, resume_step=0
    )
    with jax.set_mesh(mesh):
      if workdir:
        params = load_params.load(parsed, run.program, workdir)
      else:
        params = load_params.first_policy(
          parsed.model, run.program, run.program.init_params(run.keys.init)
        )
      if long_tails:
        params = lengths.countdown(params)
      self._state = run.program.learner.init_state(params)

  def __call__(self, step: int) -> dict[str, float]:
    """Seconds by phase of one iteration."""
    key, seconds = jax.random.key(step), {}
    with jax.set_mesh(self._mesh):
      samples, seconds["generate"] = self._timed(
        self._program.sampler.generate, self._state.policy, self.prompts, key
      )
      self.samples = samples
      rewards, seconds["score"] = self._timed(self._rewards, samples)
      (batch, old), seconds["logps"] = self._timed(
        self._train_batch, samples, rewards, key
      )
      (self._state, _, metrics), seconds["update"] = self._timed(
        self._program.learner.update, self._state, batch
      )
    _, seconds["write"] = self._timed(_write, self._writer, step, old, metrics)
    self.metrics, _ = metric_writer.to_scalars(old, metrics)
    return seconds

  def _rewards(self, samples):
    decode = scoring.ResponseDecoder(
      self._batch, self._program.tokenizer, self._group_size
    )
    scorer = scoring.Scorer(self.reward_pool, decode)
    scorer.add(finished_responses(samples))
    return scorer.scored(samples).rewards.result()

  def _train_batch(self, samples, rewards, key):
    learner, metrics = self._program.learner, {}
    batch = learner.make_train_batch(
      self.prompts, samples, self._placement(samples, key)
    )
    if learner.needs_old_logps:
      self._state, batch, metrics = learner.compute_old_logps(
        self._state, batch
      )
    total = multihost.to_global(rewards.total.reshape(-1), self._rows)
    return learner.assign_advantages(batch, total, samples.finish), metrics

  def _placement(self, samples, key) -> packing.Packing:
    """Packed rows, or one response a row."""
    learner, prompt_lengths = self._program.learner, self._batch.lengths
    if self._packed:
      return learner.pack(prompt_lengths, np.asarray(samples.lengths), key)
    groups = len(prompt_lengths)
    order = packing.shuffled_groups(key, groups, self._group_size)
    return packing.pack(
      np.full(len(order), learner.packing.width), order, learner.packing
    )


def _set_lengths(batch: PromptBatch, longest: int) -> None:
  """Ends each prompt in the token that `lengths.countdown` counts from.

  The last token of a response, after token 0, is the stop token: that of bytes
  is the last one of the vocabulary.
  """
  batch.tokens[:, -1] = lengths.long_tailed(len(batch), longest) - 1


def _write(
  writer: metric_writer.MetricWriter, step: int, *measured: dict
) -> None:
  """From the device into the files of a run; prints nothing."""
  with contextlib.redirect_stdout(io.StringIO()):
    writer.write(step, *metric_writer.to_scalars(*measured))


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
  """The median of each phase, and of the whole iteration."""
  whole = [row | {"iteration": sum(row.values())} for row in rows]
  return {k: statistics.median(row[k] for row in whole) for k in whole[0]}


def alternate(
  configs: dict, repeats: int, workdir: str = "", long_tails: bool = False
) -> dict[str, dict[str, float]]:
  """Median seconds by phase of an iteration of each of these configs.

  With `long_tails`, only those with continuous batching have packed rows.
  """
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    iterate = {}
    for name, config in configs.items():
      iterate[name] = Iterations(
        config,
        f"{folder}/{name}",
        workdir,
        long_tails=long_tails,
        packed=not long_tails or config.continuous_batching.slots > 0,
      )
      stack.enter_context(iterate[name].reward_pool)
      iterate[name](0)  # compiles
    seconds = {name: [] for name in configs}
    for step in range(1, repeats + 1):
      for name, once in iterate.items():
        seconds[name].append(once(step))
  return {name: medians(every) for name, every in seconds.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="debug sizes, once")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--workdir", default="", help="of a run, for its weights")
  parser.add_argument("--slots", type=int, default=64)
  parser.add_argument(
    "--long_tails", action="store_true", help="everything off, against all on"
  )
  parser.add_argument("--repeats", type=int, default=10)
  args = parser.parse_args()
  configs = {
    name: tiny_cpu.get_config("debug" if args.quick else "")
    for name in ("static", "continuous")
  }
  configs["continuous"].continuous_batching.slots = (
    8 if args.quick else args.slots
  )
  if args.long_tails:
    for config in configs.values():
      config.sampler.max_new_tokens = 24 if args.quick else 240
    configs["continuous"].learner.micro_batch_size = 4
  repeats = 1 if args.quick else args.repeats
  seconds = alternate(configs, repeats, args.workdir, args.long_tails)
  print("phase | static, s | share | continuous, s | share")
  for phase in seconds["static"]:
    cells = [
      f"{times[phase]:.3f} | {times[phase] / times['iteration']:.0%}"
      for times in seconds.values()
    ]
    print(" | ".join([phase, *cells]))
  ratio = seconds["static"]["iteration"] / seconds["continuous"]["iteration"]
  print(f"an iteration: {ratio:.2f} times as fast with continuous batching")
  record.finish("iteration", {"seconds": seconds}, args.out)


if __name__ == "__main__":
  main()
