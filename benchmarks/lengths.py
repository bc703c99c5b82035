"""Answers of known lengths: weights that count down, and realistic lengths."""

import math
import statistics

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.sampler.samples import Prompts

STOP = 0  # the token that all count down to
_CERTAIN = 2.0  # scales logits so that no other token is ever drawn


def countdown(params: model.Params) -> model.Params:
  """The same weights, but after token t comes t - 1 for certain.

  Layers are computed as ever and add nothing to the stream: what is to come is
  in a token's own embedding, a random code of -1 and 1. So a router sees the
  token alone: rows that are as far from their end meet the same experts, and a
  step of answers of one length needs fewer of them than real ones would.
  """
  rng = np.random.default_rng(0)
  codes = rng.choice([-1.0, 1.0], params["embed"].shape).astype(np.float32)
  head = _CERTAIN * np.roll(codes, -1, axis=0).T

  def silence(path, leaf):
    last = path[-1].key
    return np.zeros_like(leaf) if last in ("o", "down") else leaf

  layers = jax.tree.map_with_path(silence, params["layers"])
  made = params | {"embed": codes, "head": head, "layers": layers}
  return jax.device_put(made)


def long_tailed(count: int, most: int, seed: int = 0) -> np.ndarray:
  """[count] lengths: the median 10 % of `most`, 5 % of them at it.

  A log-normal distribution, cut; its quantiles evenly, in random order.
  """
  rng = np.random.default_rng(seed)
  quantiles = (np.arange(count) + 0.5) / count
  standard = statistics.NormalDist()
  normal = np.array([standard.inv_cdf(q) for q in quantiles])
  sigma = math.log(10) / standard.inv_cdf(0.95)
  lengths = 0.1 * most * np.exp(sigma * normal)
  return rng.permutation(np.clip(np.rint(lengths), 1, most).astype(np.int32))


def prompts(lengths: np.ndarray, slots: int) -> Prompts:
  """Prompts of `slots` tokens whose answers have these lengths."""
  tokens = np.ones((len(lengths), slots), np.int32)
  tokens[:, -1] = lengths
  return Prompts(tokens, np.full(len(lengths), slots, np.int32))
