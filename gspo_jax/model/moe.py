"""The Mixture-of-Experts layer: top-k routing, experts split over devices.

Dimension key: B rows, T tokens, M = B * T, D model width, E experts, e experts
of one device, k experts a token, F hidden width of one expert.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gspo_jax.model import experts as ep
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.rounding import rounded
from gspo_jax.runtime import sharding


class Routing(NamedTuple):
  """What the router did in one layer; no gradient goes through it.

  Attributes:
    experts: [B, T, k] unsigned, those that the token went to.
    log_probs: [B, T, k] float32, what the softmax over ALL experts gives the
      experts of `routes`, or where none are given those of `experts`.
    entropy: [B, T] float32, nats, of that softmax.
    dropped: [] int32, pairs of a real token and an expert that no device
      worked off: counted, and always 0.
  """

  experts: jax.Array
  log_probs: jax.Array
  entropy: jax.Array
  dropped: jax.Array


class MoE(nn.Module):
  """Qwen3's sparse MLP: `sum_e w_e * down_e(silu(gate_e x) * up_e x)`.

  The weights are the softmax over ALL experts in float32, cut to the top k and
  divided by their sum iff `norm_topk_prob`. No capacity, no dropped token.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(
    self, x_BTD, real_BT, routes_BTk=None, replay=False, own=None
  ) -> tuple[jax.Array, Routing]:
    """Returns the output [B, T, D], 0 at padding, and the routing.

    With `replay` the experts ARE the routes; their weights are those of the
    live router, which so learns. Without, routes are only looked up. Where
    `own` is true, the k likeliest experts stand for the routes.
    """
    cfg = self.cfg
    D, E, F = cfg.embed_dim, cfg.num_experts, cfg.mlp_dim
    init = nn.initializers.lecun_normal()
    stacked = nn.initializers.lecun_normal(batch_axis=0)
    weights = {
      "router": self.param("router", init, (D, E)),
      # Gate and up side by side: one matmul, and no relayout on a TPU.
      "gate_up": self.param("gate_up", stacked, (E, D, 2 * F)),
      "down": self.param("down", stacked, (E, F, D)),
    }
    lay = {name: sharding.param_spec(f"moe/{name}") for name in weights}
    rows = PartitionSpec(sharding.BATCH_AXES)
    layer = sharding.shard_map(
      functools.partial(_local, cfg=cfg, replay=replay),
      in_specs=(rows, rows, rows, lay, PartitionSpec()),
      out_specs=(rows, Routing(rows, rows, rows, PartitionSpec())),
    )
    return layer(x_BTD, real_BT, routes_BTk, weights, own)


def _local(
  x_BTD, real_BT, routes_BTk, weights, own, *, cfg: ModelConfig, replay
):
  """One device's tokens; its experts serve the devices along `expert`."""
  E, k = cfg.num_experts, cfg.experts_per_token
  x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
  routes_Mk = None if routes_BTk is None else routes_BTk.reshape(-1, k)

  def whole(name):
    part = weights[name].astype(x_MD.dtype)
    return checkpoint_name(sharding.gather(part, "fsdp", dim=0), "weights")

  logits_ME = _router_logits(x_MD, whole("router"))
  if own is not None:
    _, likeliest_Mk = jax.lax.top_k(jax.nn.softmax(logits_ME), k)
    own_Mk = likeliest_Mk.astype(routes_Mk.dtype)
    routes_Mk = jnp.where(own, own_Mk, routes_Mk)
  weights_Mk, experts_Mk = route(logits_ME, cfg, routes_Mk if replay else None)
  # All padding looks alike, and would crowd the same few experts.
  asked_Mk = jnp.where(real_BT.reshape(-1, 1), experts_Mk, E)
  y_MD, done = _share_out(
    x_MD, weights_Mk, asked_Mk, whole("gate_up"), whole("down")
  )
  pairs = jnp.sum(real_BT, dtype=jnp.int32) * k
  dropped = sharding.psum(pairs - done, *sharding.BATCH_AXES)
  noted = _note(logits_ME, experts_Mk, routes_Mk)
  noted = (x.reshape(*x_BTD.shape[:2], *x.shape[1:]) for x in noted)
  return y_MD.reshape(x_BTD.shape), Routing(*noted, dropped)


def _share_out(x_MD, weights_Mk, experts_Mk, gate_up, down):
  """Gathers tokens along `expert`, lets each device add what its experts say.

  Returns:
    The output [M, D], and the pairs worked off for the tokens here: summed over
    rows, those worked off in all.
  """
  ranks = ("expert", "tensor")
  if sharding.size(*ranks) == 1:
    return dispatch(x_MD, weights_Mk, experts_Mk, gate_up, down)
  join = lambda x: sharding.gather(x, "expert", dim=0)
  y, done = ep.apply(
    checkpoint_name(join(x_MD), "tokens"),
    join(weights_Mk.astype(x_MD.dtype)),
    join(experts_Mk) - sharding.index(*ranks) * gate_up.shape[0],
    gate_up,
    down,
    share=sharding.size(*ranks),
  )
  y_MD = sharding.scatter(y, "expert", dim=0)
  return sharding.psum(y_MD, "tensor"), sharding.psum(done, "tensor")


def _router_logits(x_MD, router_DE):
  return jnp.matmul(
    x_MD, router_DE.astype(x_MD.dtype), preferred_element_type=jnp.float32
  )


def route(logits_ME, cfg: ModelConfig, routes_Mk=None):
  """The routing weights, float32, and their experts: [M, k] each.

  The experts are the routes, or where there are none the k likeliest.
  """
  if routes_Mk is not None:
    experts_Mk = routes_Mk.astype(jnp.int32)
    if cfg.norm_topk_prob:  # dividing could be 0 / 0: routes may be unlikely
      return jax.nn.softmax(_at(logits_ME, experts_Mk)), experts_Mk
    return _at(jax.nn.softmax(logits_ME), experts_Mk), experts_Mk
  probs_ME = jax.nn.softmax(logits_ME)
  weights_Mk, experts_Mk = jax.lax.top_k(probs_ME, cfg.experts_per_token)
  if cfg.norm_topk_prob:
    weights_Mk /= weights_Mk.sum(-1, keepdims=True)
  return weights_Mk, experts_Mk


def _at(x_ME, experts_Mk):
  """`x` at these experts, [M, k]: compared and summed, exactly.

  A TPU would gather, and in the backward pass scatter, one number at a time.
  """
  here_MkE = experts_Mk[..., None] == jnp.arange(x_ME.shape[-1])
  return jnp.where(here_MkE, x_ME[:, None], 0).sum(-1)


def number_type(experts: int):
  """The smallest type for the number of one of so many experts."""
  return jnp.uint8 if experts <= 256 else jnp.uint16


def _note(logits_ME, experts_Mk, routes_Mk):
  """The first three fields of `Routing`, of M tokens."""
  logps_ME = jax.nn.log_softmax(jax.lax.stop_gradient(logits_ME))
  entropy_M = -(jnp.exp(logps_ME) * logps_ME).sum(-1)
  at_Mk = experts_Mk if routes_Mk is None else routes_Mk
  small = number_type(logits_ME.shape[-1])
  return experts_Mk.astype(small), _at(logps_ME, at_Mk), entropy_M


def dispatch(x_MD, weights_Mk, experts_Mk, gate_up, down):
  """Sends every token through its experts: sort, two grouped matmuls, unsort.

  Exact whatever the load: the groups are as long as the router made them.
  Expert E is none, for padding.

  Returns:
    The output [M, D], and the number of pairs in the groups.
  """
  M, k = experts_Mk.shape
  order = jnp.argsort(experts_Mk.reshape(-1), stable=True)
  sizes_E = jnp.bincount(experts_Mk.reshape(-1), length=gate_up.shape[0])
  weights = weights_Mk.reshape(-1)[order].astype(x_MD.dtype)
  y = ep.multiply(x_MD[order // k], weights, gate_up, down, sizes_E)
  done = sizes_E.sum(dtype=jnp.int32)
  y = jnp.where(jnp.arange(M * k)[:, None] < done, y, 0)
  # The inverse of a permutation gathers: its gradient is again a permutation.
  y = y[jnp.argsort(order)].reshape(M, k, -1).sum(1, dtype=jnp.float32)
  return rounded(y, x_MD.dtype), done
