"""Grouped matmul, by the form that the platform is good at.

Dimension key: R rows, e groups, D and F widths, n blocks, b rows of a block.
"""

import jax
import jax.numpy as jnp

from gspo_jax.runtime import sharding

_LEAST, _MOST = 8, 64  # rows of a block


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


@jax.custom_vjp
def in_blocks(x_RD, weights_eDF, sizes_e):
  """`matmul` by blocks of rows of one group each, one after the other.

  Each group is filled up to whole blocks with zeros, so that at most one block
  a group is there for nothing. One batched product of all blocks would copy a
  matrix for each of them, and is slower even then.
  """
  return _forward(x_RD, weights_eDF, sizes_e)[0]


def _forward(x_RD, weights_eDF, sizes_e):
  weights_eDF = jnp.asarray(weights_eDF)  # a number of the loop picks from it
  slot_R, count, group_n, b = _blocks(len(x_RD), sizes_e)
  x_nbD = _spread(x_RD, slot_R, len(group_n), b)

  def body(i, y_nbF):
    return y_nbF.at[i].set(x_nbD[i] @ weights_eDF[group_n[i]])

  shape = (*x_nbD.shape[:2], weights_eDF.shape[2])
  y_nbF = jax.lax.fori_loop(0, count, body, jnp.zeros(shape, x_RD.dtype))
  y_RF = _take(y_nbF.reshape(-1, shape[2]), slot_R)
  return y_RF, (x_nbD, weights_eDF, slot_R, count, group_n)


def _backward(kept, dy_RF):
  x_nbD, weights_eDF, slot_R, count, group_n = kept
  dy_nbF = _spread(dy_RF, slot_R, *x_nbD.shape[:2])

  def body(i, state):
    dx_nbD, dweights = state
    g, dy_bF = group_n[i], dy_nbF[i]
    dx_nbD = dx_nbD.at[i].set(dy_bF @ weights_eDF[g].T)
    part_DF = jnp.matmul(x_nbD[i].T, dy_bF, preferred_element_type=jnp.float32)
    return dx_nbD, dweights.at[g].add(part_DF)

  # Over many blocks a narrower type would lose the last ones.
  zeros = jnp.zeros_like(x_nbD), jnp.zeros(weights_eDF.shape)
  dx_nbD, dweights = jax.lax.fori_loop(0, count, body, zeros)
  dx_RD = _take(dx_nbD.reshape(-1, dx_nbD.shape[2]), slot_R)
  return dx_RD, dweights.astype(weights_eDF.dtype), None


in_blocks.defvjp(_forward, _backward)


def _blocks(R, sizes_e):
  """Each row's place in the blocks, how many are in use, their groups, b."""
  e = len(sizes_e)
  # About twice what a group has: few are filled up, and few need a second.
  b = min(_MOST, max(_LEAST, 2 * R // e))
  n = -(-R // b) + min(e, R)
  ends_e, blocks_e = jnp.cumsum(sizes_e), -(-sizes_e // b)
  last_e = jnp.cumsum(blocks_e)
  group_R = jnp.searchsorted(ends_e, jnp.arange(R), side="right")
  shift_e = (last_e - blocks_e) * b - (ends_e - sizes_e)
  shift_R = jnp.take(shift_e, group_R, mode="fill", fill_value=n * b)
  group_n = jnp.searchsorted(last_e, jnp.arange(n), side="right")
  return jnp.arange(R) + shift_R, last_e[-1], group_n, b


def _spread(x_RD, slot_R, n, b):
  """Rows in their blocks, [n, b, D], among zeros."""
  R = len(x_RD)
  row_S = jnp.full(n * b, R).at[slot_R].set(jnp.arange(R), mode="drop")
  return _take(x_RD, row_S).reshape(n, b, -1)


def _take(x, i):
  """Rows of `x`, zeros where there are none."""
  return jnp.take(x, i, axis=0, mode="fill", fill_value=0)
