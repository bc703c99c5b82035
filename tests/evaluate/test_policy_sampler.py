"""Responses to each problem, whatever the batches they are sampled in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.data.problem import Problem
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

TEXTS = ["1a+1?", "22?", "3?", "4a*4?", "5?"]
PROBLEMS = [Problem(text, "", "") for text in TEXTS]


class Echo:
  """A `generate`: response g to a prompt is the prompt and g, then a stop.

  The responses to "3?" are truncated instead.
  """

  def __init__(self, tokenizer, group_size):
    self.tokenizer, self.group_size = tokenizer, group_size
    self.shapes, self.keys = set(), []

  def __call__(self, params, prompts, key):
    self.shapes.add(prompts.tokens.shape)
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    rows, finish = [], []
    for tokens, length in zip(prompts.tokens, prompts.lengths, strict=True):
      problem = self.tokenizer.decode(np.asarray(tokens)[-int(length) :])
      for g in range(self.group_size):
        ids = self.tokenizer.encode(f"{problem}{g}")
        cut = problem == "3?"
        rows.append(ids if cut else [*ids, *self.tokenizer.stop_ids[:1]])
        finish.append(TRUNCATED if cut else STOPPED)
    width = max(12, *map(len, rows))  # 12 is sampler.max_new_tokens
    tokens = [row + [0] * (width - len(row)) for row in rows]
    lengths = jnp.array([len(row) for row in rows])
    none = jnp.zeros((len(rows), width))
    return Samples(
      jnp.array(tokens), none, lengths, jnp.array(finish), jnp.int32(width)
    )


def one_device():
  return sharding.make_mesh(jax.devices()[:1])


def new_sampler(keys, samples):
  config, mesh = parse(keys), one_device()
  shape = batch_shape(config, mesh, samples, len(PROBLEMS))
  return PolicySampler(config, mesh, shape)


def replace_functions(sampler, **functions):
  """Replaces functions of the sampler's program."""
  replaced = dataclasses.replace(sampler.program.sampler, **functions)
  sampler.program = dataclasses.replace(sampler.program, sampler=replaced)


@pytest.fixture
def echoing(debug_config):
  """A sampler of echoes, and its Echo; a batch is 4 prompts of 4 responses."""

  def call(samples):
    sampler = new_sampler(debug_config, samples)
    echo = Echo(sampler.program.tokenizer, sampler._shape.group_size)
    replace_functions(sampler, generate_eval=echo)
    return sampler, echo

  return call


@pytest.mark.parametrize(
  ("samples", "group_size", "prompts", "batch_size"),
  [(1, 1, 5, 5), (3, 3, 3, 3), (4, 4, 3, 3), (6, 3, 4, 2), (32, 4, 4, 1)],
)  # fmt: skip
def test_each_problem_gets_its_responses(
  echoing, samples, group_size, prompts, batch_size
):
  sampler, echo = echoing(samples)
  assert sampler.batch_size == batch_size
  responses, truncated = sampler.sample("params", PROBLEMS, jax.random.key(0))
  expected = [
    f"{p}{g}" for p in TEXTS for _ in range(samples // group_size)
    for g in range(group_size)
  ]  # fmt: skip
  assert [r.text for r in responses] == expected
  assert [r.prompt for r in responses] == [
    p for p in TEXTS for _ in range(samples)
  ]
  cut = [text.startswith("3?") for text in expected]
  assert truncated == cut
  lengths = [len(t) + (not c) for t, c in zip(expected, cut, strict=True)]
  assert [r.tokens for r in responses] == lengths
  assert {r.limit for r in responses} == {12}
  # All calls have one shape, and no two share a key.
  assert echo.shapes == {(prompts, 8)}
  assert len(echo.keys) == len(set(echo.keys))
  repeats = samples // group_size
  assert len(echo.keys) == -(-len(PROBLEMS) * repeats // prompts)


@pytest.mark.parametrize(
  ("samples", "problems", "shape"),
  [
    (4, 2, (4, 1, 8)),  # of 32 prompts, 8: one for each device
    (4, 9, (4, 1, 16)),
    (4, 500, (4, 1, 32)),
    (1, 24, (1, 1, 24)),
    (1, 500, (1, 1, 128)),
    (32, 3, (4, 8, 24)),
    (32, 1, (4, 8, 8)),
    (6, 30, (3, 2, 32)),
    (4, 33, (4, 1, 24)),  # two batches of 17
    (1, 130, (1, 1, 72)),
  ],
)
def test_a_batch_has_no_more_prompts_than_the_problems_need(
  debug_config, samples, problems, shape
):
  debug_config.data.prompts = 32
  mesh = sharding.make_mesh(data=8)
  assert batch_shape(parse(debug_config), mesh, samples, problems) == shape


def test_a_batch_that_training_could_not_split(debug_config):
  debug_config.data.prompts = 3  # of 8 devices, and of 4 minibatches
  mesh = sharding.make_mesh(data=8)
  assert batch_shape(parse(debug_config), mesh, 4, 99).prompts == 8


@pytest.mark.parametrize("key", ["rollout.group_size", "data.prompts"])
def test_an_empty_batch_is_an_error(debug_config, key):
  debug_config.update_from_flattened_dict({key: 0})
  with pytest.raises(UserError, match=f"{key}=0: expected at least 1"):
    batch_shape(parse(debug_config), one_device(), 1, 1)


@pytest.mark.parametrize(
  "changes",
  [
    {"learner.micro_batch_size": 3},
    {"data.prompts": 3},
    {"rollout.group_size": 1},
    {"cold_start.batch": 6},
    {"rollout.max_tokens_per_iteration": 4},
    {"rollout.dynamic_sampling_rounds": 2, "objective.name": "ppo"},
    {"objective.name": "no_such_module.loss"},
    {"model.variant": "qwen3-0.6b", "objective.replay": "r2"},
    {"objective.mismatch": "tis_token", "objective.old_logps": "sampler"},
  ],
)
def test_what_only_training_uses_is_not_checked(debug_config, changes):
  debug_config.update_from_flattened_dict(changes)
  with pytest.raises(UserError):
    build_program(parse(debug_config), one_device())
  new_sampler(debug_config, 4)


def test_what_sampling_uses_is_checked(debug_config):
  debug_config.sampler.top_p = 1.5
  with pytest.raises(UserError, match=r"top_p=1\.5"):
    new_sampler(debug_config, 4)


def test_instruction_and_system_prompt_reach_the_policy(debug_config):
  debug_config.data.instruction = "{problem} \\box{}"
  debug_config.data.system_prompt = "S"
  debug_config.data.max_prompt_length = 40
  sampler = PolicySampler(
    parse(debug_config), one_device(), BatchShape(1, 1, 1)
  )
  prompts = sampler.prompts([Problem("{x}?", "", "")])
  tokens = prompts.tokens[0][-prompts.lengths[0] :]
  text = sampler.program.tokenizer.decode(tokens)
  assert text.startswith("S")
  assert text.endswith("{x}? \\box{}")


def test_the_conversation_before_a_problem_reaches_the_policy(debug_config):
  debug_config.data.max_prompt_length = 40
  sampler = PolicySampler(
    parse(debug_config), one_device(), BatchShape(1, 1, 1)
  )
  history = (("system", "S"), ("user", "1?"), ("assistant", "2"))
  problem = Problem("x?", "", "", history=history)
  prompts = sampler.prompts([problem])
  tokens = prompts.tokens[0][-prompts.lengths[0] :]
  assert sampler.program.tokenizer.decode(tokens) == "S\n\n1?2\n\nx?"


def test_responses_hold_the_whole_prompt(debug_config, echoing):
  debug_config.data.instruction = "{problem}<think>"
  debug_config.data.max_prompt_length = 40
  sampler, _ = echoing(8)
  responses, _ = sampler.sample(None, PROBLEMS, jax.random.key(0))
  prompts = [response.prompt for response in responses]
  assert prompts == [f"{p}<think>" for p in TEXTS for _ in range(8)]


def test_a_problem_that_is_too_long_is_an_error(echoing):
  sampler, _ = echoing(2)
  with pytest.raises(
    UserError,
    match=r"'123456789' has 9 tokens, more than data.max_prompt.*=8: raise",
  ):
    sampler.prompts([Problem(t, "", "") for t in ("1?", "123456789")])


def test_responses_of_a_model_differ_and_repeat(debug_config):
  sampler = new_sampler(debug_config, 8)
  params = sampler.program.init_params(jax.random.key(0))
  sample = lambda k: sampler.sample(params, PROBLEMS, jax.random.key(k))
  responses = sample(1)
  assert responses == sample(1)
  texts = [response.text for response in responses[0]]
  assert texts != [response.text for response in sample(2)[0]]
  # A problem with two prompts in a batch gets different responses.
  assert len(set(texts)) > 36
  assert max(response.tokens for response in responses[0]) <= 12


def test_at_temperature_zero_responses_are_greedy(debug_config, echoing):
  debug_config.sampler.temperature = 0.0
  sampler, _ = echoing(1)
  echo = Echo(sampler.program.tokenizer, 1)
  replace_functions(sampler, generate_greedy=echo, generate_eval=None)
  responses, _ = sampler.sample(None, PROBLEMS, jax.random.key(0))
  assert [r.text for r in responses] == [f"{problem}0" for problem in TEXTS]
  with pytest.raises(UserError, match="--samples=1"):
    new_sampler(debug_config, 2)
