"""Multi-head latent attention (MLA; arXiv 2412.19437, sec. 2.1.1).

Keys and values of all heads are products of one latent vector a token. So a
cache keeps the latent and a rotated key that all heads have in common.

Dimension key: B rows, T tokens, D model width, N heads, H width of a query or a
key, V of a value, R rotated columns of a key, C width of the latent.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gspo_jax.model import exact, lora, rotary
from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.layers import (
  attend_to_all_tokens,
  by_tokens,
  project,
  rms_norm,
  sum_over_tensor,
  to_cache,
)
from gspo_jax.model.rounding import rounded, stored
from gspo_jax.runtime import sharding

# Of the norms of latents, whatever `norm_eps`: so have DeepSeek's own code and
# transformers.
_EPS = 1e-6


@jax.named_scope("mla")
def latent_attention(
  x_BTD, weights, cfg: ModelConfig, layer: Layer, angles, segments_BT, cache, i
):
  """Returns the output [B, T, D] and the latents of layer `i` in the cache.

  Without a cache, keys and values of all heads are made from the latents. With
  one, queries and outputs are moved into the space of the latents: the same
  sums in another order. A query and a token then take 2 (2 C + R) FLOPs a head,
  not 2 (H + V), but the cache has one latent in place of N keys and values,
  which a decode step would make again.
  """
  del layer
  if cache is None:
    return _attend_without_cache(x_BTD, weights, angles, segments_BT, cfg)
  q_BTNH, key_BT1H = _absorbed(x_BTD, weights, angles, cfg)
  options = {"value_dim": cfg.kv_lora_rank, "scale": _scale(cfg)}
  out_BTNC, updated = cache.attend(i, q_BTNH, key_BT1H, **options)
  return _output(out_BTNC, weights, cfg), updated


def _absorbed(x_BTD, weights, angles, cfg):
  """Queries of all heads to one key a token; its first columns are a value."""
  q_BTNH, latent_BTC, key_BT1R = _project(x_BTD, weights, angles, cfg)
  split = cfg.head_dim - cfg.rotary_width
  q_BTNC = _to_latent(q_BTNH[..., :split], weights, split)
  return (
    jnp.concatenate([q_BTNC, q_BTNH[..., split:]], -1),
    jnp.concatenate([latent_BTC[:, :, None], key_BT1R], -1),
  )


def _output(out_BTNC, weights, cfg):
  split = cfg.head_dim - cfg.rotary_width
  out_BTNV = _from_latent(out_BTNC, weights, split)
  return project(rounded(out_BTNV, jnp.dtype(cfg.dtype)), weights, "o", axes=2)


def _scale(cfg):
  """The factor of scores, YaRN's included."""
  scaling, scale = cfg.rope_scaling, cfg.head_dim**-0.5
  if isinstance(scaling, rotary.YarnScaling) and scaling.mscale_all_dim:
    mscale = rotary.yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return scale * mscale**2
  return scale


def _project(x_BTD, weights, angles, cfg):
  """Queries [B, T, N, H], latents [B, T, C] and rotated keys [B, T, 1, R]."""
  rotate = rotary.rotate_pairs if cfg.rope_interleave else rotary.rotate
  norm = lambda x, name: rms_norm(x, weights[name], cfg, _EPS)
  if cfg.q_lora_rank:
    latent = norm(project(x_BTD, weights, "q_a"), "q_a_norm")
    q_BTNH = project(latent, weights, "q_b")
  else:
    q_BTNH = project(x_BTD, weights, "q")
  q_BTNH = checkpoint_name(q_BTNH, "heads")
  q_BTNH, q_BTNR = jnp.split(q_BTNH, [cfg.head_dim - cfg.rotary_width], -1)
  q_BTNH = jnp.concatenate([q_BTNH, rotate(q_BTNR, *angles)], -1)
  latent_BTCr = checkpoint_name(project(x_BTD, weights, "kv_a"), "heads")
  latent_BTC, key_BTR = jnp.split(latent_BTCr, [cfg.kv_lora_rank], -1)
  key_BT1R = rotate(key_BTR[:, :, None], *angles)
  return q_BTNH, norm(latent_BTC, "kv_a_norm"), key_BT1R


def _to_latent(q_BTNH, weights, split):
  """Queries whose products with latents are those of queries with keys."""
  w_CNH = weights["kv_b"][..., :split]
  y_BTNC = _einsum("btnh,cnh->btnc", q_BTNH, w_CNH)
  if "kv_b" + lora.A in weights:
    a_Cr, b_rNH = weights["kv_b" + lora.A], weights["kv_b" + lora.B]
    low = _einsum("btnh,rnh->btnr", q_BTNH, b_rNH[..., :split])
    y_BTNC += _einsum("btnr,cr->btnc", low, a_Cr)
  return y_BTNC


def _from_latent(out_BTNC, weights, split):
  """Weighted sums of values, of weighted sums of latents."""
  w_CNV = weights["kv_b"][..., split:]
  y_BTNV = _einsum("btnc,cnv->btnv", out_BTNC, w_CNV)
  if "kv_b" + lora.A in weights:
    a_Cr, b_rNV = weights["kv_b" + lora.A], weights["kv_b" + lora.B]
    low = _einsum("btnc,cr->btnr", out_BTNC, a_Cr)
    y_BTNV += _einsum("btnr,rnv->btnv", low, b_rNV[..., split:])
  return y_BTNV


def _expand(latent_BTC, weights):
  """Keys and values of all heads."""
  y_BTNH = _einsum("btc,cnh->btnh", latent_BTC, weights["kv_b"])
  if "kv_b" + lora.A in weights:
    low = _einsum("btc,cr->btr", latent_BTC, weights["kv_b" + lora.A])
    y_BTNH += _einsum("btr,rnh->btnh", low, weights["kv_b" + lora.B])
  return y_BTNH


def _einsum(subscripts, x, weights):
  """Rounded to the dtype of caches, float32 on a CPU.

  So training does not round the keys and values that decoding never makes.
  """
  dtype = stored(weights.dtype)

  def product(x, weights):
    y = jnp.einsum(subscripts, x, weights, preferred_element_type=jnp.float32)
    return rounded(y, dtype)

  return exact.chosen(product, whole=1)(x, weights)


def _attend_without_cache(x_BTD, weights, angles, segments_BT, cfg):
  """Attention among the T tokens, in a shard_map over rows, tokens and heads.

  Every device along `tensor` computes all latents of its tokens.
  """
  split = cfg.head_dim - cfg.rotary_width

  def exactly(x_BTD, weights, angles, segments_BT):
    q_BTNH, key_BT1H = _absorbed(x_BTD, weights, angles, cfg)
    out_BTNC = attend_to_all_tokens(
      q_BTNH,
      key_BT1H,
      key_BT1H[..., : cfg.kv_lora_rank],
      segments_BT,
      scale=_scale(cfg),
    )
    y_BTD = sum_over_tensor(_output(out_BTNC, weights, cfg))
    return y_BTD, (to_cache(key_BT1H),)

  def local(x_BTD, weights, angles, segments_BT):
    q_BTNH, latent_BTC, key_BT1R = _project(x_BTD, weights, angles, cfg)
    kv_BTNH = _expand(latent_BTC, weights)
    k_BTNH, v_BTNV = jnp.split(kv_BTNH, [split], -1)
    shape = *k_BTNH.shape[:3], cfg.rotary_width
    k_BTNR = jnp.broadcast_to(key_BT1R, shape)
    out_BTNV = attend_to_all_tokens(
      q_BTNH,
      jnp.concatenate([k_BTNH, k_BTNR], -1),
      v_BTNV,
      segments_BT,
      scale=_scale(cfg),
    )
    y_BTD = sum_over_tensor(project(out_BTNV, weights, "o", axes=2))
    latents = jnp.concatenate([latent_BTC[:, :, None], key_BT1R], -1)
    return y_BTD, (to_cache(latents),)

  kept = PartitionSpec(sharding.ROW_AXES, None, "context")
  operands = x_BTD, weights, "mla", angles, segments_BT
  local = exactly if exact.is_on() else local
  return by_tokens(local, *operands, out=(sharding.TOKENS, kept))
