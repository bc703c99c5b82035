"""The decoder: a mesh, and what it computes again."""

import dataclasses
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import random_routes, weights

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.runtime import sharding

B, T = 3, 9
STARTS = np.array([0, 2, 5])  # left padding of each row
# A large epsilon, so that a misplaced one has an effect.
DENSE = dataclasses.replace(families.DENSE, tie_embeddings=True, norm_eps=0.05)
MOE = dataclasses.replace(families.MOE, norm_eps=0.05)
jitted = jax.jit(model.forward, static_argnums=1)


def batch(seed=0):
  """Tokens, positions and mask of rows padded on the left."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, DENSE.vocab_size, (B, T))
  mask = np.arange(T) >= STARTS[:, None]
  positions = np.maximum(np.arange(T) - STARTS[:, None], 0)
  return tokens.astype(np.int32), positions.astype(np.int32), mask


def forward(cfg, tokens, positions, mask):
  """Output in NumPy; compiled once for bool and int masks."""
  mask = np.asarray(mask, np.int32)
  out = jitted(weights(cfg), cfg, tokens, positions, mask)
  return jax.device_get(out)


def test_a_model_on_a_mesh_equals_one_device():
  """With the heads of a bias and of a norm split, and replay."""
  cfg = dataclasses.replace(
    DENSE,
    num_layers=1,
    vocab_size=24,
    qk_norm_over_heads=True,
    attention_bias=True,
    num_experts=8,
    experts_per_token=2,
  )
  rng = np.random.default_rng(8)
  tokens = rng.integers(0, 24, (8, T)).astype(np.int32)
  mask = np.arange(T) >= rng.integers(0, 4, (8, 1))
  routes = random_routes(8, 2, cfg.num_layers, 8, T)
  cotangent = rng.normal(size=(8, T, 24))

  def loss(params):
    out = model.hidden_states(
      params, cfg, tokens, mask.cumsum(1), mask, routes=routes, replay=True
    )
    hidden = jnp.where(mask[..., None], out.hidden, 0)
    logits = model.unembed(params, cfg, hidden)
    return (logits * cotangent).sum(), (logits, out.routing)

  run = lambda p: jax.jit(jax.grad(loss, has_aux=True))(p)
  expected = jax.device_get(run(weights(cfg)))
  mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
  with jax.set_mesh(mesh):
    params = jax.device_put(weights(cfg), model.shardings(weights(cfg), mesh))
    actual = jax.device_get(run(params))
  for name, x in params["layers"]["attention"].items():
    if name.endswith("bias"):
      assert x.sharding.shard_shape(x.shape)[1:] == (x.shape[1] // 2, 3)
  np.testing.assert_array_equal(actual[1][1].experts, routes)
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5 * max(np.abs(b).max(), 1))


def test_impossible_routes_are_refused():
  routes = random_routes(5, 2, MOE.num_layers, B, T)
  cache = kv.empty(MOE, B, T)
  encode = functools.partial(model.hidden_states, weights(MOE), MOE, *batch())
  with pytest.raises(ValueError, match="replay=True needs routes"):
    encode(replay=True)
  with pytest.raises(ValueError, match="with a cache: expected None"):
    encode(cache, routes=routes)


@functools.cache
def backward_operations(remat):
  """The number of operations of the backward pass, on two devices an axis."""
  cfg = model.variant("tiny", dtype="float32", remat=remat, unroll=1)
  params = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
  tokens = np.ones((4, 8), np.int32)
  loss = lambda p: model.hidden_states(
    p, cfg, tokens, tokens, tokens
  ).hidden.sum()
  with jax.set_mesh(sharding.make_mesh(fsdp=2, expert=2, tensor=2)):
    return str(jax.make_jaxpr(jax.grad(loss))(params)).count(" = ")


@pytest.mark.parametrize("name", model.KEPT)
def test_what_a_block_keeps_is_not_computed_again(name):
  """On a TPU "attention" is kept inside the kernel, too."""
  assert backward_operations(name) < backward_operations("full")


def test_bf16_is_close_and_its_logits_are_float32():
  low = dataclasses.replace(DENSE, dtype="bfloat16")
  *_, mask = inputs = batch()
  exact = forward(DENSE, *inputs).logits[mask]
  rough = forward(low, *inputs).logits[mask]
  assert rough.dtype == jnp.float32
  gap = np.abs(exact - rough)
  assert 0 < gap.mean() < 0.02
  # Logits rounded to bf16 would have no bits below these.
  assert (rough != rough.astype(jnp.bfloat16)).any()


@pytest.mark.parametrize(
  ("platform", "layers", "unroll", "scans"),
  [("cpu", 2, None, 0), ("cpu", 9, None, 1), ("tpu", 2, None, 1),
   ("cpu", 2, 1, 1), ("tpu", 2, 2, 0)],
)  # fmt: skip
def test_a_small_model_on_a_cpu_has_no_scan_over_layers(
  platform, layers, unroll, scans, monkeypatch
):
  cfg = dataclasses.replace(DENSE, num_layers=layers, unroll=unroll)
  params = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  run = lambda params: model.hidden_states(params, cfg, *batch()).hidden
  assert str(jax.make_jaxpr(run)(params)).count(" scan[") == scans


def test_init_scales_by_the_inputs_that_are_summed():
  cfg = model.variant("tiny", num_kv_heads=2, num_layers=3)
  key = jax.random.key(0, impl="rbg")  # compiles in half the time
  params = jax.device_get(jax.jit(model.init, static_argnums=1)(key, cfg))
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
  layers, D = params["layers"], cfg.embed_dim
  attended = cfg.num_heads * cfg.head_dim
  fans = [
    (params["embed"], D),
    (params["head"], D),
    *((layers["attention"][name], D) for name in "qkv"),
    (layers["attention"]["o"], attended),
    (layers["moe"]["router"], D),
    (layers["moe"]["gate_up"], D),
    (layers["moe"]["down"], cfg.mlp_dim),
  ]
  for x, fan in fans:
    assert float(x.std()) * fan**0.5 == pytest.approx(1, rel=0.08)
  for scale in (layers["attention"]["q_norm"], params["final_norm"]):
    assert (scale["scale"] == 1).all()
  q = layers["attention"]["q"]
  assert not (q[0] == q[1]).any()  # another random key for every layer


def test_unstacked_layers_are_the_stack_in_the_models_dtype():
  low = dataclasses.replace(MOE, dtype="bfloat16")
  params = jax.jit(model.unstack_layers, static_argnums=1)(weights(MOE), low)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  for i, layer in enumerate(params["layers"]):
    down = weights(MOE)["layers"]["moe"]["down"][i]
    np.testing.assert_allclose(layer["moe"]["down"], down, rtol=1e-2)
