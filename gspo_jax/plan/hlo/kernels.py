"""Matrix products in kernels: attention, and the experts' grouped products.

Their FLOPs and HBM bytes follow from their blocks. A partly filled block costs
as much as a full one. Each column of blocks reads an operand again.
"""

import math
import re
from collections.abc import Callable
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
  rows: float  # rows of blocks; a row's first and last step write an output


def _attention(computation: Computation, i: Instruction) -> _Attention | None:
  """The call of a splash kernel; None for any other instruction.

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
    for x in computation.operands(i)
    for a in x.arrays
    if a.dtype in ("bf16", "f32") and len(a.dims) > 1
  ]
  query, key = floats[:2]
  products = _SPLASH[kernel[1]]
  tokens, size = key.dims[-2], math.prod(query.dims)
  grid = computation.operands(i)[0].arrays[0].dims[-2:]
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
  left, right = computation.operands(i)[-2:]
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


# Heads, tokens of a page, width of a head, bytes of a number -> pages that
# `paged_kernel` computes at a time.
BlockPages = Callable[[int, int, int, int], int]


class Pages(NamedTuple):
  """A call of `paged_kernel`, which copies pages and computes blocks."""

  parts: int  # of the heads of a row, on TensorCores of their own
  row: float  # bundles for a part of a row, without its pages
  page: float  # bundles for a part of a page
  rows: int
  pages: int
  page_bytes: float  # keys and values, all heads
  window: int | None  # pages that a row reads at most


def pages(
  kernel: Kernel,
  computation: Computation,
  i: Instruction,
  block_pages: BlockPages,
) -> Pages | None:
  """The call of `paged_kernel`; None for any other kernel."""
  if not i.name.startswith("paged_attention"):
    return None
  query, keys, values = _of_pages(computation, i)
  K, n, t, H = keys.dims
  parts = 2 if kernel.both_cores and K % 2 == 0 else 1
  row, block = kernel.body, _longest(kernel.body)
  while any(loop.inner for loop in block.inner):
    row, block = block, _longest(block)
  of_block = block_pages(K // parts, t, H, keys.bytes // math.prod(keys.dims))
  return Pages(
    parts=parts,
    row=row.whole - block.whole,
    page=block.bundles / of_block + sum(loop.whole for loop in block.inner),
    rows=query.dims[0],
    pages=n,
    page_bytes=(keys.bytes + values.bytes) / n,
    window=_window_pages(i, t),
  )


def _of_pages(computation, i):
  """Queries, keys and values of a call of `paged_kernel`."""
  operands = [x.arrays[0] for x in computation.operands(i)]
  query, _, keys, values = (a for a in operands if a.dtype != "s32")
  return query, keys, values


def _window_pages(i, t) -> int | None:
  match = re.match(r"paged_attention_window_(\d+)", i.name)
  return -(-int(match[1]) // t) + 1 if match else None


def unread_bytes(computation: Computation, i: Instruction) -> float:
  """Bytes of the pages before the windows of the rows, with all pages full."""
  if not i.name.startswith("paged_attention_window"):
    return 0.0
  query, keys, values = _of_pages(computation, i)
  _, n, t, _ = keys.dims
  read = min(n, query.dims[0] * _window_pages(i, t))
  return (1 - read / n) * (keys.bytes + values.bytes)


class Issued(NamedTuple):
  bundles: float  # of a call
  of_blocks: float = 0.0  # the part in blocks of scores


def issued(
  kernel: Kernel, computation: Computation, i: Instruction, work: Work
) -> Issued | None:
  """Bundles of a call; None for a kernel that is not modelled.

  A grid is a loop; all its steps run what is not conditional. In attention the
  largest conditional region is a block of scores; the others begin and end a
  row of blocks. Each visit of a grouped product runs the whole loop; but of the
  gradient of the matrices, the first visit of a tile clears it, and the last
  one writes it.
  """
  once = kernel.body.bundles
  if exact := re.match(r"exact_[a-z]+_(\d+)", i.name):
    return Issued(
      once + int(exact[1]) * sum(x.whole for x in kernel.body.inner)
    )
  step = _longest(kernel.body)
  if call := _attention(computation, i):
    block = max(step.conditional, default=0)
    begin_and_end = sum(step.conditional) - block
    of_blocks = (block + step.whole - step.bundles) * call.computed
    steps = step.always * call.steps + begin_and_end * call.rows
    return Issued(once + steps + of_blocks, of_blocks)
  if tiling := _tiling(i):
    visits = (work.flops + work.padding_flops) / (2.0 * math.prod(tiling))
    if len(dims := i.arrays[0].dims) < 3:
      return Issued(once + step.whole * visits)
    G, K, N = dims
    tiles = G * math.ceil(K / tiling[1]) * math.ceil(N / tiling[2])
    always = step.whole - sum(step.conditional)
    return Issued(once + always * visits + sum(step.conditional) * tiles)
  return None


def _longest(loop):
  return max(loop.inner, key=lambda inner: inner.whole)


def _tiling(i: Instruction) -> tuple[int, ...] | None:
  """(rows, contracted columns, columns) of a block of a `ragged_dot`."""
  tiling = i.find(r'ragged_dot_tiling="(\d+,\d+,\d+)"')
  if not tiling or i.op != "custom-call":
    return None
  return tuple(int(size) for size in tiling.split(","))
