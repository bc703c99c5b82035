"""Latent attention: through keys and values, and in the space of latents.

test_hf.py compares it with transformers, test_families.py on a mesh.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from families import FAMILIES
from random_model import base_and_adapters, weights

from gspo_jax import model
from gspo_jax.model import cache, lora, mla, paged_cache, parameters

CFG = dataclasses.replace(FAMILIES["deepseek-v3"], num_layers=2)
B, T = 2, 12
forward = jax.jit(model.forward, static_argnums=1)


def tokens():
  rng = np.random.default_rng(0)
  return rng.integers(0, CFG.vocab_size, (B, T)), np.indices((B, T))[1]


@pytest.mark.parametrize(
  ("changes", "adapted"),
  [({}, True), ({"q_lora_rank": 0, "rope_interleave": False}, False)],
)
def test_latents_in_a_cache_give_what_keys_and_values_do(changes, adapted):
  """Passes of several tokens, in a cache and in pages."""
  cfg = dataclasses.replace(CFG, **changes)
  params = weights(cfg)
  if adapted:
    settings = model.LoraConfig(rank=2, alpha=3.0)
    cfg = dataclasses.replace(cfg, lora=settings)
    params = lora.join(*base_and_adapters(cfg))
  ids, positions = tokens()
  whole = forward(params, cfg, ids, positions, np.ones((B, T)))
  row = cache.empty(cfg, B, T)
  assert {x.shape for x in jax.tree.leaves(row.kv)} == {(B, 1, T, 12 + 4)}
  pages = paged_cache.empty(
    cfg, num_slots=B, num_pages=8, page_size=4, pages_per_slot=4
  )
  table = np.array([[0, 2, 4, 6], [1, 3, 5, 7]], np.int32)
  decoding = model.unstack_layers(params, cfg)
  atol = 3e-5 * np.abs(whole.logits).max()
  for kept in row, dataclasses.replace(pages, table=table):
    for a, b in itertools.pairwise((0, 5, 6, 7, T)):
      ones = np.ones((B, b - a))
      out = forward(decoding, cfg, ids[:, a:b], positions[:, a:b], ones, kept)
      kept = out.cache
      np.testing.assert_allclose(out.logits, whole.logits[:, a:b], atol=atol)


def test_one_layer_equals_the_equations():
  """arXiv 2412.19437, (1) to (11), one head at a time in float64."""
  cfg = dataclasses.replace(CFG, rope_scaling=None)
  params = jax.tree.map(lambda x: x[0], weights(cfg)["layers"]["mla"])
  x = np.random.default_rng(1).normal(size=(1, T, cfg.embed_dim))
  angle = np.arange(T)[:, None] * cfg.rope_theta ** (-np.array([0, 2]) / 4)
  angles = np.float32(np.sin(angle))[None], np.float32(np.cos(angle))[None]
  weights_by_name = parameters.weights(params, cfg)
  inputs = angles, np.ones((1, T), int), None, 0
  out, _ = mla.latent_attention(
    np.float32(x), weights_by_name, cfg, cfg.layers[0], *inputs
  )

  def norm(x, name):
    root = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x / root * params[name]["scale"]

  def rotated(x):  # neighbours are the parts of a complex number
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)

  latent, key = np.split(x[0] @ params["kv_a"], [cfg.kv_lora_rank], -1)
  latent, key = norm(latent, "kv_a_norm"), rotated(key)
  queries = norm(x[0] @ params["q_a"], "q_a_norm")
  total = 0.0
  for n in range(cfg.num_heads):
    q, q_rotary = np.split(queries @ params["q_b"][:, n], [4], -1)
    k, v = np.split(latent @ params["kv_b"][:, n], [4], -1)
    scores = (q @ k.T + rotated(q_rotary) @ key.T) / np.sqrt(8)
    scores[np.triu_indices(T, 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    total += p / p.sum(-1, keepdims=True) @ v @ params["o"][n]
  np.testing.assert_allclose(out[0], total, atol=1e-5)
