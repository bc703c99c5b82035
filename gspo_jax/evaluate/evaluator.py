"""Puts benchmarks to a policy, and keeps every response and result."""

import dataclasses
import functools
import inspect
import json
import shlex
import sys
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
from absl import logging

from gspo_jax import rewards
from gspo_jax.evaluate import benchmarks, summary
from gspo_jax.evaluate.answers_file import AnswersFile
from gspo_jax.evaluate.benchmarks import Benchmark
from gspo_jax.evaluate.judge import evaluate_benchmark
from gspo_jax.evaluate.policy_sampler import PolicySampler, batch_shape
from gspo_jax.program import load_params
from gspo_jax.program.config import ConfigDict, parse
from gspo_jax.rewards.pool import RewardPool, too_many
from gspo_jax.runtime import checkpoint, multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.identity import flatten

# Seconds that an answer gets beyond those of all the tests of its program.
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
  """Asks, judges and writes; to be called on every process.

  Args:
    config: all the keys of configs/common.py.
    folder: of the weights.
    sets: NAME=FILE each.
    out: a folder.
    samples: answers a question; else each set's own.
    limit: the first so many questions of a set.
    reward: judges instead of the sets' own.

  Returns:
    `scoreboard.summarize` of each set, on the first process.

  Raises:
    UserError: a set, the weights, the config or `out` cannot be used, or
      answers of a set could not be judged: more than `reward.max_failed` of
      those so far, or all. The batch that shows it is not kept.
  """
  multihost.require_joined()
  asked = multihost.run_on_all(lambda: _read(sets, samples, limit, reward))
  config = multihost.run_on_all(
    lambda: load_params.with_checkpoint(parse(config), folder)
  )
  mesh = multihost.run_on_all(
    lambda: sharding.make_mesh(**dataclasses.asdict(config.mesh))
  )
  with jax.set_mesh(mesh):
    pupils = multihost.run_on_all(lambda: _policy_samplers(config, mesh, asked))
    params = load_params.load(config, pupils[0].program, folder)
    settings = _settings(config, asked, params)
    multihost.require_same(flatten(settings))
    first, batches = multihost.is_primary(), _batches(asked, pupils)
    judges = {q.name: q.reward for q in asked}
    brief = lambda row: summary.brief(judges[row["set"]], row)
    kept = multihost.run_on_all(
      lambda: AnswersFile(out, settings, batches, brief) if first else None
    )
    with kept or nullcontext():
      for questions, pupil in zip(asked, pupils, strict=True):
        _run_benchmark(config, questions, pupil, params, kept)
  if not first:
    return []
  summaries = [summary.summarize(q, kept.rows[q.name]) for q in asked]
  results = {"command": shlex.join(sys.argv), "checkpoint": folder}
  results |= {"sets": summaries, "settings": settings}
  (Path(out) / "results.json").write_text(json.dumps(results, indent=1))
  return summaries


def _read(sets, samples, limit, reward) -> list[Benchmark]:
  asked = []
  for pair in sets:
    name, _, path = pair.partition("=")
    if not (name and path):
      raise UserError(f"--set={pair}: expected NAME=FILE")
    questions = benchmarks.read(name, path, reward=reward, limit=limit)
    if questions.name in [q.name for q in asked]:
      raise UserError(f"--set={pair}: {questions.name} is there twice")
    rewards.named(questions.reward)  # an unknown one is told now
    asked.append(questions._replace(samples=samples or questions.samples))
  return asked


def _policy_samplers(config, mesh, asked) -> list[PolicySampler]:
  """One for each set; those of as many samples and rows are the same."""
  pupil = functools.cache(lambda size: PolicySampler(config, mesh, size))
  pupils = [
    pupil(batch_shape(config, mesh, q.samples, len(q.problems))) for q in asked
  ]
  for questions, its in zip(asked, pupils, strict=True):
    its.read([p.text for p in questions.problems])
  return pupils


def _batches(asked, pupils) -> list[tuple[str, int]]:
  """The set, and the number of answers, of each batch."""
  return [
    (q.name, min(pupil.at_once, len(q.problems) - start) * q.samples)
    for q, pupil in zip(asked, pupils, strict=True)
    for start in range(0, len(q.problems), pupil.at_once)
  ]


def _settings(config, asked, params) -> dict:
  """What has to be the same for answers to stand in one file."""
  keys = config.as_json()
  sums = json.dumps(checkpoint.checksums(params), sort_keys=True)
  return {
    "weights": zlib.crc32(sums.encode()),
    "config": {
      **{k: keys[k] for k in ("seed", "model", "data", "sampler")},
      "rollout": {"group_size": config.rollout.group_size},
    },
    "sets": {
      q.name: {
        "sha256": q.sha256,
        "questions": len(q.problems),
        "samples": q.samples,
        "reward": q.reward,
        "seconds": _seconds(config, q.reward),
      }
      for q in asked
    },
  }


def _run_benchmark(config, questions, pupil, params, kept) -> None:
  """Puts a set to the policy, from the first batch that is not kept."""
  first, name = kept is not None, questions.name
  # The first process knows where to begin.
  begin = int(
    multihost.allgather_text(str(kept.begun(name)) if first else "")[0]
  )
  key = jax.random.key(config.seed)
  key = jax.random.fold_in(key, zlib.crc32(name.encode()))

  def respond(asked, samples, number):
    return pupil.reply(params, asked, jax.random.fold_in(key, number))

  def keep(rows, reasons):
    for reason in reasons:
      logging.warning("%s: a reward failed: %s", name, reason)
    failed = [row["failed"] for row in (*kept.rows[name], *rows)]
    most = config.reward.max_failed
    if wrong := too_many(np.array(failed), most, of=f"--set={name}"):
      reason = next(iter(reasons), "of an earlier batch")
      raise UserError(f"{wrong}; the first reason: {reason}")
    kept.append(rows)
    scores = [row["score"] for row in kept.rows[name]]
    print(
      f"{name}: {len(scores) // questions.samples} of "
      f"{len(questions.problems)} questions, average {np.mean(scores):.3f}",
      file=sys.stderr,
    )

  scorer = multihost.run_on_all(
    lambda: _scorer(config, questions) if first else None
  )
  with scorer or nullcontext():
    evaluate_benchmark(
      respond,
      questions,
      at_once=pupil.at_once,
      scorer=scorer,
      keep=keep,
      begin=begin,
      together=multihost.run_on_all,
    )


def _scorer(config, questions) -> RewardPool:
  return RewardPool(
    (questions.reward,),
    (1.0,),
    workers=config.reward.workers,
    seconds=_seconds(config, questions.reward),
  )


def _seconds(config, reward) -> float:
  """For an answer: enough for a program's tests, which end by themselves."""
  seconds = float(config.reward.seconds)
  if reward.partition(":")[0] != "code":
    return seconds
  arguments = inspect.signature(rewards.named(reward)).parameters
  return max(seconds, arguments["total"].default + _SPARE)
