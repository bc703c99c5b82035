"""Batches of the device against questions one by one, by what is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.evaluate.policy_sampler import (
  BatchShape,
  PolicySampler,
  batch_shape,
)
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, Samples

QUESTIONS = ["1a+1?", "22?", "3?", "4a*4?", "5?"]


class Echo:
  """A `generate_eval`: row g of a prompt says the prompt and g, and stops.

  A question "3?" is cut instead: it never stops.
  """

  def __init__(self, tokenizer, group):
    self.tokenizer, self.group = tokenizer, group
    self.shapes, self.keys = set(), []

  def __call__(self, params, prompts, key):
    self.shapes.add(prompts.tokens.shape)
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    rows, finish = [], []
    for tokens, length in zip(prompts.tokens, prompts.lengths, strict=True):
      question = self.tokenizer.decode(np.asarray(tokens)[-int(length) :])
      for g in range(self.group):
        ids = self.tokenizer.encode(f"{question}{g}")
        cut = question == "3?"
        rows.append(ids if cut else [*ids, *self.tokenizer.stop_ids[:1]])
        finish.append(TRUNCATED if cut else STOPPED)
    width = max(map(len, rows))
    tokens = [row + [0] * (width - len(row)) for row in rows]
    lengths = jnp.array([len(row) for row in rows])
    none = jnp.zeros((len(rows), width))
    return Samples(
      jnp.array(tokens), none, lengths, jnp.array(finish), jnp.int32(width)
    )


@pytest.fixture
def made(debug_config, monkeypatch):
  """A pupil whose answers are echoes; 4 prompts of 4 answers are a batch."""
  mesh = sharding.make_mesh(jax.devices()[:1])

  def call(samples):
    it = PolicySampler(
      parse(debug_config),
      mesh,
      batch_shape(parse(debug_config), mesh, samples, 5),
    )
    echo = Echo(it.program.tokenizer, it._group)
    object.__setattr__(it.program, "generate_eval", echo)
    return it, echo

  return call


@pytest.mark.parametrize(
  ("samples", "group", "batch", "at_once"),
  [(1, 1, 5, 5), (2, 2, 5, 5), (3, 3, 4, 4), (4, 4, 4, 4), (6, 3, 4, 2),
   (8, 4, 4, 2), (32, 4, 4, 1)],
)  # fmt: skip
def test_each_question_gets_its_answers(made, samples, group, batch, at_once):
  it, echo = made(samples)
  assert it.at_once == at_once
  replies = it.reply("params", QUESTIONS, jax.random.key(0))
  expected = [
    f"{q}{g}" for q in QUESTIONS for _ in range(samples // group)
    for g in range(group)
  ]  # fmt: skip
  assert replies.texts == expected
  assert replies.prompts == QUESTIONS
  cut = [text.startswith("3?") for text in expected]
  assert replies.truncated == cut
  lengths = [len(t) + (not c) for t, c in zip(expected, cut, strict=True)]
  assert replies.tokens == lengths
  assert replies.limit == 12
  # One compiled function serves, and no two of its calls share a key.
  assert echo.shapes == {(batch, 8)}
  assert len(echo.keys) == len(set(echo.keys))
  assert len(echo.keys) == -(-len(QUESTIONS) * (samples // group) // batch)


@pytest.mark.parametrize(
  ("samples", "questions", "size"),
  [
    (4, 2, (4, 1, 8)),  # of 32 rows, 8: one for each device
    (4, 9, (4, 1, 16)),
    (4, 500, (4, 1, 32)),
    (1, 24, (1, 1, 24)),
    (1, 500, (1, 1, 128)),
    (32, 3, (4, 8, 24)),
    (32, 1, (4, 8, 8)),
    (6, 30, (3, 2, 32)),
  ],
)
def test_no_more_rows_than_the_questions_need(
  debug_config, samples, questions, size
):
  debug_config.data.prompts = 32
  mesh = sharding.make_mesh(data=8)
  assert batch_shape(parse(debug_config), mesh, samples, questions) == size


def test_a_batch_that_training_could_not_split(debug_config):
  debug_config.data.prompts = 3  # of 8 devices, and of 4 minibatches
  mesh = sharding.make_mesh(data=8)
  assert batch_shape(parse(debug_config), mesh, 4, 99).rows == 8


@pytest.mark.parametrize("key", ["rollout.group_size", "data.prompts"])
def test_an_empty_batch_is_refused(debug_config, key):
  section, name = key.split(".")
  debug_config[section][name] = 0
  mesh = sharding.make_mesh(jax.devices()[:1])
  with pytest.raises(UserError, match=f"{key}=0: expected at least 1"):
    batch_shape(parse(debug_config), mesh, 1, 1)


@pytest.mark.parametrize(
  "changes",
  [
    {"learner": {"micro_batch_size": 3}},
    {"learner": {"minibatches": 7}},
    {"data": {"prompts": 3}},
    {"sampler": {"group_size": 1}},
    {"cold_start": {"batch": 6}},
    {"rollout": {"budget": 4}},
    {"data": {"refill_rounds": 2}, "objective": {"name": "ppo"}},
    {"objective": {"name": "rspo", "router_shift_floor": 0.0}},
    {"model": {"variant": "qwen3-0.6b"}, "objective": {"replay": "r2"}},
    {"objective": {"cap": 3.0}},
    {"objective": {"mismatch": "tis_token", "old_logps": "sampler"}},
    {"objective": {"name": "grpo", "reference_every": 3, "kl_coef": 0.0}},
    {"objective": {"name": "sapo", "dual_clip": 3.0, "tau_positive": 2.0}},
    {"objective": {"name": "sapo", "dual_clip": 3.0, "tau_negative": 2.0}},
    {
      "model": {"variant": "qwen3-0.6b"},
      "objective": {"router_shift_floor": 0.5},
    },
  ],
)
def test_what_only_training_uses_is_not_looked_at(debug_config, changes):
  for section, values in changes.items():
    debug_config[section].update(values)
  mesh = sharding.make_mesh(jax.devices()[:1])
  with pytest.raises(UserError):
    build_program(parse(debug_config), mesh)
  PolicySampler(
    parse(debug_config), mesh, batch_shape(parse(debug_config), mesh, 4, 5)
  )


def test_what_drawing_uses_is_checked(debug_config):
  debug_config.sampler.top_p = 1.5
  mesh = sharding.make_mesh(jax.devices()[:1])
  with pytest.raises(UserError, match=r"top_p=1\.5"):
    PolicySampler(
      parse(debug_config), mesh, batch_shape(parse(debug_config), mesh, 4, 5)
    )


def test_instruction_and_system_prompt_reach_the_policy(debug_config):
  debug_config.data.instruction = "{problem} \\box{}"
  debug_config.data.system_prompt = "S"
  debug_config.data.max_prompt_length = 40
  mesh = sharding.make_mesh(jax.devices()[:1])
  it = PolicySampler(
    parse(debug_config), mesh, BatchShape(group=1, times=1, rows=1)
  )
  prompts = it.read(["{x}?"])
  text = it.program.tokenizer.decode(prompts.tokens[0][-prompts.lengths[0] :])
  assert text.startswith("S")
  assert text.endswith("{x}? \\box{}")


def test_replies_hold_what_was_read(debug_config, made):
  debug_config.data.instruction = "{problem}<think>"
  debug_config.data.max_prompt_length = 40
  it, _ = made(8)
  replies = it.reply(None, QUESTIONS, jax.random.key(0))
  assert replies.prompts == [f"{q}<think>" for q in QUESTIONS]


def test_a_question_that_is_too_long_is_told(made):
  it, _ = made(2)
  with pytest.raises(
    UserError, match="'123456789' has 9 tokens, more than dat"
  ):
    it.read(["1?", "123456789"])


def test_real_answers_differ_and_repeat(debug_config):
  mesh = sharding.make_mesh(jax.devices()[:1])
  it = PolicySampler(
    parse(debug_config),
    mesh,
    batch_shape(parse(debug_config), mesh, 8, len(QUESTIONS)),
  )
  params = it.program.init_params(jax.random.key(0))
  draw = lambda k: it.reply(params, QUESTIONS, jax.random.key(k))
  replies = draw(1)
  assert replies == draw(1)
  assert replies.texts != draw(2).texts
  # Twice in a batch, a question does not get the same answers twice.
  assert len(set(replies.texts)) > 36
  assert max(replies.tokens) <= 12


def test_at_temperature_zero_the_likeliest_answer(debug_config, made):
  debug_config.sampler.temperature = 0.0
  it, _ = made(1)
  echo = Echo(it.program.tokenizer, 1)
  object.__setattr__(it.program, "generate_greedy", echo)
  object.__setattr__(it.program, "generate_eval", None)
  replies = it.reply(None, QUESTIONS, jax.random.key(0))
  assert replies.texts == [f"{question}0" for question in QUESTIONS]
  with pytest.raises(UserError, match="--samples=1"):
    made(2)
