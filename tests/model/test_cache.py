"""Tokens that come piece by piece through the cache against all at once."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.model import cache as kv

P, G, S, R = 3, 2, 6, 5
B = P * G
LENGTHS = np.array([6, 4, 1])  # of the prompts, padded on the left
DENSE = model.variant(
  "tiny",
  vocab_size=23,
  num_layers=2,
  embed_dim=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  mlp_dim=12,
  num_experts=0,
  experts_per_token=0,
  rope_theta=50.0,
  unroll=1,
  dtype="float32",
)
MOE = dataclasses.replace(DENSE, num_experts=5, experts_per_token=2)
LOW = dataclasses.replace(DENSE, dtype="bfloat16")
CONFIGS = {"dense": DENSE, "moe": MOE}
every_model = pytest.mark.parametrize("name", CONFIGS)
forward = jax.jit(model.forward, static_argnums=1)
unstack = jax.jit(model.unstack_layers, static_argnums=1)
fork = jax.jit(kv.share_prefix, static_argnums=(1, 2, 3))
grow = jax.jit(kv.grow, static_argnums=1)


@functools.cache
def weights(cfg):
  """Every array random, norm scales around one."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))

  def fill(path, leaf):
    mean = 1.0 if path[-1].key == "scale" else 0.0
    return rng.normal(mean, 0.3, leaf.shape).astype(np.float32)

  return jax.tree.map_with_path(fill, shapes)


def rows():
  """Tokens, positions, mask [B, S + R]: G different answers a prompt."""
  rng = np.random.default_rng(1)
  prompts = np.repeat(rng.integers(0, 23, (P, S)), G, axis=0)
  tokens = np.concatenate([prompts, rng.integers(0, 23, (B, R))], 1)
  first = np.repeat(S - LENGTHS, G)[:, None]
  slot = np.arange(S + R)
  positions = np.maximum(slot - first, 0)
  return tokens.astype(np.int32), positions.astype(np.int32), slot >= first


def piecewise(cfg, ends=(S + 1, S + 2, S + R)):
  """Prefill once a prompt, fork, extend to each end; grow before the last.

  Returns logits [B, S + R, V] and experts [L, B, S + R, k].
  """
  params = unstack(weights(cfg), cfg)
  part = lambda a, b, every=1: (x[::every, a:b] for x in rows())
  out = forward(params, cfg, *part(0, S, G), kv.empty(cfg, P, S))
  repeat = lambda x, axis: np.repeat(x, G, axis=axis)
  logits = [repeat(out.logits, 0)]
  experts = [repeat(out.experts, 1)] if cfg.num_experts else []
  cache = fork(out.cache, cfg, G, 2)
  for a, b in itertools.pairwise((S, *ends)):
    if b == S + R:
      cache = grow(cache, R + 1)
    out = forward(params, cfg, *part(a, b), cache)
    cache = out.cache
    logits.append(out.logits)
    experts.append(out.experts)
  assert cache.length == R
  together = np.concatenate(experts, 2) if cfg.num_experts else None
  return np.concatenate(logits, 1), together


@every_model
def test_prefill_and_decode_equal_the_full_forward(name):
  cfg = CONFIGS[name]
  *_, mask = inputs = rows()
  full = jax.device_get(forward(weights(cfg), cfg, *inputs))
  logits, experts = piecewise(cfg)
  assert np.isfinite(logits).all()
  np.testing.assert_allclose(logits[mask], full.logits[mask], atol=2e-5)
  if cfg.num_experts:
    np.testing.assert_array_equal(experts[:, mask], full.experts[:, mask])


def test_bf16_stays_close_to_float32_as_the_full_forward_does():
  *_, mask = inputs = rows()
  exact, full = (
    np.asarray(forward(weights(cfg), cfg, *inputs).logits)[mask]
    for cfg in (DENSE, LOW)
  )
  pieces = piecewise(LOW, ends=(S + R,))[0][mask]
  assert pieces.dtype == np.float32
  assert np.isfinite(pieces).all()
  noise = np.abs(full - exact).mean()
  assert 0 < noise < 0.05
  assert np.abs(pieces - exact).mean() < 2 * noise
  assert np.abs(pieces - full).mean() < 2 * noise


def test_scores_far_apart_make_one_softmax_of_both_stretches():
  """Scores differ by hundreds, now in favour of the prompt, now of the answer.

  Were each stretch not shifted by the larger of the two maxima, `exp` would
  overflow, or both sums would be zero.
  """
  rng = np.random.default_rng(3)
  K, N, H = DENSE.num_kv_heads, DENSE.num_heads, DENSE.head_dim
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  prompt_k, prompt_v = 20 * normal(P, K, S, H), normal(P, K, S, H)
  q, k, v = 20 * normal(B, 2, N, H), 20 * normal(B, 2, K, H), normal(B, 2, K, H)
  prefix = kv.Prefix((prompt_k,), (prompt_v,), np.ones((P, S), bool))
  cache = dataclasses.replace(kv.empty(DENSE, B, 2), prefix=prefix)
  cache = cache.mark(jnp.ones((B, 2)))
  out, _ = jax.jit(kv.Cache.attend, static_argnums=1)(cache, 0, q, k, v)
  out = np.asarray(out)
  for b, t, n in np.ndindex(B, 2, N):
    p, g = b // G, n // (N // K)
    keys = np.concatenate([prompt_k[p, g], k[b, : t + 1, g]])
    values = np.concatenate([prompt_v[p, g], v[b, : t + 1, g]])
    scores = np.float64(keys) @ q[b, t, n] / np.sqrt(H)
    odds = np.exp(scores - scores.max())
    expected = odds @ values / odds.sum()
    np.testing.assert_allclose(out[b, t, n], expected, atol=1e-3)


def test_one_cache_extends_in_two_parts_without_a_fork():
  tokens, positions, mask = (x[::G] for x in rows())
  params = unstack(weights(DENSE), DENSE)
  cache = kv.empty(DENSE, P, S + R)
  parts = []
  for part in (slice(0, S), slice(S, None)):
    inputs = tokens[:, part], positions[:, part], mask[:, part]
    out = forward(params, DENSE, *inputs, cache)
    cache = out.cache
    parts.append(out.logits)
  full = np.asarray(forward(weights(DENSE), DENSE, *rows()).logits)[::G]
  logits = np.concatenate(parts, 1)
  np.testing.assert_allclose(logits[mask], full[mask], atol=2e-5)


def test_a_fork_keeps_one_copy_of_each_prompt():
  cache = kv.share_prefix(kv.empty(LOW, P, S), LOW, G, 7)
  prompt = (P, LOW.num_kv_heads, S, LOW.head_dim)
  answer = (B, LOW.num_kv_heads, 7, LOW.head_dim)
  assert [x.shape for x in cache.prefix.k] == [prompt] * LOW.num_layers
  assert [x.shape for x in cache.k] == [answer] * LOW.num_layers
  assert all(x.dtype == jnp.bfloat16 for x in (*cache.k, *cache.v))
  assert cache.length == 0
  assert not cache.valid.any()


def test_parameters_as_init_makes_them_serve_with_a_cache():
  cfg = CONFIGS["dense"]
  params = weights(cfg)
  tokens = np.ones((1, 2), np.int32)
  call = lambda params: model.forward(
    params, cfg, tokens, np.arange(2)[None], tokens, kv.empty(cfg, 1, 2)
  )
  stacked, unstacked = call(params), call(model.unstack_layers(params, cfg))
  np.testing.assert_array_equal(stacked.logits, unstacked.logits)


def test_growing_keeps_what_was_written():
  rng = np.random.default_rng(0)
  full = lambda x: rng.normal(size=x.shape).astype(x.dtype)
  cache = jax.tree.map(full, kv.empty(DENSE, B, 4))
  cache = dataclasses.replace(cache, length=np.int32(4))
  grown = jax.device_get(grow(cache, 9))
  assert grown.length == 4
  for old, new in zip(cache.k + cache.v, grown.k + grown.v, strict=True):
    assert new.shape[2] == 9
    np.testing.assert_array_equal(new[:, :, :4], old)
  np.testing.assert_array_equal(grown.valid[:, :4], cache.valid)
  assert not grown.valid[:, 4:].any()
