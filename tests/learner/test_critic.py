"""The critic: its values are 0 at first, and become the returns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import unpacked

from gspo_jax import model
from gspo_jax.learner import critic, train_batch, train_step
from gspo_jax.sampler.samples import Prompts

CFG = model.variant(
  "tiny", dtype="float32", num_layers=1, num_experts=0, experts_per_token=0
)
S, R = 3, 4


@pytest.fixture(scope="module")
def params():
  policy = jax.jit(model.init, static_argnums=1)(jax.random.key(0), CFG)
  return critic.init(policy)


@pytest.fixture(scope="module")
def batch():
  rng = np.random.default_rng(0)
  ids = lambda width: rng.integers(0, 256, (8, width)).astype(np.int32)
  batch = train_batch.unpacked(
    Prompts(ids(S), np.full(8, S, np.int32)),
    ids(R),
    np.array([4, 1, 2, 3, 4, 4, 4, 1], np.int32),
  )
  returns = jnp.repeat(jnp.arange(8.0)[:, None] / 8, R, axis=1)
  return dataclasses.replace(batch, values=jnp.zeros((8, R)), returns=returns)


@pytest.mark.parametrize("tied", [True, False])
def test_starts_from_the_policys_blocks_with_a_head_of_zeros(tied):
  cfg = dataclasses.replace(CFG, tie_embeddings=tied)
  shapes = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
  policy = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
  params = critic.init(policy)
  head = params.pop("value_head")
  assert head.shape == (CFG.embed_dim,)
  assert not head.any()
  policy.pop("head", None)
  assert jax.tree.structure(params) == jax.tree.structure(policy)
  assert params["embed"] is policy["embed"]


def test_a_value_is_of_the_state_before_its_token(params, batch):
  """Token t and those behind it cannot move the value of token t."""
  head = jax.random.normal(jax.random.key(1), (CFG.embed_dim,))
  params = params | {"value_head": head}
  values = jax.jit(lambda batch: critic.values(params, CFG, batch))
  before = values(batch)
  other = batch.tokens.at[:, S + 1 :].add(1)
  after = values(dataclasses.replace(batch, tokens=other))
  np.testing.assert_array_equal(before[:, :2], after[:, :2])
  assert np.all(before[0, 2:] != after[0, 2:])


def test_values_become_the_returns(params, batch):
  optimizer = optax.adam(3e-3)
  learner = train_step.Learner(
    loss=lambda params, rows, _: critic.loss(params, rows, cfg=CFG, clip=10.0),
    optimizer=optimizer,
  )
  state = train_step.init_state(params, optimizer=optimizer)
  rows = unpacked.cut(batch, micro_batch_size=4)
  step = jax.jit(lambda state: train_step.update(state, rows, learner=learner))
  losses = []
  for _ in range(30):
    state, _, metrics = step(state)
    losses.append(metrics["loss/value"].value())
  mask = np.asarray(batch.response_mask)
  first = 0.5 * np.square(np.asarray(batch.returns))[mask].mean()
  assert losses[0] == pytest.approx(first, rel=1e-5)
  assert losses[-1] < losses[0] / 20
