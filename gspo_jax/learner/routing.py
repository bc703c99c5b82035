"""Where the routers sent the tokens, and how far that moved: by the layer.

Dimension key: B rows, T tokens, R response slots (the last of each row), L
layers, k experts a token, E experts.

All is measured at the tokens that PREDICT the response, one slot before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.losses import Mean


def predicting(x: jax.Array, length: int) -> jax.Array:
  """Of [B, L, T, ...] the slots that predict the last `length` ones."""
  return x[:, :, -length - 1 : -1]


def flips(new: jax.Array, old: jax.Array, mask: jax.Array) -> Mean:
  """Share of the old policy's experts that the new policy does not choose.

  Args:
    new: [B, L, T, k], the new policy's experts.
    old: [B, L, T, k], the old policy's; their order does not matter.
    mask: [B, R].

  Returns:
    A mean of each layer, [L].
  """
  new, old = (predicting(x, mask.shape[1]) for x in (new, old))
  kept_BLRk = (old[..., :, None] == new[..., None, :]).any(-1)
  lost_L = jnp.where(mask[:, None, :, None], ~kept_BLRk, False).sum((0, 2, 3))
  count = mask.sum(dtype=jnp.float32) * old.shape[-1]
  return Mean(lost_L.astype(jnp.float32), count)


def shift(new: jax.Array, old: jax.Array) -> jax.Array:
  """RSPO's router shift d (arXiv 2510.23027v2): [B, R], without gradient.

  The mean over layers and over the OLD policy's experts of `|log p_new(e) - log
  p_old(e)|`; 0 where no router moved.

  Args:
    new: [B, L, R, k] float32, the new router's log-probs of the old experts.
    old: [B, L, R, k] float32, the old router's.
  """
  return jax.lax.stop_gradient(jnp.abs(new - old).mean((1, 3)))


class Load(NamedTuple):
  """Tokens of the busiest expert over the mean, of each layer.

  Attributes:
    tokens: [L, E] float32, tokens that each expert was given.
  """

  tokens: jax.Array

  def value(self) -> np.ndarray:
    tokens = np.asarray(self.tokens, float)
    return tokens.max(1) / np.maximum(tokens.mean(1), 1e-9)


class MeanLoad(Load):
  """`Load`, averaged over the layers."""

  def value(self) -> float:
    return float(super().value().mean())


def tokens(experts: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
  """How many tokens each expert was given: [L, E] float32.

  Args:
    experts: [B, L, T, k].
    mask: [B, R].
    num_experts: E.
  """
  # Compared and summed: a TPU would scatter one number at a time.
  here_BLRk = predicting(experts, mask.shape[1])
  # In the experts' own small type: this is the largest array of a pass.
  every = jnp.arange(num_experts, dtype=experts.dtype)
  here_BLRkE = here_BLRk[..., None] == every
  here_BLRkE &= mask[:, None, :, None, None]
  return here_BLRkE.sum((0, 2, 3), dtype=jnp.float32)


def entropy(entropies: jax.Array, mask: jax.Array) -> Mean:
  """The routers' mean entropy, nats: of each layer, [L].

  Args:
    entropies: [B, L, R] float32.
    mask: [B, R].
  """
  total_L = jnp.where(mask[:, None], entropies, 0.0).sum((0, 2))
  return Mean(total_L, mask.sum(dtype=jnp.float32))


def over_layers(metric: Mean) -> Mean:
  """One number of a mean of each layer."""
  return Mean(metric.total.mean(), metric.count)
