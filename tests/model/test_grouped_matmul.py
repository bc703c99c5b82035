"""Grouped matmul: each row times the matrix of its group, whatever the form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.model import grouped_matmul

R, D, F = 300, 8, 6
LOADS = {
  "even": (75, 75, 75, 75),
  "ragged": (1, 0, 170, 129),
  "none beyond": (0, 0, 0, 300),
  "rows beyond": (64, 0, 65, 31),
  "nothing": (0, 0, 0, 0),
}
every_load = pytest.mark.parametrize("sizes", LOADS.values(), ids=LOADS)


def draw(sizes):
  rng = np.random.default_rng(0)
  x, target = rng.normal(size=(R, D)), rng.normal(size=(R, F))
  weights = rng.normal(size=(len(sizes), D, F))
  target[sum(sizes) :] = 0  # rows beyond the groups hold what they may
  return (np.float32(a) for a in (x, weights, target))


@every_load
def test_each_row_meets_the_matrix_of_its_group(sizes):
  x, weights, _ = draw(sizes)
  y = jax.jit(grouped_matmul.in_blocks)(x, weights, jnp.array(sizes))
  owner = np.repeat(np.arange(len(sizes)), sizes)
  want = np.einsum("rd,rdf->rf", x[: len(owner)], weights[owner])
  np.testing.assert_allclose(y[: len(owner)], want, atol=1e-5)


@every_load
def test_gradients_are_those_of_ragged_dot(sizes):
  x, weights, target = draw(sizes)

  def gradients(matmul):
    loss = lambda x, w: (matmul(x, w, jnp.array(sizes)) * target).sum()
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weights)

  close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)
  jax.tree.map(
    close, gradients(grouped_matmul.in_blocks), gradients(jax.lax.ragged_dot)
  )


def test_work_does_not_grow_with_the_groups():
  """Rows that are multiplied, of 4,096: no matrix meets those of another."""
  for groups in (1, 4, 16, 64, 256):
    sizes = jnp.full(groups, 4096 // groups, jnp.int32)
    _, count, group_n, b = grouped_matmul._blocks(4096, sizes)
    assert 4096 <= count * b <= 2 * 4096
    assert count <= len(group_n)


def test_few_rows_are_few_blocks():
  """As in decoding: 64 rows for 16 experts, each with a few."""
  sizes = jnp.array([4] * 16)
  _, count, _, b = grouped_matmul._blocks(64, sizes)
  assert count * b <= 2 * 64


@pytest.mark.parametrize("rows", [6, 64, 1000])
def test_few_rows_and_many_groups(rows):
  """Blocks of 8 and more rows, groups of none, in a rematerialised gradient."""
  rng = np.random.default_rng(rows)
  sizes = rng.multinomial(rows - 2, np.ones(32) / 32)
  x, target = rng.normal(size=(rows, D)), rng.normal(size=(rows, F))
  weights = np.float32(rng.normal(size=(32, D, F)))
  x, target = np.float32(x), np.float32(target)
  owner = np.repeat(np.arange(32), sizes)

  def loss(x, w):
    y = jax.checkpoint(grouped_matmul.in_blocks)(x, w, jnp.array(sizes))
    # Rows beyond the groups hold what they may, and learn nothing.
    return (y * target).sum()

  dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weights)
  live = target[: len(owner)]
  want = np.einsum("rf,rdf->rd", live, weights[owner])
  np.testing.assert_allclose(dx[: len(owner)], want, atol=1e-5)
  assert not dx[len(owner) :].any()
  each = np.einsum("rd,rf->rdf", x[: len(owner)], live)
  sums = np.zeros_like(weights)
  np.add.at(sums, owner, each)
  np.testing.assert_allclose(dw, sums, atol=1e-4)


def test_a_narrow_type_sums_over_many_blocks_in_float32():
  ones = jnp.ones((64 * 64 * 16, 1), jnp.bfloat16)  # 2**16 rows, of one group
  loss = lambda w: grouped_matmul.in_blocks(
    ones, w, jnp.array([len(ones)])
  ).sum()
  dw = jax.jit(jax.grad(loss))(jnp.ones((1, 1, 1), jnp.bfloat16))
  assert dw.dtype == jnp.bfloat16
  assert dw.item() == len(ones)  # 2**16 in steps of 64 stops at 2**14
