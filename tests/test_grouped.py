"""Grouped matmul: each row times the matrix of its group, whatever the form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.model import grouped

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
  y = jax.jit(grouped.in_blocks)(x, weights, jnp.array(sizes))
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
    close, gradients(grouped.in_blocks), gradients(jax.lax.ragged_dot)
  )


def test_work_does_not_grow_with_the_groups():
  """Rows that are multiplied, of 4,096: no matrix meets those of another."""
  for groups in (1, 4, 16, 64, 256):
    sizes = jnp.full(groups, 4096 // groups, jnp.int32)
    _, count, group_n, b = grouped._blocks(4096, sizes)
    assert 4096 <= count * b <= 2 * 4096
    assert count <= len(group_n)


def test_few_rows_are_few_blocks():
  """As in decoding: 64 rows for 16 experts, each with a few."""
  sizes = jnp.array([4] * 16)
  _, count, _, b = grouped._blocks(64, sizes)
  assert count * b <= 2 * 64
