"""Attention over plain lists of keys in float64, and random inputs for it."""

import jax
import jax.numpy as jnp
import numpy as np

HUGE = 1e20  # in slots that must not be read


def random_bf16(rng, *shape):
  """Random float32 numbers that bfloat16 represents exactly."""
  return np.float32(jnp.bfloat16(rng.normal(size=shape)))


def attention(q_NH, k_TKH, v_TKH, window=None, sinks_N=None):
  """Of the last token to the last `window`; a sink is one more score."""
  out = np.zeros(q_NH.shape)
  first = 0 if window is None else max(0, len(k_TKH) - window)
  for n, q_H in enumerate(q_NH):
    g = n // (len(q_NH) // k_TKH.shape[1])
    scores = np.float64(k_TKH[first:, g]) @ q_H / np.sqrt(len(q_H))
    values = v_TKH[first:, g]
    if sinks_N is not None:
      scores = np.append(scores, sinks_N[n])
      values = np.append(values, np.zeros((1, len(q_H))), 0)
    weights = np.exp(scores - scores.max())
    out[n] = weights @ values / weights.sum()
  return out


def side_by_side(pages_KnSH, j):
  """Pages [K, n, S, H] with j heads side by side: [K / j, n, S, j * H]."""
  K, n, S, H = pages_KnSH.shape
  parts = pages_KnSH.reshape(K // j, j, n, S, H).transpose(0, 2, 3, 1, 4)
  return parts.reshape(K // j, n, S, j * H)


def count_iterations(monkeypatch):
  """A list of the iterations of each loop; the loops do not run."""

  def spy(lower, upper, _, state):
    counts.append(int(upper) - lower)
    return state

  counts = []
  monkeypatch.setattr(jax.lax, "fori_loop", spy)
  return counts
