"""The decoder: functions over a plain dict of float32 arrays.

Flax Linen is used in this folder only, to name and initialise parameters. Other
wings call `forward(params, ...)` with any weights: policy, old or reference.

Dimension key: B rows, T tokens, L layers, D model width, N query heads, K
key-value heads, H head width, F hidden width, V vocabulary, k experts a token.
"""

import contextlib
import functools
import math
import operator
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gspo_jax.model import attention, lora, rotary
from gspo_jax.model import cache as kv
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.moe import MoE, Routing
from gspo_jax.model.rounding import (
  matmul,
  matmul_float32,
  recomputed,
  rounded,
  stored,
  wide,
)
from gspo_jax.runtime import sharding

Params = dict

_SMALL_DEPTH = 8  # layers that a CPU compiles unrolled


class HiddenStates(NamedTuple):
  """The output of the blocks.

  Attributes:
    hidden: [B, T, D], after the last norm; `unembed` maps it to logits.
    routing: of every layer, with a leading axis L; None for a dense model.
    cache: the cache with the T tokens added; None if none was given.
  """

  hidden: jax.Array
  routing: Routing | None
  cache: kv.Cache | None


class Output(NamedTuple):
  """The output of `forward`.

  Attributes:
    logits: [B, T, V] float32.
    experts: [L, B, T, k], the experts of each token; None for a dense model.
    cache: the cache with the T tokens added; None if none was given.
  """

  logits: jax.Array
  experts: jax.Array | None
  cache: kv.Cache | None


class _Routes(NamedTuple):
  """Experts of an earlier pass, and their use in this one; see `hidden_states`.

  Attributes:
    experts: [L, B, T, k], or [B, T, k] in one layer.
    replay: bool, static.
    use_own_experts: [] bool.
  """

  experts: jax.Array | None = None
  replay: bool = False
  use_own_experts: jax.Array | None = None


_NO_ROUTES = _Routes()


class RMSNorm(nn.Module):
  """`x / rms(x) * scale`; the float32 quotient is rounded before scaling."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
    return rms_norm(x, scale, self.eps)


def rms_norm(x, scale, eps):
  return _rms_norm(x, scale, jnp.float32(eps))


@recomputed
def _rms_norm(x, scale, eps):
  h = wide(x)
  return _normed(x, jnp.mean(h * h, -1, keepdims=True), scale, eps)


def _normed(x, mean_square, scale, eps):
  h = wide(x) * jax.lax.rsqrt(mean_square + eps)
  h = wide(rounded(h, x.dtype)) * wide(scale.astype(x.dtype))
  return rounded(h, x.dtype)


def rms_norm_over_heads(x_BTNH, scale, eps, heads):
  """`rms_norm` of all heads together.

  Inside a `shard_map`, `x` and `scale` may be of a device's part of the heads.
  """
  split = ("tensor",) if x_BTNH.shape[2] < heads else ()
  squares_BT11 = sharding.psum(_sum_of_squares(x_BTNH), *split)
  mean_square_BT11 = squares_BT11 / (heads * x_BTNH.shape[3])
  scale_NH = scale.reshape(x_BTNH.shape[2:])
  return _rms_norm_of(x_BTNH, mean_square_BT11, scale_NH, jnp.float32(eps))


@recomputed
def _sum_of_squares(x_BTNH):
  return jnp.square(wide(x_BTNH)).sum((2, 3), keepdims=True)


_rms_norm_of = recomputed(_normed)


def add(x_BTD, y_BTD):
  """Adds two activations in float32 and rounds once."""
  return rounded(wide(x_BTD) + wide(y_BTD), x_BTD.dtype)


def project(x, weights, name, axes: int = 1):
  """`matmul` by the weight of this name, with its adapter's product added."""
  cast = lambda end: weights[name + end].astype(x.dtype)
  y = matmul(x, cast(""), axes)
  if name + lora.A not in weights:
    return y
  return add(y, matmul(matmul(x, cast(lora.A), axes), cast(lora.B)))


def _gathered(weights, part, dtype):
  """A device's weights, joined along `WEIGHT_AXES`.

  `part` is the start of the path.
  """
  axes = sharding.WEIGHT_AXES

  def gather(name, x):
    spec, x = sharding.param_spec(f"{part}/{name}"), x.astype(dtype)
    if axes not in spec:
      return x
    return sharding.gather(x, *axes, dim=spec.index(axes))

  return {name: gather(name, x) for name, x in weights.items()}


class Scale(nn.Module):
  """The scale of an RMSNorm that `_project` applies."""

  @nn.compact
  def __call__(self, width):
    return self.param("scale", nn.initializers.ones, (width,))


class Attention(nn.Module):
  """Grouped-query attention with norms, with Qwen2's biases, or neither.

  The norms are over the width of each query and key head (Qwen3), or over all
  heads together (OLMoE). Queries, keys and values have the biases.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD, angles, segments_BT, cache, layer):
    """Returns the output [B, T, D] and the layer's new (k, v)."""
    cfg = self.cfg
    D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    to_heads = nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    from_heads = nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    weights = {
      "q": self.param("q", to_heads, (D, N, H)),
      "k": self.param("k", to_heads, (D, K, H)),
      "v": self.param("v", to_heads, (D, K, H)),
      "o": self.param("o", from_heads, (N, H, D)),
    }
    weights |= lora.of_module(self, list(weights), cfg)
    if cfg.qk_norm:
      for name, heads in (("q_norm", N), ("k_norm", K)):
        width = heads * H if cfg.qk_norm_over_heads else H
        weights[name] = Scale(name=name)(width)
    if cfg.attention_bias:
      for name, heads in (("q_bias", N), ("k_bias", K), ("v_bias", K)):
        weights[name] = self.param(name, nn.initializers.zeros, (heads, H))
    if cache is None:
      return _attend_without_cache(x_BTD, weights, angles, segments_BT, cfg)
    q_BTNH, k_BTKH, v_BTKH = _project(x_BTD, weights, angles, cfg)
    out_BTNH, updated = cache.attend(layer, q_BTNH, k_BTKH, v_BTKH)
    return project(out_BTNH, weights, "o", axes=2), updated


def _project(x_BTD, weights, angles, cfg):
  """Queries, keys and values; queries and keys are normed and rotated."""

  def heads(name):
    y_BTNH = project(x_BTD, weights, name)
    if cfg.attention_bias:
      y_BTNH = add(y_BTNH, weights[f"{name}_bias"].astype(x_BTD.dtype))
    return checkpoint_name(y_BTNH, "heads")

  def rotated(name, number):
    y_BTNH = heads(name)
    if cfg.qk_norm_over_heads:
      scale = weights[f"{name}_norm"]
      y_BTNH = rms_norm_over_heads(y_BTNH, scale, cfg.norm_eps, number)
    elif cfg.qk_norm:
      y_BTNH = rms_norm(y_BTNH, weights[f"{name}_norm"], cfg.norm_eps)
    return rotary.rotate(y_BTNH, *angles)

  q_BTNH, k_BTKH = rotated("q", cfg.num_heads), rotated("k", cfg.num_kv_heads)
  return q_BTNH, k_BTKH, heads("v")


def _attend_without_cache(x_BTD, weights, angles, segments_BT, cfg):
  """Attention among the T tokens, in a shard_map over rows, tokens and heads.

  A device has all heads of its part of a row's tokens. It exchanges them for
  all tokens of its part of the heads, and after attention back, so that the
  devices along `context` have equal shares of the causal scores
  (arXiv 2309.14509, sec. 3).
  """
  tokens = sharding.TOKENS
  heads_first = PartitionSpec(sharding.ROW_AXES, "tensor", "context")
  norms = PartitionSpec("tensor" if cfg.qk_norm_over_heads else None)
  specs = {
    name: norms
    if name.endswith("norm")
    else sharding.param_spec(f"attention/{name}")
    for name in weights
  }

  def local(x_BTD, weights, angles, segments_BT):
    norms = {k: x for k, x in weights.items() if k.endswith("norm")}
    others = {k: x for k, x in weights.items() if k not in norms}
    weights = norms | _gathered(others, "attention", x_BTD.dtype)
    q_BTNH, k_BTKH, v_BTKH = _project(x_BTD, weights, angles, cfg)
    out_BTNH = _attend_to_all_tokens(q_BTNH, k_BTKH, v_BTKH, segments_BT)
    y_BTD = project(out_BTNH, weights, "o", axes=2)
    y_BTD = sharding.psum(y_BTD, "tensor")
    to_cache = lambda x: x.swapaxes(1, 2).astype(stored(x.dtype))
    return y_BTD, (to_cache(k_BTKH), to_cache(v_BTKH))

  attend = sharding.shard_map(
    local,
    in_specs=(tokens, specs, tokens, tokens),
    out_specs=(tokens, heads_first),
  )
  return attend(x_BTD, weights, angles, segments_BT)


def _attend_to_all_tokens(q_BTNH, k_BTKH, v_BTKH, segments_BT):
  """`attention.attend`, with the tokens split over `context`."""
  C, K = sharding.size("context"), k_BTKH.shape[2]
  split_heads = lambda x: sharding.all_to_all(x, "context", split=2, join=1)
  # Fewer key heads than devices: some devices have the same one.
  repeat = lambda x: jnp.repeat(x, math.lcm(K, C) // K, axis=2)
  out_BTNH = attention.attend(
    split_heads(q_BTNH),
    split_heads(repeat(k_BTKH)),
    split_heads(repeat(v_BTKH)),
    sharding.gather(segments_BT, "context", dim=1),
  )
  return sharding.all_to_all(out_BTNH, "context", split=1, join=2)


@recomputed
def swiglu(gate, up):
  """`silu(gate) * up`, rounded once."""
  return rounded(nn.silu(wide(gate)) * wide(up), gate.dtype)


class MLP(nn.Module):
  """SwiGLU: `down(silu(gate x) * up x)`."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD):
    D, F = self.cfg.embed_dim, self.cfg.mlp_dim
    init = nn.initializers.lecun_normal()
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    weights = {n: self.param(n, init, shape) for n, shape in shapes.items()}
    weights |= lora.of_module(self, shapes, self.cfg)
    specs = {name: sharding.param_spec(f"mlp/{name}") for name in weights}

    def local(x_BTD, weights):
      weights = _gathered(weights, "mlp", x_BTD.dtype)
      gate, up = (project(x_BTD, weights, name) for name in ("gate", "up"))
      return sharding.psum(project(swiglu(gate, up), weights, "down"), "tensor")

    tokens = sharding.TOKENS
    mlp = sharding.shard_map(local, in_specs=(tokens, specs), out_specs=tokens)
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
    routes=_NO_ROUTES,
  ):
    """Returns the stream [B, T, D], the routing or None, the new (k, v)."""
    cfg = self.cfg
    h = RMSNorm(cfg.norm_eps, name="attention_norm")(x_BTD)
    h, updated = Attention(cfg, name="attention")(
      h, angles, segments_BT, cache, layer
    )
    x_BTD = checkpoint_name(add(x_BTD, h), "stream")
    h = RMSNorm(cfg.norm_eps, name="mlp_norm")(x_BTD)
    if cfg.num_experts:
      moe = MoE(cfg, name="moe")
      h, routing = moe(h, segments_BT != 0, *routes)
    else:
      h, routing = MLP(cfg, name="mlp")(h), None
    return add(x_BTD, h), routing, updated


def init(key: jax.Array, cfg: ModelConfig) -> Params:
  """Random float32 parameters; those of the blocks are stacked on axis 0."""
  k_embed, k_layers, k_head = jax.random.split(key, 3)
  # The least that can be sharded.
  B, T = sharding.size(*sharding.ROW_AXES), sharding.size("context")
  stream = jnp.zeros((B, T, cfg.embed_dim))
  angles = (jnp.zeros((B, T, cfg.head_dim // 2)),) * 2
  mask = jnp.ones((B, T), jnp.int32)
  block = lambda k: Block(cfg).init(k, stream, angles, mask)["params"]
  normal = nn.initializers.normal
  params = {
    # An RMSNorm follows, so the scale matters only where it is the head, too.
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
  """The weights for decoding: a tuple of one tree per layer, in `cfg.dtype`.

  Slicing a stack inside the decode loop would copy all weights in every step.
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
  use_own_experts: jax.Array | None = None,
) -> HiddenStates:
  """Runs the blocks over T tokens, after those in the cache if one is given.

  Args:
    params: from `init`. With a cache, call `unstack_layers` once beforehand.
    cfg: the model; static.
    tokens: [B, T] int32.
    positions: [B, T] int32, for the rotary embedding.
    mask: [B, T], 0 at padding. Without a cache a token attends to earlier
      tokens of the same non-zero value: integers pack several sequences in a
      row.
    cache: a `cache.Cache` or `paged_cache.Pages`, to append to.
    routes: [L, B, T, k], experts at which the routers' log-probs are taken; not
      with a cache. A dense model does not use them.
    replay: whether to send the tokens to `routes`, not to the top k; static.
    use_own_experts: [] bool; if true the top k experts replace `routes`, so
      that one program serves before and after routes are recorded. None: false.

  Returns:
    `HiddenStates`; finite, but meaningless at padding.

  Raises:
    ValueError: `replay` without `routes`, or `routes` with a cache.
  """
  if routes is None and replay:
    raise ValueError(f"{replay=} needs routes, got {routes=}")
  if cache is None:
    if routes is None:
      use_own_experts = None
    given = _Routes(routes, replay, use_own_experts)
    run = functools.partial(_scan_layers, routes=given)
    return _run_blocks(run, params, cfg, tokens, positions, mask)
  if routes is not None:
    raise ValueError(f"routes {routes.shape} with a cache: expected None")
  if not isinstance(params["layers"], tuple):
    params = unstack_layers(params, cfg)
  run = functools.partial(_loop_over_layers, cache=cache)
  return _run_blocks(run, params, cfg, tokens, positions, mask)


def prefill(
  params: Params,
  cfg: ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
) -> HiddenStates:
  """`hidden_states` without a cache; returns one that holds the T tokens."""
  run = functools.partial(_scan_layers, store=True)
  return _run_blocks(run, params, cfg, tokens, positions, mask)


def _run_blocks(run, params, cfg, tokens, positions, mask) -> HiddenStates:
  """Embedding, then `run` for the layers, then the last norm."""
  x_BTD = _embed(params["embed"], tokens, cfg)
  angles = rotary.angles(
    positions, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling
  )
  with _precision(cfg):
    x_BTD, routing, cache = run(params, cfg, x_BTD, angles, mask)
  hidden = rms_norm(x_BTD, params["final_norm"]["scale"], cfg.norm_eps)
  return HiddenStates(hidden, routing, cache)


def _embed(table_VD, tokens_BT, cfg):
  """The embedding of each token; the table is sharded by its columns, too.

  Each device looks up its columns for all tokens. An all-to-all then gives it
  all columns of its own tokens.
  """

  axes = sharding.LOGICAL["table"]

  def local(table, tokens_BT):
    tokens = sharding.gather(tokens_BT.reshape(-1), *axes, dim=0)
    row = tokens - sharding.index("tensor") * table.shape[0]
    local_row = (row >= 0) & (row < table.shape[0])
    # Cast after the lookup, so that its gradient is summed in float32.
    x = jnp.take(table, row, axis=0, mode="clip").astype(cfg.dtype)
    x = sharding.psum(jnp.where(local_row[:, None], x, 0), "tensor")
    x_MD = sharding.all_to_all(x, *axes, split=0, join=1)
    return x_MD.reshape(*tokens_BT.shape, -1)

  specs = sharding.param_spec("embed"), sharding.TOKENS
  embed = sharding.shard_map(local, in_specs=specs, out_specs=sharding.TOKENS)
  return embed(table_VD, tokens_BT)


def _precision(cfg):
  """Exact float32 products, for which a TPU uses bfloat16 by default."""
  if cfg.dtype == "float32":
    return jax.default_matmul_precision("highest")
  return contextlib.nullcontext()


def _scan_layers(
  params, cfg, x_BTD, angles, mask_BT, store=False, routes=_NO_ROUTES
):
  """A scan over the layers: stream, routing and, if `store`, the cache."""
  segments_BT = mask_BT.astype(jnp.int32)
  dtype = stored(cfg.dtype)  # of the streams that the backward pass stacks

  def body(x_BTD, layer):
    layer_params, routes_BTk = layer
    x_BTD, routing, keys_values = Block(cfg).apply(
      {"params": layer_params},
      x_BTD.astype(cfg.dtype),
      angles,
      segments_BT,
      routes=routes._replace(experts=routes_BTk),
    )
    return x_BTD.astype(dtype), (routing, keys_values if store else None)

  steps = _layers_per_step(cfg)
  if cfg.kept is not None:
    keep = jax.checkpoint_policies.save_only_these_names(*cfg.kept)
    # Inside a loop nothing can be merged with the forward pass anyway.
    body = jax.checkpoint(body, prevent_cse=steps > 1, policy=keep)
  layers = params["layers"], routes.experts
  if steps < cfg.num_layers:
    x_BTD = x_BTD.astype(dtype)
    x_BTD, stacked = jax.lax.scan(body, x_BTD, layers, unroll=steps)
  else:
    # A scan would stack what the backward pass needs, even if unrolled.
    outs = []
    for i in range(cfg.num_layers):
      layer = jax.tree.map(operator.itemgetter(i), layers)
      x_BTD, out = body(x_BTD, layer)
      outs.append(out)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *outs)
  routing, keys_values = stacked
  cache = kv.from_prefill(*keys_values, mask_BT) if store else None
  return x_BTD.astype(cfg.dtype), routing, cache


def _layers_per_step(cfg):
  """Layers of one step of the scan: `ModelConfig.unroll`, or its default."""
  if cfg.unroll is not None:
    return cfg.unroll
  small = cfg.num_layers <= _SMALL_DEPTH
  return cfg.num_layers if small and sharding.platform() == "cpu" else 1


def _loop_over_layers(params, cfg, x_BTD, angles, mask_BT, cache):
  """An unrolled loop over the layers: stream, routing and cache."""
  cache = cache.mark_valid(mask_BT)
  segments_BT = mask_BT.astype(jnp.int32)
  routings, ks, vs = [], [], []
  for i, layer_params in enumerate(params["layers"]):
    x_BTD, routing, (k, v) = Block(cfg).apply(
      {"params": layer_params}, x_BTD, angles, segments_BT, cache, i
    )
    routings.append(routing)
    ks.append(k)
    vs.append(v)
  cache = cache.append(tuple(ks), tuple(vs), mask_BT)
  routing = jax.tree.map(lambda *x: jnp.stack(x), *routings)
  return x_BTD, routing, cache


def output_matrix(params: Params, cfg: ModelConfig) -> jax.Array:
  """The output matrix [D, V]; if tied, the transpose of the embedding."""
  return params["embed"].T if cfg.tie_embeddings else params["head"]


def project_logits(
  hidden: jax.Array, head_DV: jax.Array, cfg: ModelConfig
) -> jax.Array:
  """Float32 logits [..., V] of operands in `cfg.dtype`, summed in float32."""
  with _precision(cfg):
    return matmul_float32(hidden, head_DV.astype(cfg.dtype))


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
  """`hidden_states`, then logits [B, T, V] float32; the same arguments.

  For small vocabularies and tests: `logprobs.token_logprobs` never holds all of
  [B, T, V].
  """
  out = hidden_states(params, cfg, tokens, positions, mask, cache)
  experts = out.routing.experts if out.routing else None
  return Output(unembed(params, cfg, out.hidden), experts, out.cache)
