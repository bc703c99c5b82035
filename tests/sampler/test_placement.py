"""Responses that move between shards: the same samples, even loads."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous import placement
from gspo_jax.sampler.continuous.config import ShardSizes
from gspo_jax.sampler.continuous.paged_decode import SegmentResults
from gspo_jax.sampler.continuous.placement import Placement
from gspo_jax.sampler.continuous.scheduler import Request, Scheduler


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
  placement = Placement(None, 2, [0, 1], rows=2)
  for active, cached in (
    ([True] * 4, [1, 5, 10, 20]),
    ([True, True, False, True], [3, 5, 99, 4]),
  ):
    placement.update(SegmentResults(
      num_tokens=np.zeros(4), active=np.array(active), response=np.arange(4),
      stop_at=np.ones(4), num_cached=np.array(cached), num_sampled=0,
      drafts=None,
    ))  # fmt: skip
  shard, words = placement.slowest()
  assert shard == 1
  assert words.startswith("1.58 x the mean cached tokens, ")


def results(cached_DM, num_tokens_DM, rows):
  """Of a segment: the response of slot m of shard d is d * rows + m."""
  D, M = cached_DM.shape
  response_DM = np.minimum(
    np.arange(D)[:, None] * rows + np.arange(M), D * rows
  )
  return SegmentResults(
    num_tokens=num_tokens_DM.ravel(),
    active=(cached_DM > 0).ravel(),
    response=response_DM.ravel(),
    stop_at=np.full(D * M, 990),
    num_cached=cached_DM.ravel(),
    num_sampled=0,
    drafts=None,
  )


def facts(room, visitors):
  return SimpleNamespace(
    num_spare_pages=room, num_visitors=visitors, num_waiting=0 * room
  )


def test_loads_become_even():
  """As far as slots, rows, pages and the rule for visitors allow it."""
  D, M, n = 16, 16, 8
  sizes = ShardSizes(M, 1000, 16, 8, max_new_tokens=990, max_prompt_length=11)
  rng = np.random.default_rng(0)
  cached = rng.lognormal(5, 1, (D, M)).clip(1, 900).astype(int)
  cached[rng.random((D, M)) < 0.5] = 0
  even = placement.Placement(sizes, D, [], rows=M)
  for _ in range(8):
    even.update(results(cached, cached, M))
  assert even.is_uneven()
  room, visitors = np.full(D, 80), np.zeros(D, int)
  room[3], visitors[4] = 0, 14  # visitors of 63 pages each: no more fit
  assert not even._choices(facts(room, np.full(D, 14)), n)
  choices = even._choices(facts(room, visitors), n)
  assert len(choices) > 8
  load, moved = cached.copy(), np.zeros(D, int)
  for giver, slot, taker in choices:
    tokens, load[giver, slot] = load[giver, slot], 0
    assert tokens > 0
    free = int((load[taker] == 0).argmax())
    assert load[taker, free] == 0
    load[taker, free] = tokens
    room[taker] -= -(-(tokens + 8) // 16)
    moved[taker] += 1
  givers, takers = ({c[i] for c in choices} for i in (0, 2))
  assert not givers & takers
  assert moved.max() <= n
  assert moved[3] == 0
  assert moved[4] <= 1
  assert room.min() >= 0
  before, after = (x.sum(1).max() / x.sum(1).mean() for x in (cached, load))
  assert before > 1.5
  assert after < 1.1
  even.update(results(load, load, M))
  assert not even.is_uneven()


def test_a_shard_takes_no_more_responses_than_it_has_rows():
  sizes = ShardSizes(8, 1000, 16, 8, max_new_tokens=90, max_prompt_length=11)
  cached = np.zeros((2, 8), int)
  cached[0, :4], cached[1, :3] = 80, 5
  two = placement.Placement(sizes, 2, [], rows=4)
  two.update(results(cached, cached, 4))
  far = np.full(2, 99)
  assert len(two._choices(facts(far, np.zeros(2, int)), 8)) == 1


def test_a_response_moves_with_its_pages():
  """A shard without it is as before; its new one never preempts it."""
  sizes = ShardSizes(2, 7, 2, 2, max_new_tokens=8, max_prompt_length=4)
  one, two = Scheduler(sizes, 2), Scheduler(sizes, 2)
  for shard in (one, two):
    for row, stop_at in enumerate((8, 2)):
      shard.submit(Request(np.arange(4), row, stop_at, row))
    shard.admit()
    shard.allocate_pages()
    ended = shard.apply_results(np.array([2, 2]), np.array([True, False]))
    assert [(request.row, n) for request, n in ended] == [(1, 2)]
  free = two.num_free_pages
  row, pages = one.remove(0, 3)
  assert (row, len(pages), one.num_free_pages, one.num_active) == (0, 3, 7, 0)
  slot, row, new = two.insert(
    3, response=5, num_cached=5, num_tokens=2, stop_at=8
  )
  assert (slot, row, len(new)) == (1, 1, 3)
  assert two.num_free_pages == free - 3
  assert (two.num_visitors, two.num_active) == (1, 2)
  for generated in (4, 6):
    _, active = two.allocate_pages()
    two.apply_results(np.array([generated] * 2), active)
  assert active.tolist() == [False, True]  # the newer one stays
  assert two.num_waiting == 1
