"""The run, from a config to a trained policy: read it top to bottom."""

import dataclasses
import functools
import json
import math
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from gspo_jax import (
  answer,
  batches,
  cold_start,
  data,
  hosts,
  material,
  metrics,
  policy,
  program,
  refill,
  settings,
  sharding,
  sources,
)
from gspo_jax.checkpoint import Checkpoints
from gspo_jax.curriculum import Curriculum
from gspo_jax.estimates import summarize
from gspo_jax.identity import changes, flatten, match
from gspo_jax.preemption import Preemption
from gspo_jax.rewards.pool import Scorer
from gspo_jax.sampler import TRUNCATED, Prompts
from gspo_jax.train_step import TrainState
from gspo_jax.watch import Watch, require_finite


class Keys(NamedTuple):
  """One key for each use of chance; a step folds its number into `steps`."""

  init: jax.Array
  imitate: jax.Array
  evaluate: jax.Array
  steps: jax.Array


class Run(NamedTuple):
  """What stays the same from the first step to the last.

  Attributes:
    config: all the keys of configs/common.py.
    workdir: where everything is written.
    program: the jitted functions, and the tokenizer.
    scorer: the processes that reward answers.
    material: questions.
    held_out: `eval.prompts` of the held-out questions, as one batch.
    identity: what a checkpoint, and a cold start, must agree with to be of
      this run.
    keys: of everything random.
  """

  config: ConfigDict
  workdir: epath.Path
  program: program.Program
  scorer: Scorer
  material: material.Material
  held_out: dict
  identity: dict
  keys: Keys


def train_and_evaluate(config: ConfigDict, workdir: str) -> TrainState | None:
  """Trains a policy as `config` says, resuming what `workdir` holds.

  Args:
    config: all the keys of configs/common.py.
    workdir: a folder for checkpoints, metrics and samples.

  Returns:
    The final state; None where a SIGTERM ended the run, its state saved.

  Raises:
    UserError: the config, the data or the workdir cannot work as they are.
    FloatingPointError: a metric is not finite; that step is not saved.
  """
  hosts.require_joined()
  mesh = hosts.together(lambda: sharding.make_mesh(**config.mesh))
  with jax.set_mesh(mesh), Preemption() as preemption:
    run = hosts.together(lambda: _prepare(config, workdir, mesh))
    hosts.require_same(flatten({"config": _plain(config)} | run.identity))
    hosts.require_shared(run.workdir)
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
        history=config.data.history,
      )
      source = _rollouts(run, curriculum)
      state = _start(run, curriculum, source, checkpoints, preemption)
      if state is None:
        return None
      hosts.together(lambda: _note_config(run))
      return _train(run, state, curriculum, source, checkpoints, preemption)


def _prepare(config, workdir, mesh) -> Run:
  """What a process can check by itself, before any work."""
  functions = program.build(config, mesh)
  found = material.load(config)
  identity = policy.identity(functions) | {
    "seed": config.seed,
    "data": {"fingerprint": material.fingerprint(found.stages)},
  }
  return Run(
    config=config,
    workdir=epath.Path(workdir),
    program=functions,
    scorer=Scorer(
      config.reward.names,
      config.reward.weights,
      workers=config.reward.workers,
      seconds=config.reward.seconds,
    ),
    material=found,
    held_out=data.take(
      found.held_out, functions.prompting, config.eval.prompts
    ),
    identity=identity,
    keys=Keys(*jax.random.split(jax.random.key(config.seed), 4)),
  )


def _rollouts(run, curriculum) -> batches.Source:
  """Where answers come from, as the config wants it."""
  config, functions = run.config, run.program
  sampling = batches.Sampling(
    curriculum=curriculum,
    generate=functions.generate,
    tokenizer=functions.tokenizer,
    scorer=run.scorer,
    rows=sharding.rows(functions.mesh),
    key=lambda step: _step_keys(run, step)[0],
    prompts=config.data.prompts,
    group=config.sampler.group_size,
    tells=config.paging.slots > 0,
  )
  c = config.rollout
  if config.paging.slots:
    hosts.say(functions.generate.describe(continues=c.budget > 0))
  if c.budget:
    source = batches.Partial(
      sampling,
      functions.generate.fresh,
      functions.choose,
      functions.regroup,
      shards=functions.generate.shards,
      budget=c.budget,
      spare=c.spare,
    )
  else:
    rounds = config.data.refill_rounds
    source = batches.Fresh(sampling, functions.merge, rounds=rounds)
  if c.ahead:
    nothing = functions.nothing()
    source = batches.Ahead(source, sampling, nothing, last=config.num_steps)
  return source


def _start(
  run, curriculum, source, checkpoints, preemption
) -> TrainState | None:
  """The last good checkpoint, else a fresh policy after its cold start."""
  accept = lambda _, found: match(_identity(run), found, "checkpoint")
  abstract = dataclasses.replace(
    run.program.abstract, waiting=_shapes(source.arrays)
  )
  restored = checkpoints.restore(abstract, accept)
  if restored is not None:
    curriculum.set_state(restored.metadata["data"])
    waiting = restored.metadata.get("rollouts", {})
    source.set_state(restored.state.waiting, waiting)
    hosts.say(f"resumed after step {restored.step}")
    for line in changes(restored.metadata["config"], _plain(run.config)):
      hosts.say(line)
    return dataclasses.replace(restored.state, waiting=None)
  if not run.config.cold_start.steps:
    return run.program.begin(run.program.init(run.keys.init))
  imitated = _imitate(run, preemption)
  if imitated is None:
    hosts.say("SIGTERM: cold start saved; the same command resumes")
    return None
  return run.program.begin(imitated.params)


def _identity(run) -> dict:
  """Of a state of RL, which may hold more than a cold start's."""
  more, state = {}, run.program.abstract
  if state.reference is not None:
    more["a reference (objective.kl_coef)"] = True
  if state.critic is not None:
    more["a critic (objective.name='ppo')"] = True
  c = run.config
  if c.rollout.ahead:
    more["answers drawn ahead (rollout.ahead)"] = True
  if c.rollout.budget:
    more["answers in flight (rollout.spare)"] = c.rollout.spare
  if c.rollout.ahead or c.rollout.budget:
    # Answers that wait were drawn for these prompts, and are of this shape.
    for key in ("prompts", "max_prompt_length", "system_prompt", "instruction"):
      more[f"data.{key}"] = c.data[key]
    for key in ("group_size", "max_new_tokens"):
      more[f"sampler.{key}"] = c.sampler[key]
  return run.identity | more


def _note_config(run) -> None:
  """run_config.json: the config of the run that goes on from here."""
  if hosts.first():
    path = run.workdir / "run_config.json"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(_plain(run.config), indent=2) + "\n")
    temporary.replace(path)


def _plain(config: ConfigDict) -> dict:
  """A config as JSON gives it back, for a checkpoint."""
  return json.loads(config.to_json_best_effort())


def _imitate(run, preemption) -> TrainState | None:
  """The cold start, or the result of an earlier one."""
  cold, functions = run.config.cold_start, run.program
  k_init, k_update, k_check = jax.random.split(run.keys.imitate, 3)
  batches = data.demonstrations(
    run.material.demonstrations,
    functions.prompting,
    batch=cold.batch,
    width=run.config.sampler.max_new_tokens,
    seed=run.config.seed,
  )
  settings = {k: v for k, v in _plain(cold).items() if k != "dir"}
  identity = run.identity | {
    "data": {"fingerprint": sources.fingerprint(run.material.demonstrations)},
    "cold_start": settings | {"from": run.config.model.checkpoint},
  }
  folder = cold.dir or run.workdir / "cold_start"
  with Checkpoints(folder, every=cold.check_every, keep=1) as checkpoints:
    return cold_start.imitate(
      init=lambda: functions.begin_imitation(functions.init(k_init)),
      abstract=functions.abstract_imitation,
      batches=batches,
      update=lambda state, batch: functions.imitate(
        state, hosts.lay(batch, sharding.rows(functions.mesh)), k_update
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
  writer = hosts.together(
    lambda: metrics.Writer(
      run.workdir,
      total_steps=config.num_steps,
      resume_step=begin,
      active=hosts.first(),
    )
  )
  if begin >= config.num_steps:
    hosts.say(f"num_steps={config.num_steps}: nothing is left to do")
  with writer:
    # Of answers that waited, the gap tells how far the policy has moved.
    waits = config.rollout.ahead or config.rollout.budget
    numbers = {} if waits else settings.numbers(config)
    watch = Watch(
      updates=config.learner.minibatches,
      clip_low=numbers.get("clip_low", math.inf),
      truncates=settings.sampler_config(
        config, run.program.tokenizer
      ).truncates,
    )
    if begin == 0:
      writer.write(0, _evaluate(run, state.params))
    for step in range(begin + 1, config.num_steps + 1):
      state, row, distributions, shown = _iterate(
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
        hosts.say(f"SIGTERM: saved after step {step}; the same command resumes")
        return None
  return state


def _save(run, curriculum, source, checkpoints, step, state) -> None:
  metadata = {
    "identity": _identity(run),
    "data": curriculum.get_state(),
    "rollouts": source.get_state(),
    "config": _plain(run.config),
  }
  whole = dataclasses.replace(state, waiting=source.arrays)
  checkpoints.save(step, whole, metadata)


def _step_keys(run, step) -> tuple[jax.Array, jax.Array]:
  """To draw answers with, and to shuffle them."""
  return tuple(jax.random.split(jax.random.fold_in(run.keys.steps, step)))


def _iterate(run, state, curriculum, source, step):
  """One iteration: rollouts, verification, update.

  Each phase is waited for, and so the times are true.

  Returns:
    The new state, the step's scalars and distributions, and rows of sample
    answers of this host.
  """
  functions, config = run.program, run.config
  rows = sharding.rows(functions.mesh)
  clock = [time.monotonic()]
  tick = lambda: clock.append(time.monotonic())

  # Rollouts: G answers to each question, which each host begins to verify.
  ready = source(state.params, step)
  batch, samples, answers, marking = ready.kept
  asked = hosts.lay(Prompts(batch["tokens"], batch["length"]), rows)
  tick()

  # Old log-probs, and what a reference and a critic say, meanwhile.
  rollout, scored = functions.score(state.params, asked, samples)
  if functions.appraise:
    rollout = functions.appraise(state, rollout)
  marks = marking()
  for cost in ready.costs:
    curriculum.record(cost.batch, cost.marks().correct)
  for reason in marks.reasons:
    logging.warning("step %d: an answer scored 0: %s", step, reason)
  # Advantages of whole groups, before any shuffle.
  rewards = hosts.lay(marks.total.reshape(-1), rows)
  rollout = functions.assign(rollout, rewards, samples.finish)
  jax.block_until_ready(rollout)
  tick()

  # The update: a scan over minibatches.
  state, learnt = functions.update(state, rollout, _step_keys(run, step)[1])
  row, distributions = metrics.finish(scored | learnt)
  tick()
  functions.check_compiled_once()

  row |= _rollout_row(marks, samples, ready.costs)
  row |= _time_row(clock, ready.spent)
  if config.data.refill_rounds > 1:
    row |= refill.report(ready.kept, ready.costs)
  if config.rollout.ahead or config.rollout.budget:
    # Iterations between the policy that drew a token and the one that learns.
    row["rollout/staleness"] = step - ready.drawn_at
    row["rollout/continued"] = ready.continued
  if config.data.history:
    row["data/left_out"] = curriculum.left_out
  updates = step * config.learner.minibatches
  row["optim/learning_rate"] = float(functions.schedule(updates - 1))
  require_finite(row, step)
  shown = _shown(batch["problems"], answers, marks)
  return state, row, distributions, shown


def _rollout_row(marks: answer.Marks, samples, costs) -> dict[str, float]:
  lengths, finish = hosts.fetch((samples.lengths, samples.finish))
  slot_steps = sum(int(cost.slot_steps) for cost in costs)
  parts = marks.parts if len(marks.parts) > 1 else {}
  return {
    "reward/mean": float(marks.total.mean()),
    **{f"reward/{name}": float(part.mean()) for name, part in parts.items()},
    # Groups of equal rewards have no advantage: only a penalty moves them.
    "reward/mixed_groups": float((np.ptp(marks.total, axis=1) > 0).mean()),
    "reward/failed": float(marks.failed.mean()),
    "response/length": float(lengths.mean()),
    "response/truncated": float((finish == TRUNCATED).mean()),
    # What is missing to 1 are decode steps of rows that had ended, of slots
    # that had no answer, and of tokens that were drawn again.
    "response/useful_steps": batches.tokens(costs) / slot_steps,
  }


def _time_row(clock, tokens) -> dict[str, float]:
  generate, score, update = np.diff(clock)
  whole = clock[-1] - clock[0]
  return {
    "time/generate": generate,
    "time/score": score,
    "time/update": update,
    "time/iteration": whole,
    "throughput/sampler_tokens_per_second": tokens / generate,
    "throughput/tokens_per_second": tokens / whole,
  }


def _shown(problems, answers, marks) -> list[tuple[str, str, str, float]]:
  """One answer to each question: question, answer, reference, reward."""
  group = marks.total.shape[1]
  return [
    (p.question, answers[i].text, p.answer, float(marks.total[i // group, 0]))
    for i, p in zip(range(0, marks.total.size, group), problems, strict=True)
    if i in answers  # else another host holds it
  ]


def _evaluate(run, params) -> dict[str, float]:
  """`eval/*` on the held-out questions, with the same key every time."""
  key = run.keys.evaluate
  sampled = _answer(run, run.program.generate_eval, params, key)
  return summarize(sampled, _greedy(run, params, key))


def _greedy(run, params, key) -> np.ndarray:
  return _answer(run, run.program.generate_greedy, params, key)


def _answer(run, generate, params, key) -> np.ndarray:
  return answer.answer_all(
    generate,
    params,
    run.held_out,
    batch=run.config.data.prompts,
    key=key,
    rows=sharding.rows(run.program.mesh),
    tokenizer=run.program.tokenizer,
    scorer=run.scorer,
  )
