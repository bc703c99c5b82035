"""Random parameters: norm scales of one would hide a missing scale."""

import functools

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.model import lora


@functools.cache
def weights(cfg, seed=0):
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))

  def fill(path, leaf):
    mean = float(path[-1].key == "scale" and not cfg.norm_plus_one)
    return rng.normal(mean, 0.3, leaf.shape).astype(np.float32)

  return jax.tree.map_with_path(fill, shapes)


@functools.cache
def base_and_adapters(cfg):
  """An adapter moves the logits by about as much as they are."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: lora.init(jax.random.key(0), cfg))
  noise = lambda x: (0.4 * rng.normal(size=x.shape)).astype(np.float32)
  return weights(cfg), jax.tree.map(noise, shapes)


def random_routes(experts, k, *shape, seed=0):
  """Routes [*shape, k] that no router chose; the experts of a token differ."""
  each = np.broadcast_to(np.arange(experts, dtype=np.uint8), (*shape, experts))
  return np.random.default_rng(seed).permuted(each, axis=-1)[..., :k]
