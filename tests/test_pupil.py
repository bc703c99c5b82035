"""Batches of the device against questions one by one, by what is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import sharding
from gspo_jax.errors import UserError
from gspo_jax.pupil import Pupil
from gspo_jax.sampler import STOPPED, TRUNCATED, Samples

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
    it = Pupil(debug_config, mesh, samples)
    echo = Echo(it.program.tokenizer, it._group)
    object.__setattr__(it.program, "generate_eval", echo)
    return it, echo

  return call


@pytest.mark.parametrize(
  ("samples", "group", "batch", "at_once"),
  [(1, 1, 16, 16), (2, 2, 8, 8), (3, 3, 4, 4), (4, 4, 4, 4), (6, 3, 4, 2),
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


def test_instruction_and_system_prompt_reach_the_policy(debug_config):
  debug_config.data.instruction = "{question} \\box{}"
  debug_config.data.system_prompt = "S"
  debug_config.data.max_prompt_length = 40
  mesh = sharding.make_mesh(jax.devices()[:1])
  it = Pupil(debug_config, mesh, 1)
  prompts = it.read(["{x}?"])
  text = it.program.tokenizer.decode(prompts.tokens[0][-prompts.lengths[0] :])
  assert text.startswith("S")
  assert text.endswith("{x}? \\box{}")


def test_replies_hold_what_was_read(debug_config, made):
  debug_config.data.instruction = "{question}<think>"
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
  it = Pupil(debug_config, mesh, 8)
  params = it.program.init(jax.random.key(0))
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
