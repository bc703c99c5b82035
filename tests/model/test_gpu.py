"""The kernels of a GPU, interpreted on a CPU."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from gspo_jax.model import (
  attention,
  experts,
  gpu,
  grouped_matmul,
  lora,
  paged_attention,
)

tokamax = pytest.importorskip("tokamax", reason="needs the extra `gpu`")
from tokamax._src.ops.attention import pallas_triton_vjp  # noqa: E402


def interpret(kernel, *args, **keywords):
  """`pl.pallas_call` on a CPU, which knows no `program_id` within loops."""
  grid = keywords.get("grid") or keywords["grid_spec"].grid

  @functools.wraps(kernel)
  def with_ids(*refs):
    ids = [program_id(axis) for axis in range(len(grid))]

    def known(axis):
      if axis >= len(ids):
        raise ValueError("no such axis")
      return ids[axis]

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(pl, "program_id", known)
      kernel(*refs)

  keywords["interpret"] = True
  return pallas_call(with_ids, *args, **keywords)


pallas_call, program_id = pl.pallas_call, pl.program_id


@pytest.fixture
def interpreted(monkeypatch):
  """Triton kernels run on this CPU, and `gpu` takes it for a GPU."""
  monkeypatch.setattr(pl, "pallas_call", interpret)
  # Interpreted, a mask of bits is read as numbers.
  where = lambda mask, *values: jnp.where(mask != 0, *values)
  with_where = SimpleNamespace(**vars(jnp) | {"where": where})
  monkeypatch.setattr(pallas_triton_vjp, "jnp", with_where)
  monkeypatch.setattr(gpu, "has_kernels", lambda: True)
  monkeypatch.setattr(gpu, "_capability", lambda: 8.0)
  with tokamax.config.cross_compile(True):
    yield


def normal(seed, *shape, dtype=jnp.bfloat16):
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def wide(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def assert_close(found, exact, part):
  """Up to this part of the largest number."""
  for a, b in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
    assert np.abs(np.float32(a) - b).max() < part * np.abs(b).max()


@pytest.mark.parametrize(
  ("capability", "dtype", "H", "options", "by_kernel"),
  [
    (8.9, "bfloat16", 128, {}, True),
    (8.9, "bfloat16", 160, {}, False),  # no room in shared memory
    (12.0, "bfloat16", 256, {}, False),
    (8.0, "bfloat16", 256, {"window": 5}, True),
    (9.0, "float32", 64, {}, False),
    (9.0, "bfloat16", 64, {"sinks_N": jnp.zeros(4)}, False),
    (7.5, "bfloat16", 64, {}, False),
  ],
)
def test_attention_by_compute_capability(
  capability, dtype, H, options, by_kernel, monkeypatch
):
  monkeypatch.setattr(attention.sharding, "platform", lambda: "gpu")
  monkeypatch.setattr(gpu, "_capability", lambda: capability)
  monkeypatch.setattr(gpu, "attend", lambda *operands: "kernel")
  monkeypatch.setattr(attention, "checkpoint_name", lambda x, name: x)
  q, segments = normal(0, 1, 8, 4, H, dtype=dtype), jnp.zeros((1, 8), int)
  out = attention.attend(q, q, q, segments, **options)
  assert isinstance(out, str) == by_kernel


def test_a_t4_multiplies_only_by_the_matrix_of_a_row(monkeypatch):
  monkeypatch.setattr(attention.sharding, "platform", lambda: "gpu")
  monkeypatch.setattr(gpu, "_capability", lambda: 7.5)
  operands = normal(0, 8, 4), normal(1, 3, 4, 4), jnp.array([4, 0, 4])
  jaxpr = str(jax.make_jaxpr(grouped_matmul.matmul)(*operands))
  assert "ragged_dot" not in jaxpr


def passes(function, inputs, dy):
  """The output and the gradients, compiled."""

  def both(dy):
    y, pull = jax.vjp(function, *inputs)
    return y, pull(dy)

  return jax.jit(both)(dy)


@pytest.mark.parametrize(
  ("T", "K", "H", "V", "window"),
  [(96, 4, 32, 32, 20), (70, 1, 48, 32, None)],
)
@pytest.mark.usefixtures("interpreted")
def test_flash_is_attention_within_segments(T, K, H, V, window):
  q, k, v = normal(0, 2, T, 4, H), normal(1, 2, T, K, H), normal(2, 2, T, K, V)
  dout = normal(3, 2, T, 4, V)
  segments = np.array([[0] * 30 + [1] * 5 + [2] * (T - 35), [7] * T])
  exact = lambda q, k, v: attention.in_blocks(q, k, v, segments, window)
  ours = lambda q, k, v: attention.attend(q, k, v, segments, window=window)
  (got, dgot), (want, dwant) = (
    passes(ours, (q, k, v), dout),
    wide(passes(exact, wide((q, k, v)), wide(dout))),
  )
  assert np.abs(got - want).max() < 0.02
  assert_close(dgot, dwant, 0.02)


@pytest.mark.usefixtures("interpreted")
def test_grouped_matmul_with_empty_groups_and_adapters():
  sizes = np.array([0, 20, 0, 1, 37, 0], np.int32)  # of 70 rows
  e, A, D, F = len(sizes), 70, 32, 48
  inputs = normal(0, A, D), normal(1, e, D, F), normal(3, e, D, 4)
  inputs = *inputs, normal(4, e, 4, F)
  real = np.arange(A) < sizes.sum()
  group = np.repeat(np.arange(e + 1), [*sizes, A - sizes.sum()])
  dy = np.where(real[:, None], wide(normal(2, A, F)), 0)

  def ours(x, weights, a, b):
    y = lora.grouped_product(x, lora.Experts(weights, a, b), sizes)
    return jnp.where(real[:, None], y.astype(jnp.float32), 0)

  def exact(x, weights, a, b):
    matrices = (weights + a @ b)[np.minimum(group, e - 1)]
    return jnp.where(real[:, None], jnp.einsum("ad,adf->af", x, matrices), 0)

  got, (dx, *dgot) = jax.device_get(passes(ours, inputs, dy))
  want, (dx_exact, *dwant) = wide(passes(exact, wide(inputs), dy))
  # Beyond the groups that of x is undefined.
  found, expected = (got, dx[real], dgot), (want, dx_exact[real], dwant)
  assert_close(found, expected, 0.02)
  assert not dgot[0][[0, 2, 5]].any()  # of empty groups


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [3, 256])
def test_paged_attention_in_splits_and_whole(rows, monkeypatch):
  K, n, t, H, W = 2, 9, 16, 32, 5
  q, k, v = normal(0, 3, 1, 4, H), normal(1, K, n, t, H), normal(2, K, n, t, H)
  table = np.random.default_rng(3).integers(0, n, (3, W)).astype(np.int32)
  lengths = np.array([1, 37, 80], np.int32)
  monkeypatch.setattr(paged_attention, "_GPU_PROGRAMS", 6 if rows > 3 else 256)
  got = jax.jit(lambda *x: paged_attention.read(*x))(q, k, v, table, lengths)
  inputs = *wide((q.reshape(3, K, 2, H), k, v)), table, lengths
  want = jax.jit(paged_attention.by_blocks)(*inputs, H**-0.5)
  assert np.abs(np.float32(got) - want.reshape(got.shape)).max() < 0.02


def test_experts_add_their_rows_in_one_order(monkeypatch):
  """The sum of a scatter on a GPU depends on the order in which rows end."""
  M, k, e, D, F = 40, 3, 4, 16, 8
  x, weights = normal(0, M, D), np.exp(normal(1, M, k))
  weights = (weights / weights.sum(1, keepdims=True)).astype(jnp.bfloat16)
  chosen = np.random.default_rng(2).integers(0, 2 * e, (M, k))
  gate_up, down = normal(3, e, D, 2 * F), normal(4, e, F, D)
  inputs, dy = (x, weights, gate_up, down), normal(5, M, D)

  def run(x, weights, gate_up, down):
    matrices = lora.Experts(gate_up), lora.Experts(down)
    return experts.apply(x, weights, chosen, *matrices, num_shards=2)[0]

  want = wide(passes(lambda *x: run(*x), inputs, dy))
  monkeypatch.setattr(experts.sharding, "platform", lambda: "gpu")
  monkeypatch.setattr(gpu, "_capability", lambda: 7.5)
  jaxpr = str(jax.make_jaxpr(run)(*inputs))
  assert not re.search(r":b?f\d+\[[\d,]*\] = scatter-add", jaxpr)
  assert_close(passes(run, inputs, dy), want, 0.03)
