"""Responses that move between shards: the same samples, even loads."""

import jax
import numpy as np
import pytest

from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous.paged_decode import SegmentResults
from gspo_jax.sampler.continuous.placement import Placement


@pytest.mark.parametrize("axes", [(), ("data",), ("data", "expert")])
def test_slices_go_where_they_are_sent(axes):
  shape = dict(zip(axes, (4, 2), strict=False))
  devices = jax.devices()[: int(np.prod([*shape.values(), 1]))]
  mesh = sharding.make_mesh(devices, **shape)
  D, rows, n = len(devices), 6, 3
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, D * rows, 5)).astype(np.float32)
  sent = np.stack([rng.permutation(rows)[:n] for _ in range(D)])
  source = rng.integers(0, D * n, (D, n))
  target = np.stack([rng.permutation(rows + 1)[:n] for _ in range(D)])
  expected = x.reshape(2, D, rows, 5).copy()
  offered = np.stack([expected[:, d, sent[d]] for d in range(D)], axis=1)
  offered = offered.reshape(2, D * n, 5)
  for d in range(D):
    for i in range(n):
      if target[d, i] < rows:
        expected[:, d, target[d, i]] = offered[:, source[d, i]]
  spec = jax.P(None, sharding.BATCH_AXES)
  moves = sharding.Moves(*(m.reshape(-1) for m in (sent, source, target)))
  with jax.set_mesh(mesh):
    exchange = sharding.shard_map(
      lambda x, m: sharding.exchange(x, m, *sharding.BATCH_AXES, dim=1),
      (spec, jax.P(sharding.BATCH_AXES)),
      spec,
    )
    moved = jax.jit(exchange)(x, moves)
  np.testing.assert_array_equal(moved, expected.reshape(x.shape))


def test_the_slowest_shard_is_the_one_that_the_others_waited_for():
  """Its running responses have 30 + 8 tokens where the means are 18 + 6."""
  placement = Placement(None, 2, [0, 1], np.zeros(4), np.ones(4))
  for active, cached in (
    ([True] * 4, [1, 5, 10, 20]),
    ([True, True, False, True], [3, 5, 99, 4]),
  ):
    placement.update(
      SegmentResults(
        num_tokens=np.zeros(4),
        active=np.array(active),
        response=np.arange(4),
        num_cached=np.array(cached),
        num_sampled=0,
        drafts=None,
      )
    )
  shard, words = placement.slowest()
  assert shard == 1
  assert words.startswith("1.58 x the mean cached tokens, ")
