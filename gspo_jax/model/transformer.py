"""The Qwen3 decoder: functions over a plain dict of float32 arrays.

Linen lives in this folder only, for naming and initialising parameters; the
program outside calls `forward(params, ...)` with whichever weights it means.

Dimension key: B rows, T tokens, L layers, D model width, N query heads, K
key-value heads, H head width, F hidden width, V vocabulary, k experts a token.
"""

import contextlib
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspo_jax.model import cache as kv
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.moe import MoE

Params = dict


class Encoded(NamedTuple):
  """What the blocks give.

  Attributes:
    hidden: [B, T, D], after the last norm; `unembed` makes logits of it.
    experts: [L, B, T, k] int32, the experts chosen; None for a dense model.
    cache: the cache with the T tokens added; None where none was given.
  """

  hidden: jax.Array
  experts: jax.Array | None
  cache: kv.Cache | None


class Output(NamedTuple):
  """`forward`'s result: `Encoded`, with float32 logits [B, T, V]."""

  logits: jax.Array
  experts: jax.Array | None
  cache: kv.Cache | None


class RMSNorm(nn.Module):
  """`x / rms(x) * scale`, the quotient in float32, cast back before `scale`."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
    return rms_norm(x, scale, self.eps)


def rms_norm(x, scale, eps):
  h = x.astype(jnp.float32)
  h *= jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
  return h.astype(x.dtype) * scale.astype(x.dtype)


def rotate(x_BTNH, sin_BTH, cos_BTH):
  """Rotary embedding, half-split (arXiv 2104.09864), in float32."""
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  sin, cos = sin_BTH[:, :, None], cos_BTH[:, :, None]
  out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  return out.astype(x_BTNH.dtype)


class Attention(nn.Module):
  """Grouped-query attention, queries and keys normed per head (QK-norm)."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD, angles, mask_BTS, cache, layer):
    cfg = self.cfg
    D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    init = nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    project = lambda name, heads: jnp.einsum(
      "btd,dnh->btnh",
      x_BTD,
      self.param(name, init, (D, heads, H)).astype(x_BTD.dtype),
    )
    q_BTNH = RMSNorm(cfg.norm_eps, name="q_norm")(project("q", N))
    k_BTKH = RMSNorm(cfg.norm_eps, name="k_norm")(project("k", K))
    v_BTKH = project("v", K)
    q_BTNH, k_BTKH = rotate(q_BTNH, *angles), rotate(k_BTKH, *angles)
    if cache is None:
      updated = None
      out_BTNH = jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, mask=mask_BTS[:, None]
      )
    else:
      out_BTNH, updated = kv.attend(cache, layer, q_BTNH, k_BTKH, v_BTKH)
    init = nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    o = self.param("o", init, (N, H, D)).astype(x_BTD.dtype)
    return jnp.einsum("btnh,nhd->btd", out_BTNH, o), updated


class MLP(nn.Module):
  """SwiGLU: `down(silu(gate x) * up x)`."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD):
    D, F = self.cfg.embed_dim, self.cfg.mlp_dim
    init = nn.initializers.lecun_normal()
    weight = lambda *a: self.param(a[0], init, a[1:]).astype(x_BTD.dtype)
    gate = x_BTD @ weight("gate", D, F)
    up = x_BTD @ weight("up", D, F)
    return (nn.silu(gate) * up) @ weight("down", F, D)


class Block(nn.Module):
  """One decoder block: attention, then the MLP or the experts."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD, angles, mask_BTS, cache=None, layer=0):
    """Returns the stream, the experts or None, and the layer's new (k, v)."""
    cfg = self.cfg
    h = RMSNorm(cfg.norm_eps, name="attention_norm")(x_BTD)
    h, updated = Attention(cfg, name="attention")(
      h, angles, mask_BTS, cache, layer
    )
    x_BTD += h
    h = RMSNorm(cfg.norm_eps, name="mlp_norm")(x_BTD)
    if cfg.num_experts:
      h, experts_BTk = MoE(cfg, name="moe")(h)
    else:
      h, experts_BTk = MLP(cfg, name="mlp")(h), None
    return x_BTD + h, experts_BTk, updated


def init(key: jax.Array, cfg: ModelConfig) -> Params:
  """Fresh float32 parameters; those of the blocks are stacked on axis 0."""
  k_embed, k_layers, k_head = jax.random.split(key, 3)
  stream = jnp.zeros((1, 1, cfg.embed_dim))
  angles = (jnp.zeros((1, 1, cfg.head_dim // 2)),) * 2
  mask = jnp.ones((1, 1, 1), bool)
  block = lambda k: Block(cfg).init(k, stream, angles, mask)["params"]
  normal = nn.initializers.normal
  params = {
    # RMSNorm follows; unit variance only matters where it is the head, too.
    "embed": normal(cfg.embed_dim**-0.5)(
      k_embed, (cfg.vocab_size, cfg.embed_dim)
    ),
    "layers": jax.vmap(block)(jax.random.split(k_layers, cfg.num_layers)),
    "final_norm": {"scale": jnp.ones(cfg.embed_dim)},
  }
  if not cfg.tie_embeddings:
    params["head"] = normal(cfg.embed_dim**-0.5)(
      k_head, (cfg.embed_dim, cfg.vocab_size)
    )
  return params


def unstack(params: Params, cfg: ModelConfig) -> Params:
  """The weights as decoding wants them: one tree a layer, in `cfg.dtype`.

  Slicing a stack inside the decode loop would copy every weight at every step.
  """
  params = jax.tree.map(lambda x: x.astype(cfg.dtype), params)
  layer = lambda i: jax.tree.map(lambda x: x[i], params["layers"])
  return params | {"layers": tuple(map(layer, range(cfg.num_layers)))}


def encode(
  params: Params,
  cfg: ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  cache: kv.Cache | None = None,
) -> Encoded:
  """Runs the blocks over T tokens, after those in the cache if one is given.

  Args:
    params: from `init`. With a cache better `unstack`ed, once for many calls.
    cfg: the model.
    tokens: [B, T] int32.
    positions: [B, T] int32, for the rotary embedding.
    mask: [B, T], 0 at padding. Without a cache, tokens see earlier tokens of
      the same non-zero value, so that integers pack several texts in a row.
    cache: state to extend.

  Returns:
    `Encoded`. Rows of padding hold finite garbage.
  """
  x_BTD = params["embed"].astype(cfg.dtype)[tokens]
  angles = _angles(positions, cfg)
  if cache is not None and not isinstance(params["layers"], tuple):
    params = unstack(params, cfg)
  with _precision(cfg):
    if cache is None:
      x_BTD, experts = _run_scanned(params, cfg, x_BTD, angles, mask)
    else:
      x_BTD, experts, cache = _run_cached(
        params, cfg, x_BTD, angles, mask, cache
      )
  scale = params["final_norm"]["scale"]
  return Encoded(rms_norm(x_BTD, scale, cfg.norm_eps), experts, cache)


def _precision(cfg):
  """float32 that is float32: by default a TPU multiplies it in bfloat16."""
  if cfg.dtype == "float32":
    return jax.default_matmul_precision("highest")
  return contextlib.nullcontext()


def _angles(positions_BT, cfg):
  frequency_H = cfg.rope_theta ** (
    -jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim
  )
  angle_BTH = positions_BT[..., None].astype(jnp.float32) * frequency_H
  return jnp.sin(angle_BTH), jnp.cos(angle_BTH)


def _run_scanned(params, cfg, x_BTD, angles, mask_BT):
  T = mask_BT.shape[1]
  mask_BT = mask_BT.astype(jnp.int32)
  same_BTS = mask_BT[:, :, None] == mask_BT[:, None, :]
  mask_BTS = same_BTS & jnp.tri(T, dtype=bool)

  def body(x_BTD, layer_params):
    x_BTD, experts, _ = Block(cfg).apply(
      {"params": layer_params}, x_BTD, angles, mask_BTS
    )
    return x_BTD, experts

  if cfg.remat:
    # Inside a loop nothing can be merged with the forward pass anyway.
    body = jax.checkpoint(body, prevent_cse=cfg.unroll > 1)
  return jax.lax.scan(body, x_BTD, params["layers"], unroll=cfg.unroll)


def _run_cached(params, cfg, x_BTD, angles, mask_BT, cache):
  cache = kv.mark(cache, mask_BT)
  experts, ks, vs = [], [], []
  for i, layer_params in enumerate(params["layers"]):
    x_BTD, chosen, (k, v) = Block(cfg).apply(
      {"params": layer_params}, x_BTD, angles, None, cache, i
    )
    experts.append(chosen)
    ks.append(k)
    vs.append(v)
  cache = kv.extend(cache, tuple(ks), tuple(vs), mask_BT.shape[1])
  experts = jnp.stack(experts) if cfg.num_experts else None
  return x_BTD, experts, cache


def unembed(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
  """Float32 logits [..., V]: operands in `cfg.dtype`, summed in float32."""
  head_DV = params["embed"].T if cfg.tie_embeddings else params["head"]
  with _precision(cfg):
    return jnp.matmul(
      hidden, head_DV.astype(cfg.dtype), preferred_element_type=jnp.float32
    )


def forward(
  params: Params,
  cfg: ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  cache: kv.Cache | None = None,
) -> Output:
  """`encode`, then logits [B, T, V] float32; arguments as there.

  For small vocabularies and tests: `logprobs.token_logprobs` never holds the
  whole of [B, T, V].
  """
  out = encode(params, cfg, tokens, positions, mask, cache)
  return Output(unembed(params, cfg, out.hidden), out.experts, out.cache)
