"""The decoder: functions over a plain dict of float32 arrays.

Only this folder uses Flax Linen, to name and initialise parameters. Other wings
call `forward(params, ...)` with the weights of any policy.

Dimension key: B rows, T tokens, L layers, D model width, N query heads, K
key-value heads, H head width, V vocabulary, k experts a token.
"""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.model import cache as kv
from gspo_jax.model import exact, parameters, rotary
from gspo_jax.model.block import block
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.layers import rms_norm
from gspo_jax.model.moe import NO_ROUTES, Routes, Routing
from gspo_jax.model.rounding import matmul_float32, stored
from gspo_jax.runtime import sharding

Params = dict

_SMALL_DEPTH = 8  # layers that a CPU compiles unrolled


class HiddenStates(NamedTuple):
  hidden: jax.Array  # [B, T, D], after the last norm, for `unembed`
  # With a leading axis, the layers with experts; None for a dense model.
  routing: Routing | None
  cache: kv.Cache | None  # with the T tokens added; None if none was given


class Output(NamedTuple):
  """The output of `forward`."""

  logits: jax.Array  # [B, T, V] float32
  # [layers with experts, B, T, k]; None for a dense model.
  experts: jax.Array | None
  cache: kv.Cache | None  # with the T tokens added; None if none was given


def init(key: jax.Array, cfg: ModelConfig) -> Params:
  """Random float32 parameters; a module's layers are stacked on axis 0."""
  k_embed, k_layers, k_head = jax.random.split(key, 3)
  params = {
    row.path: row.initial(k_embed if row.path == "embed" else k_head, cfg)
    for row in parameters.rows(cfg)
    if not row.stacked
  }
  keys_L = jax.random.split(k_layers, cfg.num_layers)
  layers = parameters.initial_layers(keys_L, cfg)
  return sharding.tree_of_paths(params) | {"layers": layers}


def unstack_layers(params: Params, cfg: ModelConfig) -> Params:
  """The weights for decoding: a tuple of one tree per layer, `cast`.

  Slicing a stack inside the decode loop would copy all weights in every step.
  """
  params = parameters.cast(params, cfg)
  layers = tuple(
    parameters.at(params["layers"], places)
    for _, places in parameters.places(cfg, cfg.layers)
  )
  return params | {"layers": layers}


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
  router_losses: bool = False,
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
    routes: [layers with experts, B, T, k], experts at which the routers'
      log-probs are taken; not with a cache. A dense model ignores them.
    replay: send tokens to `routes`, not to the top k; static.
    use_own_experts: [] bool, replace `routes` by the top k experts. So one
      program serves before and after routes are recorded. None: false.
    router_losses: whether the routing has the losses of the routers; static,
      not with a cache.

  Returns:
    `HiddenStates`; finite, but meaningless at padding.
  """
  if routes is None and replay:
    raise ValueError(f"{replay=} needs routes, got {routes=}")
  if cache is None:
    if routes is None:
      use_own_experts = None
    routes = Routes(routes, replay, use_own_experts, router_losses)
    run = functools.partial(_scan_layers, routes=routes)
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
  """`hidden_states` without a cache, which returns a cache of the T tokens.

  ValueError for gated DeltaNets on a mesh with `context`, whose devices may
  have copies of a head.
  """
  if sharding.size("context") > 1 and kv.has_states(cfg):
    raise ValueError("prefill of a model with states: expected mesh.context=1")
  run = functools.partial(_scan_layers, store=True)
  return _run_blocks(run, params, cfg, tokens, positions, mask)


def _run_blocks(run, params, cfg, tokens, positions, mask) -> HiddenStates:
  x_BTD = _embed(params["embed"], tokens, cfg)
  with exact.exactly(cfg.exact):
    angles = rotary.angles(
      positions, cfg.rotary_width, cfg.rope_theta, cfg.rope_scaling
    )
    with _precision(cfg.dtype):
      x_BTD, routing, cache = run(params, cfg, x_BTD, angles, mask)
    hidden = rms_norm(x_BTD, params["final_norm"]["scale"], cfg)
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


def _precision(dtype):
  """Exact float32 products: by default a TPU multiplies in bfloat16."""
  if dtype == "float32":
    return jax.default_matmul_precision("highest")
  return contextlib.nullcontext()


def _scan_layers(
  params, cfg, x_BTD, angles, mask_BT, store=False, routes=NO_ROUTES
):
  """Returns the residual stream, the routing and, if `store`, the cache.

  By a loop over all layers, or over the first ones and then a scan over the
  periods of the others.
  """
  segments_BT = mask_BT.astype(jnp.int32)
  dtype = stored(cfg.dtype)  # of the streams that the backward pass stacks
  steps = cfg.unroll
  if steps is None:
    small = cfg.num_layers <= _SMALL_DEPTH and sharding.platform() == "cpu"
    steps = cfg.num_layers if small else 1
  # A scan would stack what the backward pass needs, even if unrolled.
  scanned = steps < cfg.num_layers and cfg.num_periods > 0
  stacks, outs, rest = params["layers"], [], []
  if routes.experts is not None and "moe" in stacks:
    # Where `block` looks for those of its layer.
    stacks = stacks | {"moe": stacks["moe"] | {"routes": routes.experts}}

  def run(layer, places, x_BTD, stacks):
    x_BTD, routing, arrays = block(
      x_BTD.astype(cfg.dtype),
      stacks if places is None else parameters.at(stacks, places),
      cfg,
      layer,
      angles,
      segments_BT,
      routes=routes,
    )
    return x_BTD.astype(dtype), (routing, arrays if store else None)

  def step(layer, places=None, *, looped=False):
    """Runs a layer at these places of the stacks; None: the stacks are one."""
    body = functools.partial(run, layer, places)
    if cfg.kept is None:
      return body
    keep = jax.checkpoint_policies.save_only_these_names(*cfg.kept)
    # In a loop nothing can be merged with the forward pass anyway.
    return jax.checkpoint(body, prevent_cse=not looped, policy=keep)

  first = cfg.first if scanned else cfg.layers
  for layer, places in parameters.places(cfg, first):
    x_BTD, out = step(layer)(x_BTD, parameters.at(stacks, places))
    outs.append(out)
  if scanned:
    one, unroll = len(cfg.period) == 1, max(1, steps // len(cfg.period))
    step_of_scan = functools.partial(step, looped=unroll == 1)

    def run_period(x_BTD, stacks):
      outs = []
      for layer, places in parameters.places(cfg, cfg.period):
        # The backward pass of a scan would store a layer that is taken out of
        # the stacks here; so the step does it.
        x_BTD, out = step_of_scan(layer, places)(x_BTD, stacks)
        outs.append(out)
      return x_BTD, outs

    x_BTD, rest = jax.lax.scan(
      step_of_scan(cfg.period[0]) if one else run_period,
      x_BTD.astype(dtype),
      _by_period(stacks, cfg),
      unroll=unroll,
    )
    rest = [rest] if one else rest
  routing = _stacked([out[0] for out in outs], [out[0] for out in rest])
  if not store:
    return x_BTD.astype(cfg.dtype), routing, None
  by_layer = [arrays for _, arrays in outs] + [
    tuple(x[i] for x in arrays)
    for i in range(cfg.num_periods)
    for _, arrays in rest
  ]
  cache = kv.from_prefill(by_layer, cfg, mask_BT)
  return x_BTD.astype(cfg.dtype), routing, cache


def _by_period(stacks, cfg):
  """Layers after the first ones, [periods, ...].

  If a period has several layers, the next axis is those that have the module.
  """

  def by_period(module, x):
    rest = x[sum(cfg.has(layer, module) for layer in cfg.first) :]
    if len(cfg.period) == 1:
      return rest
    return rest.reshape(cfg.num_periods, -1, *rest.shape[1:])

  return {
    module: jax.tree.map(functools.partial(by_period, module), tree)
    for module, tree in stacks.items()
    # Its layers may all be among the first.
    if any(cfg.has(layer, module) for layer in cfg.period)
  }


def _stacked(first, rest=()):
  """The routing of all layers that have one, or None.

  `first` is by layer. `rest` is by layer of a period, [periods, ...] each.
  """
  first, rest = ([x for x in part if x is not None] for part in (first, rest))
  stack = lambda *x: jnp.stack(x)
  in_turns = lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:])
  parts = [jax.tree.map(stack, *first)] if first else []
  parts += [jax.tree.map(in_turns, *rest)] if rest else []
  join = lambda *x: jnp.concatenate(x)
  return jax.tree.map(join, *parts) if parts else None


def _loop_over_layers(params, cfg, x_BTD, angles, mask_BT, cache):
  cache = cache.mark_valid(mask_BT)
  segments_BT = mask_BT.astype(jnp.int32)
  routings, arrays = [], []
  for i, layer in enumerate(cfg.layers):
    x_BTD, routing, updated = block(
      x_BTD, params["layers"][i], cfg, layer, angles, segments_BT, cache, i
    )
    routings.append(routing)
    arrays.append(updated)
  cache = cache.append(tuple(arrays), mask_BT)
  return x_BTD, _stacked(routings), cache


def output_matrix(params: Params, cfg: ModelConfig) -> jax.Array:
  """The output matrix [D, V]; if tied, the transpose of the embedding."""
  return params["embed"].T if cfg.tie_embeddings else params["head"]


def project_logits(
  hidden: jax.Array, head_DV: jax.Array, cfg: ModelConfig
) -> jax.Array:
  """Float32 logits [..., V] of operands in `cfg.head_dtype`."""
  dtype = cfg.head_dtype
  with exact.exactly(cfg.exact), _precision(dtype):
    return matmul_float32(hidden.astype(dtype), head_DV.astype(dtype))


def unembed(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
  """Float32 logits [..., V] of the whole vocabulary."""
  return project_logits(hidden, output_matrix(params, cfg), cfg)


def scores(
  params: Params, cfg: ModelConfig, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
  """[B] float32, the scores of a `cfg.classifier`, at the last token of each.

  `tokens` [B, T] are padded on the right, `lengths` [B] are at least 1.
  """
  position_T = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions_BT = jnp.broadcast_to(position_T, tokens.shape)
  mask_BT = (positions_BT < lengths[:, None]).astype(jnp.int32)
  out = hidden_states(params, cfg, tokens, positions_BT, mask_BT)
  last_BD = jnp.take_along_axis(out.hidden, lengths[:, None, None] - 1, 1)[:, 0]
  return project_logits(last_BD, params["score"], cfg)[:, 0]


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
