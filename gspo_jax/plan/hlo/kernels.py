"""Matrix products in kernels: attention, and the experts' grouped products.

Their FLOPs and HBM bytes follow from their blocks. A partly filled block costs
as much as a full one. Each column of blocks reads an operand again.
"""

import math
import re
from typing import NamedTuple

from gspo_jax.plan.hlo.bundles import Kernel
from gspo_jax.plan.hlo.cost import Work
from gspo_jax.plan.hlo.module import Computation, Instruction

# Matrix products in each kernel of splash attention, which reports no FLOPs:
# scores and output; scores, dV, dP, dK (and dQ if fused); scores, dP, dQ.
_SPLASH = {"_fwd": 2, "_dkv": 4, "_dq": 3}


class _Attention(NamedTuple):
  """A call of a splash kernel. Its grid has a step for each pair of blocks."""

  flops: float
  steps: float
  computed: float  # steps whose blocks are not above the diagonal
  rows: float  # of blocks, that begin and end an output


def _attention(computation: Computation, i: Instruction) -> _Attention | None:
  """None for any other instruction.

  Of n blocks of queries, each is multiplied with the last `band` blocks of keys
  up to the diagonal: all of them, or those in the window. The kernel's first
  operand has n x band numbers. A fused backward pass has no window,
  but longer blocks of keys, and returns one part of dQ for each.
  """
  kernel = re.match(r"splash_m[hq]a(_fwd|_dkv|_dq)", i.name)
  if not kernel or i.op != "custom-call":
    return None
  floats = [
    a
    for name in i.operands
    for a in computation.get(name).arrays
    if a.dtype in ("bf16", "f32") and len(a.dims) > 1
  ]
  query, key = floats[:2]
  products = _SPLASH[kernel[1]]
  tokens, size = key.dims[-2], math.prod(query.dims)
  grid = computation.get(i.operands[0]).arrays[0].dims[-2:]
  band, of_queries = sorted(grid)
  n = of_queries
  parts = [a for a in i.arrays if len(a.dims) > len(query.dims)]
  if kernel[1] == "_dkv" and parts:
    products, n = products + 1, math.prod(parts[0].dims) // size
    band = n
  share = (n * band - band * (band - 1) / 2) / n**2
  heads = size / (tokens * query.dims[-1])
  return _Attention(
    flops=products * 2 * size * tokens * share,
    steps=heads * math.prod(grid),
    computed=heads * share * n * of_queries,
    rows=heads * n,
  )


def attention_flops(computation: Computation, i: Instruction) -> float:
  """FLOPs of a splash attention kernel; 0 for any other instruction."""
  call = _attention(computation, i)
  return call.flops if call else 0.0


def grouped_product(
  computation: Computation, i: Instruction, filled: float = 1.0
) -> Work | None:
  """The cost of a `ragged_dot` on TPUs; None for any other instruction.

  Blocks have m rows, k contracted columns and n columns of the result
  (`ragged_dot_tiling`). A block of rows that two groups share is visited for
  each; groups rarely end at the edge of a block, so G groups add G - 1 visits.
  A product [M, K] x [G, K, N] reads the rows for each column of blocks, and the
  matrices once, or at every visit if K needs several blocks. The gradient of
  the matrices, [M, K] x [M, N], reads its operands for each block of K and N.

  `filled` is the share of the M rows that the groups hold.
  """
  if not (tiling := _tiling(i)):
    return None
  m, k, n = tiling
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


class Pages(NamedTuple):
  """A paged attention kernel: it reads the tokens of a row by blocks."""

  heads: int  # key-value heads, in grid steps of their own
  row: int  # bundles for a row and head
  block: int  # bundles for a block of a row and head
  rows: int
  tokens: int  # of all pages
  token_bytes: float  # of keys and values, all heads


def pages(
  kernel: Kernel, computation: Computation, i: Instruction
) -> Pages | None:
  """None for a kernel that is not `paged_attention`."""
  if not i.name.startswith("paged_attention"):
    return None
  floats = [
    computation.get(name).arrays[0]
    for name in i.operands
    if computation.get(name).arrays[0].dtype != "s32"
  ]
  query, keys, values = floats[:3]
  step = _longest(kernel.body)
  return Pages(
    heads=keys.dims[0],
    row=step.bundles,
    block=sum(loop.whole for loop in step.inner),
    rows=query.dims[0],
    tokens=math.prod(keys.dims[1:3]),
    token_bytes=sum(a.bytes / math.prod(a.dims[1:3]) for a in (keys, values)),
  )


def issued(
  kernel: Kernel, computation: Computation, i: Instruction, work: Work
) -> float | None:
  """Bundles of a call; None for a kernel that is not modelled.

  A grid is a loop; all its steps run what is not conditional. In attention the
  largest conditional region is a block of scores; the others begin and end a
  row of blocks. Each visit of a grouped product runs the whole loop.
  """
  step, once = _longest(kernel.body), kernel.body.bundles
  if call := _attention(computation, i):
    block = max(step.conditional, default=0)
    inner = step.whole - step.bundles
    return (
      once
      + step.always * call.steps
      + (block + inner) * call.computed
      + (sum(step.conditional) - block) * call.rows
    )
  if tiling := _tiling(i):
    visits = (work.flops + work.padding_flops) / (2.0 * math.prod(tiling))
    return once + step.whole * visits
  return None


def _longest(loop):
  return max(loop.inner, key=lambda inner: inner.whole)


def _tiling(i: Instruction) -> tuple[int, ...] | None:
  """(rows, contracted columns, columns) of a block of a `ragged_dot`."""
  tiling = i.find(r'ragged_dot_tiling="(\d+,\d+,\d+)"')
  if not tiling or i.op != "custom-call":
    return None
  return tuple(int(size) for size in tiling.split(","))
