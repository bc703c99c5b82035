"""An array has the sharding of its logical axes; meshes fit their devices."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError

ONE = sharding.make_mesh(jax.devices()[:1])
CUBE = sharding.make_mesh(fsdp=2, expert=2, tensor=2)


def test_the_sampler_gets_the_last_devices():
  devices = jax.devices()
  assert sharding.split_devices(0) == (devices, [])
  assert sharding.split_devices(3) == (devices[:5], devices[5:])
  for count in (8, 9):
    with pytest.raises(UserError, match=rf"sampler_mesh\.devices={count}: .*7"):
      sharding.split_devices(count)


@dataclasses.dataclass(frozen=True)
class Device:
  id: int
  process_index: int
  device_kind: str


def hosts(count, chips=4, kind="TPU v5"):
  """Devices of several hosts, whose ids do not go by host."""
  return [
    Device(chip * count + host, host, kind)
    for chip in range(chips)
    for host in range(count)
  ]


def test_each_process_gives_half_of_its_devices_to_the_sampler():
  devices = hosts(3)
  ids = lambda part: [(d.process_index, d.id) for d in part]
  trainer, sampler = sharding.split_devices(6, devices)
  assert ids(trainer) == [(0, 0), (0, 3), (1, 1), (1, 4), (2, 2), (2, 5)]
  assert ids(sampler) == [(0, 6), (0, 9), (1, 7), (1, 10), (2, 8), (2, 11)]
  assert sharding.split_devices(0, devices) == (devices, [])
  for count, others in ((4, devices), (3, hosts(2, 3))):
    with pytest.raises(
      UserError, match=rf"sampler_mesh\.devices={count}: .* half of the"
    ):
      sharding.split_devices(count, others)
  for kind in ("TPU v5 lite", "TPU v6 lite"):
    with pytest.raises(UserError, match=f"several hosts of {kind}"):
      sharding.split_devices(4, hosts(2, kind=kind))


def test_a_mesh_beside_another_pairs_devices_of_a_process():
  devices = hosts(2)
  trainer, sampler = sharding.split_devices(4, devices)
  grid = np.empty((2, 1, 1, 1, 2), object)
  grid.flat = [trainer[i] for i in (2, 0, 3, 1)]
  mesh = SimpleNamespace(devices=grid)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, "_mesh", lambda grid: grid)
    other = sharding.beside(mesh, sampler)
  pairs = list(zip(grid.flat, other.flat, strict=True))
  assert other.shape == grid.shape
  assert all(b.id == a.id + 4 for a, b in pairs)
  assert all(a.process_index == b.process_index for a, b in pairs)


# Rules.

AXES = {
  "embed": ("vocab", "table"),
  "attention/q": ("layers", "embed", "heads", "whole"),
  "moe/down": ("layers", "experts", "whole", "whole"),
}


def test_an_array_has_the_rule_that_its_path_ends_in():
  q = None, ("fsdp", "context"), "tensor", None
  stack = (2, 4, 4, 4)
  tree = {
    "embed": np.ones((4, 8)),
    "mu": {"layers": {"attention": {"q": np.ones(stack)}}},
    "layers": ({"attention": {"q": np.ones(stack[1:])}},),  # of one layer
    "count": np.ones(()),
  }
  places = sharding.state_shardings(tree, CUBE, AXES)
  assert {x.mesh for x in jax.tree.leaves(places)} == {CUBE}
  assert jax.tree.map(lambda x: x.spec, places) == {
    "embed": PartitionSpec("tensor", ("fsdp", "context", "expert")),
    "mu": {"layers": {"attention": {"q": PartitionSpec(*q)}}},
    "layers": ({"attention": {"q": PartitionSpec(*q[1:])}},),
    "count": PartitionSpec(),
  }
  constrain = jax.jit(lambda tree: sharding.constrain_state(tree, AXES))
  with jax.set_mesh(CUBE):
    out = constrain(tree)
  same = lambda x, place: x.sharding.is_equivalent_to(place, x.ndim)
  assert jax.tree.all(jax.tree.map(same, out, places))


@pytest.mark.parametrize(
  ("path", "shape"),
  [
    ("embedding", (4, 4)),
    ("layers/moe/embed_table", (2, 4)),
    ("layers/attention/q/extra", (2, 4, 4, 4)),
    ("embed", (2, 4, 4)),  # a rule of another rank
    ("layers/attention/q", (4, 4)),
  ],
)
def test_an_array_without_a_rule(path, shape):
  with pytest.raises(ValueError, match=f"^{path}.*: expected ") as error:
    sharding.spec(path, shape, ONE, AXES)
  assert not isinstance(error.value, UserError)  # a fault of the code


def test_two_rules_for_one_array():
  with pytest.raises(ValueError, match="expected one rule") as error:
    sharding.rule("layers/attention/q", AXES | {"q": ("mlp", "mlp")})
  assert "'embed', 'heads'" in str(error.value)
  assert "'mlp', 'mlp'" in str(error.value)


def test_one_mesh_axis_for_two_dimensions():
  with pytest.raises(ValueError, match="'context', 'fsdp'") as error:
    sharding.partition_spec(("embed", "heads", "head_dim"))
  assert "embed -> ('fsdp', 'context')" in str(error.value)
  assert "head_dim -> ('fsdp', 'context')" in str(error.value)
  for axes in sharding.RULES.values():
    assert set(axes) <= set(sharding.AXES)


@pytest.mark.parametrize(
  ("path", "shape", "words"),
  [
    ("embed", (7, 8), "vocab=7 of embed (7, 8) is not divisible by mesh.tens"),
    ("embed", (8, 6), "table=6 of embed (8, 6) is not divisible by mesh.fsdp"),
    ("layers/moe/down", (1, 12, 4, 4), "expert=2 x mesh.tensor=2 x mesh.fsdp"),
    ("layers/attention/q", (1, 4, 1, 4), "heads=1 of layers/attention/q (1,"),
  ],
)  # fmt: skip
def test_sizes_that_do_not_divide(path, shape, words):
  with pytest.raises(UserError, match=re.escape(words)):
    sharding.spec(path, shape, CUBE, AXES)
  sharding.spec(path, shape, ONE, AXES)


# Meshes.


@pytest.mark.parametrize(
  ("sizes", "shape"),
  [({"data": -1}, (8, 1, 1, 1, 1)), ({"data": 2, "fsdp": -1}, (2, 4, 1, 1, 1)),
   ({"fsdp": 2, "expert": 2, "tensor": 2}, (1, 2, 1, 2, 2)),
   ({"data": 2, "context": 4}, (2, 1, 4, 1, 1)),
   ({"data": 8, "tensor": -1}, (8, 1, 1, 1, 1))],
)  # fmt: skip
def test_sizes_of_a_mesh(sizes, shape):
  mesh = sharding.make_mesh(**sizes)
  assert mesh.axis_names == sharding.AXES
  assert mesh.devices.shape == shape
  assert set(mesh.devices.flat) == set(jax.devices())


@pytest.mark.parametrize(
  "sizes",
  [{}, {"data": 16}, {"data": 3, "fsdp": -1}, {"data": -1, "fsdp": -1},
   {"data": 0, "fsdp": -1}, {"data": -2, "fsdp": -4}],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_the_devices(sizes):
  with pytest.raises(UserError, match="does not multiply to the 8 devices;"):
    sharding.make_mesh(**sizes)


def test_a_mesh_that_does_not_fit_the_devices_beside_the_samplers():
  words = "multiply to the 6 devices without those of sampler_mesh.devices;"
  with pytest.raises(UserError, match=words):
    sharding.make_mesh(jax.devices()[:6], data=8)
  mesh = sharding.make_mesh(jax.devices()[2:6], data=-1, tensor=2)
  assert mesh.devices.shape == (2, 1, 1, 1, 2)


def test_a_decoding_mesh_keeps_the_order_of_the_devices():
  mesh = sharding.reshape_mesh(CUBE, expert=4, tensor=1)
  assert mesh.devices.shape == (2, 1, 1, 4, 1)
  assert list(mesh.devices.flat) == list(CUBE.devices.flat)
  with pytest.raises(UserError, match="expert=3 times tensor=1"):
    sharding.reshape_mesh(CUBE, expert=3, tensor=1)


class Tpu:
  """The attributes of a TPU device that `make_mesh` reads."""

  platform, device_kind = "tpu", "TPU v5 lite"

  def __init__(self, i, slices):
    self.id, self.slice_index = i, i * slices // 8
    self.process_index = i // 4
    self.coords, self.core_on_chip = (i % 4 % 2, i % 4 // 2, i // 4), 0


def test_slices_need_the_data_axis(monkeypatch):
  devices = [Tpu(i, slices=2) for i in range(8)]
  with pytest.raises(
    UserError, match=r"mesh\.data=1 is not a multiple of the 2"
  ):
    sharding.make_mesh(devices, fsdp=8)
  grid = sharding._arrange(devices, [2, 4, 1, 1])
  assert [{d.slice_index for d in part.flat} for part in grid] == [{0}, {1}]


def test_a_part_of_the_chips_of_each_host_is_arranged_as_a_box():
  devices = [Tpu(i, slices=1) for i in range(8)]
  for i, device in enumerate(devices):  # two hosts side by side in y
    device.coords = i % 2, i // 4 * 2 + i // 2 % 2, 0
    device.device_kind = "TPU v5"
  for part in sharding.split_devices(4, devices):
    grid = sharding._arrange(part, [1, 2, 1, 2, 1]).reshape(2, 2)
    assert {d.id for d in grid.flat} == {d.id for d in part}
    for pair in (*grid, *grid.T):
      (x, y, _), (x2, y2, _) = (d.coords for d in pair)
      assert (abs(x - x2), abs(y - y2)) in ((1, 0), (0, 2))


# Batches.


@pytest.mark.parametrize(
  ("sizes", "held"),
  [({"data": 2, "fsdp": 2, "expert": 2}, 1), ({"fsdp": 4, "tensor": 2}, 2)],
)
def test_a_batch_is_sharded_over_all_axes_but_tensor(sizes, held):
  mesh = sharding.make_mesh(**sizes)
  batch = jax.device_put(np.arange(8), sharding.batch_sharding(mesh))
  pieces = [tuple(s.data.tolist()) for s in batch.addressable_shards]
  assert {len(piece) for piece in pieces} == {held}
  assert sorted(sum(set(pieces), ())) == list(range(8))


def test_constrain():
  axes = None, sharding.BATCH_AXES
  constrain = jax.jit(lambda x: sharding.constrain(x, *axes))
  tree = {"a": np.ones((3, 8)), "b": np.ones((2, 16, 5))}
  with jax.set_mesh(CUBE):
    out = constrain(tree)
  assert out["a"].sharding.shard_shape((3, 8)) == (3, 2)
  assert out["b"].sharding.shard_shape((2, 16, 5)) == (2, 4, 5)
  assert sharding.constrain(tree, *axes) is tree


# Shard maps.


def test_a_shard_map_has_its_shard_and_its_index():
  def local(x):
    assert x.shape == (1, 4)
    assert sharding.size("fsdp", "expert") == 4
    index = sharding.index("fsdp", "expert") * jnp.ones((1, 1))
    return sharding.gather(x, "fsdp", "expert", dim=0)[:1], index

  batch = PartitionSpec(("fsdp", "expert"))
  with jax.set_mesh(CUBE):
    run = jax.jit(sharding.shard_map(local, in_specs=batch, out_specs=batch))
    first, index = run(np.arange(16.0).reshape(4, 4))
  np.testing.assert_array_equal(first, [[0, 1, 2, 3]] * 4)
  np.testing.assert_array_equal(index[:, 0], range(4))


def test_without_a_mesh_shard_map_and_collectives_do_nothing():
  local = lambda x: sharding.scatter(
    sharding.psum(sharding.gather(x, "fsdp", dim=0), "tensor"), "data", dim=0
  )
  assert sharding.shard_map(local, in_specs=None, out_specs=None) is local
  x = np.arange(3)
  assert local(x) is x
  assert sharding.platform() == "cpu"


def test_gloo_gets_no_reduce_scatter(monkeypatch):
  """Values and gradients are those of the collectives that it replaces."""

  def local(x):
    whole = sharding.gather(x, "fsdp", "expert", dim=1)
    return sharding.scatter(jnp.sin(whole), "expert", "tensor", dim=1)

  batch = PartitionSpec(("fsdp", "expert"))
  x = jax.random.normal(jax.random.key(0), (8, 3))

  def results():
    run = sharding.shard_map(local, in_specs=batch, out_specs=batch)
    step = jax.jit(jax.value_and_grad(lambda x: (run(x) ** 3).sum()))
    return *step(x), step.lower(x).compile().as_text()

  with jax.set_mesh(CUBE):
    loss, grad, program = results()
    assert "reduce-scatter" in program
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    same_loss, same_grad, program = results()
  assert "reduce-scatter" not in program
  np.testing.assert_allclose(same_loss, loss, rtol=1e-6)
  np.testing.assert_allclose(same_grad, grad, rtol=1e-5, atol=1e-6)
