"""TPU kernels of `model.exact`: a product and a sum, in one order of terms.

XLA divides both by the number of rows, so that few and many rows differ in the
last bits. Here a row's terms are added in an order that only their number
decides. The plan of a program reads the steps of a grid in a kernel's name.

Dimension key: M rows, K contracted columns, N columns of the result, D of a
row. In blocks, m rows, k and n columns.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_ROWS, _COLUMNS = 512, 512  # of a block of a product's result
_TERMS = 2048  # most contracted columns of a block
_NUMBERS = 2**20  # of a block of whole rows, or more if a row has more
_VMEM = 2**25  # bytes; 8 rows of 256k numbers, twice, need 16 MiB and more
_SUBLANES = 16  # rows of a tile of 16-bit numbers


def product(x_MK, w_KN, dtype):
  """`x @ w` by float32 sums over blocks of K, the first block first."""
  (M, K), N = x_MK.shape, w_KN.shape[1]
  m, n, k = min(_ROWS, M + -M % _SUBLANES), min(_COLUMNS, N), _block(K)
  # A block of weights stays while the rows change, if K is one block.
  grid = pl.cdiv(N, n), pl.cdiv(M, m), K // k
  return pl.pallas_call(
    _product,
    grid=grid,
    in_specs=[
      pl.BlockSpec((m, k), lambda column, row, i: (row, i)),
      pl.BlockSpec((k, n), lambda column, row, i: (i, column)),
    ],
    out_specs=pl.BlockSpec((m, n), lambda column, row, i: (row, column)),
    out_shape=jax.ShapeDtypeStruct((M, N), dtype),
    scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * M * N * K,
      bytes_accessed=x_MK.nbytes + w_KN.nbytes + M * N * dtype.itemsize,
      transcendentals=0,
    ),
    name=f"exact_product_{math.prod(grid)}",
  )(x_MK, w_KN)


def _product(x_ref, w_ref, out_ref, sum_ref):
  @pl.when(pl.program_id(2) == 0)
  def _():
    sum_ref[...] = jnp.zeros_like(sum_ref)

  sum_ref[...] += jax.lax.dot_general(
    x_ref[...],
    w_ref[...],
    (((1,), (0,)), ((), ())),
    # Else Mosaic would round float32 operands to bfloat16.
    precision="highest" if x_ref.dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def rows(function, x_MD, *whole):
  """`function(x, *whole)` [M, N], by blocks of whole rows.

  `function` may sum along D. The others have one axis at most, D or N.
  """
  M, D = x_MD.shape
  whole = [jnp.reshape(x, (1, -1)) for x in whole]
  out = jax.eval_shape(function, x_MD, *whole)
  m = max(8, min(_ROWS, _NUMBERS // D // _SUBLANES * _SUBLANES))
  m = min(m, M + -M % _SUBLANES)
  block = lambda x: pl.BlockSpec((m, x.shape[1]), lambda i: (i, 0))

  def kernel(*refs):
    *operands, out_ref = refs
    out_ref[...] = function(*(ref[...] for ref in operands))

  return pl.pallas_call(
    kernel,
    grid=(pl.cdiv(M, m),),
    in_specs=[
      block(x_MD),
      *(pl.BlockSpec(x.shape, lambda i: (0, 0)) for x in whole),
    ],
    out_specs=block(out),
    out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM
    ),
    cost_estimate=pl.CostEstimate(
      flops=0,
      bytes_accessed=x_MD.nbytes + out.size * out.dtype.itemsize,
      transcendentals=0,
    ),
    name=f"exact_rows_{pl.cdiv(M, m)}",
  )(x_MD, *whole)


def _block(K):
  """k, the largest multiple of 128 up to `_TERMS` that divides K."""
  blocks = range(_LANES, min(K, _TERMS) + 1, _LANES)
  return max((k for k in blocks if K % k == 0), default=K)
