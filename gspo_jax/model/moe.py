"""The Mixture-of-Experts layer: top-k routing, experts sharded over devices.

Dimension key: B rows, T tokens, M = B * T, D model width, E experts, e experts
of one device, k experts a token, F hidden width of one expert.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gspo_jax.model import exact, grouped_matmul, lora, parameters
from gspo_jax.model import experts as ep
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.rounding import rounded
from gspo_jax.runtime import sharding

# Of gathered tokens, as in decode steps of few rows: copying them takes less
# time than two more collectives.
_FEW_BYTES = 2**20
_INTEGERS = {2: jnp.int16, 4: jnp.int32}  # by bytes, for bits of floats


class Routing(NamedTuple):
  """The router's output in one layer, all but its losses without gradient."""

  experts: jax.Array  # [B, T, k] unsigned int, where each token was sent
  # [B, T, k] float32, the log-probs of a choice among ALL experts in proportion
  # to their scores, at `routes` if they were given, else at `experts`.
  logps: jax.Array
  entropy: jax.Array  # [B, T] float32, nats, of that choice
  # [] int32, pairs of a real token and an expert that no device processed;
  # always 0, but counted.
  dropped: jax.Array
  # [B, T] float32, of each token, finite at padding; their means over real
  # tokens are the losses. None unless `Routes.losses`. See `_router_losses`.
  load_balance: jax.Array | None = None
  z_loss: jax.Array | None = None


class Routes(NamedTuple):
  """Experts of an earlier pass, and how this pass uses them.

  With `replay` the tokens go to `experts`, by the weights of the current
  router, which thus has a gradient. Otherwise these only decide where
  `Routing.logps` are taken.
  """

  experts: jax.Array | None = None  # [L, B, T, k], or [B, T, k] in one layer
  replay: bool = False  # static
  use_own_experts: jax.Array | None = None  # [] bool: the top k replace them
  losses: bool = False  # static, whether to compute the losses of `Routing`


NO_ROUTES = Routes()


@jax.named_scope("moe")
def sparse_mlp(
  x_BTD, weights, cfg: ModelConfig, real_BT, routes: Routes = NO_ROUTES
) -> tuple[jax.Array, Routing]:
  """`sum_e w_e * down_e(silu(gate_e x) * up_e x)`.

  `route` says which k experts and weights, `grouped_matmul.gated` what gpt-oss
  has in place of SwiGLU. There is no capacity limit and no dropped token.
  `real_BT` is false at padding. Returns the output [B, T, D], 0 at padding, and
  the routing.
  """
  specs = parameters.partition_specs("moe", weights)
  tokens = sharding.TOKENS
  routing = Routing(tokens, tokens, tokens, PartitionSpec())
  if routes.losses:
    routing = routing._replace(load_balance=tokens, z_loss=tokens)
  layer = sharding.shard_map(
    functools.partial(
      _local, cfg=cfg, replay=routes.replay, losses=routes.losses
    ),
    in_specs=(tokens, tokens, tokens, specs, PartitionSpec()),
    out_specs=(tokens, routing),
  )
  return layer(x_BTD, real_BT, routes.experts, weights, routes.use_own_experts)


def _local(
  x_BTD, real_BT, routes_BTk, weights, use_own_experts, *, cfg, replay, losses
):
  E, k = cfg.num_experts, cfg.experts_per_token
  x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
  routes_Mk = None if routes_BTk is None else routes_BTk.reshape(-1, k)

  def gather(name, dtype=x_MD.dtype):
    shard = weights[name].astype(dtype)
    whole = sharding.gather(shard, *sharding.WEIGHT_AXES, dim=0)
    return checkpoint_name(whole, "weights")

  def experts(name):
    ends = {"weight": "", "a": lora.A, "b": lora.B, "bias": "_bias"}
    names = {field: name + end for field, end in ends.items()}
    return lora.Experts(
      **{field: gather(n) for field, n in names.items() if n in weights}
    )

  router_dtype = jnp.float32 if cfg.float32_router else x_MD.dtype

  def product(x_MD, router_DE):
    if exact.has_kernels():
      return exact.product(x_MD, router_DE, jnp.float32)
    return jnp.matmul(
      x_MD,
      router_DE,
      precision="highest" if cfg.float32_router else None,
      preferred_element_type=jnp.float32,
    )

  logits_ME = exact.chosen(product, whole=1, axes=1)(
    x_MD.astype(router_dtype), gather("router", router_dtype)
  )
  if "router_bias" in weights:
    logits_ME += weights["router_bias"].astype(router_dtype)
  choice_bias_E = weights.get("choice_bias")
  choose = exact.chosen(
    lambda logits, routes, bias: route(logits, cfg, bias, routes), 1, axes=1
  )
  if use_own_experts is not None:
    _, top_Mk = choose(logits_ME, None, choice_bias_E)
    top_Mk = top_Mk.astype(routes_Mk.dtype)
    routes_Mk = jnp.where(use_own_experts, top_Mk, routes_Mk)
  weights_Mk, experts_Mk = choose(
    logits_ME, routes_Mk if replay else None, choice_bias_E
  )
  # Padding tokens are all alike, and would overload the same k experts.
  real_experts_Mk = jnp.where(real_BT.reshape(-1, 1), experts_Mk, E)
  y_MD, num_rows = _run_experts(
    x_MD,
    weights_Mk,
    real_experts_Mk,
    experts("gate_up"),
    experts("down"),
    cfg.swiglu_limit,
  )
  expected_rows = jnp.sum(real_BT, dtype=jnp.int32) * k
  dropped = sharding.psum(expected_rows - num_rows, *sharding.BATCH_AXES)
  records = _routing_records(logits_ME, cfg, experts_Mk, routes_Mk)
  if losses:
    records += _router_losses(logits_ME, cfg, real_experts_Mk, expected_rows)
  y_BTD = y_MD.reshape(x_BTD.shape)
  by_row = [x.reshape(*x_BTD.shape[:2], *x.shape[1:]) for x in records]
  return y_BTD, Routing(*by_row[:3], dropped, *by_row[3:])


def _router_losses(logits_ME, cfg, experts_Mk, num_rows):
  """[M] each: the terms of the load-balancing loss and of the z-loss.

  Load balancing (Switch, arXiv 2101.03961, eq. 4 to 6; top-k as transformers'
  `load_balancing_loss_func`): `E sum_e f_e P_e`, with `f_e` the tokens sent to
  expert e over all tokens and `P_e` the mean of its probability `p_e`. The term
  of a token is `E sum_e f_e p_e`; `f` has no gradient. Evenly loaded experts
  give k. Sigmoid scores are divided by their sum (arXiv 2412.19437, eq. 19).
  `f` is of the tokens of this forward pass, on the devices of one part of
  `mesh.data`; padding does not count.

  The z-loss (arXiv 2202.08906, eq. 5): the squared logsumexp of the logits.
  """
  E, k = cfg.num_experts, cfg.experts_per_token
  counts_E = (experts_Mk[..., None] == jnp.arange(E)).sum((0, 1))
  total = sharding.psum((counts_E, num_rows // k), *sharding.BATCH_AXES)
  f_E = total[0] / jnp.maximum(total[1], 1)
  p_ME = jax.nn.softmax(_log_scores(logits_ME, cfg))
  z_M = jax.nn.logsumexp(logits_ME, axis=-1)
  return E * (f_E * p_ME).sum(-1), jnp.square(z_M)


def _run_experts(x_MD, weights_Mk, experts_Mk, gate_up, down, limit):
  """The weighted sum over all experts; rows processed (sum over batch axes)."""
  ranks = ("expert", "tensor")
  if exact.is_on():
    operands = x_MD, weights_Mk, experts_Mk, gate_up, down
    exactly = functools.partial(_run_exactly, limit=limit)
    if sharding.size(*ranks) == 1:
      return exactly(*operands)  # whose gradient computes nothing again
    run = functools.partial(_run_experts, limit=limit)
    exactly = exact.exactly(True)(exactly)
    return exact.with_gradient_of(run, exactly)(*operands)
  if sharding.size(*ranks) == 1:
    operands = x_MD, weights_Mk, experts_Mk
    if sharding.platform() == "cpu" and gate_up.a is None:
      biases = None if down.bias is None else (gate_up.bias, down.bias)
      return grouped_matmul.swiglu_in_blocks(
        *operands, gate_up.weight, down.weight, biases, limit
      )
    return dispatch(*operands, gate_up, down, limit)
  operands = x_MD, weights_Mk.astype(x_MD.dtype), experts_Mk
  few = sharding.size("expert") * x_MD.nbytes <= _FEW_BYTES
  join = _gather_together if few else _gather
  x_MD, weights_Mk, experts_Mk = join(*operands)
  y, num_rows = ep.apply(
    checkpoint_name(x_MD, "tokens"),
    weights_Mk,
    experts_Mk - sharding.index(*ranks) * len(gate_up.weight),
    gate_up,
    down,
    num_shards=sharding.size(*ranks),
    limit=limit,
  )
  y_MD = sharding.scatter(y, "expert", dim=0)
  return sharding.psum(y_MD, "tensor"), sharding.psum(num_rows, "tensor")


def _run_exactly(x_MD, weights_Mk, experts_Mk, gate_up, down, limit):
  """`_run_experts`, wherever the experts are: the same bits on any mesh.

  The results of a token's k experts stay apart until all are on its device. A
  pass sends `c` results to each of the X devices along `expert`, more than most
  loads need; there are as many passes as the largest load needs.
  """
  weights_Mk = weights_Mk.astype(x_MD.dtype)
  ranks, X = ("expert", "tensor"), sharding.size("expert")
  (M, k), e = experts_Mk.shape, len(gate_up.weight)
  if sharding.size(*ranks) == 1:
    operands = x_MD, weights_Mk, experts_Mk
    y_MkD, num_rows = apart(*operands, gate_up, down, limit)
    return rounded(exact.sum_in_order(y_MkD, 1), x_MD.dtype), num_rows
  c = min(M * k, -(-int(ep.SLACK * M * k) // sharding.size(*ranks)))
  rank_XP = (_gather(experts_Mk)[0] // e).reshape(X, M * k)
  loads = (rank_XP[..., None] == jnp.arange(sharding.size(*ranks))).sum(1)
  mine_XP = rank_XP == sharding.index(*ranks)
  # The numbers of the results that this device sends, its own first.
  order_XP = jnp.argsort(~mine_XP, stable=True)
  order_XP = jnp.pad(order_XP, ((0, 0), (0, c)))
  x_XMD, weights_XP, expert_XP = (
    x.reshape(X, -1, *x.shape[1:])
    for x in _gather(x_MD, weights_Mk.reshape(-1), experts_Mk.reshape(-1))
  )
  # Where this device's results come from, and their place among all of there.
  source_P, tensor_P = jnp.divmod(
    rank_XP[sharding.index("expert")], sharding.size("tensor")
  )
  source_P = jnp.where(tensor_P == sharding.index("tensor"), source_P, X)
  is_source_PX = source_P[:, None] == jnp.arange(X)
  place_P = (jnp.cumsum(is_source_PX, 0) * is_source_PX).sum(1) - 1

  def one_pass(i, state):
    y_PD, num_rows = state
    pair_Xc = jax.lax.dynamic_slice_in_dim(order_XP, i * c, c, axis=1)
    at = lambda x, index: jax.vmap(lambda x, i: x[i])(x, index)
    real_Xc = i * c + jnp.arange(c) < mine_XP.sum(1, keepdims=True)
    local_Xc = jnp.where(real_Xc, at(expert_XP, pair_Xc) % e, e)
    y_X1D, count = apart(
      at(x_XMD, pair_Xc // k).reshape(X * c, -1),
      at(weights_XP, pair_Xc).reshape(-1, 1),
      local_Xc.reshape(-1, 1),
      gate_up,
      down,
      limit,
    )
    y_XcD = y_X1D.reshape(X, c, -1)
    y_XcD = sharding.all_to_all(y_XcD, "expert", split=0, join=0)
    here_P = (place_P // c == i) & (source_P < X)
    sent_PD = y_XcD[source_P, place_P % c]
    return jnp.where(here_P[:, None], sent_PD, y_PD), num_rows + count

  start = jnp.zeros((M * k, x_MD.shape[1]), x_MD.dtype), jnp.int32(0)
  # All devices must agree: a pass has collectives.
  passes = -(-sharding.pmax(loads.max(), *sharding.BATCH_AXES) // c)
  y_PD, num_rows = jax.lax.fori_loop(0, passes, one_pass, start)
  # Sums of one number and zeros.
  y_MkD = sharding.psum(y_PD.reshape(M, k, -1), "tensor")
  y_MD = rounded(exact.sum_in_order(y_MkD, 1), x_MD.dtype)
  return y_MD, sharding.psum(num_rows, "tensor")


def _gather(*arrays):
  return tuple(sharding.gather(x, "expert", dim=0) for x in arrays)


@jax.custom_vjp
def _gather_together(x_MD, weights_Mk, experts_Mk):
  """`_gather` by one collective, as integers; it copies the tokens."""
  integer = _INTEGERS[x_MD.dtype.itemsize]
  bits = lambda x: jax.lax.bitcast_convert_type(x, integer)
  columns = bits(x_MD), bits(weights_Mk), experts_Mk.astype(integer)
  (joined,) = _gather(jnp.concatenate(columns, axis=1))
  D, k = x_MD.shape[1], experts_Mk.shape[1]
  x, weights, experts = jnp.split(joined, (D, D + k), axis=1)
  floats = lambda x: jax.lax.bitcast_convert_type(x, x_MD.dtype)
  return floats(x), floats(weights), experts.astype(experts_Mk.dtype)


def _scatter_gradients(_, gradients):
  dx_MD, dweights_Mk, _ = gradients
  scatter = lambda x: sharding.scatter(x, "expert", dim=0)
  return scatter(dx_MD), scatter(dweights_Mk), None


_gather_together.defvjp(
  lambda *operands: (_gather_together(*operands), None), _scatter_gradients
)


def route(
  logits_ME, cfg: ModelConfig, choice_bias_E=None, routes_Mk=None
) -> tuple[jax.Array, jax.Array]:
  """Float32 weights [M, k], and their experts: `routes_Mk`, or the best k.

  An expert's score is a softmax over ALL experts or a sigmoid. The best experts
  have the largest score plus `choice_bias_E`, within the best groups. The
  weights are the scores, divided by their sum if `norm_topk_prob`, times
  `routed_scaling_factor` (arXiv 2412.19437, eq. 12 to 16).
  """
  softmax = exact.sums(jax.nn.softmax)
  score = {"softmax": softmax, "sigmoid": jax.nn.sigmoid}
  scores_ME = score[cfg.scoring_func](logits_ME)
  # Exact weights are by one formula, whoever chose the experts.
  choice = cfg.choice_bias or cfg.n_group > 1 or cfg.exact
  if routes_Mk is None and not choice:
    weights_Mk, experts_Mk = jax.lax.top_k(scores_ME, cfg.experts_per_token)
    if cfg.norm_topk_prob:
      weights_Mk /= weights_Mk.sum(-1, keepdims=True)
  else:
    experts_Mk = routes_Mk
    if routes_Mk is None:
      experts_Mk = _best_experts(scores_ME, choice_bias_E, cfg)
    experts_Mk = experts_Mk.astype(jnp.int32)
    if cfg.norm_topk_prob:  # unlikely experts would divide 0 by 0
      log_scores_Mk = _at(_log_scores(logits_ME, cfg), experts_Mk)
      weights_Mk = softmax(log_scores_Mk)
    else:
      weights_Mk = _at(scores_ME, experts_Mk)
  if cfg.routed_scaling_factor != 1:
    weights_Mk *= cfg.routed_scaling_factor
  return weights_Mk, experts_Mk


def _best_experts(scores_ME, choice_bias_E, cfg):
  choice_ME = jax.lax.stop_gradient(scores_ME)
  if cfg.choice_bias:
    choice_ME += jax.lax.stop_gradient(choice_bias_E)
  if cfg.n_group > 1:
    choice_ME = _in_best_groups(choice_ME, cfg)
  return jax.lax.top_k(choice_ME, cfg.experts_per_token)[1]


def _in_best_groups(choice_ME, cfg):
  """-inf outside of the groups with the largest sums of their two best."""
  groups_MGe = choice_ME.reshape(len(choice_ME), cfg.n_group, -1)
  best_two_MG = jax.lax.top_k(groups_MGe, 2)[0].sum(-1)
  _, best_Mg = jax.lax.top_k(best_two_MG, cfg.topk_group)
  is_best_MG = (best_Mg[..., None] == jnp.arange(cfg.n_group)).any(1)
  inside_MGe = jnp.where(is_best_MG[..., None], groups_MGe, -jnp.inf)
  return inside_MGe.reshape(choice_ME.shape)


def _log_scores(logits_ME, cfg):
  """Logarithms of the scores, for a softmax up to a constant."""
  is_sigmoid = cfg.scoring_func == "sigmoid"
  return jax.nn.log_sigmoid(logits_ME) if is_sigmoid else logits_ME


def _at(x_ME, experts_Mk):
  """`x` at these experts, [M, k]; a TPU would gather one number at a time."""
  is_expert_MkE = experts_Mk[..., None] == jnp.arange(x_ME.shape[-1])
  return jnp.where(is_expert_MkE, x_ME[:, None], 0).sum(-1)


def number_type(experts: int):
  """The smallest unsigned integer type for the number of an expert."""
  return jnp.uint8 if experts <= 256 else jnp.uint16


def _routing_records(logits_ME, cfg, experts_Mk, routes_Mk):
  log_scores_ME = _log_scores(jax.lax.stop_gradient(logits_ME), cfg)
  logps_ME = jax.nn.log_softmax(log_scores_ME)
  entropy_M = -(jnp.exp(logps_ME) * logps_ME).sum(-1)
  at_Mk = experts_Mk if routes_Mk is None else routes_Mk
  dtype = number_type(logits_ME.shape[-1])
  return experts_Mk.astype(dtype), _at(logps_ME, at_Mk), entropy_M


def dispatch(x_MD, weights_Mk, experts_Mk, gate_up, down, limit=None):
  """The weighted sum of the experts of each token: [M, D]; rows processed."""
  y_MkD, rows = apart(x_MD, weights_Mk, experts_Mk, gate_up, down, limit)
  return rounded(y_MkD.sum(1, dtype=jnp.float32), x_MD.dtype), rows


def apart(x_MD, weights_Mk, experts_Mk, gate_up, down, limit):
  """[M, k, D], the weighted results of the experts: sort, two products, unsort.

  Expert number E means no expert, for padding.
  """
  M, k = experts_Mk.shape
  order = jnp.argsort(experts_Mk.reshape(-1), stable=True)
  sizes_E = jnp.bincount(experts_Mk.reshape(-1), length=len(gate_up.weight))
  weights = weights_Mk.reshape(-1)[order].astype(x_MD.dtype)
  h = lora.grouped_product(x_MD[order // k], gate_up, sizes_E)
  y = ep.project_down(h, weights, down, sizes_E, limit)
  num_rows = sizes_E.sum(dtype=jnp.int32)
  y = jnp.where(jnp.arange(M * k)[:, None] < num_rows, y, 0)
  # A gather by the inverse permutation, whose gradient is a permutation, too.
  return y[jnp.argsort(order)].reshape(M, k, -1), num_rows
