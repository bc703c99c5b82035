"""Causal attention within segments, with the kernel of the platform.

Dimension key: B rows, T tokens, N query heads, K key-value heads, U = N / K
query heads of one key-value head, H head width, V width of a value head; in a
block of queries, Q queries and the S keys from the first that one of them
attends to, to the last.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gspo_jax.model import exact, exact_attention, gpu
from gspo_jax.model.attention_products import (
  MASKED,
  default_scale,
  products,
  weigh,
)
from gspo_jax.model.exact import noinline
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding, tpus

_BLOCK = 512  # queries and keys of a tile of scores in VMEM
# Queries and keys of a step of splash, in tiles of _BLOCK keys. A step that is
# skipped takes a twelfth of one that is not on a v5p, by its bundles, and half
# as many tokens need four times as many steps.
_SPLASH_BLOCK = 1024
# Widest key and value together of which 1,024 queries fit in the VMEM of the
# fused backward pass on a v5p, if each head has its own keys.
_WIDEST = 384
# Most bytes of the parts of the fused backward pass: 32,768 tokens of 32 heads
# of width 128. Above it a separate kernel computes the gradient of the queries,
# and the scores once more.
_PARTS_BYTES = 4 * 2**30
_CPU_BLOCK = 64  # queries of a block on a CPU are a multiple
_CACHED_SCORES = 2**18  # float32 scores that stay in the cache of a core
_LANES = 128
_SPLASH_WIDTH = 64  # of heads that splash takes, or a multiple


def attend(
  q_BTNH,
  k_BTKH,
  v_BTKV,
  segments_BT,
  *,
  window: int | None = None,
  sinks_N=None,
  scale: float | None = None,
):
  """Each token attends to itself and to the earlier tokens of its segment.

  With a window only to the last `window` of them, itself included. A sink is a
  score of each query head to a key without a value: it adds to the sum of the
  softmax, p_s = exp(score_s) / (exp(sink) + sum_s exp(score_s)).

  Query head i uses key-value head i // (N / K). The tokens of a segment follow
  one another; padding, segment 0, attends to padding. The products of queries
  and keys are multiplied by `scale`, H^-0.5 by default. The output [B, T, N, V]
  has the dtype of the queries. By splash attention on a TPU if H is a multiple
  of 64; by `gpu.attend` on a GPU from compute capability 8.0 on, for 16-bit
  numbers without sinks; else `in_blocks`. No scores [B, N, T, T] are stored.
  """
  H, operands = q_BTNH.shape[-1], (q_BTNH, k_BTKH, v_BTKV, segments_BT)
  if exact.has_kernels():
    options = {"window": window, "scale": default_scale(scale, H)}
    rows = exact_attention.of_rows
    out_BTNV = exact.with_gradient_of(
      lambda *qkv: attend(*qkv[:4], sinks_N=qkv[4], **options),
      lambda *qkv: rows(*qkv[:4], sinks_N=qkv[4], **options)[0],
    )(*operands, sinks_N)
    return checkpoint_name(out_BTNV, "attention")
  if exact.is_on():
    return in_blocks(*operands, window, sinks_N, scale, True)
  if sharding.platform() == "tpu" and H % _SPLASH_WIDTH == 0:
    return splash(*operands, window=window, sinks_N=sinks_N, scale=scale)
  if sinks_N is None and gpu.has_attention(q_BTNH.dtype, H, v_BTKV.shape[-1]):
    out_BTNV = gpu.attend(*operands, window, default_scale(scale, H))
    return checkpoint_name(out_BTNV, "attention")
  return in_blocks(*operands, window, sinks_N, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 6, 7))
def in_blocks(
  q_BTNH,
  k_BTKH,
  v_BTKV,
  segments_BT,
  window=None,
  sinks_N=None,
  scale=None,
  exactly=False,
):
  """`attend` in XLA's operations, over blocks of queries.

  A block reads the keys from the window of its first query up to its last
  query, which leaves out most masked scores. A CPU takes few rows at a time,
  whose scores fit in a core's cache. The backward pass computes the scores
  again (arXiv 2205.14135, algorithm 4). The output is rounded once from
  float32, as in the sampler's caches.
  """
  operands = q_BTNH, k_BTKH, v_BTKV, segments_BT
  return _forward(*operands, window, sinks_N, scale, exactly)[0]


def _forward(
  q_BTNH, k_BTKH, v_BTKV, segments_BT, window, sinks_N, scale, exactly
):
  if exactly:
    operands = q_BTNH, k_BTKH, v_BTKV, segments_BT
    out_BTNV, lse_BTN = exact_attention.of_rows(
      *operands,
      window=window,
      sinks_N=sinks_N,
      scale=default_scale(scale, q_BTNH.shape[-1]),
    )
  else:
    rows = functools.partial(
      _forward_rows, window=window, scale=scale, sinks_N=sinks_N
    )
    biases = _biases(segments_BT, window)
    out_BTNV, lse_BTN = _map_rows(rows, (q_BTNH, k_BTKH, v_BTKV, biases))
  # A rematerialised block that keeps both computes the scores only twice.
  out_BTNV = checkpoint_name(out_BTNV, "attention")
  lse_BTN = checkpoint_name(lse_BTN, "attention")
  inputs = q_BTNH, k_BTKH, v_BTKV, segments_BT, sinks_N
  return out_BTNV, (*inputs, out_BTNV, lse_BTN)


def _backward(window, scale, exactly, residuals, dout_BTNV):
  del exactly
  q_BTNH, k_BTKH, v_BTKV, segments_BT, sinks_N, out_BTNV, lse_BTN = residuals
  # sum_s w_s dw_s = sum_s w_s (v_s . dout) = out . dout
  delta_BTN = (wide(out_BTNV) * wide(dout_BTNV)).sum(-1)
  queries = q_BTNH, lse_BTN, delta_BTN, dout_BTNV
  operands = queries, k_BTKH, v_BTKV, _biases(segments_BT, window)
  rows = functools.partial(_backward_rows, window=window, scale=scale)
  dsinks_N = None
  if sinks_N is not None:
    weights_BTN = jnp.exp(wide(sinks_N) - lse_BTN)
    dsinks_N = -(weights_BTN * delta_BTN).sum((0, 1)).astype(sinks_N.dtype)
  return *_map_rows(rows, operands), None, dsinks_N


in_blocks.defvjp(_forward, _backward)


def _map_rows(function, operands):
  """`function(*operands)`, the last the biases; on a CPU few rows at a time."""
  B, _, N, _ = jax.tree.leaves(operands)[0].shape
  if sharding.platform() != "cpu":
    return function(*operands)
  scores = max(math.prod(bias_BQS.shape[1:]) for bias_BQS in operands[-1])
  limit = max(1, _CACHED_SCORES // (N * scores))
  rows = max(n for n in range(1, min(limit, B) + 1) if B % n == 0)
  if rows == B:
    return function(*operands)
  cut = lambda x: x.reshape(-1, rows, *x.shape[1:])
  outs = jax.lax.map(lambda x: function(*x), jax.tree.map(cut, operands))
  return jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), outs)


def _blocks(T, window):
  """(first key, first query, first query of the next block) of each block.

  Each block is compiled, and costs some operations; longer ones compute more
  masked scores. On a CPU the sum is least near 4 sqrt(T) queries.
  """
  reach = T if window is None else window
  size = _BLOCK
  if sharding.platform() == "cpu":
    size = min(4 * math.isqrt(T), reach) // _CPU_BLOCK * _CPU_BLOCK
    size = max(_CPU_BLOCK, size)
  return [
    (max(0, start - reach + 1), start, min(start + size, T))
    for start in range(0, T, size)
  ]


def _biases(segments_BT, window):
  """For each block [B, Q, S] float32, 0 at the keys that a query attends to."""
  biases = []
  for first, start, end in _blocks(segments_BT.shape[1], window):
    q_BQ, k_BS = segments_BT[:, start:end], segments_BT[:, first:end]
    query_Q1, key_S = jnp.arange(start, end)[:, None], jnp.arange(first, end)
    visible_QS = query_Q1 >= key_S
    if window is not None:
      visible_QS &= query_Q1 - key_S < window
    biases.append(_bias(q_BQ, k_BS, visible_QS))
  return biases


@noinline
def _bias(q_BQ, k_BS, visible_QS):
  visible_BQS = (q_BQ[:, :, None] == k_BS[:, None]) & visible_QS
  masked = jnp.full(visible_BQS.shape, MASKED)
  return jax.lax.select(visible_BQS, jnp.zeros_like(masked), masked)


def _by_kv_head(x_BTN, K):
  """[B, T, N, ...] -> [B, K, T, U, ...]."""
  B, T, N, *rest = x_BTN.shape
  return jnp.moveaxis(x_BTN.reshape(B, T, K, N // K, *rest), 2, 1)


def _by_token(x_BKTU):  # the inverse of `_by_kv_head`
  B, K, T, U, *rest = x_BKTU.shape
  return jnp.moveaxis(x_BKTU, 1, 2).reshape(B, T, K * U, *rest)


def _scores(q_BKQUH, k_BKSH, bias_BQS, scale):
  """Float32 scores [B, K, Q, U, S], by one product for all queries."""
  B, K, Q, U, H = q_BKQUH.shape
  scores = products(q_BKQUH.reshape(B, K, Q * U, H), k_BKSH)
  scores_BKQUS = scores.reshape(B, K, Q, U, -1) * default_scale(scale, H)
  return scores_BKQUS + bias_BQS[:, None, :, None]


def _forward_rows(q_BTNH, k_BTKH, v_BTKV, biases, *, window, scale, sinks_N):
  """The output [B, T, N, V] and the log-sum-exp of the scores [B, T, N]."""
  T, K = q_BTNH.shape[1], k_BTKH.shape[2]
  q_BKTUH = _by_kv_head(q_BTNH, K)
  k_BKTH, v_BKTV = k_BTKH.swapaxes(1, 2), v_BTKV.swapaxes(1, 2)
  outs, lses = [], []
  for (first, start, end), bias in zip(_blocks(T, window), biases, strict=True):
    q_BKQUH = q_BKTUH[:, :, start:end]
    scores_BKQUS = _scores(q_BKQUH, k_BKTH[:, :, first:end], bias, scale)
    maximum = scores_BKQUS.max(-1, keepdims=True)
    if sinks_N is not None:
      sinks = wide(sinks_N).reshape(K, 1, -1, 1)
      maximum = jnp.maximum(maximum, sinks)
    weights_BKQUS = jnp.exp(scores_BKQUS - maximum)
    total = weights_BKQUS.sum(-1, keepdims=True)
    if sinks_N is not None:
      total += jnp.exp(sinks - maximum)
    weights = _merge(weights_BKQUS)
    out = weigh("bkqs,bksv->bkqv", weights, v_BKTV[:, :, first:end])
    out_BKQUV = out.reshape(*q_BKQUH.shape[:-1], -1) / total
    outs.append(_by_token(rounded(out_BKQUV, q_BTNH.dtype)))
    lses.append(_by_token((maximum + jnp.log(total))[..., 0]))
  return jnp.concatenate(outs, 1), jnp.concatenate(lses, 1)


def _merge(x_BKQUX):
  """[B, K, Q, U, X] -> [B, K, Q * U, X]."""
  B, K, Q, U, X = x_BKQUX.shape
  return x_BKQUX.reshape(B, K, Q * U, X)


def _backward_rows(queries, k_BTKH, v_BTKV, biases, *, window, scale):
  """The gradients of queries, keys and values, in their dtypes.

  `queries` are they, and by query log-sum-exp, delta and the output's gradient.
  """
  q_BTNH, K = queries[0], k_BTKH.shape[2]
  B, T, _, H = q_BTNH.shape
  scale = default_scale(scale, H)
  queries = [_by_kv_head(x, K) for x in queries]
  k_BKTH, v_BKTV = k_BTKH.swapaxes(1, 2), v_BTKV.swapaxes(1, 2)
  dq_blocks = []
  # Keys last: the scores are then not transposed to sum over the queries.
  dk_BKHT = jnp.zeros((B, K, H, T))
  dv_BKVT = jnp.zeros((B, K, v_BTKV.shape[-1], T))
  for (first, start, end), bias in zip(_blocks(T, window), biases, strict=True):
    q, lse, delta, dout = (x[:, :, start:end] for x in queries)
    k_BKSH, v_BKSV = k_BKTH[:, :, first:end], v_BKTV[:, :, first:end]
    weights = jnp.exp(_scores(q, k_BKSH, bias, scale) - lse[..., None])
    q_BKHQ, dout_BKVQ = (_merge(x).swapaxes(2, 3) for x in (q, dout))
    dweights = weigh("bkqv,bksv->bkqs", _merge(dout), v_BKSV)
    dweights = dweights.reshape(weights.shape)
    dscores = _merge(weights * (dweights - delta[..., None]) * scale)
    dq = weigh("bkqs,bksh->bkqh", dscores, k_BKSH).reshape(q.shape)
    dq_blocks.append(_by_token(dq))
    add = lambda total, x: total.at[..., first:end].add(x)  # noqa: B023
    dk_BKHT = add(dk_BKHT, weigh("bkqs,bkhq->bkhs", dscores, q_BKHQ))
    dv_BKVT = add(dv_BKVT, weigh("bkqs,bkvq->bkvs", _merge(weights), dout_BKVQ))
  tokens_first = lambda x_BKHT: jnp.moveaxis(x_BKHT, 3, 1)
  gradients = (
    (jnp.concatenate(dq_blocks, 1), q_BTNH),
    (tokens_first(dk_BKHT), k_BTKH),
    (tokens_first(dv_BKVT), v_BTKV),
  )
  return tuple(rounded(x, like.dtype) for x, like in gradients)


def splash(
  q_BTNH,
  k_BTKH,
  v_BTKV,
  segments_BT,
  *,
  window: int | None = None,
  sinks_N=None,
  scale: float | None = None,
  interpret: bool = False,
):
  """JAX's TPU kernel; `interpret` runs it on any platform, slowly.

  It skips the blocks of scores that no segment needs. Padding, segment 0, is
  cut into segments of one block. Two TensorCores share the parts of a `vmap`,
  never the backward pass of one: these are the key-value heads, or halves of
  the query heads of an odd one.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as sa

  (B, T, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
  parts, cores = 1, sharding.cores()
  if cores > 1:
    parts = next(n for n in (math.lcm(K, cores), K) if N % n == 0)
  padding = -T % _LANES  # at the end: no earlier token attends to it
  pad = lambda x: jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
  lanes = H + -H % _LANES  # in HBM
  query_bytes = (T + padding) * N * lanes * q_BTNH.dtype.itemsize
  width = lanes + v_BTKV.shape[-1]
  sizes = _splash_sizes(T + padding, query_bytes, window, width)
  split = lambda x: x.reshape(parts, -1, *x.shape[1:])
  q_BTNH *= default_scale(scale, H)
  repeat = lambda x: jnp.repeat(x, max(parts // K, 1), axis=2)
  qkv = q_BTNH, repeat(k_BTKH), repeat(v_BTKV)
  qkv = (pad(x).swapaxes(1, 2) for x in qkv)

  def row(operands):  # whose blocks are not those of another row
    q_NTH, k_KTH, v_KTV, segments_T = operands
    kernel = _splash_kernel(sizes, segments_T, window, interpret)
    ids = sa.SegmentIds(q=segments_T, kv=segments_T)
    run = lambda *qkv, sinks: kernel(*qkv, segment_ids=ids, sinks=sinks)
    sinks = None if sinks_N is None else split(_cast_gradient(sinks_N))
    out = jax.vmap(run)(*map(split, (q_NTH, k_KTH, v_KTV)), sinks=sinks)
    return out.reshape(N, *out.shape[2:])

  segments_BT = pad(segments_BT)
  block_T = jnp.arange(T + padding) // sizes.block_q
  segments_BT = jnp.where(segments_BT == 0, -1 - block_T, segments_BT)
  # `vmap` of several would hold the parts of all rows at once.
  rows = jax.vmap(row) if B == 1 else functools.partial(jax.lax.map, row)
  out_BNTV = rows((*qkv, segments_BT))
  return out_BNTV.swapaxes(1, 2)[:, :T]


def _splash_kernel(sizes, segments_T, window, interpret=False):
  """JAX's kernel for one row; it skips the blocks that no segment needs.

  Its grid has steps for the most blocks that any row can need. A block of
  queries needs the blocks of keys from first_Q1 to last_Q1. A step that is
  skipped names the next block that is needed, or the one in VMEM.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask_info,
  )

  T = len(segments_T)
  token_T, reach = np.arange(T, dtype=np.int32), window or T

  def info(needed, block):
    dtype = jnp.int8 if max(block.shape) <= 128 else jnp.int16
    return splash_attention_mask_info.MaskInfo(
      data_next=block[None].astype(dtype),
      mask_next=None,
      block_mask=needed[None].astype(jnp.int8),
      partial_mask_blocks=None,
      q_sequence=token_T,
    )

  def band(block_q, block_kv):
    """first_Q1, last_Q1; the first query of a block sees the first key."""
    start_Q1 = token_T[::block_q, None]
    visible_QT = start_Q1 - token_T < reach
    same_QT = segments_T[start_Q1] == segments_T
    last_Q1 = (start_Q1 + block_q - 1) // block_kv
    most = 1 + (last_Q1[:, 0] - visible_QT.argmax(1) // block_kv).max()
    first_Q1 = (visible_QT & same_QT).argmax(1, keepdims=True) // block_kv
    return first_Q1, last_Q1, most

  def by_query(block_q, block_kv):
    first_Q1, last_Q1, most = band(block_q, block_kv)
    block_QG = first_Q1 + np.arange(most)
    needed_QG = block_QG <= last_Q1
    next_Q1 = jnp.roll(first_Q1, -1, axis=0)
    return info(needed_QG, jnp.where(needed_QG, block_QG, next_Q1))

  def by_key(block_q, block_kv):
    first_Q1, last_Q1, _ = band(block_q, block_kv)
    key_K = np.arange(T // block_kv)
    needed_QK = (first_Q1 <= key_K) & (key_K <= last_Q1)
    first_K = needed_QK.argmax(0)
    last_K = first_K + needed_QK.sum(0) - 1
    if sizes.use_fused_bwd_kernel:  # whose steps are all blocks of queries
      block_GK = np.arange(T // block_q)[:, None]
    else:
      last = np.minimum((key_K + 1) * block_kv + reach - 1, T) - 1
      most = 1 + (last // block_q - key_K * block_kv // block_q).max()
      block_GK = first_K + np.arange(most)[:, None]
    needed_GK = (first_K <= block_GK) & (block_GK <= last_K)
    return info(needed_GK, jnp.clip(block_GK, first_K, last_K))

  fused = sizes.use_fused_bwd_kernel
  return splash_attention_kernel.SplashAttentionKernel(
    by_query(sizes.block_q, sizes.block_kv),
    None if fused else by_query(sizes.block_q_dq, sizes.block_kv_dq),
    by_key(sizes.block_q_dkv, sizes.block_kv_dkv),
    block_sizes=sizes,
    is_mqa=False,
    save_residuals=False,
    mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
    attn_logits_soft_cap=None,
    residual_checkpoint_name="attention",
    mask_function=_causal(window),
    interpret=interpret,
  )


@functools.cache  # JAX compares functions by identity
def _causal(window):
  """Whether a query sees a key of its segment."""
  if window is None:
    return lambda query, key: query >= key
  return lambda query, key: (query >= key) & (query - key < window)


@jax.custom_vjp
def _cast_gradient(x):
  """`x`; its gradient is cast, since splash gives sinks' in another dtype."""
  return x


_cast_gradient.defvjp(lambda x: (x, x), lambda x, dx: (dx.astype(x.dtype),))


def _splash_sizes(
  tokens: int, query_bytes: int, window: int | None, width: int
):
  """The blocks of splash; `width` is of a key and a value together."""
  from jax.experimental.pallas.ops.tpu import splash_attention as sa

  block, wide_block = splash_blocks(tokens, window)
  # For a window the fused backward pass would visit every pair of blocks.
  whole = window is None or window >= tokens
  fused_block = whole and _fused_block(tokens, wide_block, query_bytes)
  names = "q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute"
  if not fused_block:
    names += "q_dq", "kv_dq"
  blocks = {f"block_{name}": block for name in names}
  blocks |= {x: min(block, _BLOCK) for x in blocks if x.endswith("_compute")}
  if width > _WIDEST:
    blocks["block_q_dkv"] = min(block, _BLOCK)
  if fused_block:
    blocks["block_kv_dkv"] = fused_block
  return sa.BlockSizes(**blocks, use_fused_bwd_kernel=fused_block > 0)


def _fused_block(tokens: int, wide_block: int, query_bytes: int) -> int:
  """Keys of a block of the fused backward pass; 0 if it has too many parts."""
  blocks = [wide_block]
  longest = tpus.of_kind(sharding.device_kind()).longest_block
  if wide_block == 2048 and tokens % longest == 0:
    blocks.append(longest)
  fits = lambda block: tokens // block * query_bytes <= _PARTS_BYTES
  return next(filter(fits, blocks), 0)


def splash_blocks(tokens: int, window: int | None = None) -> tuple[int, int]:
  """Tokens of a block of splash, and keys of a block of its backward pass.

  The fused backward pass writes one gradient of all queries for each block of
  keys: long blocks write less. But blocks on the diagonal are computed whole,
  so longer ones have at most 1/8 of the keys, and blocks of a window at most
  half of it, if that is more than 512. `tokens` is a multiple of 128.
  """
  largest = lambda limit: max(
    b for b in (128, 256, 512, 1024, 2048) if b <= limit and tokens % b == 0
  )
  reach = tokens if window is None else max(window // 2, _BLOCK)
  block = largest(min(_SPLASH_BLOCK, reach))
  return block, largest(max(block, tokens // 8))
