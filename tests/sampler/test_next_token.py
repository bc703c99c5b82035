"""Where the weights that decode are to lie."""

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format

from gspo_jax import model
from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler.decode_params import decode_params, decode_params_sharding

CFG = model.variant("tiny", dtype="float32", vocab_size=260)


def laid_out(params):
  return model.unstack_layers(decode_params(params, CFG), CFG)


@pytest.mark.parametrize(
  "sizes", [{"expert": 4}, {"data": 2, "tensor": 2}, {"tensor": 4}]
)
def test_weights_lie_as_the_layouts_say(sizes):
  """And are those of one device, whatever mesh they come from."""
  params = model.init(jax.random.key(0), CFG)
  wanted = jax.jit(laid_out)(params)
  mesh = sharding.make_mesh(jax.devices()[:4], fsdp=2, expert=2)
  decoding = sharding.reshape_mesh(
    mesh,
    **{"expert": 1, "tensor": 1}
    | {k: n for k, n in sizes.items() if k != "data"},
  )
  params = jax.device_put(params, sharding.state_shardings(params, mesh))
  told = decode_params_sharding(CFG, decoding)
  found = MeshJit(jax.jit(laid_out, out_shardings=told), decoding)(params)
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
  place = lambda x, lay: x.sharding.is_equivalent_to(lay, x.ndim)
  assert all(jax.tree.leaves(jax.tree.map(place, found, told)))
  of_vocabulary = found["head"].sharding.shard_shape(found["head"].shape)
  share = decoding.shape["expert"] * decoding.shape["tensor"]
  assert of_vocabulary == (CFG.embed_dim, CFG.vocab_size // share)


def test_a_head_of_uneven_parts_is_split_with_the_heads_alone():
  mesh = sharding.make_mesh(jax.devices()[:4], expert=2, tensor=2)
  odd = model.variant("tiny", vocab_size=258)
  assert decode_params_sharding(odd, mesh)["head"].spec[1] == "tensor"
  assert decode_params_sharding(CFG, mesh)["head"].spec[1] == (
    "expert",
    "tensor",
  )


def test_heads_come_first_where_a_tpu_multiplies_by_them():
  pytest.importorskip("libtpu")
  plan_compile.prepare()
  mesh = sharding.make_mesh(
    plan_compile.devices(chips.parse("v5e:2x2"), 1), tensor=4
  )
  turned = lambda cfg: {
    jax.tree_util.keystr(path[-1:], simple=True)
    for path, lay in jax.tree.leaves_with_path(
      decode_params_sharding(cfg, mesh)
    )
    if isinstance(lay, Format)
  }
  assert turned(model.variant("qwen3-0.6b")) == {"q", "k", "v"}
  assert not turned(model.variant("llama3.2-1b"))  # of 64, which XLA may pad
