"""Attention that gives a query the same bits in every program.

Each step takes `KEYS` keys, counted from the start of a sequence, for `_GROUPS`
groups of queries, whatever the program; one block of keys comes after the
other, with a running maximum (arXiv 2205.14135, algorithm 1). A query does not
depend on the others of its step. A block of which it sees no key changes
nothing, exactly. On a TPU the kernel of pages does this, for any keys.

Dimension key: B rows, T tokens of a row, N query heads, K key-value heads, U =
N / K, H head width, V width of a value head, n tokens of a group, p groups of
all rows, G groups of a step, R queries of a group and key head, S keys of a
step.
"""

import functools

import jax
import jax.numpy as jnp

from gspo_jax.model import exact
from gspo_jax.model.attention_products import MASKED, weigh
from gspo_jax.model.rounding import rounded, stored, wide
from gspo_jax.runtime import sharding

KEYS = 64  # S
_QUERIES = 4  # the least R: a decode step of one token fills U of them
_GROUPS = 16  # G
# On a TPU, tokens of a page of contiguous keys, and of the sampler's: how many
# keys the kernel takes a step follows from it.
PAGE = 128
_ROW = 32  # queries of a row of the kernel there


def align(platform: str) -> int:
  """In a packed row a sequence starts at a multiple.

  So the tokens of a group, and of a page, are of one sequence.
  """
  return PAGE if platform == "tpu" else _QUERIES


def attend(q_BTNH, last_BT, heads, fetch, *, window, sinks_N, scale):
  """The output [B, T, N, V], and the log-sum-exp of the scores [B, T, N].

  Args:
    q_BTNH: queries; T tokens follow one another.
    last_BT: int32, the last key that a token attends to, from 0 at the start of
      its sequence; -1: none, the output is finite and meaningless.
    heads: (K, V).
    fetch: (row, token, block) -> keys [K, S, H], values [K, S, V]: those of a
      block of the sequence of this token, all [] int32. Behind the last key of
      the token they are any finite numbers.
    window, sinks_N, scale: as of `attention.attend`.
  """
  (B, T, N, H), (K, V) = q_BTNH.shape, heads
  U, G, S = N // K, _GROUPS, KEYS
  R = max(_QUERIES, U)
  n = R // U
  per_row = -(-T // n)
  p = B * per_row

  def grouped(x_BTKU, fill):  # [p / G, G, K, R, ...]
    x = x_BTKU
    rest = [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, ((0, 0), (0, -T % n), *rest), constant_values=fill)
    x = jnp.moveaxis(x.reshape(p, n, *x.shape[2:]), 2, 1)
    x = x.reshape(p, x.shape[1], n * U, *x.shape[4:])
    rest = [(0, 0)] * (x.ndim - 3)
    padding = (0, -p % G), (0, 0), (0, R - n * U), *rest
    x = jnp.pad(x, padding, constant_values=fill)
    return x.reshape(-1, G, *x.shape[1:])

  q_cGKRH = grouped(q_BTNH.reshape(B, T, K, U, H), 0).astype(
    stored(q_BTNH.dtype)
  )
  last_cGR = grouped(
    jnp.broadcast_to(last_BT[:, :, None, None], (B, T, 1, U)), -1
  )[:, :, 0]
  number_cG = jnp.minimum(jnp.arange(len(q_cGKRH) * G), p - 1).reshape(-1, G)
  zeros = jnp.zeros((G, K, R))
  start = zeros + MASKED, zeros, jnp.zeros((G, K, R, V))
  if sinks_N is not None:
    sinks_KR = jnp.tile(wide(sinks_N).reshape(K, U), (1, n))
    sinks_KR = jnp.pad(sinks_KR, ((0, 0), (0, R - n * U)))
    start = zeros + sinks_KR, zeros + 1, start[2]
  step = exact.noinline(functools.partial(_step, window=window, scale=scale))
  end = exact.noinline(functools.partial(_end, dtype=q_BTNH.dtype))

  def part(operands):
    q_GKRH, last_GR, number_G = operands
    blocks_G = last_GR.max(1) // S + 1
    first_G = jnp.zeros_like(blocks_G)
    if window is not None:
      earliest_G = jnp.where(last_GR < 0, blocks_G[:, None] * S, last_GR).min(1)
      first_G = jnp.maximum(earliest_G - window + 1, 0) // S

    def body(j, state):
      block_G = jnp.minimum(first_G + j, jnp.maximum(blocks_G - 1, 0))
      k_GKSH, v_GKSV = jax.vmap(fetch)(
        number_G // per_row, number_G % per_row * n, block_G
      )
      # Groups that have no further block see no key.
      key_G1 = jnp.where(first_G + j < blocks_G, block_G, blocks_G)[:, None] * S
      key_GS = key_G1 + jnp.arange(S)
      return step(state, q_GKRH, k_GKSH, v_GKSV, last_GR, key_GS)

    state = jax.lax.fori_loop(0, (blocks_G - first_G).max(), body, start)
    return end(state)

  out_cGKRV, lse_cGKR = jax.lax.map(part, (q_cGKRH, last_cGR, number_cG))

  def by_token(x_cGKR):
    x = x_cGKR.reshape(-1, *x_cGKR.shape[2:])[:p, :, : n * U]
    x = jnp.moveaxis(x.reshape(p, K, n, U, *x.shape[3:]), 1, 2)
    return x.reshape(B, per_row * n, N, *x.shape[4:])[:, :T]

  return by_token(out_cGKRV), by_token(lse_cGKR)


def _step(state, q_GKRH, k_GKSH, v_GKSV, last_GR, key_GS, *, window, scale):
  maximum, total, out = state
  visible_GRS = key_GS[:, None] <= last_GR[..., None]
  if window is not None:
    visible_GRS &= last_GR[..., None] - key_GS[:, None] < window
  scores = jnp.einsum(
    "gkrh,gksh->gkrs", q_GKRH, k_GKSH, preferred_element_type=jnp.float32
  )
  scores = jnp.where(visible_GRS[:, None], scores * scale, MASKED)
  new = jnp.maximum(maximum, scores.max(-1))
  weights, shrink = jnp.exp(scores - new[..., None]), jnp.exp(maximum - new)
  part = weigh("gkrs,gksv->gkrv", weights, v_GKSV)
  total = total * shrink + weights.sum(-1)
  return new, total, out * shrink[..., None] + part


def _end(state, *, dtype):
  maximum, total, out = state
  # The largest score adds 1 to its total: only queries without keys have less.
  total = jnp.maximum(total, 1)
  return rounded(out / total[..., None], dtype), maximum + jnp.log(total)


def of_rows(q_BTNH, k_BTKH, v_BTKV, segments_BT, *, window, sinks_N, scale):
  """`attend` among the tokens of each segment, as `attention.attend`.

  No number where a segment does not start at a multiple of `align`.
  """
  column_T = jnp.arange(segments_BT.shape[1])
  before_BT = jnp.pad(segments_BT, ((0, 0), (1, 0)))[:, :-1]
  begins_BT = jnp.where(segments_BT != before_BT, column_T, 0)
  start_BT = jax.lax.cummax(begins_BT, axis=1)
  last_BT = jnp.where(segments_BT > 0, column_T - start_BT, -1)

  multiple = align(sharding.platform())
  aligned_BT = (start_BT % multiple == 0) | (segments_BT == 0)
  arrays = [x.swapaxes(1, 2).astype(stored(x.dtype)) for x in (k_BTKH, v_BTKV)]
  options = {"window": window, "sinks_N": sinks_N, "scale": scale}
  out_BTNV, lse_BTN = _contiguous(q_BTNH, start_BT, last_BT, arrays, **options)
  out_BTNV = jnp.where(aligned_BT[..., None, None], out_BTNV, jnp.nan)
  if lse_BTN is not None:
    # So the weights of padding are 0 in the backward pass.
    lse_BTN = jnp.where(segments_BT[..., None] > 0, lse_BTN, -MASKED)
  return out_BTNV, lse_BTN


def of_cache(
  q_BTNH, valid_BS, length, arrays, sinks_N, *, value_dim, **options
):
  """`attend` of the last T of `length` slots, of keys and values [B, K, S, H].

  `valid_BS` is false at padding, on either side of a row's tokens. Without
  values, a value is the first `value_dim` columns of its key.
  """
  T = q_BTNH.shape[1]
  start_BT = jnp.repeat(valid_BS.argmax(1)[:, None], T, axis=1)
  slot_T = length - T + jnp.arange(T)
  last_BT = jnp.where(valid_BS[:, slot_T], slot_T - start_BT, -1)
  options |= {"sinks_N": sinks_N, "value_dim": value_dim}
  return _contiguous(q_BTNH, start_BT, last_BT, arrays, **options)[0]


def _contiguous(
  q_BTNH, start_BT, last_BT, arrays, *, value_dim=None, **options
):
  """`attend` of keys and values [B, K, S, H], and the start of each sequence.

  On a TPU there is no log-sum-exp, and a sequence starts at a page.
  """
  if sharding.platform() == "tpu":
    return _in_pages(q_BTNH, *arrays, start_BT, last_BT, **options), None
  # The last block of a row may end behind the row.
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, KEYS), (0, 0)))
  arrays = [*map(pad, arrays)]

  def fetch(row, token, block):
    at = row, 0, start_BT[row, token] + block * KEYS, 0
    cut = lambda x: jax.lax.dynamic_slice(
      x, at, (1, x.shape[1], KEYS, x.shape[3])
    )
    return _keys_and_values([cut(x)[0] for x in arrays], value_dim)

  heads = arrays[0].shape[1], value_dim or arrays[-1].shape[3]
  return attend(q_BTNH, last_BT, heads, fetch, **options)


def _in_pages(q_BTNH, k_BKSH, v_BKSH, start_BT, last_BT, *, scale, **options):
  """`attend` of contiguous keys, by `paged_kernel`."""
  from gspo_jax.model import paged_kernel

  (B, T, N, H), K, t = q_BTNH.shape, k_BKSH.shape[1], PAGE
  n = min(_ROW, T)
  tail = lambda x, axis, size: jnp.pad(
    x, [(0, -x.shape[i] % size * (i == axis)) for i in range(x.ndim)]
  )
  q_BTNH = tail(q_BTNH, 1, n)

  def pages(x_BKSH):
    x = tail(x_BKSH, 2, t).reshape(B, K, -1, t, H)
    return x.swapaxes(0, 1).reshape(K, -1, t, H)

  k_KntH, v_KntH = pages(k_BKSH), pages(v_BKSH)
  W = k_KntH.shape[1] // B
  page_BpW = start_BT[:, ::n, None] // t + jnp.arange(W)
  page_BpW = jnp.minimum(page_BpW, W - 1) + W * jnp.arange(B)[:, None, None]
  out_RnKUH = paged_kernel.attend(
    q_BTNH.reshape(-1, n, K, N // K, H),
    k_KntH,
    v_KntH,
    page_BpW.reshape(-1, W).astype(jnp.int32),
    last_BT[:, ::n].reshape(-1) + 1,
    scale,
    **options,
  )
  return out_RnKUH.reshape(B, -1, N, H)[:, :T]


def of_pages(q_BTNH, arrays, table_BW, lengths_B, value_dim, **options):
  """`paged_attention.read`; a page has a divisor or a multiple of `KEYS`."""
  (_, T, _, H), (K, _, t, width) = q_BTNH.shape, arrays[0].shape
  W, blocks = table_BW.shape[1], max(1, t // KEYS)  # of a page
  j, pages, S = width // H, max(1, KEYS // t), min(t, KEYS)
  most_BT = jnp.minimum(lengths_B[:, None] + jnp.arange(T), W * t)
  last_BT = jnp.where(lengths_B[:, None] > 0, most_BT, 0) - 1

  def fetch(row, token, block):
    del token
    index = block // blocks * pages + jnp.arange(pages)
    page = table_BW[row, jnp.minimum(index, W - 1)]
    token = block % blocks * S

    def read(x_KntH):
      x = jax.lax.dynamic_slice_in_dim(x_KntH[:, page], token, S, axis=2)
      x = x.reshape(K, KEYS, j, -1)
      return x.swapaxes(1, 2).reshape(K * j, KEYS, -1)

    return _keys_and_values([*map(read, arrays)], value_dim)

  heads = K * j, value_dim or arrays[-1].shape[3] // j
  return attend(q_BTNH, last_BT, heads, fetch, **options)[0]


def _keys_and_values(arrays, value_dim):
  return arrays[0], arrays[-1][..., :value_dim]
