"""Operators of `model.exact` against ordinary ones, and in other shapes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.model import attention, exact, moe, rounding
from gspo_jax.model.variants import variant
from gspo_jax.runtime import sharding

KEYS = jax.random.split(jax.random.key(0), 9)
jit = functools.partial(jax.jit, compiler_options=rounding.OPTIONS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_depend_on_how_many_there_are(dtype):
  """A softmax, alone and within a longer batch at another place."""
  x = jax.random.normal(KEYS[0], (1, 200, 48), dtype)
  weights = jax.random.normal(KEYS[1], (48, 40), dtype)

  def function(x, weights):
    y = jnp.tanh(x @ weights)
    return rounding.rounded(jax.nn.softmax(rounding.wide(y)), x.dtype)

  run = jit(exact.by_tokens(function, whole=1))
  whole = run(x, weights)
  np.testing.assert_allclose(whole, function(x, weights), rtol=2e-2)
  for start, end in ((0, 1), (3, 10), (100, 165)):
    part = run(x[:, start:end], weights)
    np.testing.assert_array_equal(part, whole[:, start:end])


def test_the_gradient_is_the_functions_own():
  x, weights = jax.random.normal(KEYS[0], (3, 30, 8)), jnp.arange(8.0)
  function = lambda x, weights: jnp.sin(x * weights)
  loss = lambda f: lambda *args: jnp.cos(f(*args)).sum()
  gradients = (
    jax.grad(loss(f), argnums=(0, 1))(x, weights)
    for f in (exact.by_tokens(function, whole=1), function)
  )
  jax.tree.map(np.testing.assert_array_equal, *gradients)


SEGMENTS = np.array([[1] * 90 + [0] * 2 + [2] * 71 + [0] * 9, [1] * 172])


def operands(heads, key_heads):
  shape = lambda heads: (2, SEGMENTS.shape[1], heads, 16)
  shapes = map(shape, (heads, key_heads, key_heads))
  return [jax.random.normal(KEYS[i], x) for i, x in enumerate(shapes)]


@pytest.mark.parametrize(
  ("heads", "window", "sinks"),
  [((4, 2), None, False), ((6, 1), 30, True), ((3, 3), 70, False)],
)
def test_attention_is_ordinary_attention_up_to_rounding(heads, window, sinks):
  qkv = operands(*heads)
  sinks_N = jax.random.normal(KEYS[5], heads[:1]) if sinks else None
  real = (SEGMENTS > 0)[..., None, None]

  def loss(exactly, *qkv):
    with exact.exactly(exactly):
      out = attention.attend(*qkv, SEGMENTS, window=window, sinks_N=sinks_N)
    return jnp.sin(jnp.where(real, out, 0)).sum(), jnp.where(real, out, 0)

  grad = jax.grad(loss, argnums=(1, 2, 3), has_aux=True)
  found, expected = (jax.jit(grad, static_argnums=0)(x, *qkv) for x in (1, 0))
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5)


def test_a_sequence_that_starts_within_a_group_of_queries_is_no_number():
  segments = np.where(np.arange(24) < 13, 1, 2)[None]
  qkv = [x[:1, :24] for x in operands(2, 2)]
  with exact.exactly(True):
    out = attention.attend(*qkv, segments)
  assert np.isfinite(out[:, :13]).all()
  assert np.isnan(out[:, 13:]).all()


def test_log_probs_of_kept_ids_do_not_depend_on_the_batch():
  cfg = variant("tiny", exact=True)
  logits = 3 * jax.random.normal(KEYS[0], (70, 100))
  targets, kept = jnp.arange(70), jnp.arange(70)[:, None] + jnp.arange(9)

  @jit
  def run(logits, targets, kept):
    columns = jnp.arange(100)
    return model.target_logps(
      logits, targets, kept, columns, cfg=cfg, temperature=0.7
    )

  logps, entropy = run(logits, targets, kept)
  for i in (0, 69):
    kept_logps = jax.nn.log_softmax(logits[i, kept[i]] / 0.7)
    np.testing.assert_allclose(logps[i], kept_logps[0], rtol=1e-5)
    part = slice(i, i + 1)
    one = run(logits[part], targets[part], kept[part])
    np.testing.assert_array_equal(one, [logps[part], entropy[part]])


@pytest.mark.parametrize(
  "load", [pytest.param("even", marks=pytest.mark.slow), "all to one"]
)
def test_experts_are_exact_wherever_they_are(load):
  """On meshes that split tokens and experts unlike; one expert needs passes."""
  cfg = variant("tiny", dtype="float32", exact=True, num_experts=8)
  D, F = cfg.embed_dim, cfg.mlp_dim
  weights = {
    "router": jax.random.normal(KEYS[0], (D, 8)),
    "gate_up": jax.random.normal(KEYS[1], (8, D, 2 * F)) / 8,
    "down": jax.random.normal(KEYS[2], (8, F, D)) / 8,
  }
  x = jax.random.normal(KEYS[3], (8, 20, D))
  if load == "all to one":
    x, weights["router"] = (
      x.at[..., 0].set(9),
      weights["router"].at[0, 3].set(9),
    )
  real = jnp.arange(20) < jnp.arange(13, 21)[:, None]

  def loss(weights, x, cfg):
    with exact.exactly(cfg.exact):
      y, routing = moe.sparse_mlp(x, weights, cfg, real)
    return jnp.sin(y).sum(), (y, routing.dropped)

  run = jit(jax.grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)

  def on(cfg, **axes):
    devices = jax.devices()[: math.prod(axes.values())]
    with jax.set_mesh(sharding.make_mesh(devices, **axes)):
      return jax.device_get(run(weights, x, cfg))

  gradients, (y, dropped) = on(cfg, data=1)
  assert dropped == 0
  ordinary = on(dataclasses.replace(cfg, exact=False), data=1)
  for found, expected in zip(
    jax.tree.leaves((gradients, y)), jax.tree.leaves(ordinary)[:-1], strict=True
  ):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  for axes in ({"expert": 4, "data": 2}, {"expert": 2, "tensor": 2, "fsdp": 2}):
    slopes, (elsewhere, dropped) = on(cfg, **axes)
    assert dropped == 0
    np.testing.assert_array_equal(elsewhere, y)
    for pair in zip(*map(jax.tree.leaves, (slopes, gradients)), strict=True):
      np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4)
