"""A decoder block: a mixer of tokens, then the MLP or the experts."""

import flax.linen as nn
from jax.ad_checkpoint import checkpoint_name

from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.delta_net import DeltaNet
from gspo_jax.model.layers import MLP, Attention, RMSNorm, add
from gspo_jax.model.mla import MLA
from gspo_jax.model.moe import NO_ROUTES, MoE

_MIXERS = {"attention": Attention, "mla": MLA, "delta_net": DeltaNet}


class Block(nn.Module):
  cfg: ModelConfig
  layer: Layer

  @nn.compact
  def __call__(
    self, x_BTD, angles, segments_BT, cache=None, i=0, routes=NO_ROUTES
  ):
    """Returns the stream [B, T, D], the routing or None, the new cache arrays.

    `i` is the number of the layer in the cache.
    """
    cfg, mixer = self.cfg, self.layer.mixer
    h = RMSNorm(cfg, name="attention_norm")(x_BTD)
    mix = _MIXERS[mixer](cfg, self.layer, name=mixer)
    h, updated = mix(h, angles, segments_BT, cache, i)
    x_BTD = checkpoint_name(add(x_BTD, h), "stream")
    h = RMSNorm(cfg, name="mlp_norm")(x_BTD)
    if not self.layer.experts:
      return add(x_BTD, MLP(cfg, name="mlp")(h)), None, updated
    y_BTD, routing = MoE(cfg, name="moe")(h, segments_BT != 0, *routes)
    if cfg.shared_dim:
      y_BTD = add(y_BTD, MLP(cfg, name="shared")(h))
    return add(x_BTD, y_BTD), routing, updated
