"""Activations are rounded at the same places in every compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from processes import python

from gspo_jax.model.rounding import matmul, matmul_float32, rounded, stored
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rounds_to_the_nearest(dtype):
  x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
  y = rounded(x, dtype)
  assert y.dtype == dtype
  np.testing.assert_array_equal(y, x.astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [1, 2])
def test_products_and_their_gradients_are_rounded_once(dtype, axes):
  """Against float64; the sums of 16-bit products are float32."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  x, w = draw(3, 5, 4, 6), draw(*(4, 6)[2 - axes :], 2, 7)
  y, pull = jax.vjp(lambda x, w: matmul(x, w, axes), x, w)
  dy = draw(*y.shape)
  wide = lambda a: np.asarray(a, np.float64)
  summed = np.prod(w.shape[:axes])
  x2, w2 = wide(x).reshape(-1, summed), wide(w).reshape(summed, -1)
  dy2 = wide(dy).reshape(len(x2), -1)
  for got, exact in zip(
    (y, *pull(dy)), (x2 @ w2, dy2 @ w2.T, x2.T @ dy2), strict=True
  ):
    assert got.dtype == dtype
    exact = exact.reshape(got.shape)
    unit = np.spacing(np.abs(exact).astype(np.float32)) / 2
    if dtype == "bfloat16":
      unit *= 2**16  # half a unit in the last place
    np.testing.assert_array_less(np.abs(wide(got) - exact), unit + 1e-5)


def test_logits_are_not_rounded_but_their_gradient_before_its_product():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
  x, w = draw(5, 6), draw(6, 7)
  dy = jnp.asarray(rng.standard_normal((5, 7)), jnp.float32)
  logits, pull = jax.vjp(matmul_float32, x, w)
  exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
  dx, dw = pull(dy)
  wide = lambda a: np.asarray(a, np.float32)
  rounded_dy = wide(rounded(dy, jnp.bfloat16))
  bfloat16 = lambda a: wide(rounded(jnp.asarray(a), jnp.bfloat16))
  np.testing.assert_array_equal(wide(dx), bfloat16(rounded_dy @ wide(w).T))
  np.testing.assert_array_equal(wide(dw), bfloat16(wide(x).T @ rounded_dy))


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
