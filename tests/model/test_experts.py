"""Experts in chunks: exact for any load, on one shard and on a mesh.

Dimension key: as in gspo_jax/model/experts.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.model import experts as ep
from gspo_jax.model import grouped_matmul, lora
from gspo_jax.model.moe import MoE
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


def chunked(x, weights, gate_up, down, chosen):
  y, num_rows = ep.apply(x, weights, chosen, gate_up, down, num_shards=4)
  return (y * COTANGENT).sum(), (y, num_rows)


def dense(x, weights, gate_up, down, chosen):
  """Every expert on every token."""
  gate_up, down = (
    p.weight if p.a is None else p.weight + p.a @ p.b for p in (gate_up, down)
  )
  gate, up = jnp.split(jnp.einsum("md,edf->mef", x, gate_up), 2, -1)
  each = jnp.einsum("mef,efd->med", jax.nn.silu(gate) * up, down)
  one_hot = jax.nn.one_hot(chosen, len(down))  # zeros for other devices
  share = (one_hot * weights[..., None]).sum(1)
  y = jnp.einsum("med,me->md", each, share)
  return (y * COTANGENT).sum(), (y, one_hot.sum().astype(int))


GRADIENTS = [
  jax.jit(jax.grad(f, argnums=range(4), has_aux=True)) for f in (chunked, dense)
]


@every_load
@pytest.mark.parametrize("first", [0, 2, 6])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_shard_and_its_gradient_equal_the_dense_sum(load, first, adapters):
  """Two experts of eight: one chunk, several, or no row at all."""
  x, weights, chosen, *matrices = random_layer(load)
  projections = [lora.Experts(w[first : first + 2]) for w in matrices]
  if adapters:
    rng = np.random.default_rng(2)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    projections = [
      lora.Experts(w, normal(2, w.shape[1], 3), normal(2, 3, w.shape[2]))
      for w, _, _ in projections
    ]
  inputs = x, weights, *projections, chosen - first
  actual, expected = (gradient(*inputs) for gradient in GRADIENTS)
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
MESHES = {
  "expert 2, tensor 2, fsdp 2": {"expert": 2, "tensor": 2, "fsdp": 2},
  "data 2, expert 4": {"data": 2, "expert": 4},
  "fsdp 8": {"fsdp": 8},
}


@functools.cache
def compiled(mesh):
  """Output, routing and gradients of the layer, on a mesh or on one device."""

  def loss(params, x, cotangent, real):
    y, routing = MoE(CFG).apply({"params": params}, x, real)
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
@pytest.mark.parametrize("mesh", MESHES)
def test_the_layer_on_a_mesh_equals_the_layer_on_one_device(mesh, skew):
  x_MD, _, _, gate_up, down = random_layer("even")
  rng = np.random.default_rng(2)
  router = rng.normal(size=(D, E)).astype(np.float32)
  x_MD[:, 0], router[0, 5] = 1, skew
  params = {"router": router, "gate_up": gate_up, "down": down}
  cotangent, real = rng.normal(size=(16, 4, D)), rng.random((16, 4)) < 0.8
  inputs = params, x_MD.reshape(16, 4, D), cotangent, real
  grads, (y, routing) = jax.device_get(compiled(None)(*inputs))
  grads8, (y8, routing8) = jax.device_get(compiled(mesh)(*inputs))
  np.testing.assert_array_equal(routing.experts, routing8.experts)
  assert (routing.experts == 5).any(-1).all() == bool(skew)
  assert routing.dropped == routing8.dropped == 0
  assert not y8[~real].any()
  np.testing.assert_allclose(y, y8, atol=3e-5)
  close = functools.partial(np.testing.assert_allclose, atol=3e-4, rtol=1e-5)
  jax.tree.map(close, grads, grads8)


def test_rows_beyond_the_groups_are_never_used(monkeypatch):
  """They are zeros on a CPU and undefined on a TPU."""
  plain = grouped_matmul.matmul

  def with_garbage(rows, weights, sizes):
    beyond = jnp.arange(len(rows))[:, None] >= sizes.sum()
    return jnp.where(beyond, 1e4, plain(rows, weights, sizes))

  def compiled():
    loss = lambda *a: run(*a[:2], a[4], *a[2:4])[0].sum()
    return jax.jit(jax.value_and_grad(loss, argnums=range(4)))

  def results(gradient):
    inputs = map(random_layer, LOADS)
    return [
      gradient(x, weights, gate_up[2:4], down[2:4], chosen - 2)
      for x, weights, chosen, gate_up, down in inputs
    ]

  clean = results(compiled())
  monkeypatch.setattr(grouped_matmul, "matmul", with_garbage)
  jax.tree.map(np.testing.assert_array_equal, results(compiled()), clean)


def test_dropped_rows_are_counted(monkeypatch):
  """With a loop that stops after its first chunk."""
  once = lambda more, body, state: body(state)
  monkeypatch.setattr(jax.lax, "while_loop", once)
  x_MD, _, _, gate_up, down = random_layer("even")
  router = np.zeros((D, E), np.float32)
  router[0, :2] = x_MD[:, 0] = 5  # all to the first two experts
  params = {"router": router, "gate_up": gate_up, "down": down}
  with jax.set_mesh(sharding.make_mesh(data=2, expert=4)):
    layer = jax.jit(MoE(CFG).apply)
    all_real = np.ones((16, 4), bool)
    _, routing = layer({"params": params}, x_MD.reshape(16, 4, D), all_real)
  # Two groups of 32 tokens: of 64 rows each, a chunk takes 24.
  assert routing.dropped == 2 * (64 - 24)
