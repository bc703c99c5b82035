"""Grouped matmul, by the form that the platform is good at.

Dimension key: R rows, e groups, D and F widths, n blocks, b rows of a block.
"""

import jax
import jax.numpy as jnp

from gspo_jax import sharding

_MOST = 64  # rows of a block; 32 to 256 are about as fast on two cores


def matmul(x_RD, weights_eDF, sizes_e):
  """Rows sorted by group, each times the matrix of its group: [R, F].

  On a CPU, XLA's ragged_dot multiplies every row by every matrix.

  Args:
    x_RD: rows; those of group 0 first.
    weights_eDF: a matrix for each group.
    sizes_e: rows of each group. Rows beyond them hold what they may.
  """
  if sharding.platform() == "cpu":
    return in_blocks(x_RD, weights_eDF, sizes_e)
  return jax.lax.ragged_dot(x_RD, weights_eDF, sizes_e)


def in_blocks(x_RD, weights_eDF, sizes_e):
  """`matmul` as one batched product of blocks, each of one group.

  Each group is filled up to whole blocks with zeros, so that at most one block
  a group is there for nothing.
  """
  (R, D), e = x_RD.shape, len(weights_eDF)
  b = min(_MOST, max(_MOST // 2, R // e))
  n = -(-R // b) + min(e, R)
  ends_e, blocks_e = jnp.cumsum(sizes_e), -(-sizes_e // b)
  last_e = jnp.cumsum(blocks_e)
  group_R = jnp.searchsorted(ends_e, jnp.arange(R), side="right")
  shift_e = (last_e - blocks_e) * b - (ends_e - sizes_e)
  shift_R = jnp.take(shift_e, group_R, mode="fill", fill_value=n * b)
  slot_R = jnp.arange(R) + shift_R
  row_S = jnp.full(n * b, R).at[slot_R].set(jnp.arange(R), mode="drop")
  x_nbD = _take(x_RD, row_S).reshape(n, b, D)
  group_n = jnp.searchsorted(last_e, jnp.arange(n), side="right")
  w_nDF = jnp.take(weights_eDF, group_n, axis=0, mode="clip")
  y_nbF = jnp.einsum("nbd,ndf->nbf", x_nbD, w_nDF)
  return _take(y_nbF.reshape(n * b, -1), slot_R)


def _take(x, i):
  """Rows of `x`, zeros where there are none."""
  return jnp.take(x, i, axis=0, mode="fill", fill_value=0)
