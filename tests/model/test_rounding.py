"""Activations are rounded at the same places in every compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from processes import python

from gspo_jax.model.exact import noinline
from gspo_jax.model.rounding import (
  matmul,
  matmul_float32,
  rounded,
  stored,
)
from gspo_jax.runtime import sharding

# Elementwise operations, compiled as one program and one by one.
COMPARE = """
import jax, jax.numpy as jnp, numpy as np
from gspo_jax import model
from gspo_jax.model import layers, rotary, rounding
rng = np.random.default_rng(0)
q = jnp.asarray(rng.standard_normal((64, 128, 4, 16)), jnp.bfloat16)
angle = jnp.asarray(rng.standard_normal((64, 128, 8)), jnp.float32)
scale = jnp.asarray(1 + 0.1 * rng.standard_normal(16), jnp.float32)
def norm_and_rotate(q, angle):
  normed = layers.rms_norm(q, scale, model.variant("tiny"))
  return rotary.rotate(normed, jnp.sin(angle), jnp.cos(angle))
whole = jax.jit(norm_and_rotate, compiler_options=rounding.OPTIONS)(q, angle)
apart = norm_and_rotate(q, angle)
print(float(jnp.mean(whole != apart)))
"""


def test_no_compiler_drops_a_rounding():
  """With XLA's default optimizations, some of which other tests turn off."""
  result = python("-c", COMPARE, check=True)
  # 29 % without `rounded`; the rest are sums in another order.
  assert float(result.stdout) < 1e-3


@pytest.mark.parametrize(
  ("function", "times"), [(jnp.sin, 2), (noinline(jnp.sin), 1)]
)
def test_what_several_operations_use_is_computed_once(function, times):
  def twice(x, y):
    by_column = function(x)[:, None]
    return (y * by_column) @ (y + by_column)

  compiled = jax.jit(twice).lower(jnp.ones(8), jnp.ones((8, 8))).compile()
  assert compiled.as_text().count(" sine(") == times


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rounds_to_the_nearest(dtype):
  x = draw(1000, dtype=np.float32)
  y = rounded(x, dtype)
  assert y.dtype == dtype
  np.testing.assert_array_equal(y, x.astype(dtype))


def draw(*shape, dtype=jnp.bfloat16, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def with_gradients(product, x, w, dy):
  """The product, and the gradients of its operands."""

  @jax.jit
  def run(x, w, dy):
    y, pull = jax.vjp(product, x, w)
    return y, *pull(dy)

  return jax.device_get(run(x, w, dy))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [1, 2])
def test_products_and_their_gradients_are_rounded_once(dtype, axes):
  """Against float64; the sums of 16-bit products are float32."""
  dtype = jnp.dtype(dtype)
  x = draw(3, 5, 4, 6, dtype=dtype)
  w = draw(*(4, 6)[2 - axes :], 2, 7, dtype=dtype, seed=1)
  dy = draw(*x.shape[: 4 - axes], 2, 7, dtype=dtype, seed=2)
  summed = np.prod(w.shape[:axes])
  x2, w2 = np.float64(x).reshape(-1, summed), np.float64(w).reshape(summed, -1)
  dy2 = np.float64(dy).reshape(len(x2), -1)
  product = lambda x, w: matmul(x, w, axes)
  for got, exact in zip(
    with_gradients(product, x, w, dy), (x2 @ w2, dy2 @ w2.T, x2.T @ dy2),
    strict=True,
  ):  # fmt: skip
    assert got.dtype == dtype
    exact = exact.reshape(got.shape)
    unit = np.spacing(np.abs(exact).astype(np.float32)) / 2
    if dtype == jnp.bfloat16:
      unit *= 2**16  # half a unit in the last place
    np.testing.assert_array_less(np.abs(np.float64(got) - exact), unit + 1e-5)


def test_logits_are_not_rounded_but_their_gradient_before_its_product():
  x, w, dy = draw(5, 6), draw(6, 7, seed=1), draw(5, 7, dtype="f4", seed=2)
  logits, dx, dw = with_gradients(matmul_float32, x, w, dy)
  assert logits.dtype == np.float32
  exact = np.float64(x) @ np.float64(w)
  np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
  x, w, dy = (np.float32(a) for a in (x, w, dy.astype(jnp.bfloat16)))
  np.testing.assert_array_equal(dx, (dy @ w.T).astype(jnp.bfloat16))
  np.testing.assert_array_equal(dw, (x.T @ dy).astype(jnp.bfloat16))


def test_products_on_a_mesh_gather_no_rows():
  """A layout is prescribed where arrays are whole: XLA gathers them for it."""
  mesh = sharding.make_mesh(data=8)
  x = jax.ShapeDtypeStruct(
    (16, 3, 8), jnp.bfloat16, sharding=sharding.batch_sharding(mesh)
  )
  w = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
  gathers, prescribes = "all-gather", "layout_constraint"
  for product in (matmul, matmul_float32):
    local = lambda x, w, product=product: sharding.shard_map(
      product,
      in_specs=(PartitionSpec(sharding.BATCH_AXES), PartitionSpec()),
      out_specs=PartitionSpec(sharding.BATCH_AXES),
    )(x, w)
    assert prescribes in str(jax.make_jaxpr(product)(x, w))  # one device
    with jax.set_mesh(mesh):
      assert gathers not in jax.jit(product).lower(x, w).compile().as_text()
      assert gathers not in jax.jit(local).lower(x, w).compile().as_text()
      assert prescribes in str(jax.make_jaxpr(local)(x, w))


def test_a_cpu_stores_slices_in_float32():
  assert stored("bfloat16") == stored("float32") == jnp.float32
