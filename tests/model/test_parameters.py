"""Each array of a training state has one row of the table of parameters."""

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from gspo_jax import model
from gspo_jax.learner import critic, optimizer
from gspo_jax.model import parameters
from gspo_jax.runtime import sharding

ONE = sharding.make_mesh(jax.devices()[:1])
CUBE = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
LORA = model.LoraConfig(7, 1.0)
ADAMW, MUON = (
  optimizer.optimizer(optimizer.OptimConfig(name)) for name in ("adamw", "muon")
)
# The first variant with each set of parameters: others have other sizes.
KINDS = {
  frozenset(sharding.leaves_by_path(model.shapes(model.variant(name)))): name
  for name in reversed(model.VARIANTS)
}
each_kind = pytest.mark.parametrize("name", list(KINDS.values()))


@functools.cache
def initial(name):
  """The shapes of `model.init`; makes no array."""
  make = functools.partial(model.init, cfg=model.variant(name))
  return jax.eval_shape(make, jax.random.key(0))


def specs(tree, mesh):
  places = sharding.state_shardings(tree, mesh, optimizer.STATE_AXES)
  return jax.tree.map(lambda place: place.spec, places)


def test_no_path_is_declared_twice():
  count = sum(3 if row.target else 1 for row in parameters.TABLE)
  assert len(parameters.AXES) == count
  for row in parameters.TABLE:
    assert len(row.logical_axes) == row.stacked + sum(map(len, row.groups))


@each_kind
def test_the_table_has_the_shapes_of_a_model(name):
  cfg = dataclasses.replace(model.variant(name), lora=LORA)
  adapters = jax.eval_shape(lambda: model.lora.init(jax.random.key(0), cfg))
  assert model.shapes(cfg) == model.lora.join(initial(name), adapters)
  assert model.shapes(model.variant(name)) == initial(name)


@each_kind
def test_every_array_of_a_state_has_one_row(name):
  params = model.shapes(dataclasses.replace(model.variant(name), lora=LORA))
  value_model = jax.eval_shape(critic.init, initial(name))
  for tree in (params, value_model):
    expected = specs(tree, ONE)
    for path, leaf in sharding.leaves_by_path(tree).items():
      row = parameters.find(path)
      assert len(sharding.leaves_by_path(expected)[path]) == leaf.ndim
      assert row.decays == (not re.search("norm|bias|sinks|A_log|conv", path))
    state = jax.eval_shape(ADAMW.init, tree)
    for moment in ("mu", "nu"):
      assert specs(optax.tree.get(state, moment), ONE) == expected
    specs(jax.eval_shape(MUON.init, tree), ONE)


def test_modules_have_the_order_of_the_table_in_every_process():
  """Else the compilation cache of another process has other programs."""
  cfg = model.variant("tiny")
  [(_, places)] = parameters.places(cfg, cfg.layers[:1])
  assert [*places] == ["attention_norm", "attention", "mlp_norm", "moe"]


def test_every_row_belongs_to_an_array():
  trees = [
    model.shapes(dataclasses.replace(model.variant(n), lora=LORA))
    for n in model.VARIANTS
  ]
  trees.append(jax.eval_shape(critic.init, initial("tiny")))
  trees.append(model.shapes(model.variant("tiny", classifier=True)))
  paths = {path for tree in trees for path in sharding.leaves_by_path(tree)}
  assert {path.removeprefix("layers/") for path in paths} == {*parameters.AXES}


def test_the_embedding_is_split_over_all_and_whole_experts_too():
  placed = specs(initial("tiny"), CUBE)
  assert placed["embed"] == PartitionSpec(
    "tensor", ("fsdp", "context", "expert")
  )
  assert placed["layers"]["moe"]["down"] == PartitionSpec(
    None, ("expert", "tensor", "fsdp", "context"), None, None
  )


@each_kind
def test_muon_has_a_moment_for_each_matrix_and_adamw_two_for_the_rest(name):
  params = initial(name)
  state = jax.eval_shape(MUON.init, params)
  moments = {"mu": [], "nu": []}
  for path in sharding.leaves_by_path(state):
    if match := re.search("/(mu|nu)/(.*)", path):
      moments[match[1]].append(match[2])
  paths = sharding.leaves_by_path(params).keys()
  assert sorted(moments["mu"]) == sorted(paths)
  mla = "mla/(q|q_a|q_b|kv_a|kv_b|o)|delta_net/[qkvzbao]+"
  matrix = (
    f"attention/[qkvo]|{mla}|(mlp|shared)/(gate|up|down)|moe/(gate_up|down)"
  )
  assert sorted(moments["nu"]) == sorted(
    path for path in paths if not re.search(f"({matrix})$", path)
  )


# Four experts do not divide among eight devices, nor three key heads among two,
# which is an error.
DIVISIBLE = [
  name
  for name, cfg in model.VARIANTS.items()
  if cfg.num_experts % 8 == 0 and cfg.num_kv_heads % 2 == 0
]


@pytest.mark.parametrize("name", DIVISIBLE)
def test_no_large_array_is_replicated(name):
  params = model.shapes(model.variant(name))
  shardings = sharding.leaves_by_path(model.shardings(params, CUBE))
  for path, leaf in sharding.leaves_by_path(params).items():
    held = np.prod(shardings[path].shard_shape(leaf.shape)) / leaf.size
    small = re.search("norm|router|bias|sinks|A_log|expert_gate|_a$|conv", path)
    assert held <= (1 if small else 1 / 4), path
