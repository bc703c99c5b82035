"""One iteration, with a program that only notes what it is given."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import hosts, rollout, runs, sharding, tokenizer, train
from gspo_jax.iteration import iterate
from gspo_jax.rewards.pool import Scorer, Scores
from gspo_jax.sampler import Samples
from gspo_jax.tasks import Problem
from gspo_jax.train_step import TrainState


class Spy:
  """A program, and a curriculum, that notes the keys it is given."""

  mesh = sharding.make_mesh(jax.devices()[:1])
  tokenizer = tokenizer.load("bytes")
  appraise = None

  def __init__(self):
    self.keys = []

  def generate(self, params, prompts, key):
    self.keys.append(key)
    tokens = jnp.full((4, 3), ord("#"), jnp.int32)
    ones = jnp.ones(4, jnp.int32)
    return Samples(tokens, jnp.zeros((4, 3)), ones, ones * 0, jnp.int32(1))

  def score(self, params, prompts, samples):
    batch = rollout.assemble(prompts, samples.tokens, samples.lengths)
    return batch, {}

  def merge(self, kept, new, index):
    return kept

  def assign(self, batch, rewards, finish):
    return batch

  def update(self, state, batch, key):
    self.keys.append(key)
    return state, {}

  def draw(self, step):
    return {
      "tokens": np.zeros((2, 3), np.int32),
      "length": np.ones(2, np.int32),
      "problems": [Problem("1?", "1", "#1")] * 2,
    }

  def record(self, batch, correct):
    pass

  def check_compiled_once(self):
    pass

  def schedule(self, step):
    return 1.0


class Broken:
  """A scorer that fails."""

  def submit(self, answers):
    zeros = np.zeros(len(answers), np.float32)
    scores = Scores(zeros, {"broken": zeros}, zeros == 0, ("why",))
    return SimpleNamespace(result=lambda: scores)


def test_a_reward_that_always_fails_stops_it(debug_config):
  """All that was drawn counts, whatever dynamic sampling keeps of it."""
  spy = Spy()
  keys = runs.Keys(*jax.random.split(jax.random.key(0), 4))
  run = runs.Run(debug_config, None, spy, Broken(), None, None, None, keys)
  debug_config.sampler.group_size = 2
  debug_config.data.refill_rounds = 3
  debug_config.reward.max_failed = 1.0
  source = train._rollouts(run, spy)
  with pytest.raises(hosts.Agreed, match=r"iteration 7: 12 of 12 .* why$"):
    iterate(run, TrainState(0, None, None), spy, source, 7)


def test_every_step_and_use_has_its_own_key(debug_config):
  spy = Spy()
  keys = runs.Keys(*jax.random.split(jax.random.key(0), 4))
  scorer = Scorer(("final_answer",), (1.0,), workers=1)
  run = runs.Run(debug_config, None, spy, scorer, None, None, None, keys)
  debug_config.sampler.group_size = 2
  debug_config.data.refill_rounds = 2  # both are drawn: no group is mixed
  state = TrainState(0, None, None)
  with scorer:
    source = train._rollouts(run, spy)
    for step in (1, 2, 1):
      iterate(run, state, spy, source, step)
  drawn = [tuple(jax.random.key_data(k).tolist()) for k in spy.keys]
  assert len(set(drawn[:6])) == 6
  assert drawn[:3] == drawn[6:]  # the same step repeats
