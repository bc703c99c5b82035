"""A real run whose jitted functions only note their arguments; it says "#7"."""

import contextlib
import dataclasses
import io
import json
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import train as training
from gspo_jax.learner.train_step import TrainState
from gspo_jax.losses import Mean
from gspo_jax.program import experiment
from gspo_jax.record import metric_writer, wandb_run
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import (
  STOPPED,
  Samples,
  SamplingParams,
  finished_responses,
)
from gspo_jax.workers import pool
from gspo_jax.workers.pool import Result

RESPONSE = (ord("#"), ord("7"))
HEALTH = (  # metrics that `HealthChecks` reads
  "clip_frac/token",
  "grad/norm",
  "mismatch/sequence_abs_mean",
  "ratio/first_minibatch_std",
  "ratio/moved",
)


class MadeRun:
  """A run, and a record of the calls to its program."""

  def __init__(self, config, folder: Path):
    self.folder, self.experiment = folder, None
    # (function, argument) of each call in order; arguments are texts of
    # problems, rewards, or arrays of demonstrations.
    self.events = []
    self.keys = {}  # the random keys of each function's calls
    self.pools = []  # the set-up of each process that scores
    self.wandb = mock.MagicMock()
    build, prepare = experiment.build_program, training.prepare

    def made(config, mesh, *, sampler_devices):
      built = build(config, mesh, sampler_devices=sampler_devices)
      return _recording(built, config, self)

    def keep(*args):
      self.experiment = prepare(*args)
      return self.experiment

    def start_trace(folder, profiler_options):
      self.events.append(("start_trace", folder))

    def stop_trace():
      self.events.append(("stop_trace", None))

    worker = lambda setup: _Worker(setup, self.pools)
    with (
      mock.patch.object(jax.profiler, "start_trace", start_trace),
      mock.patch.object(jax.profiler, "stop_trace", stop_trace),
      mock.patch.object(wandb_run, "require_login"),
      mock.patch.object(metric_writer, "WandbRun", self.wandb),
      mock.patch.object(experiment, "build_program", made),
      mock.patch.object(training, "prepare", keep),
      mock.patch.object(pool, "Process", worker),
      contextlib.redirect_stdout(io.StringIO()),
      contextlib.suppress(UserError),
    ):  # of a gate that was missed
      training.train_and_evaluate(config, str(folder))

  def given(self, name: str) -> list:
    """The noted argument of each call of a function."""
    return [argument for event, argument in self.events if event == name]

  def rows(self, name: str = "step") -> list:
    """A column of metrics.jsonl; None where a record lacks it."""
    lines = (self.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line).get(name) for line in lines]


class _Worker:
  """In the place of `workers.process.Process`: runs tasks in this process."""

  def __init__(self, setup, pools):
    pools.append(setup)
    self._tasks, self._facts = setup.load(setup.seconds)

    self.restarts = 0

  def wait_ready(self):
    return self._facts

  def run(self, calls):
    for i, call in enumerate(calls):
      yield i, Result(self._tasks[call.task](call.request), None)

  def close(self):
    pass


def _recording(built, config, notes):
  """The program with functions that only note their arguments."""
  mesh, tokenizer = built.mesh, built.tokenizer
  rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)

  def note(name, argument, key=None):
    notes.events.append((name, argument))
    notes.keys.setdefault(name, []).append(key)

  def problems(prompts):
    tokens, lengths = multihost.to_host((prompts.tokens, prompts.lengths))
    return [
      tokenizer.decode(row[len(row) - n :])
      for row, n in zip(tokens, lengths, strict=True)
    ]

  def responses(count):
    R = config.sampler.max_new_tokens
    tokens = np.full((count, R), tokenizer.pad_id, np.int32)
    tokens[:, :3] = [*RESPONSE, tokenizer.stop_ids[0]]
    lengths, finish = np.full(count, 3, np.int32), np.full(count, STOPPED)
    logps = np.zeros(tokens.shape, np.float32)
    return Samples(
      *multihost.to_global(
        (tokens, logps, lengths, finish.astype(np.int8)), rows
      ),
      slot_steps=multihost.to_global(np.int32(tokens.size), whole),
    )

  G = config.rollout.group_size

  def sampler(name):
    def sample(
      params, prompts, key, *, group_size=G, on_finished=lambda _: None, **_
    ):
      texts = problems(prompts)
      note(name, texts, key)
      samples = responses(len(texts) * group_size)
      on_finished(finished_responses(samples))
      return samples

    sample.batch_sharding, sample.jitted = rows, None
    sample.describe = lambda **_: ""
    sample.config = types.SimpleNamespace(
      group_size=G,
      max_new_tokens=config.sampler.max_new_tokens,
      params=SamplingParams(),
    )
    return sample

  def init_params(key):
    note("init", None, key)
    return {"weight": multihost.to_global(np.zeros(1, np.float32), whole)}

  def init_state(params):
    return TrainState(multihost.to_global(np.int32(0), whole), params, ())

  def assign_advantages(batch, rewards, finish):
    note("rewards", np.asarray(rewards).tolist())
    return batch

  def step(state, batch, apply_updates):
    note("update" if apply_updates else "old_logps", None)
    numbers = dict.fromkeys(HEALTH, _number(float(apply_updates)))
    state = dataclasses.replace(state, step=state.step + int(apply_updates))
    return state, batch, numbers

  def cold_start_update(state, *arrays_and_packing):
    note("cold_start", jax.device_get(arrays_and_packing[:-1]))
    numbers = {"loss/imitation": _number(1)}
    return dataclasses.replace(state, step=state.step + 1), numbers

  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  weights = {"weight": multihost.to_global(np.zeros(1, np.float32), whole)}
  abstract = jax.tree.map(shape, init_state(weights))
  samplers = dataclasses.replace(
    built.sampler,
    generate=sampler("generate"),
    respond=sampler("respond"),
  )
  learner = dataclasses.replace(
    built.learner,
    abstract=abstract,
    init_state=init_state,
    make_train_batch=lambda prompts, samples, packing: packing,
    add_reference_and_values=None,
    assign_advantages=assign_advantages,
    step=step,
  )
  cold_start = dataclasses.replace(
    built.cold_start,
    abstract=abstract,
    init_state=init_state,
    update=cold_start_update,
  )
  return dataclasses.replace(
    built,
    init_params=init_params,
    sampler=samplers,
    learner=learner,
    cold_start=cold_start,
  )


def _number(value) -> Mean:
  return Mean(jnp.float32(value), jnp.float32(1))
