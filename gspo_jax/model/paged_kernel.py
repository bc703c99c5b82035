"""A TPU kernel: attention of a few queries per row to pages.

Dimension key: B rows, R rows of a program, T queries a row, K key-value heads,
U query heads of each, M = T * U, H head width, n pages, t tokens a page, W
maximum pages a row; S tokens of a block, in P pages.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gspo_jax.model.attention_products import MASKED
from gspo_jax.runtime import sharding

# In VMEM: blocks of keys and values, one of which is computed while others are
# on their way; and queries, as many output rows, and both a second time.
_TOKENS = 512  # most tokens of a block
_BLOCK_BYTES = 2**20  # at most, of keys and values
_BUFFERS_BYTES = 2**22  # of at most `_BUFFERS` blocks
_BUFFERS = 4
_QUERY_BYTES = 2**20
_SUBLANES = 16  # rows of a tile of 16-bit numbers


def attend(
  q_BTKUH,
  k_KntH,
  v_KntH,
  table_BW,
  lengths_B,
  scale,
  *,
  window: int | None = None,
  sinks_N=None,
):
  """Query t of a row attends to its first `lengths_B + t` tokens.

  To all of them, or to the last `window`. `sinks_N`: see `attention.attend`.
  Only pages with such tokens are copied from HBM, each once for all key-value
  heads of a TensorCore. Two cores share the heads, or else the rows. Copies
  wait neither for the end of a row nor for rows without tokens, whose output
  is 0.
  """
  (B, T, K, U, H), (t, W) = q_BTKUH.shape, (k_KntH.shape[2], table_BW.shape[1])
  M, itemsize = T * U, k_KntH.dtype.itemsize
  cores = sharding.cores() if K % 2 == 0 or B % 2 == 0 else 1
  heads, rows = (K // cores, B) if K % cores == 0 else (K, B // cores)
  S = block_pages(heads, t, H, itemsize) * t
  block_bytes = 2 * heads * S * H * itemsize
  buffers = max(2, min(_BUFFERS, _BUFFERS_BYTES // block_bytes))
  padded = M + -M % _SUBLANES
  most = max(1, _QUERY_BYTES // (heads * padded * H * itemsize))
  R = max(r for r in range(1, min(rows, most) + 1) if rows % r == 0)

  def place(core, i, *_):
    """The numbers of the program's block of rows, and of heads."""
    return (i, core) if rows == B else (core * (rows // R) + i, 0)

  queries = pl.BlockSpec((R, heads, M, H), lambda *ids: (*place(*ids), 0, 0))
  sinks = pl.BlockSpec((heads, M, 1), lambda *ids: (place(*ids)[1], 0, 0))
  in_hbm = pl.BlockSpec(memory_space=pl.ANY)
  blocks = pltpu.VMEM((buffers, heads, S, H), k_KntH.dtype)
  q_BKMH = q_BTKUH.swapaxes(1, 2).reshape(B, K, M, H)
  # The sink of a head adds 1 to a sum of exp(score - sink).
  sinks_N = jnp.full(K * U, MASKED) if sinks_N is None else sinks_N
  sinks_KM = jnp.tile(sinks_N.reshape(K, U).astype(jnp.float32), (1, T))
  out_BKMH = pl.pallas_call(
    functools.partial(
      _attend, T=T, W=W, place=place, scale=scale, window=window
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(cores, rows // R),
      in_specs=[queries, sinks, in_hbm, in_hbm],
      out_specs=queries,
      scratch_shapes=[blocks, blocks, pltpu.SemaphoreType.DMA((buffers,))],
    ),
    out_shape=jax.ShapeDtypeStruct(q_BKMH.shape, q_BKMH.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      # They would take as many instructions as the copies that they check.
      disable_bounds_checks=True,
    ),
    # The plan of a program knows the kernel and its window by this name.
    name="paged_attention" + (f"_window_{window}" if window else ""),
  )(
    lengths_B,
    table_BW.reshape(-1),
    q_BKMH,
    sinks_KM[..., None],
    k_KntH,
    v_KntH,
  )
  return out_BKMH.reshape(B, K, T, U, H).swapaxes(1, 2)


def block_pages(heads: int, t: int, H: int, itemsize: int) -> int:
  """P, the pages of a block of so many heads."""
  page_bytes = 2 * heads * t * H * itemsize
  return max(1, min(_TOKENS // t, _BLOCK_BYTES // page_bytes))


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """Blocks of keys and values in VMEM, for the rows and heads of a program.

  They are copied from the pages in the order in which they are computed: block
  after block of a row, row after row.
  """

  # Refs: tokens and pages of all rows; keys and values in HBM, and in VMEM as
  # [buffers, heads, S, H]; a semaphore of each buffer.
  lengths: Any
  table: Any
  pages: tuple[Any, Any]
  blocks: tuple[Any, Any]
  arrived: Any
  first: tuple[jax.Array, jax.Array]  # row and head of the program
  R: int
  T: int
  W: int
  window: int | None

  @property
  def t(self) -> int:
    return self.pages[0].shape[2]

  @property
  def P(self) -> int:
    return self.blocks[0].shape[2] // self.t

  def tokens(self, row):
    """Of the first query."""
    return self.lengths[self.first[0] + jnp.minimum(row, self.R - 1)]

  def first_block(self, row):
    return self._first_page(row) // self.P

  def end_block(self, row):
    return pl.cdiv(self._end_page(row), self.P)

  def _first_page(self, row):
    if self.window is None:
      return 0
    return jnp.maximum(self.tokens(row) - self.window, 0) // self.t

  def _end_page(self, row):
    return jnp.minimum(pl.cdiv(self.tokens(row) + self.T - 1, self.t), self.W)

  def with_tokens(self, row):
    """The first such row, from this one on; R if there is none."""
    empty = lambda row: (row < self.R) & (self.tokens(row) == 0)
    return jax.lax.while_loop(empty, lambda row: row + 1, row)

  def _each_copy(self, act, buffer, row, block):
    """Calls `act` for the copies of a block's keys and values."""
    start, (row_0, head_0) = block * self.P, self.first
    heads = pl.ds(head_0, self.blocks[0].shape[1])

    def of_page(p, _):
      page = self.table[(row_0 + row) * self.W + start + p]
      for hbm, ref in zip(self.pages, self.blocks, strict=True):
        target = ref.at[buffer, :, pl.ds(p * self.t, self.t)]
        copy = (hbm.at[heads, page], target, self.arrived.at[buffer])
        act(pltpu.make_async_copy(*copy))

    first = jnp.maximum(self._first_page(row) - start, 0)
    end = jnp.minimum(self._end_page(row) - start, self.P)
    jax.lax.fori_loop(first, end, of_page, None)

  def start(self, buffer, following):
    """Starts the copies of a block, if there is one; the block after it."""
    row, block = following

    @pl.when(row < self.R)
    def _():
      self._each_copy(lambda copy: copy.start(), buffer, row, block)

    ends = (block + 1) * self.P >= self._end_page(row)
    next_row = self.with_tokens(jnp.where(ends, row + 1, row))
    return next_row, jnp.where(ends, self.first_block(next_row), block + 1)

  def wait(self, buffer, row, block):
    self._each_copy(lambda copy: copy.wait(), buffer, row, block)


def _attend(
  lengths_ref,
  table_ref,
  q_ref,
  sinks_ref,
  k_hbm,
  v_hbm,
  out_ref,
  k_ref,
  v_ref,
  arrived,
  *,
  T,
  W,
  place,
  scale,
  window,
):
  """The rows and heads of a program."""
  (R, heads, M, H), (buffers, _, S, _) = q_ref.shape, k_ref.shape
  row, head = place(pl.program_id(0), pl.program_id(1))
  pages, memory = (k_hbm, v_hbm), (k_ref, v_ref)
  first, sizes = (row * R, head * heads), (R, T, W, window)
  blocks = _Blocks(
    lengths_ref, table_ref, pages, memory, arrived, first, *sizes
  )
  out_ref[...] = jnp.zeros_like(out_ref)

  # Tokens that are not copied have no weight, but must be numbers.
  @pl.when((blocks.P > 1) & (pl.program_id(1) == 0))
  def _():
    v_ref[...] = jnp.zeros_like(v_ref)

  row = blocks.with_tokens(0)
  following = row, jnp.int32(blocks.first_block(row))
  following = jax.lax.fori_loop(0, buffers - 1, blocks.start, following)
  # A token's place in its block, less its query's among those of the row.
  iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, (M, S))
  place_MS = iota(1) - iota(0) // (M // T)

  def of_row(state):
    row, buffer, following = state

    def of_block(block, state):
      buffer, following, softmax = state
      free = jnp.where(buffer == 0, buffers, buffer) - 1
      following = blocks.start(free, following)
      blocks.wait(buffer, row, block)
      left = blocks.tokens(row) - block * S
      visible_MS = place_MS < left
      if window is not None:
        visible_MS &= place_MS >= left - window
      softmax = tuple(
        _update(
          *(x[h] for x in (q_ref.at[row], k_ref.at[buffer], v_ref.at[buffer])),
          visible_MS,
          scale,
          *softmax[h],
        )
        for h in range(heads)
      )
      buffer = jnp.where(buffer + 1 == buffers, 0, buffer + 1)
      return buffer, following, softmax

    softmax = tuple(
      (sinks_ref[h], jnp.ones((M, 1)), jnp.zeros((M, H))) for h in range(heads)
    )
    buffer, following, softmax = jax.lax.fori_loop(
      blocks.first_block(row),
      blocks.end_block(row),
      of_block,
      (buffer, following, softmax),
    )
    for h, (_, total_M1, out_MH) in enumerate(softmax):
      out_ref[row, h] = (out_MH / total_M1).astype(out_ref.dtype)
    return blocks.with_tokens(row + 1), buffer, following

  state = row, jnp.int32(0), following
  jax.lax.while_loop(lambda state: state[0] < R, of_row, state)


def _update(q_MH, k_SH, v_SH, visible_MS, scale, max_M1, total_M1, out_MH):
  """Adds a block to the largest score, the sum of weights and the output."""
  dot = functools.partial(
    jax.lax.dot_general, preferred_element_type=jnp.float32
  )
  scores_MS = dot(q_MH, k_SH, (((1,), (1,)), ((), ()))) * scale
  scores_MS = jnp.where(visible_MS, scores_MS, MASKED)
  new_M1 = jnp.maximum(max_M1, scores_MS.max(-1, keepdims=True))
  weights_MS = jnp.exp(scores_MS - new_M1)
  part_MH = dot(weights_MS.astype(v_SH.dtype), v_SH, (((1,), (0,)), ((), ())))
  decay_M1 = jnp.exp(max_M1 - new_M1)
  total_M1 = total_M1 * decay_M1 + weights_MS.sum(-1, keepdims=True)
  return new_M1, total_M1, out_MH * decay_M1 + part_MH
