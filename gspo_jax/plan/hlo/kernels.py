"""Matrix products in kernels: attention, and the experts' grouped products.

Their FLOPs and HBM bytes follow from the blocks: one at an edge, or one that
two groups share, costs as much as a whole one, and an operand is read again for
each column of blocks.
"""

import math
import re

from gspo_jax.plan.hlo.cost import Work
from gspo_jax.plan.hlo.module import Computation, Instruction

# Matrix products in each kernel of splash attention, which reports no FLOPs:
# scores and output; scores, dV, dP, dK (and dQ if fused); scores, dP, dQ.
_SPLASH = {"_fwd": 2, "_dkv": 4, "_dq": 3}
# Its blocks of queries and keys, or 256 or 128 where 512 does not divide the
# number of tokens. The same as `_BLOCK` in gspo_jax/model/attention.py.
_SPLASH_BLOCK = 512


def attention_flops(computation: Computation, i: Instruction) -> float:
  """The FLOPs of a kernel of splash attention; 0 for any other instruction.

  Of n x n blocks of scores it computes the n (n + 1) / 2 on and below the
  diagonal. A fused backward pass has longer blocks of keys, and returns dQ in
  as many parts.
  """
  kernel = re.match(r"splash_m[hq]a(_fwd|_dkv|_dq)", i.name)
  if not kernel or i.op != "custom-call":
    return 0.0
  floats = [
    a
    for name in i.operands
    for a in computation.get(name).arrays
    if a.dtype in ("bf16", "f32") and len(a.dims) > 1
  ]
  query, key = floats[:2]
  products = _SPLASH[kernel[1]]
  tokens, size = key.dims[-2], math.prod(query.dims)
  n = tokens // math.gcd(tokens, _SPLASH_BLOCK)
  parts = [a for a in i.arrays if len(a.dims) > len(query.dims)]
  if kernel[1] == "_dkv" and parts:
    products, n = products + 1, math.prod(parts[0].dims) // size
  return products * size * tokens * (n + 1) / n


def grouped_product(
  computation: Computation, i: Instruction, filled: float = 1.0
) -> Work | None:
  """The cost of a `ragged_dot` on TPUs; None for any other instruction.

  The kernel multiplies blocks of m rows, k contracted columns and n columns of
  the result, as its `ragged_dot_tiling` says. It visits a block of rows that
  two groups share for each of them; groups rarely end where a block does, so
  that there are as many such visits as groups but one. Blocks beyond the last
  group are not visited.

  - A product [M, K] x [G, K, N] walks once for each column of blocks. The rows
    are read as often, the matrices once, or at every visit if K is more than a
    block: each visit then reads all blocks of K.
  - The gradient of the matrices, [M, K] x [M, N] -> [G, K, N], walks once for
    each of the blocks of K and N.

  `filled` is the share of the M rows that the groups hold.
  """
  tiling = i.find(r'ragged_dot_tiling="(\d+,\d+,\d+)"')
  if not tiling or i.op != "custom-call":
    return None
  m, k, n = (int(size) for size in tiling.split(","))
  left, right = (computation.get(name) for name in i.operands[-2:])
  M, K = left.arrays[0].dims
  out = i.arrays[0].dims
  N, G = out[-1], (out if len(out) == 3 else right.arrays[0].dims)[0]
  rows = M * filled
  visits = math.ceil(rows / m) + G - 1
  of_K, of_N = math.ceil(K / k), math.ceil(N / n)
  flops = 2.0 * rows * K * N
  padded = 2.0 * visits * m * (of_K * k) * (of_N * n)
  left_bytes, right_bytes = left.hbm_bytes * filled, right.hbm_bytes
  if len(out) == 3:
    moved = of_N * left_bytes + of_K * right_bytes * filled + i.hbm_bytes
  else:
    again = visits * m / rows if of_K > 1 else 1.0
    moved = of_N * left_bytes * again + i.hbm_bytes * filled
    moved += right_bytes * (visits / G if of_K > 1 else 1.0)
  return Work(flops, padding_flops=padded - flops, hbm_bytes=moved)
