"""Groups of two batches, picked on one device and on eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import (
  SamplerConfig,
  Samples,
  empty_samples,
  merge_groups,
  samples_sharding,
  take_groups,
)

P, G = 8, 3
DENSE = model.variant("qwen3-0.6b")


def tree(rng):
  """Answers: whatever fields they have, routing by the layer among them."""
  draw = lambda *shape: rng.integers(0, 250, (P * G, *shape))
  return {
    "tokens": draw(5).astype(np.int32),
    "logps": draw(5).astype(np.float32),
    "lengths": draw().astype(np.int32),
    "finish": draw().astype(np.int8),
    "routing": draw(4, 6, 2).astype(np.uint8),
    "absent": None,
    "steps": np.int32(rng.integers(9)),
  }


def expected(kept, new, index):
  """Row by row, in plain Python."""
  rows = [i * G + g for i in index.tolist() for g in range(G)]
  pick = lambda a, b: np.stack([[*a, *b][row] for row in rows])
  return jax.tree.map(lambda a, b: pick(a, b) if a.ndim else a + b, kept, new)


def orders(rng):
  yield np.arange(P)  # nothing new
  yield np.arange(P) + P  # nothing else
  for _ in range(4):
    yield rng.permutation(2 * P)[:P]


@pytest.mark.parametrize("devices", [1, 8])
def test_the_picked_groups_are_those_and_stay_where_rows_lie(devices):
  rng = np.random.default_rng(0)
  mesh = sharding.make_mesh(jax.devices()[:devices], fsdp=-1)
  rows = sharding.batch_sharding(mesh)
  place = lambda x: rows if x.ndim else sharding.replicated(mesh)
  kept, new = tree(rng), tree(rng)
  shardings = jax.tree.map(place, kept)
  merge = jax.jit(merge_groups, out_shardings=shardings)
  laid = [jax.device_put(t, shardings) for t in (kept, new)]
  with jax.set_mesh(mesh):
    for index in orders(rng):
      merged = merge(*laid, jnp.asarray(index, jnp.int32))
      jax.tree.map(
        np.testing.assert_array_equal, merged, expected(kept, new, index)
      )
      assert jax.tree.map(lambda x: x.dtype, merged) == jax.tree.map(
        lambda x: x.dtype, kept
      )
      assert merged["routing"].sharding.is_equivalent_to(rows, 4)
  assert merge._cache_size() == 1


def test_no_device_holds_the_routing_of_all_rows():
  """In the memory of one device: a layer of it at a time."""
  mesh = sharding.make_mesh(fsdp=-1)
  rows, everywhere = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  routing = jax.ShapeDtypeStruct((64, 32, 512, 4), jnp.uint8, sharding=rows)
  index = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=everywhere)
  merge = jax.jit(merge_groups, out_shardings=rows)
  compiled = merge.lower(routing, routing, index).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < routing.size


@pytest.mark.parametrize("devices", [1, 8])
def test_groups_are_taken_and_made_room_for(devices):
  """In a longer, a shorter and an equal batch; -1 is a group of nothing."""
  rng = np.random.default_rng(1)
  mesh = sharding.make_mesh(jax.devices()[:devices], fsdp=-1)
  draw = SamplerConfig(G, 5, stop_ids=(1,), pad_id=9)
  lay = samples_sharding(draw, mesh)
  made = {k: x for k, x in tree(rng).items() if k != "routing"}
  made.pop("absent")
  samples = Samples(**{"slot_steps": made.pop("steps"), **made})
  take = jax.jit(
    functools.partial(take_groups, cfg=DENSE, sampler=draw), out_shardings=lay
  )
  empty = jax.device_get(empty_samples(1, 0, DENSE, draw))
  with jax.set_mesh(mesh):
    for count in (P, 2 * P):
      index = rng.integers(-1, P, count).astype(np.int32)
      index[0] = -1
      found = take(jax.device_put(samples, lay), index)
      assert found.slot_steps == samples.slot_steps
      for name in ("tokens", "logps", "lengths", "finish"):
        cut = np.asarray(getattr(samples, name)).reshape(P, G, -1)
        nothing = np.asarray(getattr(empty, name)).reshape(G, -1)
        wanted = [nothing if i < 0 else cut[i] for i in index]
        rows = np.asarray(getattr(found, name)).reshape(count, G, -1)
        np.testing.assert_array_equal(rows, wanted)
