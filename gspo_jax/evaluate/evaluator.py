"""Evaluates a policy on benchmarks, and writes all responses and results."""

import functools
import itertools
import json
import shlex
import sys
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

import jax
import numpy as np
from absl import logging
from etils import epath

from gspo_jax import rewards
from gspo_jax.data import readers
from gspo_jax.data.sources import Fields
from gspo_jax.evaluate import benchmarks, summary
from gspo_jax.evaluate.answers_file import AnswersFile
from gspo_jax.evaluate.benchmarks import Benchmark
from gspo_jax.evaluate.policy_sampler import PolicySampler
from gspo_jax.program import load_params
from gspo_jax.program.config import ConfigDict, parse
from gspo_jax.program.experiment import make_reward_model
from gspo_jax.program.settings import length_warning, make_meshes
from gspo_jax.record import checkpoint
from gspo_jax.record.identity import flatten
from gspo_jax.record.progress import Progress
from gspo_jax.rewards import thinking
from gspo_jax.rewards.pool import PendingRewards, RewardPool, too_many
from gspo_jax.rewards.reward import EXAMPLE
from gspo_jax.rollout import reward_model
from gspo_jax.rollout.scoring import wait_for_calls
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError
from gspo_jax.workers import sandbox_files

_SPARE = 10.0  # seconds for a call beyond its reward's own limit
# Longest reference, in characters, that is written with each response. A
# program's tests can have millions; the benchmark's file has them.
_LONGEST_REFERENCE = 2000


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
  """Samples and scores responses, and writes results; call on every process.

  Args:
    config: all keys of configs/common.py.
    folder: the weights; see `load_params.load`.
    sets: NAME=FILE for each benchmark.
    out: a folder; each benchmark gets a folder NAME in it.
    samples: responses to each problem; None for the benchmark's number.
    limit: how many problems to read from the start of each benchmark.
    reward: replaces the benchmarks' rewards.

  Returns `summary.summarize` of each benchmark, on the first process. Raises
  UserError also if too many responses could not be scored
  (`reward.max_failed`); the batch that exceeds the limit is not written.
  """

  def prepare():
    parsed = parse(config)
    if spec := parsed.rollout.environment:
      raise UserError(
        f"rollout.environment={spec!r}: expected '', for files are evaluated "
        "by single responses; a training run evaluates conversations "
        "(eval.every)"
      )
    chosen = _read(parsed, sets, samples, limit, reward)
    parsed = load_params.with_checkpoint(parsed, folder)
    return parsed, chosen, make_meshes(parsed)[0]

  multihost.require_joined()
  parsed, chosen, mesh = multihost.run_on_all(prepare)
  for benchmark in chosen if multihost.is_primary() else ():
    if benchmark.note:
      print(benchmark.note, file=sys.stderr)
  with jax.set_mesh(mesh), ExitStack() as stack:
    samplers = multihost.run_on_all(lambda: _samplers(parsed, mesh, chosen))
    params = load_params.load(parsed, samplers[0].program, folder)
    settings = _settings(parsed, chosen, params)
    multihost.require_same(flatten(settings))

    def open_file(benchmark, sampler):
      if not multihost.is_primary():
        return None
      file = AnswersFile(
        f"{out}/{benchmark.name}",
        settings[benchmark.name],
        [len(x) * benchmark.samples for x in _batches(benchmark, sampler)],
        functools.partial(summary.shorten, benchmark.reward),
      )
      return stack.enter_context(file)

    files = multihost.run_on_all(lambda: list(map(open_file, chosen, samplers)))
    summaries, threshold = [], parsed.reward.pass_threshold
    for benchmark, sampler, file in zip(chosen, samplers, files, strict=True):
      _run(parsed, benchmark, sampler, params, file)
      of_set = settings[benchmark.name]
      save = functools.partial(
        _save_results, benchmark, file, out, folder, of_set, threshold
      )
      # A full disk must end all processes, or the others wait for this one.
      summaries += multihost.run_on_all(save)
  return summaries


def _save_results(benchmark, file, out, folder, settings, threshold) -> list:
  """Writes results.json where the file is; returns the summary."""
  if file is None:
    return []
  results = summary.summarize(benchmark, file.records, threshold)
  document = {
    "command": shlex.join(sys.argv),
    "checkpoint": folder,
    "results": results,
    "settings": settings,
  }
  path = epath.Path(out) / benchmark.name / "results.json"
  path.write_text(json.dumps(document, indent=1))
  return [results]


def _read(config, sets, samples, limit, reward) -> list[Benchmark]:
  fields, chosen = Fields.of(config.data), []
  sandbox_files.require_hidden("the current folder", ".")
  for pair in sets:
    name, _, file = pair.partition("=")
    if not (name and file) or "/" in name or name in (".", ".."):
      raise UserError(
        f"--set={pair}: expected NAME=FILE, where NAME names a folder of --out"
      )
    path = readers.path_of(readers.spec_of(file))
    sandbox_files.require_hidden(f"--set={pair}", path)
    benchmark = benchmarks.read(
      name, file, reward=reward, limit=limit, fields=fields
    )
    if benchmark.name in [b.name for b in chosen]:
      raise UserError(f"--set={pair}: {benchmark.name} is there twice")
    if not reward_model.folder_of([benchmark.reward]):
      rewards.named(benchmark.reward)  # UserError here if it does not exist
    chosen.append(benchmark._replace(samples=samples or benchmark.samples))
  return chosen


def _samplers(config, mesh, chosen) -> list[PolicySampler]:
  if warning := length_warning(config):
    multihost.print_once(f"warning: {warning}")
  samplers = [
    PolicySampler(config, mesh, samples=b.samples, problems=len(b.problems))
    for b in chosen
  ]
  for benchmark, each in zip(chosen, samplers, strict=True):
    each.prompts(benchmark.problems)  # checks their lengths
    each.program.prompt_config.check(benchmark.problems[:1])
  return samplers


def _batches(benchmark, sampler) -> list[range]:
  """The indices of the problems of each batch."""
  indices, size = range(len(benchmark.problems)), sampler.batch_size
  return [indices[i : i + size] for i in indices[::size]]


def _settings(config, chosen, params) -> dict[str, dict]:
  """Benchmark -> settings that must stay equal to continue it."""
  keys = config.as_json()
  sums = json.dumps(checkpoint.checksums(params), sort_keys=True)
  common = {
    "weights (--checkpoint)": zlib.crc32(sums.encode()),
    "config": {
      **{k: keys[k] for k in ("seed", "model", "data", "sampler")},
      "rollout": {"group_size": config.rollout.group_size},
    },
  }
  return {
    b.name: common
    | {
      "content (--set)": b.content,
      "problems (--limit)": len(b.problems),
      "samples (--samples)": b.samples,
      "reward (--reward)": b.reward,
      "seconds (reward.seconds)": _seconds(config, b.reward),
    }
    for b in chosen
  }


def _run(config, benchmark, sampler, params, file: AnswersFile | None) -> None:
  """Runs the batches not in the file; scores one while the next is sampled."""
  name, batches = benchmark.name, _batches(benchmark, sampler)
  # Only the first process has the file.
  done = None if file is None else file.batches_done
  first_batch = multihost.allgather_json(done)[0]
  key = jax.random.key(config.seed)
  key = jax.random.fold_in(key, zlib.crc32(name.encode()))

  typed, of = f"--reward={benchmark.reward}", [benchmark.reward]
  scorer = multihost.run_on_all(
    lambda: make_reward_model(of, typed, config, sampler.program)
  )
  # Not before all processes have a scorer: who fails leaves no pool open.
  reward_pool = multihost.run_on_all(
    lambda: None if file is None or scorer else _reward_pool(config, benchmark)
  )
  progress = Progress(
    name,
    len(benchmark.problems) * benchmark.samples,
    "responses",
    done=sum(map(len, batches[:first_batch])) * benchmark.samples,
    file=sys.stderr,
  )
  save = lambda: None  # saves the previous batch
  with reward_pool or nullcontext(), progress:
    for batch, indices in [*enumerate(batches)][first_batch:]:
      problems = [benchmark.problems[i] for i in indices]
      batch_key = jax.random.fold_in(key, batch)
      sampled = sampler.sample(params, problems, batch_key, progress)
      responses, _ = sampled
      multihost.run_on_all(save)
      if scorer:
        scores = scorer(dict(enumerate(responses)), len(responses))
        pending = PendingRewards.computed(scores)
      elif reward_pool:
        pending = reward_pool.submit(responses, benchmark.samples)
      if file is not None:
        save = functools.partial(
          _save_batch, config, benchmark, file, indices, sampled, pending
        )
    multihost.run_on_all(save)


def _save_batch(config, benchmark, file, indices, sampled, pending) -> None:
  """Waits for the scores of `sampled`, and writes them."""
  name = benchmark.name
  responses, truncated = sampled
  places = itertools.product(indices, range(benchmark.samples))

  def wrong(count):
    count += sum(r["failed"] for r in file.records)
    size = len(responses) + len(file.records)
    return too_many(count, size, config.reward.max_failed, f"--set={name}")

  if error := wait_for_calls([pending], wrong, label=name, file=sys.stderr):
    raise UserError(error)
  scores = pending.result()
  for reason in scores.reasons:
    logging.warning("%s: a reward failed: %s", name, reason)
  if error := wrong(int(scores.failed.sum())):
    reason = next(iter(scores.reasons), "of an earlier batch")
    raise UserError(f"{error}; the first reason: {reason}")
  short = lambda text: text if len(text) <= _LONGEST_REFERENCE else None
  file.append(
    [
      {
        "set": name,
        "id": benchmark.ids[i],
        "sample": n,
        "problem": benchmark.problems[i].text,
        "response": thinking.opening(response.prompt) + response.text,
        "reference": short(response.reference),
        "score": float(score),
        "failed": bool(failed),
        "tokens": int(response.tokens),
        "finish": "truncated" if cut else "stopped",
      }
      for (i, n), response, score, failed, cut in zip(
        places, responses, scores.total, scores.failed, truncated, strict=True
      )
    ]
  )
  values = [r["score"] for r in file.records]
  print(
    f"{name}: {len(values) // benchmark.samples} of "
    f"{len(benchmark.problems)} problems, average {np.mean(values):.3f}",
    file=sys.stderr,
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
  """Limit of a call, above the limits of "code" and "judge" themselves."""
  seconds = float(config.reward.seconds)
  if reward.partition(":")[0] not in ("code", "judge"):
    return seconds
  return max(seconds, rewards.named(reward).arguments["total"] + _SPARE)
