"""Grouped matmul, by the fastest method for the platform.

Dimension key: A rows, such as the M * k pairs of a token and an expert, M
tokens, k experts a token, e groups, D and F widths, n blocks, b rows of a
block. In tiles, m rows, k contracted columns and n columns of the result.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from gspo_jax.model import exact, gpu
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding, tpus

_MIN_BLOCK, _MAX_BLOCK = 8, 64  # rows of a block, a multiple of the first
_EXACT_BLOCK = 32  # rows of a block, whatever their number
_MAX_EXPERT_BLOCK = 128  # rows of a block that passes both products
_LANES = 128  # tiles of a TPU are multiples of this
_MAX_TILE = 2048 * 768  # bfloat16 numbers of a tile that fits in VMEM
_ALPHA = 1.702  # of the clamped activation, in the sigmoid


def gated(gate, up, limit: float | None):
  """The hidden rows of an expert or an MLP, in float32: `silu(gate) * up`.

  With a limit `(up + 1) * gate * sigmoid(1.702 gate)`, where `gate` is at most
  the limit and `up` between it and its negative (gpt-oss, arXiv 2508.10925).
  """
  if limit is None:
    return jax.nn.silu(wide(gate)) * wide(up)
  gate = jnp.minimum(wide(gate), limit)
  up = jnp.clip(wide(up), -limit, limit)
  return (up + 1) * gate * jax.nn.sigmoid(_ALPHA * gate)


def bias_of_rows(bias_eF, sizes_e, num_rows):
  """The bias of each row's group, in float32: [A, F].

  Rows are as in `matmul`; those beyond the groups are 0 and have no gradient. A
  product sums the gradient of a bias in float32; a TPU would gather and scatter
  one row at a time.
  """
  ends_e, row_A1 = jnp.cumsum(sizes_e), jnp.arange(num_rows)[:, None]
  in_group_Ae = (row_A1 >= ends_e - sizes_e) & (row_A1 < ends_e)
  one_hot_Ae = in_group_Ae.astype(bias_eF.dtype)
  y_AF = jnp.matmul(one_hot_Ae, bias_eF, preferred_element_type=jnp.float32)
  # The gradient that comes from an undefined row may be no number.
  return jnp.where(row_A1 < ends_e[-1], y_AF, 0)


def matmul(x_AD, weights_eDF, sizes_e):
  """Multiplies each row by the matrix of its group: [A, F].

  Rows are sorted by group; group e has `sizes_e[e]` rows. Rows beyond the sum
  of the sizes are undefined. A TPU v5 uses `in_tiles`, other TPUs ragged_dot,
  GPUs from compute capability 8.0 on tokamax's kernel. Others use `in_blocks`:
  ragged_dot would multiply every row by every matrix there.
  """
  if exact.has_kernels():  # tiles of 128 rows, whose terms only widths divide
    rows = jnp.pad(x_AD, ((0, -len(x_AD) % _LANES), (0, 0)))
    return in_tiles(rows, weights_eDF, sizes_e)[: len(x_AD)]
  if exact.is_on():
    return in_blocks(x_AD, weights_eDF, sizes_e, True)
  if gpu.has_kernels():
    return gpu.grouped_matmul(x_AD, weights_eDF, sizes_e)
  if sharding.platform() != "tpu":
    return in_blocks(x_AD, weights_eDF, sizes_e)
  if tpus.of_kind(sharding.device_kind()).chooses_tiles:
    return in_tiles(x_AD, weights_eDF, sizes_e)
  return jax.lax.ragged_dot(x_AD, weights_eDF, sizes_e)


# Rows [A, D] times matrices [e, D, F]; rows [A, F] times their transposes; and
# the gradient of the matrices.
_PRODUCT, _OF_ROWS, _OF_WEIGHTS = (
  jax.lax.RaggedDotDimensionNumbers((axes, ((), ())), (0,), groups)
  for axes, groups in (
    (((1,), (1,)), (0,)),
    (((1,), (2,)), (0,)),
    (((0,), (0,)), ()),
  )
)


@jax.custom_vjp
def in_tiles(x_AD, weights_eDF, sizes_e):
  """`matmul` by ragged_dot, in tiles that divide the widths of the matrices.

  libtpu may choose others: on v5e and v5p it multiplies 768 columns in two
  tiles of 640. Where only 128 or nothing divides a width, as 2880, the tiles
  are padded: libtpu's, of 128 columns, would read the rows twice as often. Two
  TensorCores share tiles of columns, so there are at least two.
  """
  return _tiled(x_AD, weights_eDF, sizes_e, _PRODUCT)


def _tiled_backward(operands, dy_AF):
  x_AD, weights_eDF, sizes_e = operands
  return (
    _tiled(dy_AF, weights_eDF, sizes_e, _OF_ROWS),
    _tiled(x_AD, dy_AF, sizes_e, _OF_WEIGHTS),
    None,
  )


in_tiles.defvjp(
  lambda *operands: (_tiled(*operands, _PRODUCT), operands), _tiled_backward
)


def _tiled(left, right, sizes_e, axes):
  product = jax.lax.ragged_dot_general
  k, columns = left.shape[1], right.shape[1 if axes is _OF_ROWS else -1]
  numbers = _MAX_TILE
  if axes is _OF_WEIGHTS:  # its sums are float32
    k, numbers = _divisor(k, 1024) or k, _MAX_TILE // 2
  limit = 2 * numbers // (k * left.dtype.itemsize)
  n = _divisor(columns, limit)
  if n == columns and sharding.cores() == 2:
    half = _divisor(columns, n // 2)
    n = half if half > _LANES else n
  if n <= _LANES:  # too few: a padded tile costs less
    n = min(columns, limit) // _LANES * _LANES
  # A tile has 128 rows, and libtpu takes only tiles that divide the rows.
  if not n or k < _LANES or left.shape[0] % _LANES:
    return product(left, right, sizes_e, axes)  # the compiler's own tiles
  with set_xla_metadata(ragged_dot_tiling=f"{_LANES},{k},{n}"):
    return product(left, right, sizes_e, axes)


def _divisor(width, limit):
  """The largest multiple of 128, up to `limit`, that divides `width`; or 0."""
  tiles = range(_LANES, min(width, limit) + 1, _LANES)
  return max((tile for tile in tiles if width % tile == 0), default=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def in_blocks(x_AD, weights_eDF, sizes_e, exactly=False):
  """`matmul` in a loop over blocks; all rows of a block are of one group.

  One batched product of all blocks would copy a matrix for each block. Exact,
  if `exactly`: then a block always has as many rows.
  """
  return _forward(x_AD, weights_eDF, sizes_e, exactly)[0]


def _forward(x_AD, weights_eDF, sizes_e, exactly):
  weights_eDF = jnp.asarray(weights_eDF)  # indexed by a traced number
  product = exact.noinline(jnp.matmul) if exactly else jnp.matmul
  blocks = _blocks(len(x_AD), sizes_e, size=_EXACT_BLOCK if exactly else 0)
  slot_A, group_n = blocks.slot_A, blocks.group_n
  x_nbD = _to_blocks(x_AD, slot_A, len(group_n), blocks.size)

  def body(i, y_nbF):
    return y_nbF.at[i].set(product(x_nbD[i], weights_eDF[group_n[i]]))

  shape = (*x_nbD.shape[:2], weights_eDF.shape[2])
  y_nbF = jax.lax.fori_loop(0, blocks.count, body, jnp.zeros(shape, x_AD.dtype))
  y_AF = _take(y_nbF.reshape(-1, shape[2]), slot_A)
  return y_AF, (x_nbD, weights_eDF, slot_A, blocks.count, group_n)


def _backward(_, residuals, dy_AF):
  x_nbD, weights_eDF, slot_A, count, group_n = residuals
  dy_nbF = _to_blocks(dy_AF, slot_A, *x_nbD.shape[:2])

  def body(i, state):
    dx_nbD, dweights = state
    g, dy_bF = group_n[i], dy_nbF[i]
    dx_nbD = dx_nbD.at[i].set(dy_bF @ weights_eDF[g].T)
    part_DF = jnp.matmul(x_nbD[i].T, dy_bF, preferred_element_type=jnp.float32)
    return dx_nbD, dweights.at[g].add(part_DF)

  # In a narrower dtype the sum over many blocks would stop growing.
  zeros = jnp.zeros_like(x_nbD), jnp.zeros(weights_eDF.shape)
  dx_nbD, dweights = jax.lax.fori_loop(0, count, body, zeros)
  dx_AD = _take(dx_nbD.reshape(-1, dx_nbD.shape[2]), slot_A)
  return dx_AD, dweights.astype(weights_eDF.dtype), None


in_blocks.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def swiglu_in_blocks(
  x_MD, weights_Mk, experts_Mk, gate_up, down, biases=None, limit=None
):
  """The experts on one CPU: `w * down(gated(gate x, up x))`.

  Each step runs both products on one expert's tokens, while they are in the
  cache. Data moves by gathers, also in the backward pass. Expert number e means
  no expert; `gate_up` is [e, D, 2F], `down` [e, F, D], and `biases` are None or
  those of both, [e, 2F] and [e, D]. Returns the weighted sum [M, D], and the
  number of (token, expert) pairs.
  """
  operands = x_MD, weights_Mk, experts_Mk, gate_up, down, biases
  return _experts(*operands, limit)[0]


def _gate(h_bF, weights_b, limit, dtype):
  gate, up = jnp.split(wide(h_bF), 2, axis=-1)
  return rounded(gated(gate, up, limit) * weights_b[:, None], dtype)


def _experts(x_MD, weights_Mk, experts_Mk, gate_up, down, biases, limit):
  gate_up, down = jnp.asarray(gate_up), jnp.asarray(down)
  k, dtype = experts_Mk.shape[1], x_MD.dtype
  places = _places(experts_Mk, len(gate_up))
  n, b = places.pair_nb.shape
  weights_nb = _weights(weights_Mk, places, dtype)
  if biases:
    gate_up_bias, down_bias = (jnp.asarray(x).astype(dtype) for x in biases)

  def body(i, state):
    y_nbD, h_nbF = state
    group = places.group_n[i]
    x_bD = jnp.take(x_MD, places.pair_nb[i] // k, axis=0, mode="clip")
    h_bF = x_bD @ gate_up[group].astype(dtype)
    if biases:
      h_bF = rounded(wide(h_bF) + wide(gate_up_bias[group]), dtype)
    y_bD = _gate(h_bF, weights_nb[i], limit, dtype) @ down[group].astype(dtype)
    if biases:
      bias_bD = weights_nb[i][:, None] * wide(down_bias[group])
      y_bD = rounded(wide(y_bD) + bias_bD, dtype)
    return y_nbD.at[i].set(y_bD), h_nbF.at[i].set(h_bF)

  # Without a gradient XLA removes the hidden rows from the loop.
  state = tuple(jnp.zeros((n, b, x.shape[2]), dtype) for x in (down, gate_up))
  y_nbD, h_nbF = jax.lax.fori_loop(0, places.count, body, state)
  y_MkD = _take(y_nbD.reshape(n * b, -1), places.slot_Mk)
  y_MD = rounded(y_MkD.sum(1, dtype=jnp.float32), dtype)
  operands = x_MD, weights_Mk, gate_up, down, biases
  return (y_MD, places.num_pairs), (operands, places, h_nbF)


def _experts_backward(limit, residuals, cotangents):
  (x_MD, weights_Mk, gate_up, down, biases), places, h_nbF = residuals
  dy_MD, dtype = cotangents[0], x_MD.dtype
  k, (n, b) = weights_Mk.shape[1], places.pair_nb.shape
  weights_nb = _weights(weights_Mk, places, dtype)
  product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)

  def body(i, state):
    dx_nbD, dweights_nb, dgate_up, ddown, dbiases = state
    group, token_b = places.group_n[i], places.pair_nb[i] // k
    x_bD, dy_bD = (
      jnp.take(x, token_b, axis=0, mode="clip") for x in (x_MD, dy_MD)
    )
    gated_bF, pull = jax.vjp(
      lambda h, w: _gate(h, w, limit, dtype), h_nbF[i], weights_nb[i]
    )
    dh_bF, dweights_b = pull(dy_bD @ down[group].T.astype(dtype))
    dx_bD = dh_bF @ gate_up[group].T.astype(dtype)
    if biases:
      down_bias_D = wide(jnp.asarray(biases[1])[group].astype(dtype))
      dweights_b += wide(dy_bD) @ down_bias_D
      dbiases = (
        dbiases[0].at[group].add(wide(dh_bF).sum(0)),
        dbiases[1].at[group].add(weights_nb[i] @ wide(dy_bD)),
      )
    return (
      dx_nbD.at[i].set(dx_bD),
      dweights_nb.at[i].set(dweights_b),
      dgate_up.at[group].add(product(x_bD.T, dh_bF)),
      ddown.at[group].add(product(gated_bF.T, dy_bD)),
      dbiases,
    )

  # In a narrower dtype the sum over many blocks would stop growing.
  state = (
    jnp.zeros((n, b, x_MD.shape[1]), dtype),
    jnp.zeros((n, b)),
    jnp.zeros(gate_up.shape),
    jnp.zeros(down.shape),
    jax.tree.map(lambda x: jnp.zeros(x.shape), biases),
  )
  dx_nbD, dweights_nb, dgate_up, ddown, dbiases = jax.lax.fori_loop(
    0, places.count, body, state
  )
  dx_MkD = _take(dx_nbD.reshape(n * b, -1), places.slot_Mk)
  dx_MD = rounded(dx_MkD.sum(1, dtype=jnp.float32), dtype)
  dweights_Mk = _take(dweights_nb.reshape(-1), places.slot_Mk)
  return (
    dx_MD,
    dweights_Mk.astype(weights_Mk.dtype),
    None,
    dgate_up.astype(gate_up.dtype),
    ddown.astype(down.dtype),
    jax.tree.map(lambda dx, x: dx.astype(x.dtype), dbiases, biases),
  )


swiglu_in_blocks.defvjp(_experts, _experts_backward)


class _Places(NamedTuple):
  pair_nb: jax.Array  # the pair m * k + j at each place; M * k for none
  slot_Mk: jax.Array  # each pair's place; n * b or more if it has no expert
  group_n: jax.Array  # the expert of each block
  count: jax.Array  # [] the number of blocks in use
  num_pairs: jax.Array  # [] int32, the pairs that have an expert


def _places(experts_Mk, num_experts) -> _Places:
  A = experts_Mk.size
  order_A = jnp.argsort(experts_Mk.reshape(-1), stable=True)
  sizes_e = jnp.bincount(experts_Mk.reshape(-1), length=num_experts)
  blocks = _blocks(A, sizes_e, _MAX_EXPERT_BLOCK)
  n, b = len(blocks.group_n), blocks.size
  pairs = jnp.full(n * b, A).at[blocks.slot_A].set(order_A, mode="drop")
  slot_A = jnp.zeros(A, jnp.int32).at[order_A].set(blocks.slot_A)
  return _Places(
    pairs.reshape(n, b),
    slot_A.reshape(experts_Mk.shape),
    blocks.group_n,
    blocks.count,
    sizes_e.sum(dtype=jnp.int32),
  )


def _weights(weights_Mk, places, dtype):
  """Routing weights by place, rounded as activations; 0 at an empty place."""
  return wide(_take(weights_Mk.reshape(-1).astype(dtype), places.pair_nb))


class _Blocks(NamedTuple):
  slot_A: jax.Array  # each row's place; n * b or more beyond the groups
  count: jax.Array  # [] the number of blocks in use
  group_n: jax.Array  # the group of each block
  size: int  # b


def _blocks(A, sizes_e, limit=_MAX_BLOCK, size=0) -> _Blocks:
  """Blocks of `size` rows; 0: of as many as take the least time."""
  e = len(sizes_e)
  # A block reads a matrix, as long as some 20 rows take; a group's last one is
  # padded by half. With A / e rows the sum is least at sqrt(40 A / e).
  b = math.isqrt(40 * A // e) // _MIN_BLOCK * _MIN_BLOCK
  b = size or min(limit, max(_MIN_BLOCK, b))
  n = -(-A // b) + min(e, A)
  ends_e, blocks_e = jnp.cumsum(sizes_e), -(-sizes_e // b)
  last_e = jnp.cumsum(blocks_e)
  group_A = jnp.searchsorted(ends_e, jnp.arange(A), side="right")
  shift_e = (last_e - blocks_e) * b - (ends_e - sizes_e)
  shift_A = jnp.take(shift_e, group_A, mode="fill", fill_value=n * b)
  group_n = jnp.searchsorted(last_e, jnp.arange(n), side="right")
  return _Blocks(jnp.arange(A) + shift_A, last_e[-1], group_n, b)


def _to_blocks(x_AD, slot_A, n, b):
  """The rows in their blocks, [n, b, D]; zeros elsewhere."""
  A = len(x_AD)
  rows = jnp.full(n * b, A).at[slot_A].set(jnp.arange(A), mode="drop")
  return _take(x_AD, rows).reshape(n, b, -1)


def _take(x, i):
  """Rows of `x`; zeros for an index out of range."""
  return jnp.take(x, i, axis=0, mode="fill", fill_value=0)
