"""Any number of prompts, in batches of one size."""

import jax
import numpy as np
import pytest

from gspo_jax.runtime import sharding
from gspo_jax.sampler.many_prompts import equal_batches, sample_many
from gspo_jax.sampler.samples import Prompts


def test_batches_are_few_and_about_equally_large():
  for count in range(1, 60):
    for most in range(1, 20):
      for multiple in (1, 2, 4):
        size = equal_batches(count, most, multiple)
        batches = -(-count // size)
        assert size % multiple == 0
        assert size < most + multiple
        assert batches <= -(-count // most)
        # Less padding than one row of each device in every batch.
        assert 0 <= size * batches - count < batches * multiple
  assert [equal_batches(24, 512), equal_batches(65, 64)] == [24, 33]


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8])
def test_each_prompt_is_sampled_once_and_padding_is_not_new(count):
  """The `generate` here returns its arguments."""
  tokens = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
  prompts = Prompts(tokens, np.full(count, 2, np.int32))
  mesh = sharding.make_mesh(jax.devices()[:1])
  key = jax.random.key(0)
  batches = list(
    sample_many(
      lambda params, batch, key: (params, batch, key),
      "params",
      prompts,
      key,
      batch_size=4,
      batch_sharding=sharding.batch_sharding(mesh),
    )
  )
  new = np.concatenate([batch.index[: batch.new] for batch in batches])
  np.testing.assert_array_equal(new, np.arange(count))
  for i, batch in enumerate(batches):
    params, sampled, batch_key = batch.samples
    assert params == "params"
    assert batch_key == jax.random.fold_in(key, i)
    assert sampled.tokens.shape == (4, 2)
    np.testing.assert_array_equal(sampled.tokens, tokens[batch.index])
