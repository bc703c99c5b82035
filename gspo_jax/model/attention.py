"""Causal attention within segments, with the kernel of the platform.

Dimension key: B rows, T tokens, N query heads, K key-value heads, H head width.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspo_jax.model.rounding import rounded
from gspo_jax.runtime import sharding

_BLOCK = 512  # queries and keys of a tile of scores in VMEM
_LANES = 128
MASKED = -1e30  # finite: a query without any key gives a finite output


def attend(q_BTNH, k_BTKH, v_BTKH, segments_BT):
  """Each token attends to itself and to the earlier tokens of its segment.

  It runs splash attention on a TPU, cuDNN's attention on a GPU, and XLA's
  operations elsewhere. Only the last hold scores of [B, N, T, T]; cuDNN takes
  the segments as a mask of [B, 1, T, T]. XLA is also used where a kernel's
  conditions are not met: splash needs H to be a multiple of 128, cuDNN needs
  16-bit numbers and H to be a multiple of 8.

  Args:
    q_BTNH: queries.
    k_BTKH: keys; query head n uses key-value head n // (N / K).
    v_BTKH: values.
    segments_BT: int32; padding is a segment, too.

  Returns:
    [B, T, N, H], in the dtype of the queries.
  """
  platform, (T, H) = sharding.platform(), q_BTNH.shape[1::2]
  if platform == "tpu" and H % _LANES == 0:
    return splash(q_BTNH, k_BTKH, v_BTKH, segments_BT)
  cudnn = platform in ("gpu", "cuda") and q_BTNH.dtype != jnp.float32
  same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
  visible_BTS = same_BTS & jnp.tri(T, dtype=bool)
  if cudnn and H % 8 == 0:
    out_BTNH = jax.nn.dot_product_attention(
      q_BTNH, k_BTKH, v_BTKH, mask=visible_BTS[:, None], implementation="cudnn"
    )
  else:
    out_BTNH = plain(q_BTNH, k_BTKH, v_BTKH, visible_BTS)
  return checkpoint_name(out_BTNH, "attention")


def plain(q_BTNH, k_BTKH, v_BTKH, visible_BTS):
  """Attention in plain operations, which hold scores of [B, N, T, T].

  Scores and softmax are float32 and the output is rounded once, as in the
  caches of the sampler.

  Args:
    q_BTNH: queries.
    k_BTKH: keys.
    v_BTKH: values.
    visible_BTS: bool, whether a query may attend to a key.
  """
  B, T, N, H = q_BTNH.shape
  K = k_BTKH.shape[2]
  q_BTKRH = q_BTNH.reshape(B, T, K, N // K, H)
  scores_BKRTS = jnp.einsum(
    "btkrh,bskh->bkrts",
    q_BTKRH,
    k_BTKH,
    preferred_element_type=jnp.float32,
  )
  scores_BKRTS *= H**-0.5
  scores_BKRTS = jnp.where(visible_BTS[:, None, None], scores_BKRTS, MASKED)
  weights_BKRTS = jax.nn.softmax(scores_BKRTS)
  out_BTKRH = weigh("bkrts,bskh->btkrh", weights_BKRTS, v_BTKH)
  return rounded(out_BTKRH, q_BTNH.dtype).reshape(B, T, N, H)


def weigh(subscripts: str, weights, values):
  """An einsum of float32 weights with values of any dtype, summed in float32.

  A CPU multiplies in float32. Other platforms round the weights to the dtype of
  the values in their matrix units; the explicit cast here avoids a float32 copy
  of the values.
  """
  if sharding.platform() != "cpu":
    weights = weights.astype(values.dtype)
  return jnp.einsum(
    subscripts,
    weights,
    values.astype(weights.dtype),
    preferred_element_type=jnp.float32,
  )


def splash(q_BTNH, k_BTKH, v_BTKH, segments_BT, *, interpret: bool = False):
  """JAX's TPU kernel; `interpret` runs it on any platform, slowly."""
  from jax.experimental.pallas.ops.tpu import splash_attention as sa

  _, T, N, H = q_BTNH.shape
  padding = -T % _LANES  # at the end: no earlier token attends to it
  pad = lambda x: jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
  kernel = _splash_kernel(N, T + padding, interpret)
  heads_first = lambda x: pad(x).swapaxes(1, 2)
  out_BNTH = jax.vmap(
    lambda q, k, v, s: kernel(q, k, v, segment_ids=sa.SegmentIds(q=s, kv=s))
  )(
    heads_first(q_BTNH * H**-0.5),
    heads_first(k_BTKH),
    heads_first(v_BTKH),
    pad(segments_BT),
  )
  return out_BNTH.swapaxes(1, 2)[:, :T]


def _splash_kernel(heads: int, tokens: int, interpret: bool):
  from jax.experimental.pallas.ops.tpu import splash_attention as sa

  block = max(b for b in (128, 256, _BLOCK) if tokens % b == 0)
  return sa.make_splash_mha(
    sa.MultiHeadMask([sa.CausalMask((tokens, tokens))] * heads),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=sa.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=block,
      # Fewer products than two kernels, for more memory: with one row of
      # 16,384 tokens per chip 20 % of a v5p is still free (gspo_jax.plan).
      use_fused_bwd_kernel=True,
    ),
    residual_checkpoint_name="attention",
    interpret=interpret,
  )
