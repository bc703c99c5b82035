"""The weights for decoding: values, shardings and memory layouts."""

import functools

import jax
import numpy as np
import pytest
from compilers import absent_devices, needs_libtpu
from jax.experimental.layout import Format

from gspo_jax import model
from gspo_jax.runtime import sharding
from gspo_jax.runtime.mesh_jit import MeshJit
from gspo_jax.sampler.decode_params import decode_params, decode_params_sharding

CFG = model.variant(
  "tiny",
  dtype="float32",
  vocab_size=260,
  lora=model.LoraConfig(rank=2, alpha=4.0),
)


def unstacked(params):
  return model.unstack_layers(decode_params(params, CFG), CFG)


@functools.cache
def on_one_device():
  """The weights as they are trained, and as they decode."""
  key = jax.random.key(0)
  params = jax.jit(model.init, static_argnums=1)(key, CFG)
  adapters = model.lora.init(key, CFG)
  params = model.lora.join(params, adapters)
  return params, jax.jit(unstacked)(params)


@pytest.mark.parametrize(
  ("expert", "tensor"), [(4, 1), (1, 2)], ids=["expert 4", "data 2, tensor 2"]
)
def test_weights_have_these_shardings_and_the_values_of_one_device(
  expert, tensor
):
  """Moved to the decoding mesh from a training mesh of other axes."""
  params, expected = on_one_device()
  mesh = sharding.make_mesh(jax.devices()[:4], fsdp=2, expert=2)
  sampler_mesh = sharding.reshape_mesh(mesh, expert=expert, tensor=tensor)
  params = jax.device_put(params, model.shardings(params, mesh))
  shardings = decode_params_sharding(CFG, sampler_mesh)
  moved = MeshJit(unstacked, sampler_mesh, out_shardings=shardings)(params)
  jax.tree.map(np.testing.assert_array_equal, moved, expected)
  has = lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim)
  assert all(jax.tree.leaves(jax.tree.map(has, moved, shardings)))
  head = moved["head"].sharding.shard_shape(moved["head"].shape)
  assert head == (CFG.embed_dim, CFG.vocab_size // (expert * tensor))


def test_a_vocabulary_of_uneven_parts_is_split_over_tensor_alone():
  mesh = sharding.make_mesh(jax.devices()[:4], expert=2, tensor=2)
  vocab = lambda cfg: decode_params_sharding(cfg, mesh)["head"].spec[1]
  assert vocab(model.variant("tiny", vocab_size=258)) == "tensor"
  assert vocab(CFG) == ("expert", "tensor")


@needs_libtpu
def test_heads_come_first_where_a_tpu_multiplies_by_them():
  mesh = sharding.make_mesh(absent_devices("v5e:2x2"), tensor=4)
  heads_first = lambda cfg: {
    jax.tree_util.keystr(path[-1:], simple=True)
    for path, leaf in jax.tree.leaves_with_path(
      decode_params_sharding(cfg, mesh)
    )
    if isinstance(leaf, Format)
  }
  assert heads_first(model.variant("qwen3-0.6b")) == {"q", "k", "v"}
  assert not heads_first(model.variant("llama3.2-1b"))  # of 64: XLA may pad
