"""Grouped matmul, in the form that is fast on the platform.

Dimension key: R rows, e groups, D and F widths, n blocks, b rows of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.runtime import sharding

_MIN_BLOCK, _MAX_BLOCK = 8, 64  # rows of a block


def matmul(x_RD, weights_eDF, sizes_e):
  """Multiplies each row by the matrix of its group.

  `in_blocks` on a CPU, where XLA's ragged_dot multiplies every row by every
  matrix; ragged_dot elsewhere.

  Args:
    x_RD: rows, sorted by group.
    weights_eDF: a matrix for each group.
    sizes_e: int, rows of each group.

  Returns:
    [R, F]; rows beyond the sum of the sizes are undefined.
  """
  if sharding.platform() == "cpu":
    return in_blocks(x_RD, weights_eDF, sizes_e)
  return jax.lax.ragged_dot(x_RD, weights_eDF, sizes_e)


@jax.custom_vjp
def in_blocks(x_RD, weights_eDF, sizes_e):
  """`matmul` in a loop over blocks, each with rows of one group.

  Each group is padded with zeros to whole blocks, at most one extra block per
  group. One batched product of all blocks would copy a matrix for each block,
  and is slower.
  """
  return _forward(x_RD, weights_eDF, sizes_e)[0]


def _forward(x_RD, weights_eDF, sizes_e):
  weights_eDF = jnp.asarray(weights_eDF)  # indexed by a traced number
  blocks = _blocks(len(x_RD), sizes_e)
  slot_R, group_n = blocks.slot_R, blocks.group_n
  x_nbD = _to_blocks(x_RD, slot_R, len(group_n), blocks.size)

  def body(i, y_nbF):
    return y_nbF.at[i].set(x_nbD[i] @ weights_eDF[group_n[i]])

  shape = (*x_nbD.shape[:2], weights_eDF.shape[2])
  y_nbF = jax.lax.fori_loop(0, blocks.count, body, jnp.zeros(shape, x_RD.dtype))
  y_RF = _take(y_nbF.reshape(-1, shape[2]), slot_R)
  return y_RF, (x_nbD, weights_eDF, slot_R, blocks.count, group_n)


def _backward(residuals, dy_RF):
  x_nbD, weights_eDF, slot_R, count, group_n = residuals
  dy_nbF = _to_blocks(dy_RF, slot_R, *x_nbD.shape[:2])

  def body(i, state):
    dx_nbD, dweights = state
    g, dy_bF = group_n[i], dy_nbF[i]
    dx_nbD = dx_nbD.at[i].set(dy_bF @ weights_eDF[g].T)
    part_DF = jnp.matmul(x_nbD[i].T, dy_bF, preferred_element_type=jnp.float32)
    return dx_nbD, dweights.at[g].add(part_DF)

  # In a narrower dtype the sum over many blocks would stop growing.
  zeros = jnp.zeros_like(x_nbD), jnp.zeros(weights_eDF.shape)
  dx_nbD, dweights = jax.lax.fori_loop(0, count, body, zeros)
  dx_RD = _take(dx_nbD.reshape(-1, dx_nbD.shape[2]), slot_R)
  return dx_RD, dweights.astype(weights_eDF.dtype), None


in_blocks.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
  """The assignment of rows to blocks.

  Attributes:
    slot_R: the place of each row in the blocks; n * b or more for the rows
      beyond the groups.
    count: [] the number of blocks in use.
    group_n: the group of each block.
    size: b.
  """

  slot_R: jax.Array
  count: jax.Array
  group_n: jax.Array
  size: int


def _blocks(R, sizes_e) -> _Blocks:
  e = len(sizes_e)
  # About twice the mean size: most groups fit in one block with little padding.
  b = min(_MAX_BLOCK, max(_MIN_BLOCK, 2 * R // e))
  n = -(-R // b) + min(e, R)
  ends_e, blocks_e = jnp.cumsum(sizes_e), -(-sizes_e // b)
  last_e = jnp.cumsum(blocks_e)
  group_R = jnp.searchsorted(ends_e, jnp.arange(R), side="right")
  shift_e = (last_e - blocks_e) * b - (ends_e - sizes_e)
  shift_R = jnp.take(shift_e, group_R, mode="fill", fill_value=n * b)
  group_n = jnp.searchsorted(last_e, jnp.arange(n), side="right")
  return _Blocks(jnp.arange(R) + shift_R, last_e[-1], group_n, b)


def _to_blocks(x_RD, slot_R, n, b):
  """Puts rows into their blocks, [n, b, D]; zeros elsewhere."""
  R = len(x_RD)
  row_S = jnp.full(n * b, R).at[slot_R].set(jnp.arange(R), mode="drop")
  return _take(x_RD, row_S).reshape(n, b, -1)


def _take(x, i):
  """Rows of `x`; zeros for an index out of range."""
  return jnp.take(x, i, axis=0, mode="fill", fill_value=0)
