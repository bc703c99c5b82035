"""Causal attention inside segments, by the kernel that the platform has.

Dimension key: B rows, T tokens, N query heads, K key-value heads, H head width.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspo_jax.model.rounding import rounded
from gspo_jax.runtime import sharding

_BLOCK = 512  # rows and columns of scores in VMEM at one time
_LANES = 128
MASKED = -1e30  # finite: a row with no key to see stays finite


def attend(q_BTNH, k_BTKH, v_BTKH, segments_BT):
  """Tokens see the earlier tokens of their own segment, and themselves.

  On a TPU splash attention, on a GPU cuDNN's, else XLA's: the last alone holds
  [B, N, T, T]. (cuDNN is given the segments as a mask, [B, 1, T, T].) What a
  kernel cannot take falls to XLA: splash wants H in multiples of 128, cuDNN
  16-bit numbers and H in multiples of 8.

  Args:
    q_BTNH: queries.
    k_BTKH: keys; query head n reads key-value head n // (N / K).
    v_BTKH: values.
    segments_BT: int32; padding is a segment, too.
  """
  platform, (T, H) = sharding.platform(), q_BTNH.shape[1::2]
  if platform == "tpu" and H % _LANES == 0:
    return splash(q_BTNH, k_BTKH, v_BTKH, segments_BT)
  kernel = platform in ("gpu", "cuda") and q_BTNH.dtype != jnp.float32
  same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
  seen_BTS = same_BTS & jnp.tri(T, dtype=bool)
  if kernel and H % 8 == 0:
    out_BTNH = jax.nn.dot_product_attention(
      q_BTNH, k_BTKH, v_BTKH, mask=seen_BTS[:, None], implementation="cudnn"
    )
  else:
    out_BTNH = plain(q_BTNH, k_BTKH, v_BTKH, seen_BTS)
  return checkpoint_name(out_BTNH, "attention")


def plain(q_BTNH, k_BTKH, v_BTKH, seen_BTS):
  """Plain operations, that hold [B, N, T, T].

  Each query and key takes part in one product of float32, one softmax in it,
  and one rounding of the output, as with the caches of the sampler.
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
  scores_BKRTS = jnp.where(seen_BTS[:, None, None], scores_BKRTS, MASKED)
  weights_BKRTS = jax.nn.softmax(scores_BKRTS)
  out_BTKRH = weigh("bkrts,bskh->btkrh", weights_BKRTS, v_BTKH)
  return rounded(out_BTKRH, q_BTNH.dtype).reshape(B, T, N, H)


def weigh(subscripts: str, weights, values):
  """An einsum of float32 weights with values of any type, in float32.

  A CPU multiplies in float32. Where matrix units round the weights to the type
  of the values, that is said here, so that no wider copy of the values is made.
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
  """The TPU kernel of jax; `interpret` runs it, slowly, anywhere."""
  from jax.experimental.pallas.ops.tpu import splash_attention as sa

  _, T, N, H = q_BTNH.shape
  more = -T % _LANES  # tokens after the last, which nobody before them sees
  pad = lambda x: jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])
  kernel = _kernel(N, T + more, interpret)
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


def _kernel(heads: int, tokens: int, interpret: bool):
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
      # Fewer products than two kernels, for more memory: a row of 16,384
      # tokens a chip still leaves 20 % of a v5p (gspo_jax.plan).
      use_fused_bwd_kernel=True,
    ),
    residual_checkpoint_name="attention",
    interpret=interpret,
  )
