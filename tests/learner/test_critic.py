"""The critic: it starts at nothing, and learns what answers will earn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspo_jax import model
from gspo_jax.learner import critic, train_step
from gspo_jax.learner.cold_start import demonstration_batch


@pytest.fixture(scope="module")
def cfg():
  return dataclasses.replace(model.variant("tiny"), dtype="float32")


@pytest.fixture(scope="module")
def rows():
  rng = np.random.default_rng(0)
  draw = lambda width: rng.integers(0, 256, (8, width)).astype(np.int32)
  batch = {
    "tokens": draw(3),
    "length": np.full(8, 3, np.int32),
    "response": draw(4),
    "response_length": np.array([4, 1, 2, 3, 4, 4, 4, 1], np.int32),
  }
  returns = jnp.repeat(jnp.arange(8.0)[:, None] / 8, 4, axis=1)
  rollout = demonstration_batch(batch)
  return dataclasses.replace(rollout, values=jnp.zeros((8, 4)), returns=returns)


@pytest.mark.parametrize("tied", [True, False])
def test_starts_from_the_policy_and_expects_nothing(cfg, rows, tied):
  cfg = dataclasses.replace(cfg, tie_embeddings=tied)
  policy = model.init(jax.random.key(0), cfg)
  params = critic.init(policy)
  assert "head" not in params
  np.testing.assert_array_equal(params["embed"], policy["embed"])
  assert not critic.values(params, cfg, rows).any()


def test_a_value_is_of_the_state_before_its_token(cfg, rows):
  """Token t and what follows it cannot move the value of token t."""
  params = critic.init(model.init(jax.random.key(0), cfg))
  params["value_head"] = jax.random.normal(jax.random.key(1), (cfg.embed_dim,))
  before = critic.values(params, cfg, rows)
  S = rows.tokens.shape[1] - 4
  other = rows.tokens.at[:, S + 1 :].add(1)
  after = critic.values(params, cfg, dataclasses.replace(rows, tokens=other))
  np.testing.assert_array_equal(before[:, :2], after[:, :2])
  assert np.all(before[0, 2:] != after[0, 2:])


def test_learns_what_is_to_come(cfg, rows):
  optimizer = optax.adam(3e-3)
  learner = train_step.Learner(
    loss=lambda p, r, own: critic.loss(p, r, cfg=cfg, clip=10.0),
    optimizer=optimizer,
    minibatches=1,
    micro_batch_size=4,
    group_size=1,
  )
  state = train_step.init_state(
    critic.init(model.init(jax.random.key(0), cfg)), optimizer=optimizer
  )
  step = jax.jit(
    lambda s: train_step.update(s, rows, jax.random.key(0), learner=learner)
  )
  losses = []
  for _ in range(30):
    state, _, metrics = step(state)
    losses.append(metrics["loss/value"].value())
  mask = np.asarray(rows.response_mask)
  first = 0.5 * np.square(np.asarray(rows.returns))[mask].mean()
  assert losses[0] == pytest.approx(first, rel=1e-5)
  assert losses[-1] < losses[0] / 20
