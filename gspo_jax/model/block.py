"""A decoder block: a mixer of tokens, then the MLP or the experts."""

from jax.ad_checkpoint import checkpoint_name

from gspo_jax.model import parameters
from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.delta_net import gated_delta_net
from gspo_jax.model.layers import add, mlp, rms_norm, self_attention
from gspo_jax.model.mla import latent_attention
from gspo_jax.model.moe import NO_ROUTES, sparse_mlp

_MIXERS = {
  "attention": self_attention,
  "mla": latent_attention,
  "delta_net": gated_delta_net,
}


def block(
  x_BTD,
  params: dict,
  cfg: ModelConfig,
  layer: Layer,
  angles,
  segments_BT,
  cache=None,
  i=0,
  routes=NO_ROUTES,
):
  """Returns the stream [B, T, D], the routing or None, the new cache arrays.

  `params` are the layer's by module; "moe" may have "routes", too. `i` is the
  number of the layer in the cache.
  """
  weights = {name: parameters.weights(x, cfg) for name, x in params.items()}
  norm = lambda x, name: rms_norm(x, weights[name]["scale"], cfg)
  operands = norm(x_BTD, "attention_norm"), weights[layer.mixer]
  mix = _MIXERS[layer.mixer]
  h, updated = mix(*operands, cfg, layer, angles, segments_BT, cache, i)
  x_BTD = checkpoint_name(add(x_BTD, h), "stream")
  h = norm(x_BTD, "mlp_norm")
  if not layer.experts:
    return add(x_BTD, mlp(h, weights["mlp"], "mlp")), None, updated
  routes = routes._replace(experts=weights["moe"].pop("routes", None))
  y_BTD, routing = sparse_mlp(h, weights["moe"], cfg, segments_BT != 0, routes)
  if cfg.shared_dim:
    y_BTD = add(y_BTD, mlp(h, weights["shared"], "shared"))
  return add(x_BTD, y_BTD), routing, updated
