"""Latent attention: through keys and values, and in the space of latents."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from families import FAMILIES
from random_model import base_and_adapters, weights

from gspo_jax import model
from gspo_jax.model import cache, lora, paged_cache

CFG = dataclasses.replace(
  FAMILIES["deepseek-v3"],
  num_layers=1,
  first=(),
  pattern=(model.Layer(experts=False, mixer="mla"),),
  n_group=1,
  topk_group=1,
  num_experts=0,
  experts_per_token=0,
)
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
  unstacked = model.unstack_layers(params, cfg)  # else each pass does it
  atol = 3e-5 * np.abs(whole.logits).max()
  for kept, decoding in (
    (row, params),
    (dataclasses.replace(pages, table=table), unstacked),
  ):
    for a, b in itertools.pairwise((0, 5, 6, 7, T)):
      ones = np.ones((B, b - a))
      out = forward(decoding, cfg, ids[:, a:b], positions[:, a:b], ones, kept)
      kept = out.cache
      np.testing.assert_allclose(out.logits, whole.logits[:, a:b], atol=atol)
