"""A whole run on one process, whose devices and rewards only take notes.

`train.train_and_evaluate` is real, as are data, checkpoints and files. The
policy answers "#7" to every question.
"""

import contextlib
import dataclasses
import io
import json
import re
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import rewards
from gspo_jax import train as training
from gspo_jax.learner import train_batch
from gspo_jax.learner.train_step import TrainState
from gspo_jax.losses import Mean
from gspo_jax.program import experiment
from gspo_jax.rewards import pool
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import STOPPED, UNFINISHED, Samples

ANSWER = (ord("#"), ord("7"))
WATCHED = (  # numbers of a step that a run reads
  "grad/norm",
  "mismatch/sequence_abs_mean",
  "ratio/first_minibatch_std",
  "ratio/moved",
)


class MadeRun:
  """What a run did.

  Attributes:
    folder: its workdir.
    run: the `runs.Run`.
    events: in their order: the name of a function of its program, and what it
      was given: texts of questions, rewards, arrays of demonstrations.
    keys: by the name of a function, the keys it was given.
    widths: tokens of the prompts that it was given.
    pools: what each process that scores was set up with.
    error: the text of the error that ended it, or "".
  """

  def __init__(self, config, folder: Path):
    self.folder, self.run = folder, None
    self.events, self.keys, self.widths, self.pools = [], {}, set(), []
    self.error = ""
    build, prepare = experiment.build_program, experiment.prepare

    def made(config, mesh):
      return _devices(build(config, mesh), config, self)

    def keep(*args):
      self.run = prepare(*args)
      return self.run

    desk = lambda setup: _Desk(setup, self.pools)
    with (
      mock.patch.object(experiment, "build_program", made),
      mock.patch.object(experiment, "prepare", keep),
      mock.patch.object(pool, "Process", desk),
      contextlib.redirect_stdout(io.StringIO()),
    ):
      try:
        training.train_and_evaluate(config, str(folder))
      except ValueError as error:  # UserError is one
        self.error = str(error)

  def given(self, name: str) -> list:
    """What each call of a function was given."""
    return [what for event, what in self.events if event == name]

  def rows(self, name: str = "step") -> list:
    """A column of metrics.jsonl; None where a row has no such number."""
    lines = (self.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line).get(name) for line in lines]


def broken(prompt, answer, reference, *, of):
  """A reward that fails on the odd questions of a file."""
  if re.fullmatch(f"{of}\\d*[13579]\\?", prompt):
    raise LookupError(prompt)
  return 1.0


class _Desk:
  """In the place of `rewards.process.Process`: scores in this process."""

  def __init__(self, setup, pools):
    names, seconds, _ = setup
    pools.append({"names": names, "seconds": seconds})
    self._rewards = [rewards.named(name, seconds) for name in names]

  def wait_ready(self):
    pass

  def score(self, answers):
    return [[self._one(r, a) for r in self._rewards] for a in answers]

  def _one(self, reward, answer):
    names = rewards.length_arguments(reward)
    how = {name: getattr(answer, name) for name in names}
    given = answer.prompt, answer.text, answer.reference
    try:
      return reward(*given, **how), None
    except LookupError as error:  # of `broken`
      return None, str(error)

  def close(self):
    pass


def _devices(built, config, notes):
  """The program with functions that take notes."""
  mesh, texts = built.mesh, built.prompt_config.tokenizer
  rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)

  def note(name, what, key=None):
    notes.events.append((name, what))
    notes.keys.setdefault(name, []).append(key)

  def questions(prompts):
    tokens, lengths = multihost.to_host((prompts.tokens, prompts.lengths))
    notes.widths.add(tokens.shape[1])
    return [
      texts.decode(row[len(row) - n :])
      for row, n in zip(tokens, lengths, strict=True)
    ]

  def answers(count, group, until):
    """Answers of up to `until` tokens."""
    R = config.sampler.max_new_tokens
    tokens = np.full((count * group, R), texts.pad_id, np.int32)
    whole_answer = [*ANSWER, texts.stop_ids[0]]
    tokens[:, :3] = whole_answer
    lengths = np.minimum(until, 3).astype(np.int32) * np.ones(
      count * group, np.int32
    )
    finish = np.where(lengths == 3, STOPPED, UNFINISHED)
    logps, finish = np.zeros(tokens.shape, np.float32), finish.astype(np.int8)
    return Samples(
      *multihost.to_global((tokens, logps, lengths, finish), rows),
      slot_steps=multihost.to_global(np.int32(tokens.size), whole),
    )

  def generate(name, group):
    def draw(
      params, prompts, key, *, resume_from=None, stop_at=None, on_finished=None
    ):
      asked = questions(prompts)
      note(name, asked, key)
      if stop_at is not None:
        note("until", np.asarray(stop_at).tolist())
      return answers(len(asked), group, 99 if stop_at is None else stop_at)

    return draw

  G = config.rollout.group_size
  draw = _Paged(generate("generate", G), lambda count: answers(count, G, 0))

  def fresh(key):
    note("init", None, key)
    return {"weight": multihost.to_global(np.zeros(1, np.float32), whole)}

  def begin(params):
    return TrainState(multihost.to_global(np.int32(0), whole), params, ())

  def assemble(prompts, samples):
    return train_batch.make_train_batch(
      prompts, samples.tokens, samples.lengths
    )

  def assign(batch, rewards, finish):
    note("assign", np.asarray(rewards).tolist())
    return batch

  def step(state, batch, key, apply_updates):
    note("update" if apply_updates else "score", None, key)
    numbers = dict.fromkeys(WATCHED, _number(float(apply_updates)))
    state = dataclasses.replace(state, step=state.step + int(apply_updates))
    return state, batch, numbers

  def imitate(state, batch, key):
    note("imitate", jax.device_get(batch), key)
    numbers = {"loss/imitation": _number(1)}
    return dataclasses.replace(state, step=state.step + 1), numbers

  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  abstract = jax.tree.map(
    shape,
    begin({"weight": multihost.to_global(np.zeros(1, np.float32), whole)}),
  )
  return dataclasses.replace(
    built,
    abstract=abstract,
    init=fresh,
    begin=begin,
    generate=draw,
    generate_eval=generate("generate_eval", config.eval.samples),
    generate_greedy=generate("generate_greedy", 1),
    merge=lambda kept, new, index: kept,
    nothing=lambda: answers(config.data.prompts, G, 0),
    assemble=assemble,
    appraise=None,
    assign=assign,
    step=step,
    abstract_imitation=abstract,
    begin_imitation=begin,
    imitate=imitate,
  )


class _Paged:
  """As a `PagedSampler` is called."""

  shards = 1

  def __init__(self, generate, fresh):
    self._generate = generate
    self.jitted = types.SimpleNamespace(empty_samples=fresh)

  def __call__(self, *args, **how):
    return self._generate(*args, **how)

  def describe(self, *, continues):
    return ""


def _number(value) -> Mean:
  return Mean(jnp.float32(value), jnp.float32(1))
