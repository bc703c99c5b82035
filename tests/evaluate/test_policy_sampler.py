"""Responses to each problem, whatever the batches they are sampled in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.data.problem import Problem
from gspo_jax.evaluate.policy_sampler import PolicySampler
from gspo_jax.program.config import parse
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, Samples

TEXTS = ["1a+1?", "22?", "3?", "4a*4?", "5?"]
PROBLEMS = [Problem(text, "", "") for text in TEXTS]


class Echo:
  """A `respond`: the prompt and g, then a stop; those to "3?" are truncated."""

  def __init__(self, sampler):
    self.tokenizer = sampler.program.tokenizer
    respond = sampler.program.sampler.respond
    self.config, self.batch_sharding = respond.config, respond.batch_sharding
    self.shapes, self.keys, self.asked = set(), [], 0

  def __call__(self, params, prompts, key, *, group_size, stop_at, progress):
    self.shapes.add((prompts.tokens.shape, stop_at.shape))
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    self.asked += (stop_at == 12).sum()  # 12 is sampler.max_new_tokens
    rows, finish = [], []
    for tokens, length in zip(prompts.tokens, prompts.lengths, strict=True):
      problem = self.tokenizer.decode(np.asarray(tokens)[-int(length) :])
      for g in range(group_size):
        ids = self.tokenizer.encode(f"{problem}{g}")
        cut = problem == "3?"
        rows.append(ids if cut else [*ids, *self.tokenizer.stop_ids[:1]])
        finish.append(TRUNCATED if cut else STOPPED)
    width = max(12, *map(len, rows))
    tokens = [row + [0] * (width - len(row)) for row in rows]
    lengths = jnp.array([len(row) for row in rows])
    none = jnp.zeros((len(rows), width))
    return Samples(
      jnp.array(tokens), none, lengths, jnp.array(finish), jnp.int32(width)
    )


def one_device():
  return sharding.make_mesh(jax.devices()[:1])


def new_sampler(keys, samples, problems=5, mesh=None):
  return PolicySampler(
    parse(keys), mesh or one_device(), samples=samples, problems=problems
  )


@pytest.mark.parametrize(
  ("samples", "batch_size"), [(1, 5), (3, 5), (4, 3), (6, 2), (32, 1)]
)
def test_each_problem_gets_its_responses(debug_config, samples, batch_size):
  """A batch has at most 4 prompts x 4 responses, or one problem."""
  sampler = new_sampler(debug_config, samples)
  echo = Echo(sampler)
  functions = dataclasses.replace(sampler.program.sampler, respond=echo)
  sampler.program = dataclasses.replace(sampler.program, sampler=functions)
  assert sampler.batch_size == batch_size
  responses, truncated = sampler.sample("params", PROBLEMS, jax.random.key(0))
  expected = [f"{p}{g}" for p in TEXTS for g in range(samples)]
  assert [r.text for r in responses] == expected
  assert [r.prompt for r in responses] == [
    p for p in TEXTS for _ in range(samples)
  ]
  cut = [text.startswith("3?") for text in expected]
  assert truncated == cut
  lengths = [len(t) + (not c) for t, c in zip(expected, cut, strict=True)]
  assert [r.tokens for r in responses] == lengths
  assert {r.limit for r in responses} == {12}
  # All calls have one shape, no two share a key, and padding is not sampled.
  assert echo.shapes == {((batch_size, 8), (batch_size * samples,))}
  assert len({*echo.keys}) == len(echo.keys) == -(-len(PROBLEMS) // batch_size)
  assert echo.asked == len(expected)
  # Another key gives other keys, and the same key the same.
  of_first, first = echo.keys, (responses, truncated)
  for seed in (1, 0):
    echo.keys = []
    again = sampler.sample("params", PROBLEMS, jax.random.key(seed))
    assert again == first
    assert {*of_first}.isdisjoint(echo.keys) == (seed == 1)
  assert echo.keys == of_first


@pytest.mark.parametrize(
  ("samples", "problems", "batch_size", "rows"),
  [
    (4, 2, 2, 8),  # of 32 prompts, 8: one for each device
    (4, 9, 9, 16),
    (4, 500, 32, 32),
    (1, 500, 125, 128),
    (6, 30, 15, 16),  # two batches of 15
    (32, 3, 3, 8),
    (200, 1, 1, 8),  # more than a batch of training has
  ],
)
def test_a_batch_has_no_more_prompts_than_the_problems_need(
  debug_config, samples, problems, batch_size, rows
):
  debug_config.data.prompts = 32
  mesh = sharding.make_mesh(data=8)
  sampler = new_sampler(debug_config, samples, problems, mesh)
  assert (sampler.batch_size, sampler._prompts) == (batch_size, rows)


@pytest.mark.parametrize("key", ["rollout.group_size", "data.prompts"])
def test_an_empty_batch_is_an_error(debug_config, key):
  debug_config.update_from_flattened_dict({key: 0})
  with pytest.raises(UserError, match=f"{key}=0: expected at least 1"):
    new_sampler(debug_config, 1)


def test_what_sampling_uses_is_checked(debug_config):
  debug_config.sampler.top_p = 1.5
  with pytest.raises(UserError, match=r"top_p=1\.5"):
    new_sampler(debug_config, 4)


def test_instruction_history_and_system_prompt_reach_the_policy(debug_config):
  debug_config.data.instruction = "{problem} \\box{}"
  debug_config.data.system_prompt = "S"
  debug_config.data.max_prompt_length = 40
  sampler = new_sampler(debug_config, 1)
  history = (("user", "1?"), ("assistant", "2"))
  prompts = sampler.prompts([Problem("{x}?", "", "", history=history)])
  tokens = prompts.tokens[0][-prompts.lengths[0] :]
  text = sampler.program.tokenizer.decode(tokens)
  assert text == "S\n\n1?2\n\n{x}? \\box{}"


def test_at_temperature_zero_there_is_one_response(debug_config):
  debug_config.sampler.temperature = 0.0
  respond = new_sampler(debug_config, 1).program.sampler.respond
  assert respond.config.temperature == 0
  with pytest.raises(UserError, match="--samples=1"):
    new_sampler(debug_config, 2)
