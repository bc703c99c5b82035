"""Sampling parameters, and groups selected on one device and on eight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import (
  SamplerConfig,
  Samples,
  empty_samples,
  merge_groups,
  samples_sharding,
  take_groups,
)

P, G = 8, 3
ROUTED = model.variant(
  "qwen3-0.6b", num_layers=4, num_experts=8, experts_per_token=2
)


@pytest.mark.parametrize(
  ("key", "value"),
  [("rollout.group_size", 0), ("sampler.max_new_tokens", 0),
   ("sampler.temperature", -0.1), ("sampler.temperature", float("nan")),
   ("sampler.top_k", -1), ("sampler.top_p", 0.0), ("sampler.top_p", 1.1),
   ("sampler.min_p", 1.1), ("sampler.kept_ids", -1), ("min_new_tokens", -1),
   ("min_new_tokens", 5)],
)  # fmt: skip
def test_a_bad_value_is_a_user_error_that_names_the_key(key, value):
  good = {"group_size": 2, "max_new_tokens": 4, "stop_ids": (1,)}
  with pytest.raises(UserError) as error:
    SamplerConfig(**{**good, key.rpartition(".")[2]: value})
  assert f"{key}={value}: expected" in str(error.value)


@pytest.mark.parametrize(
  ("fields", "words"),
  [({}, "stop_ids=\\(\\): expected at least one token"),
   ({"stop_ids": (1,), "stop": ("a",)}, "expected StopStrings")],
)  # fmt: skip
def test_a_sampler_needs_its_stops(fields, words):
  with pytest.raises(UserError, match=words):
    SamplerConfig(**fields).require_stops()


def random_samples(rng):
  """A dict like Samples, with routing of 4 layers."""
  integers = lambda *shape: rng.integers(0, 250, (P * G, *shape))
  return {
    "tokens": integers(5).astype(np.int32),
    "logps": integers(5).astype(np.float32),
    "lengths": integers().astype(np.int32),
    "finish": integers().astype(np.int8),
    "experts": integers(4, 6, 2).astype(np.uint8),
    "absent": None,
    "slot_steps": np.int32(rng.integers(9)),
  }


def merged_in_python(kept, new, index):
  rows = [i * G + g for i in index.tolist() for g in range(G)]
  select = lambda a, b: np.stack([[*a, *b][row] for row in rows])
  return jax.tree.map(lambda a, b: select(a, b) if a.ndim else a + b, kept, new)


def indices(rng):
  yield np.arange(P)  # all of the first batch
  yield np.arange(P) + P  # all of the second
  for _ in range(4):
    yield rng.permutation(2 * P)[:P]


@pytest.mark.parametrize("devices", [1, 8])
def test_merge_groups_selects_the_groups_of_the_index(devices):
  """And keeps their types and shardings."""
  rng = np.random.default_rng(0)
  mesh = sharding.make_mesh(jax.devices()[:devices], fsdp=-1)
  batch = sharding.batch_sharding(mesh)
  place = lambda x: batch if x.ndim else sharding.replicated(mesh)
  kept, new = random_samples(rng), random_samples(rng)
  shardings = jax.tree.map(place, kept)
  merge = jax.jit(merge_groups, out_shardings=shardings)
  on_devices = [jax.device_put(x, shardings) for x in (kept, new)]
  with jax.set_mesh(mesh):
    for index in indices(rng):
      merged = merge(*on_devices, jnp.asarray(index, jnp.int32))
      expected = merged_in_python(kept, new, index)
      jax.tree.map(np.testing.assert_array_equal, merged, expected)
      dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
      assert dtypes(merged) == dtypes(kept)
      assert merged["experts"].sharding.is_equivalent_to(batch, 4)
  assert merge._cache_size() == 1


def test_no_device_holds_the_routing_of_all_responses():
  """Routing crosses devices one layer at a time."""
  mesh = sharding.make_mesh(fsdp=-1)
  batch, replicated = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  routing = jax.ShapeDtypeStruct((64, 32, 512, 4), jnp.uint8, sharding=batch)
  index = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=replicated)
  merge = jax.jit(merge_groups, out_shardings=batch)
  compiled = merge.lower(routing, routing, index).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < routing.size
  like = functools.partial(jax.ShapeDtypeStruct, sharding=batch)
  row = like((64,), jnp.int32)
  tokens, count = like((64, 9), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
  samples = Samples(tokens, tokens, row, row, count, experts=routing)
  sampler = SamplerConfig(4, 9, stop_ids=(1,), record_routing=True)
  cfg = dataclasses.replace(ROUTED, num_layers=32, experts_per_token=4)
  take = jax.jit(
    functools.partial(take_groups, cfg=cfg, sampler=sampler),
    out_shardings=Samples(*[batch] * 4, replicated, batch),
  )
  compiled = take.lower(samples, index).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < routing.size


@pytest.mark.parametrize("devices", [1, 8])
def test_take_groups_selects_groups_and_adds_empty_ones(devices):
  """Into an equal and a longer batch; the index -1 is an empty group."""
  rng = np.random.default_rng(1)
  mesh = sharding.make_mesh(jax.devices()[:devices], fsdp=-1)
  sampler = SamplerConfig(
    G, 5, stop_ids=(1,), pad_id=9, record_routing=True, top_k=4
  )
  shardings = samples_sharding(ROUTED, sampler, mesh)
  fields = random_samples(rng)
  fields["kept_ids"] = rng.integers(1, 250, (P * G, 4, 5)).astype(np.int32)
  samples = Samples(**{k: x for k, x in fields.items() if k != "absent"})
  take = jax.jit(
    functools.partial(take_groups, cfg=ROUTED, sampler=sampler),
    out_shardings=shardings,
  )
  empty = jax.device_get(empty_samples(1, 0, ROUTED, sampler))
  with jax.set_mesh(mesh):
    for count in (P, 2 * P):
      index = rng.integers(-1, P, count).astype(np.int32)
      index[0] = -1
      taken = take(jax.device_put(samples, shardings), index)
      assert taken.slot_steps == samples.slot_steps
      for name in ("tokens", "logps", "lengths", "finish", "kept_ids"):
        groups = np.asarray(getattr(samples, name)).reshape(P, G, -1)
        nothing = np.asarray(getattr(empty, name)).reshape(G, -1)
        expected = [nothing if i < 0 else groups[i] for i in index]
        found = np.asarray(getattr(taken, name)).reshape(count, G, -1)
        np.testing.assert_array_equal(found, expected)
      groups = samples.experts.reshape(P, G, 4, 6, 2)
      found = np.asarray(taken.experts).reshape(count, G, 4, 6, 2)
      real = index >= 0  # an empty group has any experts
      np.testing.assert_array_equal(found[real], groups[index[real]])
