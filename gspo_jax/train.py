"""The run, from a config to a trained policy: read it top to bottom."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
from ml_collections import ConfigDict

from gspo_jax.data import pipeline, sources
from gspo_jax.data.curriculum import Curriculum
from gspo_jax.evaluate import held_out
from gspo_jax.evaluate.held_out import summarize
from gspo_jax.iteration import iterate
from gspo_jax.learner import cold_start
from gspo_jax.learner.health import HealthChecks
from gspo_jax.learner.train_step import TrainState
from gspo_jax.program import config as settings
from gspo_jax.program import experiment
from gspo_jax.rollout.batch import RolloutContext
from gspo_jax.rollout.on_policy import OnPolicy
from gspo_jax.rollout.one_step_off import OneStepOffPolicy
from gspo_jax.rollout.partial import PartialRollouts
from gspo_jax.rollout.source import Source
from gspo_jax.runtime import metric_writer, multihost, sharding
from gspo_jax.runtime.checkpoint import Checkpoints
from gspo_jax.runtime.identity import changes, flatten, match
from gspo_jax.runtime.preemption import Preemption


def train_and_evaluate(config: ConfigDict, workdir: str) -> TrainState | None:
  """Trains a policy as `config` says, resuming what `workdir` holds.

  Args:
    config: all the keys of configs/common.py.
    workdir: a folder for checkpoints, metrics and samples.

  Returns:
    The final state; None where a SIGTERM ended the run, its state saved.

  Raises:
    UserError: the config, the data or the workdir cannot work as they are, or
      the rewards failed on too many answers (`reward.max_failed`).
    FloatingPointError: a metric is not finite; that step is not saved.
  """
  multihost.require_joined()
  mesh = multihost.run_on_all(lambda: sharding.make_mesh(**config.mesh))
  with jax.set_mesh(mesh), Preemption() as preemption:
    run = multihost.run_on_all(
      lambda: experiment.prepare(config, workdir, mesh)
    )
    multihost.require_same(
      flatten({"config": experiment.config_as_json(config)} | run.identity)
    )
    multihost.require_shared(run.workdir)
    checkpoints = Checkpoints(
      run.workdir / "checkpoints",
      every=config.checkpoint.every,
      keep=config.checkpoint.keep,
    )
    with run.scorer, checkpoints:
      curriculum = Curriculum(
        run.material.stages,
        run.program.prompting,
        batch=config.data.prompts,
        seed=config.seed,
        history=config.data.drop_solved,
      )
      source = _rollouts(run, curriculum)
      state = _start(run, curriculum, source, checkpoints, preemption)
      if state is None:
        return None
      multihost.run_on_all(lambda: _note_config(run))
      return _train(run, state, curriculum, source, checkpoints, preemption)


def _rollouts(run, curriculum) -> Source:
  """Where answers come from, as the config wants it."""
  config, functions = run.config, run.program
  sampling = RolloutContext(
    curriculum=curriculum,
    generate=functions.generate,
    tokenizer=functions.tokenizer,
    scorer=run.scorer,
    rows=sharding.batch_sharding(functions.mesh),
    key=lambda step: experiment.iteration_keys(run, step)[0],
    prompts=config.data.prompts,
    group=config.rollout.group_size,
    tells=config.continuous_batching.slots > 0,
  )
  c = config.rollout
  if config.continuous_batching.slots:
    multihost.print_once(functions.generate.describe(continues=c.budget > 0))
  if c.budget:
    source = PartialRollouts(
      sampling,
      functions.generate.jitted.empty_samples,
      functions.choose,
      functions.regroup,
      shards=functions.generate.shards,
      budget=c.budget,
      spare=c.spare,
    )
  else:
    rounds = config.rollout.dynamic_sampling_rounds
    source = OnPolicy(sampling, functions.merge, rounds=rounds)
  if c.ahead:
    nothing = functions.nothing()
    source = OneStepOffPolicy(source, sampling, nothing, last=config.num_steps)
  return source


def _start(
  run, curriculum, source, checkpoints, preemption
) -> TrainState | None:
  """The last good checkpoint, else a fresh policy after its cold start."""
  accept = lambda _, found: match(
    experiment.checkpoint_identity(run), found, "checkpoint"
  )
  abstract = dataclasses.replace(
    run.program.abstract, waiting=_shapes(source.arrays)
  )
  restored = checkpoints.restore(abstract, accept)
  if restored is not None:
    curriculum.set_state(restored.metadata["data"])
    waiting = restored.metadata.get("rollouts", {})
    source.set_state(restored.state.waiting, waiting)
    multihost.print_once(f"resumed after step {restored.step}")
    for line in changes(
      restored.metadata["config"], experiment.config_as_json(run.config)
    ):
      multihost.print_once(line)
    return dataclasses.replace(restored.state, waiting=None)
  if not run.config.cold_start.steps:
    return run.program.begin(run.program.init(run.keys.init))
  imitated = _imitate(run, preemption)
  if imitated is None:
    multihost.print_once("SIGTERM: cold start saved; the same command resumes")
    return None
  return run.program.begin(imitated.params)


def _note_config(run) -> None:
  """run_config.json: the config of the run that goes on from here."""
  if multihost.is_primary():
    path = run.workdir / "run_config.json"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(
      json.dumps(experiment.config_as_json(run.config), indent=2) + "\n"
    )
    temporary.replace(path)


def _imitate(run, preemption) -> TrainState | None:
  """The cold start, or the result of an earlier one."""
  cold, functions = run.config.cold_start, run.program
  k_init, k_update, k_check = jax.random.split(run.keys.imitate, 3)
  on_policy = pipeline.demonstrations(
    run.material.demonstrations,
    functions.prompting,
    batch=cold.batch,
    width=run.config.sampler.max_new_tokens,
    seed=run.config.seed,
  )
  settings = {
    k: v for k, v in experiment.config_as_json(cold).items() if k != "dir"
  }
  identity = run.identity | {
    "data": {"fingerprint": sources.fingerprint(run.material.demonstrations)},
    "cold_start": settings | {"from": run.config.model.checkpoint},
  }
  folder = cold.dir or run.workdir / "cold_start"
  with Checkpoints(folder, every=cold.check_every, keep=1) as checkpoints:
    return cold_start.imitate(
      init=lambda: functions.begin_imitation(functions.init(k_init)),
      abstract=functions.abstract_imitation,
      batches=on_policy,
      update=lambda state, batch: functions.imitate(
        state,
        multihost.to_global(batch, sharding.batch_sharding(functions.mesh)),
        k_update,
      ),
      accuracy=lambda params: float(_greedy(run, params, k_check).mean()),
      checkpoints=checkpoints,
      preemption=preemption,
      identity=identity,
      cfg=cold_start.ColdStartConfig(cold.steps, cold.check_every, cold.gate),
    )


def _shapes(arrays):
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  return jax.tree.map(shape, arrays)


def _train(
  run, state, curriculum, source, checkpoints, preemption
) -> TrainState | None:
  """RL from `state` on, to the last step or to a SIGTERM."""
  config, begin = run.config, int(state.step)
  writer = multihost.run_on_all(
    lambda: metric_writer.MetricWriter(
      run.workdir,
      total_steps=config.num_steps,
      resume_step=begin,
      active=multihost.is_primary(),
    )
  )
  if begin >= config.num_steps:
    multihost.print_once(f"num_steps={config.num_steps}: nothing is left to do")
  with writer:
    watch = _watch(run)
    if begin == 0:
      writer.write(0, _evaluate(run, state.params))
    for step in range(begin + 1, config.num_steps + 1):
      state, row, distributions, shown = iterate(
        run, state, curriculum, source, step
      )
      last, stop = step == config.num_steps, preemption.reached()
      row["data/epochs"] = curriculum.epochs
      save = functools.partial(
        _save, run, curriculum, source, checkpoints, step, state
      )
      if stop:  # at once: a SIGKILL in the evaluation then costs a row at most
        save()
      if last or step % config.eval.every == 0:
        row |= _evaluate(run, state.params)
      writer.write(step, row, distributions)
      watch(row)
      if last or step % config.log.samples_every == 0:
        writer.samples(step, shown[: config.log.samples])
      if last or checkpoints.due(step):
        save()
      if stop and not last:
        checkpoints.wait()
        multihost.print_once(
          f"SIGTERM: saved after step {step}; the same command resumes"
        )
        return None
  return state


def _watch(run) -> HealthChecks:
  config, c = run.config, run.config.objective
  # Of answers that waited, the gap tells how far the policy has moved.
  waits = (
    config.rollout.one_step_off_policy
    or config.rollout.max_tokens_per_iteration
  )
  numbers = {} if waits else settings.numbers(config)
  drawn = settings.sampler_config(config, run.program.tokenizer)
  return HealthChecks(
    updates=config.learner.minibatches,
    clip_low=numbers.get("clip_low", math.inf),
    recomputed=c.old_logps == "recompute",
    # A critic, and a KL in the reward, teach of equal rewards, too.
    compares=c.name != "ppo" and not (c.kl_coef and c.kl_estimator == "k1"),
    truncates=drawn.truncates,
  )


def _save(run, curriculum, source, checkpoints, step, state) -> None:
  metadata = {
    "identity": experiment.checkpoint_identity(run),
    "data": curriculum.get_state(),
    "rollouts": source.get_state(),
    "config": experiment.config_as_json(run.config),
  }
  whole = dataclasses.replace(state, waiting=source.arrays)
  checkpoints.save(step, whole, metadata)


def _evaluate(run, params) -> dict[str, float]:
  """`eval/*` on the held-out questions, with the same key every time."""
  key = run.keys.evaluate
  sampled = _answer(run, run.program.generate_eval, params, key)
  return summarize(sampled, _greedy(run, params, key))


def _greedy(run, params, key) -> np.ndarray:
  return _answer(run, run.program.generate_greedy, params, key)


def _answer(run, generate, params, key) -> np.ndarray:
  return held_out.verdicts(
    generate,
    params,
    run.held_out,
    batch=run.config.data.prompts,
    key=key,
    rows=sharding.batch_sharding(run.program.mesh),
    tokenizer=run.program.tokenizer,
    scorer=run.scorer,
    max_failed=run.config.reward.max_failed,
  )
