"""Evaluates a policy on benchmarks, and writes every response and result."""

import dataclasses
import functools
import json
import shlex
import sys
import zlib
from collections.abc import Sequence
from contextlib import nullcontext

import jax
import numpy as np
from absl import logging
from etils import epath

from gspo_jax import rewards
from gspo_jax.evaluate import benchmarks, summary
from gspo_jax.evaluate.answers_file import AnswersFile, Batch
from gspo_jax.evaluate.benchmarks import Benchmark
from gspo_jax.evaluate.judge import run_benchmark
from gspo_jax.evaluate.policy_sampler import PolicySampler, batch_shape
from gspo_jax.program import load_params
from gspo_jax.program.config import Config, ConfigDict, parse
from gspo_jax.program.settings import length_warning
from gspo_jax.rewards.pool import EXAMPLE, RewardPool, too_many
from gspo_jax.runtime import checkpoint, multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.identity import flatten
from gspo_jax.runtime.progress import Progress

# Seconds of a call beyond the time limit that its reward keeps itself.
_SPARE = 10.0


def evaluate(
  config: ConfigDict,
  folder: str,
  sets: Sequence[str],
  *,
  out: str,
  samples: int | None = None,
  limit: int | None = None,
  reward: str = "",
) -> list[dict]:
  """Samples, scores and writes; call it on every process.

  Args:
    config: all the keys of configs/common.py.
    folder: of the weights; see `load_params.load`.
    sets: NAME=FILE for each benchmark.
    out: a folder for the results; see `answers_file`.
    samples: responses to each problem; by default the benchmark's number.
    limit: only so many problems from the start of a benchmark.
    reward: a reward in place of the benchmarks' own.

  Returns:
    `summary.summarize` of each benchmark, on the first process.

  Raises:
    UserError: a benchmark, the weights, the config or `out` cannot be used; or
      too many responses of a benchmark so far could not be scored
      (`reward.max_failed`). The batch that exceeds the limit is not written.
  """
  multihost.require_joined()
  chosen = multihost.run_on_all(lambda: _read(sets, samples, limit, reward))
  config = multihost.run_on_all(
    lambda: load_params.with_checkpoint(_without_environment(config), folder)
  )
  mesh = multihost.run_on_all(
    lambda: sharding.make_mesh(
      sharding.split_devices(config.sampler_mesh.devices)[0],
      **dataclasses.asdict(config.mesh),
    )
  )
  with jax.set_mesh(mesh):
    samplers = multihost.run_on_all(lambda: _samplers(config, mesh, chosen))
    params = load_params.load(config, samplers[0].program, folder)
    settings = _settings(config, chosen, params)
    multihost.require_same(flatten(settings))
    file = multihost.run_on_all(
      lambda: (
        _open(out, settings, chosen, samplers)
        if multihost.is_primary()
        else None
      )
    )
    with file or nullcontext():
      for benchmark, sampler in zip(chosen, samplers, strict=True):
        _run(config, benchmark, sampler, params, file)
  if file is None:
    return []
  summaries = [summary.summarize(b, file.records[b.name]) for b in chosen]
  results = {"command": shlex.join(sys.argv), "checkpoint": folder}
  results |= {"sets": summaries, "settings": settings}
  (epath.Path(out) / "results.json").write_text(json.dumps(results, indent=1))
  return summaries


def _without_environment(keys) -> Config:
  """The config; UserError if its responses would be turns of conversations."""
  config = parse(keys)
  if spec := config.rollout.environment:
    raise UserError(
      f"rollout.environment={spec!r}: expected '', for files are evaluated by "
      "single responses; a training run evaluates conversations (eval.every)"
    )
  return config


def _read(sets, samples, limit, reward) -> list[Benchmark]:
  chosen = []
  for pair in sets:
    name, _, path = pair.partition("=")
    if not (name and path):
      raise UserError(f"--set={pair}: expected NAME=FILE")
    benchmark = benchmarks.read(name, path, reward=reward, limit=limit)
    if benchmark.name in [b.name for b in chosen]:
      raise UserError(f"--set={pair}: {benchmark.name} is there twice")
    rewards.named(benchmark.reward)  # UserError here if it does not exist
    chosen.append(benchmark._replace(samples=samples or benchmark.samples))
  return chosen


def _samplers(config, mesh, chosen) -> list[PolicySampler]:
  """One for each benchmark; those with one batch shape share one."""
  if warning := length_warning(config):
    multihost.print_once(warning)
  sampler = functools.cache(lambda shape: PolicySampler(config, mesh, shape))
  samplers = [
    sampler(batch_shape(config, mesh, b.samples, len(b.problems)))
    for b in chosen
  ]
  for benchmark, each in zip(chosen, samplers, strict=True):
    each.prompts([p.text for p in benchmark.problems])  # checks their lengths
  return samplers


def _open(out, settings, chosen, samplers) -> AnswersFile:
  names = {b.name: b.reward for b in chosen}
  shorten = lambda record: summary.shorten(names[record["set"]], record)
  return AnswersFile(out, settings, _batches(chosen, samplers), shorten)


def _batches(chosen, samplers) -> list[Batch]:
  """All batches of the evaluation, in order."""
  return [
    Batch(b.name, min(s.batch_size, len(b.problems) - start) * b.samples)
    for b, s in zip(chosen, samplers, strict=True)
    for start in range(0, len(b.problems), s.batch_size)
  ]


def _settings(config, chosen, params) -> dict:
  """What must be the same for two evaluations to share a file."""
  keys = config.as_json()
  sums = json.dumps(checkpoint.checksums(params), sort_keys=True)
  return {
    "weights": zlib.crc32(sums.encode()),
    "config": {
      **{k: keys[k] for k in ("seed", "model", "data", "sampler")},
      "rollout": {"group_size": config.rollout.group_size},
    },
    "sets": {
      b.name: {
        "sha256": b.sha256,
        "problems": len(b.problems),
        "samples": b.samples,
        "reward": b.reward,
        "seconds": _seconds(config, b.reward),
      }
      for b in chosen
    },
  }


def _run(config, benchmark, sampler, params, file: AnswersFile | None) -> None:
  """Runs a benchmark from its first batch that is not in the file."""
  name = benchmark.name
  # The first process has the file.
  done = "" if file is None else str(file.batches_done(name))
  first_batch = int(multihost.allgather_text(done)[0])
  key = jax.random.key(config.seed)
  key = jax.random.fold_in(key, zlib.crc32(name.encode()))

  def sample(problems, samples, batch):
    key_of_batch = jax.random.fold_in(key, batch)
    return sampler.sample(params, problems, key_of_batch, progress)

  def save(records, reasons):
    for reason in reasons:
      logging.warning("%s: a reward failed: %s", name, reason)
    failed = [r["failed"] for r in (*file.records[name], *records)]
    most = config.reward.max_failed
    if error := too_many(np.array(failed), most, of=f"--set={name}"):
      reason = next(iter(reasons), "of an earlier batch")
      raise UserError(f"{error}; the first reason: {reason}")
    file.append(records)
    scores = [r["score"] for r in file.records[name]]
    print(
      f"{name}: {len(scores) // benchmark.samples} of "
      f"{len(benchmark.problems)} problems, average {np.mean(scores):.3f}",
      file=sys.stderr,
    )

  reward_pool = multihost.run_on_all(
    lambda: None if file is None else _reward_pool(config, benchmark)
  )
  progress = Progress(
    name,
    len(benchmark.problems) * benchmark.samples,
    "responses",
    done=first_batch * sampler.batch_size * benchmark.samples,
    file=sys.stderr,
  )
  with reward_pool or nullcontext(), progress:
    run_benchmark(
      sample,
      benchmark,
      batch_size=sampler.batch_size,
      reward_pool=reward_pool,
      save=save,
      first_batch=first_batch,
      run_on_all=multihost.run_on_all,
    )


def _reward_pool(config, benchmark) -> RewardPool:
  return RewardPool(
    (benchmark.reward,),
    (1.0,),
    workers=config.reward.workers,
    concurrency=config.reward.concurrency,
    seconds=_seconds(config, benchmark.reward),
    examples=[EXAMPLE.to(benchmark.problems[0])],
  )


def _seconds(config, reward) -> float:
  """For one call; enough for "code" and "judge" to reach their own limit."""
  seconds = float(config.reward.seconds)
  if reward.partition(":")[0] not in ("code", "judge"):
    return seconds
  return max(seconds, rewards.named(reward).keywords["total"] + _SPARE)
