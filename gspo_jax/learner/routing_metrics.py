"""Metrics of the routing of each layer: expert load, entropy and changes.

Dimension key: B rows, T columns, R response columns (the last of each row; of a
packed row all but the first), L layers, k experts a token, E experts.

They are measured at the tokens that predict the response tokens, one column
earlier.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.losses import Mean


def predicting(x: jax.Array, length: int) -> jax.Array:
  """The columns of [B, L, T, ...] that predict the last `length` tokens."""
  return x[:, :, -length - 1 : -1]


def flips(new: jax.Array, old: jax.Array, mask: jax.Array) -> Mean:
  """[L]: share of the old policy's experts that the new one does not choose."""
  # Experts are [B, L, T, k], in any order.
  new, old = (predicting(x, mask.shape[1]) for x in (new, old))
  kept_BLRk = (old[..., :, None] == new[..., None, :]).any(-1)
  lost_L = jnp.where(mask[:, None, :, None], ~kept_BLRk, False).sum((0, 2, 3))
  count = mask.sum(dtype=jnp.float32) * old.shape[-1]
  return Mean(lost_L.astype(jnp.float32), count)


def shift(new: jax.Array, old: jax.Array) -> jax.Array:
  """RSPO's router shift d (arXiv 2510.23027v2): [B, R], without gradient.

  `|log p_new(e) - log p_old(e)|`, averaged over layers and over the OLD
  policy's experts e. Both arguments are log-probs of these experts,
  [B, L, R, k] float32.
  """
  return jax.lax.stop_gradient(jnp.abs(new - old).mean((1, 3)))


class Load(NamedTuple):
  """[L]: tokens of the busiest expert over the mean of all experts."""

  tokens: jax.Array  # [L, E] float32, of each expert

  def value(self) -> float | np.ndarray:
    tokens = np.asarray(self.tokens, float)
    return tokens.max(1) / np.maximum(tokens.mean(1), 1e-9)


class MeanLoad(Load):
  """`Load`, averaged over the layers."""

  def value(self) -> float:
    return float(np.mean(super().value()))


def tokens(experts: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
  """[L, E] float32: tokens of each expert of [B, L, T, k]; mask [B, R]."""
  # Compared and summed: a TPU would scatter one number at a time.
  chosen_BLRk = predicting(experts, mask.shape[1])
  # In the experts' small integer type: this is the largest array of a pass.
  numbers_E = jnp.arange(num_experts, dtype=experts.dtype)
  chosen_BLRkE = chosen_BLRk[..., None] == numbers_E
  chosen_BLRkE &= mask[:, None, :, None, None]
  return chosen_BLRkE.sum((0, 2, 3), dtype=jnp.float32)


def over_layers(metric: Mean) -> Mean:
  """The mean over the layers of a `Mean` [L]."""
  return Mean(metric.total.mean(), metric.count)
