"""The run, from a config to a trained policy; it reads from top to bottom."""

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import jax
import numpy as np
from absl import logging
from clu import parameter_overview

from gspo_jax import model
from gspo_jax.data import pipeline
from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.prompt_batch import DemonstrationBatch
from gspo_jax.evaluate import held_out
from gspo_jax.evaluate.estimators import correct
from gspo_jax.learner import cold_start
from gspo_jax.learner.health import (
  HealthChecks,
  require_exact,
  require_finite,
  require_responses,
)
from gspo_jax.learner.train_step import TrainState
from gspo_jax.losses import Metrics
from gspo_jax.program import first_difference, load_params, settings
from gspo_jax.program.config import ConfigDict, parse
from gspo_jax.program.experiment import (
  Experiment,
  checkpoint_identity,
  cold_start_identity,
  cold_start_key,
  prepare,
)
from gspo_jax.record import metric_writer, profile, run_files, wandb_run
from gspo_jax.record.checkpoint import Checkpoints, checksums
from gspo_jax.record.identity import changes, flatten, match
from gspo_jax.record.kept import Kept
from gspo_jax.record.metric_writer import LogConfig, MetricWriter
from gspo_jax.record.progress import Compilations
from gspo_jax.rollout.batch import ScoredSamples, prompts_on_device
from gspo_jax.rollout.context import RolloutContext, iteration_keys
from gspo_jax.rollout.metrics import (
  memory_metrics,
  rollout_metrics,
  time_metrics,
  useful_fractions,
)
from gspo_jax.rollout.off_policy import OffPolicy
from gspo_jax.rollout.scoring import rewards_apart, wait_scored
from gspo_jax.rollout.source import Source, make_source
from gspo_jax.runtime import compilation_cache, multihost, sharding
from gspo_jax.runtime.preemption import Preemption

_SAMPLES_EVERY = 10  # iterations between sample responses


class Run(NamedTuple):
  """An experiment, and the parts of a run that have state."""

  experiment: Experiment
  curriculum: Curriculum
  source: Source
  checkpoints: Checkpoints  # of RL; not of the cold start
  preemption: Preemption
  teachers: tuple[model.Params, ...]  # weights, in no checkpoint
  identity: dict  # of checkpoints


class Row(NamedTuple):
  """What an iteration adds to the files of a run."""

  metrics: dict[str, float]
  distributions: dict[str, list[float]]  # histograms, and numbers by layer
  # (problem, response, reference, reward) of some groups, every few steps
  samples: list[tuple[str, str, str, float]]


def train_and_evaluate(config: ConfigDict, workdir: str) -> TrainState | None:
  """Trains a policy as `config` says, and resumes what `workdir` holds.

  `config` has all the keys of configs/common.py. `workdir` is a folder for
  checkpoints, metrics and samples.

  Returns:
    The final state; None if a SIGTERM ended the run, with its state saved.

  Raises:
    UserError: the config, the data or the workdir has a mistake, another run
      writes to the workdir, or the rewards failed on too many responses
      (`reward.max_failed`).
    FloatingPointError: a metric is not finite; that step is not saved.
  """
  multihost.require_joined()
  config = multihost.run_on_all(lambda: parse(config))
  mesh, sampler_devices = multihost.run_on_all(
    lambda: settings.make_meshes(config)
  )
  multihost.print_once(devices(mesh, sampler_devices))
  multihost.run_on_all(lambda: check_log(config.log))
  with (
    jax.set_mesh(mesh),
    Preemption() as preemption,
    Compilations(),
    ExitStack() as stack,
  ):
    multihost.run_on_all(
      lambda: (
        multihost.is_primary()
        and stack.enter_context(run_files.locked(workdir))
      )
    )
    multihost.print_once("loading the data and the tokenizer")
    experiment = multihost.run_on_all(
      lambda: prepare(config, workdir, mesh, sampler_devices)
    )
    multihost.require_same(
      flatten({"config": config.as_json()} | experiment.identity)
    )
    multihost.require_shared(experiment.workdir)
    checkpoints = Checkpoints(
      experiment.workdir / "checkpoints", keep=config.checkpoint.keep
    )
    with experiment.reward_pool, checkpoints, ExitStack() as sampling:
      curriculum = make_curriculum(experiment)
      source = _source(experiment, curriculum)
      if isinstance(source, OffPolicy):
        sampling.callback(source.close)
      teachers = load_params.load_teachers(config, experiment.program)
      run = Run(
        experiment,
        curriculum,
        source,
        checkpoints,
        preemption,
        teachers,
        checkpoint_identity(experiment, teachers),
      )
      _print_parameters(experiment)
      if preemption.reached():
        multihost.print_once("stopped before training; nothing is lost")
        return None
      started = _start(run)
      if started is None:
        return None
      multihost.run_on_all(lambda: _write_config(experiment))
      return _train(run, *started)


def _train(
  run: Run, state: TrainState, unwritten: Mapping | None
) -> TrainState | None:
  """RL from `state` to the last step, or to a SIGTERM."""
  experiment, config = run.experiment, run.experiment.config
  first, last = int(state.step) + 1, config.num_steps
  writer = multihost.run_on_all(
    lambda: MetricWriter(
      experiment.workdir,
      total_steps=last,
      resume_step=first - 1,
      wandb=config.log.wandb,
      config=config.as_json(),
    )
  )
  traced = profile.Profile(config.log.profile, experiment.workdir / "profile")
  with writer, traced:
    health = _health_checks(experiment)

    def finish(step: int, state: TrainState, row: Row) -> None:
      """Evaluates if it is due, and writes the row of a step."""
      metrics = row.metrics
      if _due(config.eval.every, step, last):
        _wait_for_sampler(run)  # evaluation takes its devices
        metrics = metrics | held_out.evaluate(experiment, state.policy)
      writer.write(step, metrics, row.distributions, row.samples)
      health(metrics)

    # The row of the restored step, if `_save` stored one.
    if unwritten and multihost.any_process(writer.lacks(first - 1)):
      multihost.print_once(f"step {first - 1} was cut short: its row comes now")
      finish(first - 1, state, Row(**unwritten))
    elif first > last:
      multihost.print_once(f"num_steps={last}: nothing is left to do")
    if first == 1 and config.eval.every:
      writer.write(0, held_out.evaluate(experiment, state.policy))
    if first <= last and run.preemption.reached():  # during an evaluation
      multihost.print_once("stopped: no step is lost; the same command resumes")
      return None
    for step in range(first, last + 1):
      with traced.iteration(step):
        state, row = iterate(run, state, step)
      stop = run.preemption.reached()
      evaluates = _due(config.eval.every, step, last)
      if not evaluates:
        finish(step, state, row)
      rest = row if evaluates else None
      if stop and (step < last or evaluates):
        _stop(run, writer, step, state, rest)
        return None
      if _due(config.checkpoint.every, step, last):
        writer.flush()  # a checkpoint has all the rows before it
        _save(run, step, state, rest)
      if evaluates:
        finish(step, state, row)
        if step < last and run.preemption.reached():
          _stop(run, writer, step, state, None)
          return None
  return state


def _stop(run: Run, writer, step, state, unwritten: Row | None) -> None:
  writer.flush()
  _save(run, step, state, unwritten)
  run.checkpoints.wait()
  multihost.print_once(
    f"stopped: saved after step {step}; the same command resumes"
  )


def _due(every: int, step: int, last: int) -> bool:
  """Whether a step is the last or a multiple of `every`; never if that is 0."""
  return every > 0 and (step == last or step % every == 0)


def iterate(run: Run, state: TrainState, step: int) -> tuple[TrainState, Row]:
  """One iteration; it waits for each phase, so that the times are correct."""
  config, learner = run.experiment.config, run.experiment.program.learner
  assert learner is not None
  batch_sharding = sharding.batch_sharding(run.experiment.program.mesh)
  key = iteration_keys(run.experiment.keys.steps, step).shuffle
  clock = [time.monotonic()]

  # Rollout: G responses to each prompt. Scoring begins in the background.
  batch = run.source(state.policy, step)
  scored = batch.samples
  prompts, prompt_lengths = scored.samples.prompts, scored.prompts.lengths
  if prompts is None:
    prompts = prompts_on_device(scored.prompts, batch_sharding)
  else:
    prompt_lengths = multihost.to_host(prompts.lengths)
  clock.append(time.monotonic())

  # Old log-probs, those of reference and teachers, and values, during the
  # scoring.
  lengths = multihost.to_host(scored.samples.lengths)
  packing = learner.pack(prompt_lengths, lengths, key)
  train_batch = learner.make_train_batch(prompts, scored.samples, packing)
  old_metrics: Metrics = {}
  if learner.needs_old_logps:
    state, train_batch, old_metrics = learner.compute_old_logps(
      state, train_batch
    )
  if learner.add_reference_and_values:
    teacher = run.experiment.teachers_of(scored.prompts)
    if teacher is not None:
      teacher = np.repeat(teacher, learner.group_size)
      teacher = multihost.to_global(teacher, batch_sharding)
    taught = (run.teachers, teacher) if run.teachers else ()
    train_batch = learner.add_reference_and_values(state, train_batch, *taught)

  # Rewards.
  all_rewards = wait_scored(
    [cost.rewards for cost in batch.costs],
    config.reward.max_failed,
    label=f"iteration {step}",
  )
  threshold = config.reward.pass_threshold
  rewards = scored.rewards.result()
  for cost, each in zip(batch.costs, all_rewards, strict=True):
    run.curriculum.record(cost.prompts, correct(each.first, threshold))
  for reason in rewards.reasons:
    logging.warning("step %d: no reward for a response: %s", step, reason)

  # Advantages.
  credited = rewards.total.reshape(-1)
  needed = config.objective.estimator_row.rewards
  if config.objective.credit == "turn":
    credited = scored.conversation["rewards"]
  elif needed == "each":
    credited = rewards_apart(rewards, config.reward.weights)
  elif needed == "right":
    credited = np.float32(correct(rewards.first, threshold)).reshape(-1)
  train_batch = learner.assign_advantages(
    train_batch,
    multihost.to_global(credited, batch_sharding),
    scored.samples.finish,
  )
  jax.block_until_ready(train_batch)
  clock.append(time.monotonic())

  # Update: an optimizer step a minibatch.
  state, train_batch, update_metrics = learner.update(state, train_batch)
  metrics, distributions = metric_writer.to_scalars(old_metrics, update_metrics)
  clock.append(time.monotonic())
  run.experiment.program.check_compiled_once()

  # Metrics.
  metrics |= rollout_metrics(batch, config.rollout, step)
  lost = np.array([run.experiment.reward_pool.take_restarts()], np.int32)
  metrics["workers/restarts"] = float(multihost.sum_of_all(lost)[0])
  metrics |= time_metrics(clock, batch, int(scored.samples.num_sampled))
  metrics |= memory_metrics(jax.local_devices()[0])
  if "dynamic_sampling/tokens_discarded_share" in metrics:
    metrics["time/generate_discarded"] = (
      metrics["dynamic_sampling/tokens_discarded_share"]
      * metrics["time/generate"]
    )
  metrics |= useful_fractions(
    learner.row_tokens(prompt_lengths, lengths, packing), batch.costs
  )
  metrics["data/epochs"] = batch.epochs
  if config.data.drop_solved:
    metrics["data/solved"] = run.curriculum.num_solved
  updates = step * config.learner.minibatches
  metrics["optim/learning_rate"] = float(learner.learning_rate(updates - 1))
  require_responses(config.objective, metrics["response/truncated"], step)
  require_finite(metrics, step)
  if config.is_exact:
    passes = run.experiment.program, state.policy, train_batch
    require_exact(metrics, step, lambda: first_difference.find(*passes))
  samples = []
  if _due(_SAMPLES_EVERY, step, config.num_steps):
    samples = _first_samples(scored, config.log.samples)
  return state, Row(metrics, distributions, samples)


def _first_samples(
  scored: ScoredSamples, count: int
) -> list[tuple[str, str, str, float]]:
  """The first response of each of the first `count` groups of all hosts."""
  total = scored.rewards.result().total
  rows = range(0, total.size, total.shape[1])
  local = [
    (row, (p.text, scored.responses[row].text, p.reference, float(reward)))
    for row, p, reward in zip(
      rows, scored.prompts.problems, total[:, 0], strict=True
    )
    if row in scored.responses
  ]
  samples = dict(itertools.chain(*multihost.allgather_json(local[:count])))
  return [samples[row] for row in sorted(samples)[:count]]


def make_curriculum(experiment: Experiment) -> Curriculum:
  config = experiment.config
  return Curriculum(
    experiment.datasets.stages,
    experiment.program.prompt_config,
    batch=config.data.prompts,
    seed=config.seed,
    drop_solved=config.data.drop_solved,
  )


def _source(experiment: Experiment, curriculum: Curriculum) -> Source:
  config, sampler = experiment.config, experiment.program.sampler
  pool = experiment.reward_pool
  assert sampler is not None
  context = RolloutContext(
    rollout=config.rollout,
    curriculum=curriculum,
    sampler=sampler,
    tokenizer=experiment.program.tokenizer,
    reward_pool=None if config.rollout.environment else pool,  # type: ignore[arg-type]
    # Keys on a dedicated sampler's devices, so that they wait for no training.
    rng=sharding.key_beside(
      sharding.batch_sharding(sampler.mesh), experiment.keys.steps
    ),
    prompts=config.data.prompts,
    max_failed=config.reward.max_failed,
    conversations=experiment.conversations,
  )
  if line := sampler.generate.describe(continues=config.rollout.continues):
    multihost.print_once(line)
  return make_source(context, last_step=config.num_steps)


def devices(mesh: jax.sharding.Mesh, sampler: Sequence[jax.Device]) -> str:
  """One line for the log: "8 x TPU v5p on 2 processes, mesh fsdp=8"."""
  kind = mesh.devices.flat[0].device_kind
  axes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
  hosts = f" on {count} processes" if (count := jax.process_count()) > 1 else ""
  split = f", mesh {', '.join(axes)}" if axes else ""
  more = f"; {len(sampler)} more to sample" if sampler else ""
  return f"{mesh.size} x {kind}{hosts}{split}{more}"


def check_log(c: LogConfig) -> None:
  """UserError now for what would fail after hours."""
  if c.wandb and multihost.is_primary():
    wandb_run.require_login(c.wandb)
  if c.profile:
    profile.require_profiler(c.profile)


def _print_parameters(experiment: Experiment) -> None:
  """Prints a table of the weights; the layers of a stack share a row."""
  multihost.print_once(
    parameter_overview.get_parameter_overview(
      experiment.program.abstract_policy, include_stats="sharding"
    )
  )
  assert experiment.program.learner is not None
  state = experiment.program.learner.abstract
  if state.base is not None:
    trained = parameter_overview.count_parameters(state.params)
    multihost.print_once(f"{trained:,} of them are trained: the adapters")


def _start(run: Run) -> tuple[TrainState, dict | None] | None:
  """The saved state, else a first one; and the row that `_save` stored."""
  experiment, learner = run.experiment, run.experiment.program.learner
  assert learner is not None
  name = f"checkpoint in {str(experiment.workdir)!r}"
  accept = lambda _, saved: match(
    run.identity, saved, name, "use another --workdir"
  )
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  pending = jax.tree.map(shape, run.source.pending)
  abstract = dataclasses.replace(
    learner.abstract, base=None, pending_rollouts=pending
  )
  restored = run.checkpoints.restore(abstract, accept)
  if restored is not None:
    run.curriculum.set_state(restored.metadata["data"])
    run.source.set_state(
      restored.state.pending_rollouts, restored.metadata["rollouts"]
    )
    multihost.print_once(f"resumed after step {restored.step}")
    config = experiment.config.as_json()
    saved = restored.metadata["config"]
    for line in changes(saved, config):
      multihost.print_once(line)
    if note := settings.changed_decay(experiment.config, saved, restored.step):
      multihost.print_once(note)
    base = None
    if experiment.config.model.lora.rank:
      base = load_params.load_base(
        experiment.config.model,
        experiment.program,
        experiment.workdir,
        restored.metadata["base"],
      )
    state = dataclasses.replace(
      restored.state, base=base, pending_rollouts=None
    )
    return state, restored.metadata.get("unwritten")
  if experiment.config.cold_start.steps:
    imitated = _cold_start(experiment, run.preemption)
    if imitated is None:  # SIGTERM
      multihost.print_once(
        "stopped: cold start saved; the same command resumes"
      )
      return None
    params = imitated.params
  else:
    params = experiment.program.init_params(experiment.keys.init)
  state = learner.init_state(
    load_params.first_policy(
      experiment.config.model, experiment.program, params
    )
  )
  if state.base is not None:
    load_params.save_base(state.base, experiment.config, experiment.workdir)
  return state, None


def _save(
  run: Run, step: int, state: TrainState, unwritten: Row | None
) -> None:
  """Saves a run, and the row of its step if its evaluation is still to come."""
  _wait_for_sampler(run)  # it takes prompts of the curriculum
  metadata = {
    "identity": run.identity,
    "data": run.curriculum.get_state(),
    "rollouts": run.source.get_state(),
    "config": run.experiment.config.as_json(),
    # Kept in case the process is killed in the evaluation.
    "unwritten": unwritten and unwritten._asdict(),
  }
  if state.base is not None:
    metadata["base"] = checksums(state.base)
  state = dataclasses.replace(
    state, base=None, pending_rollouts=run.source.pending
  )
  run.checkpoints.save(step, state, metadata)


def _wait_for_sampler(run: Run) -> None:
  if isinstance(run.source, OffPolicy):
    run.source.wait()


def _write_config(experiment: Experiment) -> None:
  if multihost.is_primary():
    text = json.dumps(experiment.config.as_json(), indent=2) + "\n"
    path = experiment.workdir / "run_config.json"
    run_files.RunFile(path, text.encode()).close()


def _cold_start(experiment: Experiment, preemption) -> TrainState | None:
  """The policy of this or an earlier cold start; None after a SIGTERM."""
  config, program = experiment.config, experiment.program
  assert program.cold_start is not None
  k_init, k_check = jax.random.split(experiment.keys.cold_start)
  folder = experiment.workdir / "cold_start"
  kept, key = compilation_cache.beside("cold_start"), cold_start_key(experiment)

  def greedy_accuracy(params: model.Params) -> float:
    rewards = held_out.greedy(experiment, program.new_policy(params), k_check)
    return float(correct(rewards, config.reward.pass_threshold).mean())

  with Checkpoints(folder, keep=1) as checkpoints:
    return cold_start.run(
      program.cold_start,
      lambda: program.init_params(k_init),
      batches=demonstrations(experiment),
      batch_sharding=sharding.batch_sharding(program.mesh),
      accuracy=greedy_accuracy,
      checkpoints=checkpoints,
      identity=cold_start_identity(experiment),
      cfg=config.cold_start,
      preemption=preemption,
      kept=Kept(kept, key) if kept and key else None,
    )


def demonstrations(
  experiment: Experiment,
) -> pipeline.Batches[DemonstrationBatch]:
  config = experiment.config
  return pipeline.demonstrations(
    experiment.datasets.demonstrations,
    experiment.program.prompt_config,
    batch=config.cold_start.batch,
    width=config.sampler.max_new_tokens,
    seed=config.seed,
    conversations=bool(config.rollout.environment),
  )


def _health_checks(experiment: Experiment) -> HealthChecks:
  config = experiment.config
  sampling = settings.sampler_config(config, experiment.program.tokenizer)
  return HealthChecks(
    config.objective,
    minibatches=config.learner.minibatches,
    off_policy=config.rollout.is_off_policy,
    truncated_sampling=sampling.truncates and not sampling.keeps_ids,
  )
