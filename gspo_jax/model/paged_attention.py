"""Attention of one query a row to the keys that its pages hold.

Dimension key: B rows, N query heads, K key-value heads, R = N / K, H head
width, n pages, S tokens a page, W most pages a row, M (row, page) pairs of a
block. Of narrow heads, j may lie side by side in a page, as one of width j * H.
"""

import jax
import jax.numpy as jnp

from gspo_jax.model import attention
from gspo_jax.model.rounding import rounded
from gspo_jax.runtime import sharding

_LANES = 128
_TOKENS = 512  # of keys in VMEM at one time
_BYTES = {"cpu": 2**18}  # of the keys of a block


def side_by_side(heads: int, width: int) -> int:
  """j, how many key-value heads are to lie beside each other in a page.

  On a TPU as many as fill its lanes, if the heads of a device come out even.
  Narrow ones alone would be padded to as much, and XLA copies the whole cache
  to do so: all of it around a segment, and a layer's in each step.

  Args:
    heads: of all devices together.
    width: H.
  """
  fill = _LANES // width if width < _LANES and _LANES % width == 0 else 1
  even = heads % (fill * sharding.size("tensor")) == 0
  return fill if sharding.platform() == "tpu" and even else 1


def every_head(K):
  """Names the heads that `:` would: with that, a TPU turns the whole cache.

  For a slice of heads, XLA wants them beside H, but the kernel does not: two
  copies of all pages in every layer of every step.
  """
  return jnp.arange(K)[:, None]


def read(q_BNH, k_KnSH, v_KnSH, table_BW, lengths_B):
  """Attention of one query a row and head to the first tokens of its pages.

  On a TPU by jax's kernel, which wants pages to be multiples of 128 wide and
  rounds keys and values to bfloat16; what it cannot take, and other platforms,
  by blocks.

  Args:
    q_BNH: queries; N / K heads in a row read the same key-value head.
    k_KnSH: keys; or [K / j, n, S, j * H].
    v_KnSH: values, likewise.
    table_BW: int32, the pages of each row.
    lengths_B: int32, tokens to see; 0 gives finite garbage.

  Returns:
    [B, N, H].
  """
  (B, N, H), (K, _, _, width) = q_BNH.shape, k_KnSH.shape
  fits = width % _LANES == 0 and q_BNH.dtype == jnp.bfloat16
  kernel = sharding.platform() == "tpu" and fits
  attend = by_kernel if kernel else by_blocks
  # A head's query is 0 where the others beside it have their keys, and of
  # their values, too, it gets a sum: that is left out.
  j = width // H
  own_jj = jnp.eye(j, dtype=q_BNH.dtype)
  q_BKRH = q_BNH.reshape(B, K, j, -1, 1, H) * own_jj[:, None, :, None]
  q_BKRH = q_BKRH.reshape(B, K, -1, width)
  out_BKRH = attend(q_BKRH, k_KnSH, v_KnSH, table_BW, lengths_B, H**-0.5)
  out_BKjRjH = out_BKRH.reshape(B, K, j, -1, j, H)
  return jnp.einsum("bkjrjh->bkjrh", out_BKjRjH).reshape(B, N, H)


def by_kernel(q_BKRH, k_KnSH, v_KnSH, table_BW, lengths_B, scale):
  """The TPU kernel of jax; a row of no tokens sees one."""
  from jax.experimental.pallas.ops.tpu import paged_attention as pa

  B, K, R, H = q_BKRH.shape
  S, W = k_KnSH.shape[2], table_BW.shape[1]
  block = min(W, max(1, _TOKENS // S))
  # It takes whole blocks only; where a row has no page it may be any.
  table_BW = jnp.pad(table_BW, ((0, 0), (0, -W % block)))
  q_BNH = q_BKRH.reshape(B, K * R, H).astype(jnp.float32) * scale
  out_BNH = pa.paged_attention(
    q_BNH,
    k_KnSH,
    v_KnSH,
    jnp.maximum(lengths_B, 1),
    table_BW,
    pages_per_compute_block=block,
  )
  return out_BNH.reshape(q_BKRH.shape).astype(q_BKRH.dtype)


def by_blocks(q_BKRH, k_KnSH, v_KnSH, table_BW, lengths_B, scale):
  """Plain operations, whose cost follows the tokens that are there.

  The pages of all rows, one row after the other, make one list of (row, page)
  pairs. A loop of as many trips as the list needs takes M pairs at a time into
  a softmax that is rescaled whenever a row's maximum grows.
  """
  B, K = q_BKRH.shape[:2]
  S, W = k_KnSH.shape[2], table_BW.shape[1]
  M = _pairs(B, W, k_KnSH)
  ends_B = jnp.cumsum(-(-lengths_B // S))

  def body(i, state):
    pair_M = i * M + jnp.arange(M)
    row_M, page_M, left_M = _look_up(pair_M, ends_B, table_BW, lengths_B, S)
    at = every_head(K), page_M
    scores_KMRS = _scores(q_KBRH[:, row_M], k_KnSH[at], left_M, scale)
    return _fold(state, row_M, scores_KMRS, v_KnSH[at])

  # Heads first, as the pages have them: else each trip turns what it reads.
  q_KBRH = q_BKRH.swapaxes(0, 1)
  nothing_KBR = jnp.zeros(q_KBRH.shape[:-1])
  state = nothing_KBR + attention.MASKED, nothing_KBR, jnp.zeros(q_KBRH.shape)
  trips = -(-ends_B[-1] // M)
  _, total_KBR, out_KBRH = jax.lax.fori_loop(0, trips, body, state)
  # The largest score alone adds 1 to a total: only of no tokens is it less.
  out_KBRH /= jnp.maximum(total_KBR, 1)[..., None]
  return rounded(out_KBRH.swapaxes(0, 1), q_BKRH.dtype)


def _pairs(B, W, k_KnSH):
  """M, as many as have so many bytes of keys.

  With 1/4 MiB, which its caches hold, a CPU took at most 13 % longer than with
  the best, in ten shapes tried by hand: 50 to 900 tokens of 16 and 64 rows, 2
  to 8 heads of 16 to 128. A GPU starts a dozen kernels a trip, some 50 us
  whatever they do, in which it reads some 64 MiB of keys and values; that is
  reckoned, not measured.
  """
  K, _, S, H = k_KnSH.shape
  most = _BYTES.get(sharding.platform(), 2**25)
  return min(B * W, max(1, most // (K * S * H * k_KnSH.dtype.itemsize)))


def _look_up(pair_M, ends_B, table_BW, lengths_B, S):
  """Row, page, and tokens from the start of the page to the end of the row.

  Pairs after the last are pages of the last row, with no token left in them.
  """
  B, W = table_BW.shape
  row_M = jnp.searchsorted(ends_B, pair_M, "right", method="compare_all")
  row_M = jnp.minimum(row_M, B - 1)
  start_M = jnp.where(row_M > 0, ends_B[row_M - 1], 0)
  nth_M = pair_M - start_M
  page_M = table_BW[row_M, jnp.minimum(nth_M, W - 1)]
  return row_M, page_M, lengths_B[row_M] - nth_M * S


def _scores(q_KMRH, k_KMSH, left_M, scale):
  scores_KMRS = jnp.einsum(
    "kmrh,kmsh->kmrs", q_KMRH, k_KMSH, preferred_element_type=jnp.float32
  )
  seen_MS = jnp.arange(k_KMSH.shape[2]) < left_M[:, None]
  return jnp.where(seen_MS[:, None], scores_KMRS * scale, attention.MASKED)


def _fold(state, row_M, scores_KMRS, v_KMSH):
  """Adds pairs to their rows' largest score, sum of weights and output."""
  old_KBR, total_KBR, out_KBRH = state
  top_KBR = old_KBR.at[:, row_M].max(scores_KMRS.max(-1))
  weights_KMRS = jnp.exp(scores_KMRS - top_KBR[:, row_M][..., None])
  part_KMRH = attention.weigh("kmrs,kmsh->kmrh", weights_KMRS, v_KMSH)
  shrink_KBR = jnp.exp(old_KBR - top_KBR)
  total_KBR = (total_KBR * shrink_KBR).at[:, row_M].add(weights_KMRS.sum(-1))
  out_KBRH = (out_KBRH * shrink_KBR[..., None]).at[:, row_M].add(part_KMRH)
  return top_KBR, total_KBR, out_KBRH
