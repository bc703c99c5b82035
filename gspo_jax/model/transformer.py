"""The decoder: functions over a plain dict of float32 arrays.

Only this folder uses Flax Linen, to name and initialise parameters. Other wings
call `forward(params, ...)` with the weights of any policy.

Dimension key: B rows, T tokens, L layers, D model width, N query heads, K
key-value heads, H head width, V vocabulary, k experts a token.
"""

import contextlib
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.model import cache as kv
from gspo_jax.model import parameters, rotary
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.layers import Block, rms_norm
from gspo_jax.model.moe import NO_ROUTES, Routes, Routing
from gspo_jax.model.rounding import matmul_float32, stored
from gspo_jax.runtime import sharding

Params = dict

_SMALL_DEPTH = 8  # layers that a CPU compiles unrolled


class HiddenStates(NamedTuple):
  hidden: jax.Array  # [B, T, D], after the last norm, for `unembed`
  routing: Routing | None  # with a leading axis L; None for a dense model
  cache: kv.Cache | None  # with the T tokens added; None if none was given


class Output(NamedTuple):
  """The output of `forward`."""

  logits: jax.Array  # [B, T, V] float32
  # [L, B, T, k], the experts of each token; None for a dense model.
  experts: jax.Array | None
  cache: kv.Cache | None  # with the T tokens added; None if none was given


def init(key: jax.Array, cfg: ModelConfig) -> Params:
  """Random float32 parameters; the blocks are stacked on axis 0."""
  k_embed, k_layers, k_head = jax.random.split(key, 3)
  # The smallest shape that can be sharded.
  B, T = sharding.size(*sharding.ROW_AXES), sharding.size("context")
  stream = jnp.zeros((B, T, cfg.embed_dim))
  angles = (jnp.zeros((B, T, cfg.head_dim // 2)),) * 2
  mask = jnp.ones((B, T), jnp.int32)
  block = lambda k: Block(cfg).init(k, stream, angles, mask)["params"]
  initial = lambda path, k: parameters.find(path).initial(k, cfg)
  params = {
    "embed": initial("embed", k_embed),
    "layers": jax.vmap(block)(jax.random.split(k_layers, cfg.num_layers)),
    "final_norm": {"scale": initial("final_norm/scale", None)},
  }
  if not cfg.tie_embeddings:
    params["head"] = initial("head", k_head)
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
  """Runs the blocks over T tokens, which follow the tokens of the cache if any.

  Args:
    params: from `init`. With a cache, call `unstack_layers` once beforehand.
    cfg: static.
    tokens: [B, T] int32.
    positions: [B, T] int32.
    mask: [B, T], 0 at padding. Without a cache a token attends to earlier
      tokens with the same number, so a row may pack several sequences.
    cache: a `cache.Cache` or `paged_cache.Pages`, to append to.
    routes: [L, B, T, k], experts at which the routers' log-probs are taken; not
      with a cache. A dense model ignores them.
    replay: send tokens to `routes`, not to the top k; static.
    use_own_experts: [] bool, replace `routes` by the top k experts. So one
      program serves before and after routes are recorded. None: false.

  Returns:
    `HiddenStates`; finite, but meaningless at padding.
  """
  if routes is None and replay:
    raise ValueError(f"{replay=} needs routes, got {routes=}")
  if cache is None:
    if routes is None:
      use_own_experts = None
    run = functools.partial(
      _scan_layers, routes=Routes(routes, replay, use_own_experts)
    )
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
  """`hidden_states` without a cache, which returns a cache of the T tokens."""
  run = functools.partial(_scan_layers, store=True)
  return _run_blocks(run, params, cfg, tokens, positions, mask)


def _run_blocks(run, params, cfg, tokens, positions, mask) -> HiddenStates:
  x_BTD = _embed(params["embed"], tokens, cfg)
  angles = rotary.angles(
    positions, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling
  )
  with _precision(cfg):
    x_BTD, routing, cache = run(params, cfg, x_BTD, angles, mask)
  hidden = rms_norm(x_BTD, params["final_norm"]["scale"], cfg.norm_eps)
  return HiddenStates(hidden, routing, cache)


def _embed(table_VD, tokens_BT, cfg):
  """Each device looks up its columns for all tokens, then exchanges columns."""
  axes = sharding.RULES["table"]

  def local(table, tokens_BT):
    tokens = sharding.gather(tokens_BT.reshape(-1), *axes, dim=0)
    row = tokens - sharding.index("tensor") * table.shape[0]
    local_row = (row >= 0) & (row < table.shape[0])
    # Cast after the lookup, so that its gradient is summed in float32.
    x = jnp.take(table, row, axis=0, mode="clip").astype(cfg.dtype)
    x = sharding.psum(jnp.where(local_row[:, None], x, 0), "tensor")
    x_MD = sharding.all_to_all(x, *axes, split=0, join=1)
    return x_MD.reshape(*tokens_BT.shape, -1)

  specs = parameters.partition_spec("embed"), sharding.TOKENS
  embed = sharding.shard_map(local, in_specs=specs, out_specs=sharding.TOKENS)
  return embed(table_VD, tokens_BT)


def _precision(cfg):
  """Exact float32 products: by default a TPU multiplies in bfloat16."""
  if cfg.dtype == "float32":
    return jax.default_matmul_precision("highest")
  return contextlib.nullcontext()


def _scan_layers(
  params, cfg, x_BTD, angles, mask_BT, store=False, routes=NO_ROUTES
):
  """Returns the residual stream, the routing and, if `store`, the cache."""
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
  if cfg.unroll is not None:
    return cfg.unroll
  small = cfg.num_layers <= _SMALL_DEPTH
  return cfg.num_layers if small and sharding.platform() == "cpu" else 1


def _loop_over_layers(params, cfg, x_BTD, angles, mask_BT, cache):
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

  For small vocabularies: `logprobs.token_logprobs` never holds all logits.
  """
  out = hidden_states(params, cfg, tokens, positions, mask, cache)
  experts = out.routing.experts if out.routing else None
  return Output(unembed(params, cfg, out.hidden), experts, out.cache)
