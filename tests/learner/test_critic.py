"""The critic: its values are 0 at first, and of the states before tokens."""

import dataclasses

import jax
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.learner import critic, train_batch
from gspo_jax.sampler.samples import Prompts

CFG = model.variant(
  "tiny", dtype="float32", num_layers=1, num_experts=0, experts_per_token=0
)


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


def test_a_value_is_of_the_state_before_its_token():
  """Token t and those behind it cannot move the value of token t."""
  init = jax.jit(lambda key: critic.init(model.init(key, CFG)))
  head = jax.random.normal(jax.random.key(1), (CFG.embed_dim,))
  params = init(jax.random.key(0)) | {"value_head": head}
  rng, S, R = np.random.default_rng(0), 3, 4
  ids = lambda width: rng.integers(0, 256, (8, width)).astype(np.int32)
  prompts = Prompts(ids(S), np.full(8, S, np.int32))
  batch = train_batch.unpacked(prompts, ids(R), np.full(8, R, np.int32))
  values = jax.jit(lambda batch: critic.values(params, CFG, batch))
  before = values(batch)
  other = batch.tokens.at[:, S + 1 :].add(1)
  after = values(dataclasses.replace(batch, tokens=other))
  np.testing.assert_array_equal(before[:, :2], after[:, :2])
  assert np.all(before[0, 2:] != after[0, 2:])
