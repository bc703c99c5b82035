"""The decoder: functions over a plain dict of float32 arrays.

Linen lives in this folder only, for naming and initialising parameters; the
program outside calls `forward(params, ...)` with whichever weights it means.

Dimension key: B rows, T tokens, L layers, D model width, N query heads, K
key-value heads, H head width, F hidden width, V vocabulary, k experts a token.
"""

import contextlib
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gspo_jax.model import attention
from gspo_jax.model import cache as kv
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.moe import MoE, Routing
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding

Params = dict


class HiddenStates(NamedTuple):
  """What the blocks give.

  Attributes:
    hidden: [B, T, D], after the last norm; `unembed` makes logits of it.
    routing: what the routers did, with a leading axis of L layers; None for a
      dense model.
    cache: the cache with the T tokens added; None where none was given.
  """

  hidden: jax.Array
  routing: Routing | None
  cache: kv.Cache | None


class Output(NamedTuple):
  """`forward`'s result: float32 logits [B, T, V], experts [L, B, T, k]."""

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
  h = wide(x)
  h *= jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
  h = wide(rounded(h, x.dtype)) * wide(scale.astype(x.dtype))
  return rounded(h, x.dtype)


def rotate(x_BTNH, sin_BTH, cos_BTH):
  """Rotary embedding, half-split (arXiv 2104.09864), in float32."""
  a, b = jnp.split(wide(x_BTNH), 2, axis=-1)
  sin, cos = sin_BTH[:, :, None], cos_BTH[:, :, None]
  out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  return rounded(out, x_BTNH.dtype)


def add(x_BTD, y_BTD):
  """The sum of two activations, added in float32 and rounded once."""
  return rounded(wide(x_BTD) + wide(y_BTD), x_BTD.dtype)


class Scale(nn.Module):
  """The scale of an RMSNorm that is applied elsewhere."""

  @nn.compact
  def __call__(self, width):
    return self.param("scale", nn.initializers.ones, (width,))


class Attention(nn.Module):
  """Grouped-query attention, with Qwen3's norms or Qwen2's biases, or neither.

  The norms are over the H of each query and key, the biases on all three.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD, angles, segments_BT, cache, layer):
    """Returns the output [B, T, D] and the layer's new (k, v)."""
    cfg = self.cfg
    D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    into = nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    out_of = nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    weights = {
      "q": self.param("q", into, (D, N, H)),
      "k": self.param("k", into, (D, K, H)),
      "v": self.param("v", into, (D, K, H)),
      "o": self.param("o", out_of, (N, H, D)),
    }
    if cfg.qk_norm:
      weights |= {name: Scale(name=name)(H) for name in ("q_norm", "k_norm")}
    if cfg.attention_bias:
      for name, heads in (("q_bias", N), ("k_bias", K), ("v_bias", K)):
        weights[name] = self.param(name, nn.initializers.zeros, (heads, H))
    if cache is None:
      return _attend_together(x_BTD, weights, angles, segments_BT, cfg)
    q_BTNH, k_BTKH, v_BTKH = _project(x_BTD, weights, angles, cfg)
    out_BTNH, updated = cache.attend(layer, q_BTNH, k_BTKH, v_BTKH)
    o = weights["o"].astype(x_BTD.dtype)
    return jnp.einsum("btnh,nhd->btd", out_BTNH, o), updated


def _project(x_BTD, weights, angles, cfg):
  """Queries, keys and values; the first two normed and rotated."""

  def heads(name):
    w = weights[name].astype(x_BTD.dtype)
    y_BTNH = jnp.einsum("btd,dnh->btnh", x_BTD, w)
    if cfg.attention_bias:
      y_BTNH = add(y_BTNH, weights[f"{name}_bias"].astype(x_BTD.dtype))
    return checkpoint_name(y_BTNH, "heads")

  def turned(name):
    y_BTNH = heads(name)
    if cfg.qk_norm:
      y_BTNH = rms_norm(y_BTNH, weights[f"{name}_norm"], cfg.norm_eps)
    return rotate(y_BTNH, *angles)

  return turned("q"), turned("k"), heads("v")


def _attend_together(x_BTD, weights, angles, segments_BT, cfg):
  """Attention of tokens to one another, as an island: rows and heads apart."""
  rows = PartitionSpec(sharding.BATCH_AXES)
  kept = PartitionSpec(sharding.BATCH_AXES, "tensor")
  lay = {
    name: PartitionSpec()
    if name.endswith("norm")
    else sharding.param_spec(f"attention/{name}")
    for name in weights
  }
  biases = [name for name in weights if name.endswith("bias")]

  def local(x_BTD, weights, angles, segments_BT):
    whole = lambda name, dim: sharding.gather(
      weights[name].astype(x_BTD.dtype), "fsdp", dim=dim
    )
    gathered = weights | {name: whole(name, 0) for name in "qkv"}
    gathered |= {name: whole(name, 1) for name in biases}
    q_BTNH, k_BTKH, v_BTKH = _project(x_BTD, gathered, angles, cfg)
    out_BTNH = attention.attend(q_BTNH, k_BTKH, v_BTKH, segments_BT)
    y_BTD = jnp.einsum("btnh,nhd->btd", out_BTNH, whole("o", 1))
    y_BTD = sharding.psum(y_BTD, "tensor")
    return y_BTD, (k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2))

  attend = sharding.shard_map(
    local, in_specs=(rows, lay, rows, rows), out_specs=(rows, kept)
  )
  return attend(x_BTD, weights, angles, segments_BT)


class MLP(nn.Module):
  """SwiGLU: `down(silu(gate x) * up x)`."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD):
    D, F = self.cfg.embed_dim, self.cfg.mlp_dim
    init = nn.initializers.lecun_normal()
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    weights = {n: self.param(n, init, shape) for n, shape in shapes.items()}
    lay = {name: sharding.param_spec(f"mlp/{name}") for name in weights}

    def local(x_BTD, weights):
      whole = lambda name, dim: sharding.gather(
        weights[name].astype(x_BTD.dtype), "fsdp", dim=dim
      )
      gate, up = x_BTD @ whole("gate", 0), x_BTD @ whole("up", 0)
      hidden = rounded(nn.silu(wide(gate)) * wide(up), x_BTD.dtype)
      return sharding.psum(hidden @ whole("down", 1), "tensor")

    rows = PartitionSpec(sharding.BATCH_AXES)
    mlp = sharding.shard_map(local, in_specs=(rows, lay), out_specs=rows)
    return mlp(x_BTD, weights)


class Block(nn.Module):
  """One decoder block: attention, then the MLP or the experts."""

  cfg: ModelConfig

  @nn.compact
  def __call__(
    self,
    x_BTD,
    angles,
    segments_BT,
    cache=None,
    layer=0,
    routes_BTk=None,
    replay=False,
    own=None,
  ):
    """Returns the stream, the routing or None, and the layer's new (k, v)."""
    cfg = self.cfg
    h = RMSNorm(cfg.norm_eps, name="attention_norm")(x_BTD)
    h, updated = Attention(cfg, name="attention")(
      h, angles, segments_BT, cache, layer
    )
    x_BTD = checkpoint_name(add(x_BTD, h), "stream")
    h = RMSNorm(cfg.norm_eps, name="mlp_norm")(x_BTD)
    if cfg.num_experts:
      moe = MoE(cfg, name="moe")
      h, routing = moe(h, segments_BT != 0, routes_BTk, replay, own)
    else:
      h, routing = MLP(cfg, name="mlp")(h), None
    return add(x_BTD, h), routing, updated


def init(key: jax.Array, cfg: ModelConfig) -> Params:
  """Fresh float32 parameters; those of the blocks are stacked on axis 0."""
  k_embed, k_layers, k_head = jax.random.split(key, 3)
  B = sharding.size(
    *sharding.BATCH_AXES
  )  # a row for each device; none is computed
  stream = jnp.zeros((B, 1, cfg.embed_dim))
  angles = (jnp.zeros((B, 1, cfg.head_dim // 2)),) * 2
  mask = jnp.ones((B, 1), jnp.int32)
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


def unstack_layers(params: Params, cfg: ModelConfig) -> Params:
  """The weights as decoding wants them: one tree a layer, in `cfg.dtype`.

  Slicing a stack inside the decode loop would copy every weight at every step.
  """
  params = jax.tree.map(lambda x: x.astype(cfg.dtype), params)
  layer = lambda i: jax.tree.map(lambda x: x[i], params["layers"])
  return params | {"layers": tuple(map(layer, range(cfg.num_layers)))}


def hidden_states(
  params: Params,
  cfg: ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  cache: kv.Cache | None = None,
  *,
  routes: jax.Array | None = None,
  replay: bool = False,
  own: jax.Array | None = None,
) -> HiddenStates:
  """Runs the blocks over T tokens, after those in the cache if one is given.

  Args:
    params: from `init`. With a cache better `unstack`ed, once for many calls.
    cfg: the model.
    tokens: [B, T] int32.
    positions: [B, T] int32, for the rotary embedding.
    mask: [B, T], 0 at padding. Without a cache, tokens see earlier tokens of
      the same non-zero value, so that integers pack several texts in a row.
    cache: state to extend.
    routes: [L, B, T, k], experts whose log-probs are asked for; not with a
      cache, and nothing to a dense model.
    replay: send the tokens to `routes` instead of the k likeliest; static.
    own: [] bool; where it is true, the k likeliest experts stand for `routes`,
      so that one program serves before and after the routes are known. None,
      as without routes: false.

  Returns:
    `Encoded`. Rows of padding hold finite garbage.
  """
  if routes is None and replay:
    raise ValueError(f"{replay=} needs routes, got {routes=}")
  if routes is None:
    own = None
  if cache is None:
    run = functools.partial(_run_scanned, routes=routes, replay=replay, own=own)
    return _encode(run, params, cfg, tokens, positions, mask)
  if routes is not None:
    raise ValueError(f"routes {routes.shape} with a cache: expected None")
  if not isinstance(params["layers"], tuple):
    params = unstack_layers(params, cfg)
  run = functools.partial(_run_cached, cache=cache)
  return _encode(run, params, cfg, tokens, positions, mask)


def prefill(
  params: Params,
  cfg: ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
) -> HiddenStates:
  """As `encode` without a cache, and returns one that T tokens have filled."""
  run = functools.partial(_run_scanned, store=True)
  return _encode(run, params, cfg, tokens, positions, mask)


def _encode(run, params, cfg, tokens, positions, mask) -> HiddenStates:
  x_BTD = _look_up(params["embed"], tokens, cfg)
  angles = _angles(positions, cfg)
  with _precision(cfg):
    x_BTD, routing, cache = run(params, cfg, x_BTD, angles, mask)
  hidden = rms_norm(x_BTD, params["final_norm"]["scale"], cfg.norm_eps)
  return HiddenStates(hidden, routing, cache)


def _look_up(table_VD, tokens_BT, cfg):
  """Rows of the embedding: its columns, not its rows, are what devices split.

  Each device looks up its columns for all tokens, then columns and tokens
  change places.
  """

  def local(table, tokens_BT):
    tokens = sharding.gather(tokens_BT.reshape(-1), "fsdp", "expert", dim=0)
    at = tokens - sharding.index("tensor") * table.shape[0]
    here = (at >= 0) & (at < table.shape[0])
    # Cast after the lookup, so that its gradient is summed in float32.
    x = jnp.take(table, at, axis=0, mode="clip").astype(cfg.dtype)
    x = sharding.psum(jnp.where(here[:, None], x, 0), "tensor")
    x_MD = sharding.all_to_all(x, "fsdp", "expert", split=0, join=1)
    return x_MD.reshape(*tokens_BT.shape, -1)

  rows = PartitionSpec(sharding.BATCH_AXES)
  look_up = sharding.shard_map(
    local, in_specs=(sharding.param_spec("embed"), rows), out_specs=rows
  )
  return look_up(table_VD, tokens_BT)


def _precision(cfg):
  """float32 that is float32: by default a TPU multiplies it in bfloat16."""
  if cfg.dtype == "float32":
    return jax.default_matmul_precision("highest")
  return contextlib.nullcontext()


def _angles(positions_BT, cfg):
  frequency_H = cfg.rope_theta ** (
    -jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim
  )
  if cfg.rope_scaling:
    factor, low, high, length = cfg.rope_scaling
    turns_H = length * frequency_H / (2 * jnp.pi)
    kept_H = jnp.clip((turns_H - low) / (high - low), 0, 1)
    frequency_H *= kept_H + (1 - kept_H) / factor
  angle_BTH = positions_BT[..., None].astype(jnp.float32) * frequency_H
  return jnp.sin(angle_BTH), jnp.cos(angle_BTH)


def _run_scanned(
  params,
  cfg,
  x_BTD,
  angles,
  mask_BT,
  store=False,
  routes=None,
  replay=False,
  own=None,
):
  segments_BT = mask_BT.astype(jnp.int32)

  def body(x_BTD, layer):
    layer_params, routes_BTk = layer
    x_BTD, routing, kept = Block(cfg).apply(
      {"params": layer_params},
      x_BTD,
      angles,
      segments_BT,
      routes_BTk=routes_BTk,
      replay=replay,
      own=own,
    )
    return x_BTD, (routing, kept if store else None)

  if cfg.remat:
    keep = jax.checkpoint_policies.save_only_these_names(*cfg.keep)
    # Inside a loop nothing can be merged with the forward pass anyway.
    body = jax.checkpoint(body, prevent_cse=cfg.unroll > 1, policy=keep)
  x_BTD, (routing, kept) = jax.lax.scan(
    body, x_BTD, (params["layers"], routes), unroll=cfg.unroll
  )
  return x_BTD, routing, kv.from_prefill(*kept, mask_BT) if store else None


def _run_cached(params, cfg, x_BTD, angles, mask_BT, cache):
  cache = cache.mark(mask_BT)
  segments_BT = mask_BT.astype(jnp.int32)
  routings, ks, vs = [], [], []
  for i, layer_params in enumerate(params["layers"]):
    x_BTD, routing, (k, v) = Block(cfg).apply(
      {"params": layer_params}, x_BTD, angles, segments_BT, cache, i
    )
    routings.append(routing)
    ks.append(k)
    vs.append(v)
  cache = cache.extend(tuple(ks), tuple(vs), mask_BT)
  # The routings of the layers become one, with a leading axis of layers.
  routing = jax.tree.map(lambda *x: jnp.stack(x), *routings)
  return x_BTD, routing, cache


def output_matrix(params: Params, cfg: ModelConfig) -> jax.Array:
  """The output matrix [D, V]; the embedding's transpose where they are tied."""
  return params["embed"].T if cfg.tie_embeddings else params["head"]


def project_logits(
  hidden: jax.Array, head_DV: jax.Array, cfg: ModelConfig
) -> jax.Array:
  """Float32 logits [..., V]: operands in `cfg.dtype`, summed in float32."""
  with _precision(cfg):
    return jnp.matmul(
      hidden, head_DV.astype(cfg.dtype), preferred_element_type=jnp.float32
    )


def unembed(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
  """Float32 logits [..., V] of the whole vocabulary."""
  return project_logits(hidden, output_matrix(params, cfg), cfg)


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
  out = hidden_states(params, cfg, tokens, positions, mask, cache)
  experts = out.routing.experts if out.routing else None
  return Output(unembed(params, cfg, out.hidden), experts, out.cache)
