"""Responses of known lengths: weights that count down; realistic lengths."""

import math
import statistics

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.sampler.samples import Prompts

STOP = 0  # the token that every response counts down to
_CERTAIN = 2.0  # scales logits so that no other token is ever sampled


def countdown(params: model.Params) -> model.Params:
  """The same weights, except that token t - 1 always follows token t.

  The layers are computed but add nothing to the residual stream: the next token
  depends on the embedding of the last one alone, a random code of -1 and 1. So
  a router sees the token alone: responses that are equally far from their end
  meet the same experts, and a step of responses of one length needs fewer
  experts than a real one.
  """
  rng = np.random.default_rng(0)
  codes = rng.choice([-1.0, 1.0], params["embed"].shape).astype(np.float32)
  head = _CERTAIN * np.roll(codes, -1, axis=0).T

  def silence(path, leaf):
    last = path[-1].key
    return np.zeros_like(leaf) if last in ("o", "down") else leaf

  layers = jax.tree.map_with_path(silence, params["layers"])
  return jax.device_put(
    params | {"embed": codes, "head": head, "layers": layers}
  )


def long_tailed(count: int, most: int, seed: int = 0) -> np.ndarray:
  """[count] lengths with a median of 10 % of `most`, and 5 % of them at `most`.

  Even quantiles of a clipped log-normal distribution, in random order.
  """
  rng = np.random.default_rng(seed)
  quantiles = (np.arange(count) + 0.5) / count
  standard = statistics.NormalDist()
  normal = np.array([standard.inv_cdf(q) for q in quantiles])
  sigma = math.log(10) / standard.inv_cdf(0.95)
  lengths = 0.1 * most * np.exp(sigma * normal)
  return rng.permutation(np.clip(np.rint(lengths), 1, most).astype(np.int32))


def lognormal(
  count: int, most: int, mean: float = 0.25, seed: int = 0
) -> np.ndarray:
  """[count] lengths whose mean is that share of `most` before they are cut.

  Even quantiles of a log-normal distribution with sigma 1, cut at `most`, in
  random order.
  """
  rng = np.random.default_rng(seed)
  standard = statistics.NormalDist()
  quantiles = (np.arange(count) + 0.5) / count
  normal = np.array([standard.inv_cdf(q) for q in quantiles])
  lengths = mean * most * np.exp(normal - 0.5)
  return rng.permutation(np.clip(np.rint(lengths), 1, most).astype(np.int32))


def prompts(lengths: np.ndarray, slots: int) -> Prompts:
  """Prompts of `slots` tokens whose responses have these lengths."""
  tokens = np.ones((len(lengths), slots), np.int32)
  tokens[:, -1] = lengths
  return Prompts(tokens, np.full(len(lengths), slots, np.int32))
