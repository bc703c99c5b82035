"""Teacher-forced log-probs against the log-softmax of the whole logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import logprobs, model
from gspo_jax.runtime import sharding

V, B, S, R = 37, 2, 5, 13
T = S + R
DENSE = model.variant(
  "tiny",
  vocab_size=V,
  num_layers=1,
  embed_dim=8,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  mlp_dim=6,
  num_experts=0,
  experts_per_token=0,
  tie_embeddings=True,
  unroll=1,
  dtype="float32",
)
MOE = dataclasses.replace(
  DENSE, num_layers=2, num_experts=4, experts_per_token=2, tie_embeddings=False
)


@functools.cache
def weights(cfg):
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))
  fill = lambda x: rng.normal(0, 0.6, x.shape).astype(np.float32)
  return jax.tree.map(fill, shapes)


def text():
  """Tokens, positions, mask [B, T]: the second row padded at both ends."""
  tokens = np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32)
  mask = np.ones((B, T), bool)
  mask[1, :3], mask[1, -4:] = False, False
  positions = np.maximum(mask.cumsum(1) - 1, 0).astype(np.int32)
  return tokens, positions, mask


def score(cfg, piece=256, **options):
  """`token_logprobs`, traced anew for each size of a piece."""

  def scored(params):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(logprobs, "_PIECE", piece * B)
      return logprobs.token_logprobs(params, cfg, *text(), **options)

  return scored


@functools.cache
def gradient(piece):
  """Of both outputs, weighed: ((loss, result), gradient)."""
  rng = np.random.default_rng(2)
  a, b = rng.normal(size=(2, B, R)).astype(np.float32)

  def loss(params):
    out = score(DENSE, piece, response_length=R, temperature=0.7)(params)
    return (out.logps * a + out.entropy * b).sum(), out

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(
  ("cfg", "response_length", "temperature"),
  [(DENSE, R, 0.7), (MOE, R, 1.0), (DENSE, T - 1, 0), (MOE, 1, 1.3)],
)
def test_equals_the_log_softmax_of_the_forward(
  cfg, response_length, temperature
):
  tokens, _, _ = text()
  options = {"response_length": response_length, "temperature": temperature}
  out = jax.device_get(jax.jit(score(cfg, **options))(weights(cfg)))
  forward = jax.jit(model.forward, static_argnums=1)
  full = jax.device_get(forward(weights(cfg), cfg, *text()))

  logits = np.asarray(full.logits, np.float64) / (temperature or 1)
  logits -= logits.max(-1, keepdims=True)
  table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  entropy = -(np.exp(table) * table).sum(-1)
  scored = range(T - response_length, T)
  for column, t in enumerate(scored):
    expected = table[np.arange(B), t - 1, tokens[:, t]]
    np.testing.assert_allclose(out.logps[:, column], expected, atol=2e-5)
    np.testing.assert_allclose(
      out.entropy[:, column], entropy[:, t - 1], atol=2e-5
    )
  assert out.logps.shape == out.entropy.shape == (B, response_length)
  if cfg.num_experts:
    np.testing.assert_array_equal(out.experts, full.experts)
  assert np.std(out.entropy) > 0.005
  assert np.isfinite(out.logps).all()


@functools.cache
def scored(cfg, replay, seed):
  """`token_logprobs` and `encode` under routes made of a seed; None: free."""
  shape = (cfg.num_layers, B, T, max(cfg.num_experts, 1))
  rng = np.random.default_rng(seed)
  order = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
  routes = None if seed is None else order[..., : cfg.experts_per_token]
  sent = {"routes": routes, "replay": replay}
  both = lambda params: (
    score(cfg, response_length=R, **sent)(params),
    model.hidden_states(params, cfg, *text(), **sent),
  )
  return jax.device_get(jax.jit(both)(weights(cfg))), routes


@pytest.mark.parametrize(
  ("replay", "seed"), [(False, None), (False, 3), (True, 3)]
)
def test_the_routing_is_that_of_the_tokens_that_predict(replay, seed):
  (out, full), routes = scored(MOE, replay, seed)
  np.testing.assert_array_equal(out.experts, full.routing.experts)
  if replay:
    np.testing.assert_array_equal(out.experts, routes)
  for column, t in enumerate(range(S, T)):
    for found, whole in (
      (out.router_logps, full.routing.log_probs),
      (out.router_entropy, full.routing.entropy),
    ):
      close = functools.partial(np.testing.assert_allclose, atol=1e-5)
      close(found[:, :, column], whole[:, :, t - 1])
  assert out.router_logps.shape == (2, B, R, 2)
  assert out.router_entropy.shape == (2, B, R)
  assert (out.dropped == 0).all()


def test_replay_changes_the_log_probs_and_a_look_does_not():
  free, looked, replayed = (
    scored(MOE, replay, seed)[0][0].logps
    for replay, seed in ((False, None), (False, 3), (True, 3))
  )
  np.testing.assert_allclose(looked, free, atol=1e-6)
  assert np.abs(replayed - free).mean() > 0.01


def test_a_dense_model_has_no_routing():
  (out, _), _ = scored(DENSE, False, None)
  assert out[2:] == (None,) * 4


@pytest.mark.parametrize("piece", [4, 13])
def test_pieces_change_neither_value_nor_gradient(piece):
  whole = gradient(256)(weights(DENSE))
  cut = gradient(piece)(weights(DENSE))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, cut, whole)


def shapes_in(jaxpr):
  """The shapes of all values of a jaxpr and of the jaxprs inside it."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars)
    for inner in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
      if hasattr(inner, "eqns"):
        yield from shapes_in(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("backward", [False, True])
def test_the_logits_of_all_tokens_never_exist(backward):
  def largest(piece):
    """Most values in one array with a vocabulary axis, as tokens."""
    forward = score(DENSE, piece, response_length=R, temperature=0.7)
    f = gradient(piece) if backward else forward
    traced = jax.make_jaxpr(f)(weights(DENSE))
    return max(
      np.prod(shape) // V for shape in shapes_in(traced.jaxpr) if V in shape
    )

  assert largest(256) == B * R  # what the pieces are there to avoid
  assert largest(4) == B * 4


def test_bf16_logits_are_float32():
  low = dataclasses.replace(DENSE, dtype="bfloat16")
  out, exact = (
    jax.device_get(jax.jit(score(cfg, response_length=R))(weights(DENSE)))
    for cfg in (low, DENSE)
  )
  assert out.logps.dtype == out.entropy.dtype == jnp.float32
  assert (out.logps.astype(jnp.bfloat16) != out.logps).any()
  assert 0 < np.abs(out.logps - exact.logps).mean() < 0.1


@pytest.mark.parametrize("response_length", [-1, 0, T, T + 1])
def test_a_response_length_out_of_range(response_length):
  with pytest.raises(ValueError, match=f"{response_length=} must .*1..{T - 1}"):
    score(DENSE, response_length=response_length)(weights(DENSE))


@pytest.mark.parametrize(
  "sizes",
  [
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"data": 2, "expert": 4},
    {"data": 2, "fsdp": 4},
  ],
  ids=str,
)
def test_a_dense_tied_model_on_a_mesh(sizes):
  """Log-probs, entropies and every gradient, as on one device."""
  cfg = model.variant(
    "tiny",
    num_experts=0,
    experts_per_token=0,
    num_kv_heads=2,
    tie_embeddings=True,
    dtype="float32",
    remat=True,
  )
  rng = np.random.default_rng(0)
  mask = np.ones((8, 24), np.int32)
  mask[::2, :4] = 0
  tokens = rng.integers(0, 258, mask.shape).astype(np.int32)
  positions = np.maximum(mask.cumsum(1) - 1, 0)
  shapes = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes
  )
  target = rng.normal(size=(8, 12)).astype(np.float32)

  def loss(params):
    scored = logprobs.token_logprobs(
      params, cfg, tokens, positions, mask, response_length=12
    )
    both = scored.logps, scored.entropy
    return sum((x * target).sum() for x in both), both

  run = lambda p: jax.jit(jax.grad(loss, has_aux=True))(p)
  expected = jax.device_get(run(params))
  mesh = sharding.make_mesh(**sizes)
  with jax.set_mesh(mesh):
    laid = jax.device_put(params, sharding.state_shardings(shapes, mesh))
    found = jax.device_get(run(laid))
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 1))
