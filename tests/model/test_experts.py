"""Experts in chunks: any load, on a shard and a mesh. Keys as in experts.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_oracle import random_experts, weighted_sum

from gspo_jax import model
from gspo_jax.model import experts as ep
from gspo_jax.model import grouped_matmul, lora, moe, parameters
from gspo_jax.runtime import sharding

M, D, E, F, k = 64, 8, 8, 6, 2
# The two experts of token i.
LOADS = {
  "even": lambda i: np.stack([i % E, (i + 3) % E], 1),
  "all to two experts": lambda i: np.stack([0 * i, 0 * i + 1], 1),
  "none to the first two": lambda i: np.stack([2 + i % 3, 5 + i % 3], 1),
}
every_load = pytest.mark.parametrize("load", LOADS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
  monkeypatch.setattr(ep, "_TILE", 8)


def random_layer(load):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  weights = rng.uniform(0.1, 1, (M, k)).astype(np.float32)
  experts = LOADS[load](np.arange(M)).astype(np.int32)
  return normal(M, D), weights, experts, normal(E, D, 2 * F), normal(E, F, D)


def run(x, weights, chosen, gate_up, down):
  """The experts of one device of four."""
  gate_up, down = lora.Experts(gate_up), lora.Experts(down)
  return ep.apply(x, weights, chosen, gate_up, down, num_shards=4)


COTANGENT = np.random.default_rng(1).normal(size=(M, D)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=5)
@functools.partial(jax.grad, argnums=range(4), has_aux=True)
def chunked(x, weights, gate_up, down, chosen, limit):
  y, num_rows = ep.apply(
    x, weights, chosen, gate_up, down, num_shards=4, limit=limit
  )
  return (y * COTANGENT).sum(), (y, num_rows)


@every_load
@pytest.mark.parametrize("first", [0, 2, 6])
@pytest.mark.parametrize(
  ("limit", "adapters"),
  [(None, False), (1.5, True)],
  ids=["plain", "clamped, biases, adapters"],
)
def test_a_shard_and_its_gradient_equal_a_loop(load, first, limit, adapters):
  """Two experts of eight: one chunk, several, or no row at all."""
  x, weights, chosen, *_ = random_layer(load)
  kinds, rng = (adapters, limit is not None), np.random.default_rng(2)
  gate_up = random_experts(rng, 2, D, 2 * F, *kinds)
  down = random_experts(rng, 2, F, D, *kinds)
  inputs = gate_up, down, chosen - first, limit
  grads, (y, num_rows) = chunked(x, weights, *inputs)
  inputs = x, weights, chosen - first, gate_up, down, limit, COTANGENT
  expected_y, expected, pairs = weighted_sum(*inputs)
  assert num_rows == pairs
  actual, expected = (y, grads), (expected_y, expected)
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5 * max(np.abs(b).max(), 1))


def test_total_skew_takes_several_chunks(monkeypatch):
  """The mean load is 64 * 2 / 4 = 32 rows."""
  # Does not pad rows.
  monkeypatch.setattr(grouped_matmul, "matmul", jax.lax.ragged_dot)
  x, weights, chosen, gate_up, down = random_layer("all to two experts")
  text = str(jax.make_jaxpr(run)(x, weights, chosen, gate_up[:2], down[:2]))
  assert f"f32[40,{2 * F}]" in text  # 1.25 * 32 rows of gates and ups
  assert "f32[128," not in text  # never the worst case


CFG = model.variant(
  "tiny", embed_dim=D, mlp_dim=F, num_experts=E, dtype="float32"
)
# As gpt-oss, with adapters.
BIASED = dataclasses.replace(
  CFG,
  expert_bias=True,
  swiglu_limit=1.5,
  lora=model.LoraConfig(rank=3, alpha=5.0, targets="mlp"),
)
MESHES = {
  "expert 2, tensor 2, fsdp 2": {"expert": 2, "tensor": 2, "fsdp": 2},
  "data 2, expert 4": {"data": 2, "expert": 4},
  "fsdp 8": {"fsdp": 8},
}


@functools.cache
def compiled(cfg, mesh, few=None):
  """Output, routing and gradients of the layer, on a mesh or on one device."""

  def loss(params, x, cotangent, real):
    y, routing = moe.sparse_mlp(x, parameters.weights(params, cfg), cfg, real)
    return (y * cotangent).sum(), (y, routing)

  run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
  if mesh is None:
    return run
  mesh = sharding.make_mesh(**MESHES[mesh])

  def on_mesh(*args):
    with jax.set_mesh(mesh):
      return run(*args)

  return on_mesh


@pytest.mark.parametrize("skew", [0, 30], ids=["even", "all to expert 5"])
@pytest.mark.parametrize(
  ("mesh", "cfg", "few"),
  [*((mesh, CFG, moe._FEW_BYTES) for mesh in MESHES),
   pytest.param(next(iter(MESHES)), BIASED, 0,
    id="tokens gathered apart, biases, adapters")],
)  # fmt: skip
def test_the_layer_on_a_mesh_equals_the_layer_on_one_device(
  mesh, cfg, few, skew, monkeypatch
):
  monkeypatch.setattr(moe, "_FEW_BYTES", few)
  x_MD, _, _, gate_up, down = random_layer("even")
  rng = np.random.default_rng(2)
  router = rng.normal(size=(D, E)).astype(np.float32)
  x_MD[:, 0], router[0, 5] = 1, skew
  params = {"router": router, "gate_up": gate_up, "down": down}
  if cfg.expert_bias:
    shapes = parameters.shapes(cfg)["layers"]["moe"]
    draw = lambda x: rng.normal(size=x.shape[1:]).astype(np.float32)
    params = {name: draw(x) for name, x in shapes.items()} | params
  cotangent, real = rng.normal(size=(16, 4, D)), rng.random((16, 4)) < 0.8
  inputs = params, x_MD.reshape(16, 4, D), cotangent, real
  grads, (y, routing) = jax.device_get(compiled(cfg, None)(*inputs))
  grads8, (y8, routing8) = jax.device_get(compiled(cfg, mesh, few)(*inputs))
  np.testing.assert_array_equal(routing.experts, routing8.experts)
  assert (routing.experts == 5).any(-1).all() == bool(skew)
  assert routing.dropped == routing8.dropped == 0
  assert not y8[~real].any()
  np.testing.assert_allclose(y, y8, atol=3e-5)
  for a, b in zip(*map(jax.tree.leaves, (grads, grads8)), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5 * max(np.abs(a).max(), 10))


def test_rows_beyond_the_groups_are_never_used(monkeypatch):
  """They are zeros on a CPU and undefined on a TPU."""
  plain, rng = grouped_matmul.matmul, np.random.default_rng(2)
  gate_up = random_experts(rng, 2, D, 2 * F, bias=True)
  down = random_experts(rng, 2, F, D, bias=True)

  def with_nan(rows, sizes):
    beyond = jnp.arange(len(rows))[:, None] >= sizes.sum()
    return jnp.where(beyond, jnp.nan, rows)

  @jax.custom_vjp
  def with_garbage(rows, weights, sizes):
    return with_nan(plain(rows, weights, sizes), sizes)

  def backward(operands, dy):
    rows, weights, sizes = operands
    _, pull = jax.vjp(lambda *a: plain(*a, sizes), rows, weights)
    drows, dweights = pull(dy)
    return with_nan(drows, sizes), dweights, None

  with_garbage.defvjp(lambda *a: (with_garbage(*a), a), backward)

  def results():
    gradient = jax.jit(functools.partial(chunked.__wrapped__, limit=1.5))
    return [
      gradient(x, weights, gate_up, down, chosen - 2)
      for x, weights, chosen, *_ in map(random_layer, LOADS)
    ]

  clean = results()
  monkeypatch.setattr(grouped_matmul, "matmul", with_garbage)
  jax.tree.map(np.testing.assert_array_equal, results(), clean)


def test_dropped_rows_are_counted(monkeypatch):
  """With a loop that stops after its first chunk."""
  once = lambda more, body, state: body(state)
  monkeypatch.setattr(jax.lax, "while_loop", once)
  x_MD, _, _, gate_up, down = random_layer("even")
  router = np.zeros((D, E), np.float32)
  router[0, :2] = x_MD[:, 0] = 5  # all to the first two experts
  params = {"router": router, "gate_up": gate_up, "down": down}
  with jax.set_mesh(sharding.make_mesh(data=2, expert=4)):
    layer = jax.jit(moe.sparse_mlp, static_argnums=2)
    all_real = np.ones((16, 4), bool)
    _, routing = layer(x_MD.reshape(16, 4, D), params, CFG, all_real)
  # Two groups of 32 tokens: of 64 rows each, a chunk takes 24.
  assert routing.dropped == 2 * (64 - 24)
