"""The Mixture-of-Experts layer: top-k routing over sorted tokens, dropless.

Dimension key: B rows, T tokens, M = B * T, D model width, E experts, k experts
a token, F hidden width of one expert.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspo_jax.model.config import ModelConfig


class MoE(nn.Module):
  """Qwen3's sparse MLP: `sum_e w_e * down_e(silu(gate_e x) * up_e x)`.

  The weights are the softmax over ALL experts in float32, cut to the top k and
  divided by their sum iff `norm_topk_prob`. No capacity, no dropped token.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD):
    """Returns the output [B, T, D] and the chosen experts [B, T, k] int32."""
    cfg = self.cfg
    D, E, F = cfg.embed_dim, cfg.num_experts, cfg.mlp_dim
    init = nn.initializers.lecun_normal()
    stacked = nn.initializers.lecun_normal(batch_axis=0)
    router_DE = self.param("router", init, (D, E))
    # Gate and up side by side: one matmul, and no relayout on a TPU.
    gate_up = self.param("gate_up", stacked, (E, D, 2 * F))
    down = self.param("down", stacked, (E, F, D))

    x_MD = x_BTD.reshape(-1, D)
    weights_Mk, experts_Mk = route(x_MD, router_DE, cfg)
    y_MD = dispatch(x_MD, weights_Mk, experts_Mk, gate_up, down)
    shape = (*x_BTD.shape[:2], cfg.experts_per_token)
    return y_MD.reshape(x_BTD.shape), experts_Mk.reshape(shape)


def route(x_MD, router_DE, cfg: ModelConfig):
  """The top-k routing weights, float32, and their experts: [M, k] each."""
  logits_ME = jnp.matmul(
    x_MD, router_DE.astype(x_MD.dtype), preferred_element_type=jnp.float32
  )
  probs_ME = jax.nn.softmax(logits_ME)
  weights_Mk, experts_Mk = jax.lax.top_k(probs_ME, cfg.experts_per_token)
  if cfg.norm_topk_prob:
    weights_Mk /= weights_Mk.sum(-1, keepdims=True)
  return weights_Mk, experts_Mk


def dispatch(x_MD, weights_Mk, experts_Mk, gate_up, down):
  """Sends every token through its experts: sort, two grouped matmuls, unsort.

  Exact whatever the load: the groups are as long as the router made them. On a
  CPU, XLA multiplies every row by every expert: E times the work of a TPU.
  """
  M, k = experts_Mk.shape
  order = jnp.argsort(experts_Mk.reshape(-1), stable=True)
  sizes_E = jnp.bincount(experts_Mk.reshape(-1), length=gate_up.shape[0])
  x = x_MD[order // k]
  h = jax.lax.ragged_dot(x, gate_up.astype(x.dtype), sizes_E)
  gate, up = jnp.split(h, 2, axis=-1)
  # Weighted here, on F columns, rather than after `down`, on D.
  h = nn.silu(gate) * up * weights_Mk.reshape(-1)[order, None].astype(x.dtype)
  y = jax.lax.ragged_dot(h, down.astype(x.dtype), sizes_E)
  # The inverse of a permutation gathers: its gradient is again a permutation.
  return y[jnp.argsort(order)].reshape(M, k, -1).sum(1)
