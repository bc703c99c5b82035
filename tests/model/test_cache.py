"""The cache: tokens in several passes against all tokens in one."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import DENSE, MOE, SHORT, family
from paged_oracle import attention
from random_model import weights

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.model.rounding import stored

P, G, S, R = 3, 2, 6, 5
B = P * G
PROMPT_LENGTHS = np.array([6, 4, 1])  # padded on the left
LOW = dataclasses.replace(DENSE, dtype="bfloat16")
forward = jax.jit(model.forward, static_argnums=1)
unstack = jax.jit(model.unstack_layers, static_argnums=1)
share_prefix = jax.jit(kv.share_prefix, static_argnums=(1, 2, 3))
grow = jax.jit(kv.grow, static_argnums=1)


def rows():
  """Tokens, positions, mask [B, S + R]; the G responses of a prompt differ."""
  rng = np.random.default_rng(1)
  prompts = np.repeat(rng.integers(0, 23, (P, S)), G, axis=0)
  tokens = np.concatenate([prompts, rng.integers(0, 23, (B, R))], 1)
  first = np.repeat(S - PROMPT_LENGTHS, G)[:, None]
  slot = np.arange(S + R)
  positions = np.maximum(slot - first, 0)
  return tokens.astype(np.int32), positions.astype(np.int32), slot >= first


def in_passes(cfg, ends=(S + 1, S + 2, S + R)):
  """Prefills each prompt once, then decodes up to each of `ends`.

  The cache grows before the last pass. Returns logits [B, S + R, V] and
  experts [L, B, S + R, k].
  """
  params = unstack(weights(cfg), cfg)
  part = lambda a, b, step=1: (x[::step, a:b] for x in rows())
  out = forward(params, cfg, *part(0, S, G), kv.empty(cfg, P, S))
  repeat = lambda x, axis: np.repeat(x, G, axis=axis)
  logits = [repeat(out.logits, 0)]
  experts = [repeat(out.experts, 1)] if cfg.num_experts else []
  cache = share_prefix(out.cache, cfg, G, 2)
  for a, b in itertools.pairwise((S, *ends)):
    if b == S + R:
      cache = grow(cache, R + 1)
    out = forward(params, cfg, *part(a, b), cache)
    cache = out.cache
    logits.append(out.logits)
    experts.append(out.experts)
  assert cache.length == R
  experts = np.concatenate(experts, 2) if cfg.num_experts else None
  return np.concatenate(logits, 1), experts


@pytest.mark.parametrize(
  "cfg",
  [pytest.param(MOE, id="moe"),
   *(family(name, cfg) for name, cfg in SHORT.items())],
)  # fmt: skip
def test_prefill_and_decode_equal_the_full_forward(cfg):
  *_, mask = inputs = rows()
  full = jax.device_get(forward(weights(cfg), cfg, *inputs))
  logits, experts = in_passes(cfg)
  assert np.isfinite(logits).all()
  np.testing.assert_allclose(logits[mask], full.logits[mask], atol=2e-5)
  np.testing.assert_array_equal(experts[:, mask], full.experts[:, mask])


def test_softmax_over_prefix_and_response_with_scores_far_apart():
  """Without a shift by the larger maximum `exp` would overflow, or be zero."""
  rng = np.random.default_rng(3)
  K, N, H = DENSE.num_kv_heads, DENSE.num_heads, DENSE.head_dim
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  prompt_k, prompt_v = 20 * normal(P, K, S, H), normal(P, K, S, H)
  q, k, v = 20 * normal(B, 2, N, H), 20 * normal(B, 2, K, H), normal(B, 2, K, H)
  prefix = kv.Prefix(((prompt_k, prompt_v),), np.ones((P, S), bool))
  cache = dataclasses.replace(kv.empty(DENSE, B, 2), prefix=prefix)
  cache = cache.mark_valid(jnp.ones((B, 2)))
  out, _ = jax.jit(kv.Cache.attend, static_argnums=1)(cache, 0, q, k, v)
  out = np.asarray(out)
  for b, t in np.ndindex(B, 2):
    pairs = (prompt_k, k), (prompt_v, v)
    keys, values = (
      np.concatenate([x[b // G].swapaxes(0, 1), y[b, : t + 1]])
      for x, y in pairs
    )
    expected = attention(q[b, t], keys, values)
    np.testing.assert_allclose(out[b, t], expected, atol=1e-3)


ONE = dataclasses.replace(DENSE, num_layers=1)


def random_heads(mask):
  """q, k, v [B, T, heads, H], and sinks [N]; at padding they are large."""
  rng = np.random.default_rng(5)
  K, N, H = DENSE.num_kv_heads, DENSE.num_heads, DENSE.head_dim

  def normal(heads):
    x = rng.normal(size=(*mask.shape, heads, H)).astype(np.float32)
    return np.where(mask[..., None, None], x, 100 * x)

  return [normal(N), normal(K), normal(K)], 2 * np.float32(rng.normal(size=N))


@functools.partial(jax.jit, static_argnames="window")
def attend(cache, q, k, v, sinks_N, window):
  return cache.attend(0, q, k, v, sinks_N=sinks_N, window=window)


def attend_in_passes(cache, qkv, mask, ends, **options):
  """The output [B, T, N, H] of tokens fed up to each of `ends`."""
  outs = []
  for a, b in itertools.pairwise((0, *ends)):
    cache = cache.mark_valid(mask[:, a:b])
    out, pair = attend(cache, *(x[:, a:b] for x in qkv), **options)
    outs.append(out)
    cache = cache.append((pair,), mask[:, a:b])
  return np.concatenate(outs, 1)


def assert_equals_plain_attention(out, qkv, mask, **options):
  """For the last tokens, of which `out` is the output."""
  assert np.isfinite(out).all()
  q, k, v = qkv
  first = q.shape[1] - out.shape[1]
  for b, t in np.argwhere(mask[:, first:]):
    tokens = np.flatnonzero(mask[b, : first + t + 1])
    expected = attention(q[b, first + t], k[b, tokens], v[b, tokens], **options)
    np.testing.assert_allclose(out[b, t], expected, atol=5e-6)


WINDOWS = pytest.mark.parametrize("window", [None, 1, 3, R + 2, S + R])
PADDING = pytest.mark.parametrize("padding", ["left", "right"])


def prompt_mask(padding):
  slot, lengths = np.arange(S), PROMPT_LENGTHS[:, None]
  return slot < lengths if padding == "right" else slot >= S - lengths


@WINDOWS
@PADDING
def test_a_window_leaves_out_the_padding_of_a_shared_prompt(padding, window):
  """The tokens of a response come in passes of 1, 1 and 3."""
  prompts = prompt_mask(padding)
  mask = np.concatenate([np.repeat(prompts, G, 0), np.ones((B, R), bool)], 1)
  qkv, sinks_N = random_heads(mask)
  for x in qkv:
    x[:, :S] = np.repeat(x[::G, :S], G, axis=0)
  of_prompts = tuple(x[::G, :S].swapaxes(1, 2) for x in qkv[1:])
  cache = kv.from_prefill([of_prompts], ONE, prompts)
  cache = kv.share_prefix(cache, ONE, G, R)
  options = {"window": window, "sinks_N": sinks_N}
  responses = [x[:, S:] for x in qkv]
  out = attend_in_passes(cache, responses, mask[:, S:], (1, 2, R), **options)
  assert_equals_plain_attention(out, qkv, mask, **options)


@WINDOWS
@PADDING
def test_a_window_over_a_prompt_in_chunks(padding, window):
  mask = prompt_mask(padding)
  qkv, sinks_N = random_heads(mask)
  options = {"window": window, "sinks_N": sinks_N}
  cache = kv.empty(ONE, P, S)
  out = attend_in_passes(cache, qkv, mask, (2, 4, S), **options)
  assert_equals_plain_attention(out, qkv, mask, **options)


def test_share_prefix_keeps_one_copy_of_each_prompt():
  cache = kv.share_prefix(kv.empty(LOW, P, S), LOW, G, 7)
  prompt = (P, LOW.num_kv_heads, S, LOW.head_dim)
  response = (B, LOW.num_kv_heads, 7, LOW.head_dim)
  shapes = jax.tree.map(jnp.shape, (cache.prefix.kv, cache.kv))
  assert shapes == tuple(
    ((shape,) * 2,) * LOW.num_layers for shape in (prompt, response)
  )
  leaves = jax.tree.leaves(cache.kv)
  assert all(x.dtype == stored("bfloat16") for x in leaves)
  assert cache.length == 0
  assert not cache.valid.any()
