"""Attention of each row's newest tokens to keys and values in pages.

Dimension key: B rows, T queries a row, N query heads, K key-value heads, U = N
/ K, H head width, V width of a value head, n pages, t tokens a page, W maximum
pages a row, M (row, page) pairs of a block. A page may hold j narrow heads side
by side, as one head of width j * H. With T queries as rows, R = B * T.
"""

import jax
import jax.numpy as jnp

from gspo_jax.model import exact, exact_attention, gpu
from gspo_jax.model.attention_products import (
  MASKED,
  default_scale,
  products,
  weigh,
)
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding

_LANES = 128
_GPU_KERNEL_TOKENS = 64  # keys in shared memory at one time
# Programs that keep a GPU busy: about two for each of an H100's 132 cores.
_GPU_PROGRAMS = 256
_BLOCK_BYTES = {"cpu": 2**18}  # of the keys of a block; elsewhere 2**25


def side_by_side(heads: int, width: int) -> int:
  """j, the number of key-value heads that lie side by side in a page.

  On a TPU they fill its 128 lanes, if j divides the heads of a device: XLA pads
  a narrow head, and copies a layer's cache in each step. `heads` is K in total.
  """
  j = _LANES // width if width < _LANES and _LANES % width == 0 else 1
  divisible = heads % (j * sharding.size("tensor")) == 0
  return j if sharding.platform() == "tpu" and divisible else 1


def every_head(K):
  """An explicit index of all heads: with `:` XLA would copy all pages twice."""
  return jnp.arange(K)[:, None]


def read(
  q_BTNH,
  k_KntH,
  v_KntH,
  table_BW,
  lengths_B,
  *,
  value_dim: int | None = None,
  window: int | None = None,
  sinks_N=None,
  scale: float | None = None,
):
  """Attention of T queries per row and head to the tokens in its pages.

  Query t of a row attends to its first `lengths_B + t` tokens, of which its
  pages have room for; its output [B, T, N, V] is finite, but meaningless if
  there are none or if they are more. A row without tokens reads nothing.

  For bfloat16 queries on a TPU by `paged_kernel`, if the width of the pages is
  a multiple of 128. On a GPU by JAX's kernel from compute capability 8.0 on, if
  width and tokens of a page are powers of two, and the tokens 16 to 64, without
  window and sinks (see `attention.attend`). Else, and without values,
  `by_blocks`; a value is the first `value_dim` (V) columns of its key. Query
  head i uses key-value head i // (N / K). Keys and values may also be
  [K / j, n, t, j * H]. With a window, a query attends to the last `window` of
  its tokens.
  """
  (B, T, N, H), (K, _, t, width) = q_BTNH.shape, k_KntH.shape
  scale = default_scale(scale, H)
  if exact.is_on() and not exact.has_kernels():
    arrays = [x for x in (k_KntH, v_KntH) if x is not None]
    operands = q_BTNH, arrays, table_BW, lengths_B, value_dim
    options = {"window": window, "sinks_N": sinks_N, "scale": scale}
    return exact_attention.of_pages(*operands, **options)
  # A query is padded with zeros at the other j - 1 heads of its page. The
  # output also has the values of these heads, which the einsum drops.
  j = width // H
  identity_jj = jnp.eye(j, dtype=q_BTNH.dtype)
  q_BTKUH = q_BTNH.reshape(B, T, K, j, -1, 1, H) * identity_jj[:, None, :, None]
  q_BTKUH = q_BTKUH.reshape(B, T, K, -1, width)
  inputs = q_BTKUH, k_KntH, v_KntH, table_BW, lengths_B, scale
  options = {"window": window, "sinks_N": sinks_N}
  low = q_BTNH.dtype == jnp.bfloat16 and v_KntH is not None
  if low and sharding.platform() == "tpu" and width % _LANES == 0:
    from gspo_jax.model import paged_kernel

    out_BTKUV = paged_kernel.attend(*inputs, **options)
  else:
    plain = low and window is None and sinks_N is None
    fits = gpu.fills_tiles(width, t) and t <= _GPU_KERNEL_TOKENS
    if plain and fits and gpu.has_kernels():
      out_BTKUV = by_gpu_kernel(*inputs)
    else:
      q_BKTUH = q_BTKUH.swapaxes(1, 2)
      q_BKUH = q_BKTUH.reshape(B, K, -1, width)
      options |= {"value_dim": value_dim, "queries": T}
      out_BKUV = by_blocks(q_BKUH, *inputs[1:], **options)
      out_BKTUV = out_BKUV.reshape(*q_BKTUH.shape[:-1], -1)
      out_BTKUV = out_BKTUV.swapaxes(1, 2)
  out_BTKjUjV = out_BTKUV.reshape(B, T, K, j, N // (K * j), j, -1)
  out_BTKjUV = jnp.einsum("btkjujv->btkjuv", out_BTKjUjV)
  return out_BTKjUV.reshape(B, T, N, -1)


def by_gpu_kernel(q_BTKUH, k_KntH, v_KntH, table_BW, lengths_B, scale):
  """JAX's GPU kernel, for which each query is a row.

  The tokens of a row are split if there are few rows.
  """
  from jax.experimental.pallas.ops.gpu import paged_attention as pa

  B, T, K, U, H = q_BTKUH.shape
  R, t, W = B * T, k_KntH.shape[2], table_BW.shape[1]
  if T > 1:
    lengths_BT = lengths_B[:, None] + jnp.arange(T)
    lengths_BT = jnp.minimum(lengths_BT, W * t)
    lengths_B = jnp.where(lengths_B[:, None] > 0, lengths_BT, 0).reshape(-1)
    table_BW = jnp.repeat(table_BW, T, axis=0)
  block = max(1, _GPU_KERNEL_TOKENS // t)
  splits = min(-(-_GPU_PROGRAMS // (R * K)), -(-W // block))
  table_BW = jnp.pad(table_BW, ((0, 0), (0, -W % (block * splits))))
  q_RNH = rounded(wide(q_BTKUH) * scale, q_BTKUH.dtype).reshape(R, K * U, H)
  out_RNH = pa.paged_attention(
    q_RNH,
    k_KntH,
    v_KntH,
    table_BW,
    lengths_B,
    pages_per_compute_block=block,
    k_splits=splits,
  )
  return out_RNH.reshape(q_BTKUH.shape)


def by_blocks(
  q_BKUH,
  k_KntH,
  v_KntH,
  table_BW,
  lengths_B,
  scale,
  *,
  value_dim: int | None = None,
  window: int | None = None,
  sinks_N=None,
  queries: int = 1,
):
  """XLA operations, M (row, page) pairs a step, only for the tokens in use.

  With several `queries`, those of one key-value head lie side by side in U.
  """
  (B, K, U), t = q_BKUH.shape[:3], k_KntH.shape[2]
  if window is not None:
    rows = table_BW, lengths_B
    table_BW, lengths_B = _last_pages(*rows, t, window, queries)
  # Tokens of each query.
  later_U = jnp.arange(queries).repeat(U // queries) if queries > 1 else 0
  most_BU = jnp.minimum(lengths_B[:, None] + later_U, table_BW.shape[1] * t)
  tokens_BU = jnp.where(lengths_B[:, None] > 0, most_BU, 0)
  M = _block_pairs(B, table_BW.shape[1], k_KntH)
  ends_B = jnp.cumsum(-(-tokens_BU[:, -1] // t))

  def body(i, state):
    pair_M = i * M + jnp.arange(M)
    row_M, page_M, start_M = _look_up(pair_M, ends_B, table_BW, t)
    index = every_head(K), page_M
    left_MU1 = (tokens_BU[row_M] - start_M[:, None])[..., None]
    visible_MUt = jnp.arange(t) < left_MU1
    if window is not None:
      visible_MUt &= jnp.arange(t) >= left_MU1 - window
    k_KMtH = k_KntH[index]
    scores_KMUt = _scores(q_KBUH[:, row_M], k_KMtH, visible_MUt, scale)
    v_KMtV = k_KMtH[..., :value_dim] if v_KntH is None else v_KntH[index]
    return _update_softmax(state, row_M, scores_KMUt, v_KMtV)

  # Heads first, as in the pages: else each iteration would transpose them.
  q_KBUH = q_BKUH.swapaxes(0, 1)
  zeros_KBU = jnp.zeros(q_KBUH.shape[:-1])
  V = value_dim or q_KBUH.shape[-1]
  state = (
    zeros_KBU + MASKED,
    zeros_KBU,
    jnp.zeros((*zeros_KBU.shape, V)),
  )
  if sinks_N is not None:
    sinks_K1U = jnp.tile(wide(sinks_N).reshape(K, 1, -1), queries)
    sinks_KBU = zeros_KBU + sinks_K1U
    state = sinks_KBU, zeros_KBU + 1, state[2]
  num_blocks = -(-ends_B[-1] // M)
  _, total_KBU, out_KBUH = jax.lax.fori_loop(0, num_blocks, body, state)
  # The largest score adds 1 to its total: only rows without tokens have less.
  out_KBUH /= jnp.maximum(total_KBU, 1)[..., None]
  return rounded(out_KBUH.swapaxes(0, 1), q_BKUH.dtype)


def _block_pairs(B, W, k_KntH):
  """M, the number of pairs whose keys take `_BLOCK_BYTES`.

  1/4 MiB fits in a CPU's caches: at most 13 % slower than the best M in ten
  shapes. A GPU starts the dozen kernels of a step in 50 us, in which it reads
  about 64 MiB (estimated, not measured).
  """
  K, _, t, H = k_KntH.shape
  block_bytes = _BLOCK_BYTES.get(sharding.platform(), 2**25)
  return min(B * W, max(1, block_bytes // (K * t * H * k_KntH.dtype.itemsize)))


def _look_up(pair_M, ends_B, table_BW, t):
  """Each pair's row, page and first token (behind all after the last pair)."""
  B, W = table_BW.shape
  row_M = jnp.searchsorted(ends_B, pair_M, "right", method="compare_all")
  row_M = jnp.minimum(row_M, B - 1)
  start_M = jnp.where(row_M > 0, ends_B[row_M - 1], 0)
  page_index_M = pair_M - start_M
  page_M = table_BW[row_M, jnp.minimum(page_index_M, W - 1)]
  return row_M, page_M, page_index_M * t


def _last_pages(table_BW, lengths_B, t, window, queries):
  """The table and lengths without the pages before the windows of each row."""
  W = table_BW.shape[1]
  skipped_B = jnp.maximum(lengths_B - window, 0) // t
  # The tokens of all windows lie in at most so many pages.
  index_W = jnp.arange(min(W, -(-(window + queries - 2) // t) + 1))
  index_BW = jnp.minimum(skipped_B[:, None] + index_W, W - 1)
  table_BW = jnp.take_along_axis(table_BW, index_BW, axis=1)
  return table_BW, lengths_B - skipped_B * t


def _scores(q_KMUH, k_KMtH, visible_MUt, scale):
  scores_KMUt = products(q_KMUH, k_KMtH) * scale
  return jnp.where(visible_MUt, scores_KMUt, MASKED)


def _update_softmax(state, row_M, scores_KMUt, v_KMtH):
  """Adds M pairs to the rows' largest score, sum of weights and output."""
  old_max_KBU, total_KBU, out_KBUH = state
  max_KBU = old_max_KBU.at[:, row_M].max(scores_KMUt.max(-1))
  weights_KMUt = jnp.exp(scores_KMUt - max_KBU[:, row_M][..., None])
  part_KMUH = weigh("kmut,kmth->kmuh", weights_KMUt, v_KMtH)
  scale_KBU = jnp.exp(old_max_KBU - max_KBU)
  total_KBU = (total_KBU * scale_KBU).at[:, row_M].add(weights_KMUt.sum(-1))
  out_KBUH = (out_KBUH * scale_KBU[..., None]).at[:, row_M].add(part_KMUH)
  return max_KBU, total_KBU, out_KBUH
