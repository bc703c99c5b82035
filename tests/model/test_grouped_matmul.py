"""Grouped matmul: each row times the matrix of its group, in both forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_oracle import random_experts, weighted_sum
from processes import python

from gspo_jax.model import grouped_matmul, moe

D, F = 8, 6
LOADS = {
  "even": (75, 75, 75, 75),
  "ragged": (1, 0, 170, 129),
  "none beyond": (0, 0, 0, 300),
  "rows beyond": (64, 0, 65, 31),
  "nothing": (0, 0, 0, 0),
}


def by_row(x, weights, sizes, dy):
  """In NumPy: the products of rows in groups, and gradients of operands."""
  group = np.repeat(np.arange(len(sizes)), sizes)
  x, dy = x[: len(group)], dy[: len(group)]
  dw = np.zeros_like(weights)
  np.add.at(dw, group, np.einsum("rd,rf->rdf", x, dy))
  y = np.einsum("rd,rdf->rf", x, weights[group])
  return y, np.einsum("rf,rdf->rd", dy, weights[group]), dw


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(form, x, weights, sizes, dy):
  y, pull = jax.vjp(lambda x, w: form(x, w, sizes), x, weights)
  return y, *pull(dy)


in_blocks = grouped_matmul.in_blocks
again_in_blocks = jax.checkpoint(grouped_matmul.in_blocks)
small = np.random.default_rng(0).multinomial


@pytest.mark.parametrize(
  ("form", "rows", "widths", "sizes"),
  [
    *((in_blocks, 300, (D, F), sizes) for sizes in LOADS.values()),
    # On a CPU the tiles are an attribute that nothing reads.
    *(
      (grouped_matmul.in_tiles, 384, (128, 256), sizes)
      for sizes in LOADS.values()
    ),
    # Blocks of 8 and more rows, empty groups.
    *(
      (again_in_blocks, rows, (D, F), small(rows - 2, np.ones(32) / 32))
      for rows in (6, 1000)
    ),
  ],
)
def test_each_row_is_multiplied_by_the_matrix_of_its_group(
  form, rows, widths, sizes
):
  """Gradients, too; rows beyond the groups are undefined and have none."""
  rng, (D, F), n = np.random.default_rng(1), widths, sum(sizes)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  x, weights, dy = normal(rows, D), normal(len(sizes), D, F), normal(rows, F)
  dy[n:] = 0
  y, dx, dw = with_gradients(form, x, weights, np.array(sizes), dy)
  tiled = form is grouped_matmul.in_tiles
  assert tiled or not dx[n:].any()
  expected = by_row(x, weights, sizes, dy)
  limits = (1e-4,) * 3 if tiled else (1e-5, 1e-5, 1e-4)
  for a, b, atol in zip((y[:n], dx[:n], dw), expected, limits, strict=True):
    np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize("rows", [384, 64, 300])
def test_tiles_divide_the_rows(rows):
  """libtpu compiles no others: `expecting m % mt == 0, got: 64 % 128`."""
  inputs = (
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (
      ((rows, 128), jnp.float32),
      ((4, 128, 256), jnp.float32),
      ((4,), jnp.int32),
    )
  )
  text = jax.jit(grouped_matmul.in_tiles).lower(*inputs).as_text()
  tiled = 'ragged_dot_tiling = "128,128,256"' in text
  assert tiled == (rows % 128 == 0)


TILES = """
import jax, jax.numpy as jnp, numpy as np
from gspo_jax.model import grouped_matmul
from gspo_jax.plan import chips, compile
from gspo_jax.plan.hlo.module import parse
from gspo_jax.runtime import sharding
compile.prepare()
where = chips.parse("{topology}")
mesh = sharding.make_mesh(compile.devices(where, 1), data=-1)
def product(x, w, sizes, dy):
  y, pull = jax.vjp(lambda x, w: grouped_matmul.matmul(x, w, sizes), x, w)
  return y, pull(dy)
def local(*args):
  whole = jax.sharding.PartitionSpec()
  return sharding.shard_map(product, in_specs=whole, out_specs=whole)(*args)
E = 32
with jax.set_mesh(mesh):
  for R, K, N in (
    *((174080, 2048, 1536), (174080, 768, 2048)),
    *((64, 2048, 1536), (16, 768, 2048)),
    *((10240, 2880, 5760), (10240, 2880, 2880)),
  ):
    shapes = (R, K), (E, K, N), (E,), (R, N)
    inputs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    inputs[2] = jax.ShapeDtypeStruct((E,), jnp.int32)
    module = parse(compile.compile_one(jax.jit(local).lower(*inputs)).text)
    for computation in module.computations.values():
      for i in computation:
        tiling = i.find(r'ragged_dot_tiling="([\\d,]+)"')
        if R > 64 and tiling and i.op == "custom-call":
          print(i.arrays[0].dims, tiling)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("topology", "down", "transposed"),
  [("v5p:2x2x1", 1024, 384), ("v5e:2x2", 2048, 768)],
)
def test_tiles_of_products_divide_their_widths(topology, down, transposed):
  """Of Qwen3-30B-A3B's and gpt-oss's experts, of many rows and of few."""
  pytest.importorskip("libtpu")
  script = TILES.replace("{topology}", topology)
  out = python("-c", script, check=True).stdout
  assert sorted(out.splitlines()) == [
    *["(10240, 2880) 128,2880,512"] * 2,
    "(10240, 2880) 128,5760,256",
    "(10240, 5760) 128,2880,384",
    "(174080, 1536) 128,2048,768",
    "(174080, 2048) 128,1536,1024",
    f"(174080, 2048) 128,768,{down}",
    f"(174080, 768) 128,2048,{transposed}",
    "(32, 2048, 1536) 128,1024,768",
    "(32, 2880, 2880) 128,2880,256",
    "(32, 2880, 5760) 128,2880,256",
    "(32, 768, 2048) 128,768,1024",
  ]


@pytest.mark.parametrize(
  ("rows", "groups"), [(4096, 1), (4096, 16), (4096, 256), (64, 16)]
)
def test_work_does_not_grow_with_the_groups(rows, groups):
  """At most twice the rows are multiplied, in decoding (64 rows), too."""
  sizes = jnp.full(groups, rows // groups, jnp.int32)
  blocks = jax.jit(grouped_matmul._blocks, static_argnums=0)(rows, sizes)
  assert rows <= blocks.count * blocks.size <= 2 * rows
  assert blocks.count <= len(blocks.group_n)


def test_bfloat16_gradients_are_summed_over_blocks_in_float32():
  ones = jnp.ones((2**16, 1), jnp.bfloat16)  # rows of one group
  loss = lambda w: grouped_matmul.in_blocks(
    ones, w, jnp.array([len(ones)])
  ).sum()
  dw = jax.jit(jax.grad(loss))(jnp.ones((1, 1, 1), jnp.bfloat16))
  assert dw.dtype == jnp.bfloat16
  assert dw.item() == len(ones)  # 2**16 in steps of 64 stops at 2**14


def test_gradients_of_biases_are_summed_over_rows_in_float32():
  """In bfloat16 2**16 in steps of 1 would stop at 2**8."""
  dtype = jnp.bfloat16
  rows, experts = jnp.ones((2**16, 1), dtype), np.zeros((2**16, 1), int)
  matrix, bias = jnp.ones((1, 1, 2), dtype), jnp.zeros((1, 2), dtype)

  def in_blocks(biases):
    weights, down = rows.astype("float32"), matrix[..., :1]
    y, _ = grouped_matmul.swiglu_in_blocks(
      rows, weights, experts, matrix, down, biases
    )
    return y.sum(dtype=jnp.float32)

  def by_product(bias):
    return grouped_matmul.bias_of_rows(bias, jnp.array([2**16]), 2**16).sum()

  dgate_up, ddown = jax.jit(jax.grad(in_blocks))((bias, bias[:, :1]))
  sigmoid = 1 / (1 + np.exp(-1))  # of silu: its derivative at 1
  slopes = np.array([sigmoid * (2 - sigmoid), sigmoid])
  np.testing.assert_allclose(dgate_up[0], 2**16 * slopes, rtol=1e-2)
  assert ddown.item() == 2**16
  assert (jax.jit(jax.grad(by_product))(bias) == 2**16).all()


@pytest.mark.parametrize("limit", [None, 1.1], ids=["plain", "clamped, biases"])
@pytest.mark.parametrize(
  ("experts", "dtype"), [(3, "float32"), (32, "bfloat16")]
)
def test_both_ways_of_experts_equal_a_loop(experts, dtype, limit, monkeypatch):
  """Values and gradients of a CPU's way and the other; some have no expert."""
  monkeypatch.setattr(grouped_matmul, "_MAX_EXPERT_BLOCK", 32)
  M, k, biases = 100, 2, limit is not None
  rng = np.random.default_rng(experts)
  chosen = rng.permuted(np.tile(np.arange(experts), (M, 1)), axis=1)[:, :k]
  chosen[::7] = experts
  weights = np.float32(np.abs(rng.normal(size=(M, k))))
  weights = np.where(chosen < experts, weights, 0)
  quarters = lambda x: jnp.asarray(np.clip(np.rint(4 * x), -4, 4) / 4, dtype)
  x = quarters(rng.normal(size=(M, D)))
  gate_up = random_experts(rng, experts, D, 2 * F, bias=biases)
  gate_up = jax.tree.map(quarters, gate_up)
  down = random_experts(rng, experts, F, D, bias=biases)
  down = jax.tree.map(lambda x: jnp.asarray(x, dtype), down)
  cotangent = np.float32(rng.normal(size=(M, D)))

  def fused(x, weights, gate_up, down):
    pair = (gate_up.bias, down.bias) if biases else None
    inputs = x, weights, chosen, gate_up.weight, down.weight, pair, limit
    return grouped_matmul.swiglu_in_blocks(*inputs)

  def sorted_by_expert(x, weights, gate_up, down):
    return moe.dispatch(x, weights, chosen, gate_up, down, limit)

  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
  inputs = x, weights, gate_up, down
  expected_y, expected, pairs = weighted_sum(
    x, weights, chosen, gate_up, down, limit, cotangent
  )
  for function in fused, sorted_by_expert:

    def loss(*inputs, function=function):
      y, num_rows = function(*inputs)
      return (y * cotangent).sum(), (y, num_rows)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    actual, (y, num_rows) = grad(*inputs)
    assert num_rows == pairs == (chosen < experts).sum()
    assert y.dtype == dtype
    assert dtypes(actual) == dtypes(inputs)
    results = (y, actual), (expected_y, expected)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
      close = {"float32": 2e-6, "bfloat16": 2e-2}[dtype]
      scale = max(np.abs(b).max(), 1)
      np.testing.assert_allclose(np.float32(a), b, atol=close * scale)
