"""Teacher-forced log-probs against the log-softmax of the whole logits."""

import dataclasses
import functools

import families
import jax
import numpy as np
import pytest
from random_model import random_routes, weights

from gspo_jax import logprobs, model
from gspo_jax.runtime import sharding
from gspo_jax.sampler import next_token
from gspo_jax.sampler.decode_params import decode_params

V, B, S, R = 37, 2, 5, 13
T = S + R
DENSE = dataclasses.replace(
  families.DENSE, vocab_size=V, num_layers=1, embed_dim=8, tie_embeddings=True
)
MOE = dataclasses.replace(families.MOE, vocab_size=V)


def inputs():
  """Tokens, positions, mask [B, T]; the second row is padded at both ends."""
  tokens = np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32)
  mask = np.ones((B, T), bool)
  mask[1, :3], mask[1, -4:] = False, False
  positions = np.maximum(mask.cumsum(1) - 1, 0).astype(np.int32)
  return tokens, positions, mask


def score(cfg, chunk=256, **options):
  """`token_logprobs` with `chunk` * B tokens in a chunk, as a new function."""

  def token_logprobs(params):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(logprobs, "_CHUNK", chunk * B)
      return logprobs.token_logprobs(params, cfg, *inputs(), **options)

  return token_logprobs


@functools.cache
def gradient(chunk):
  """((loss, result), gradient) of a weighted sum of both outputs."""
  rng = np.random.default_rng(2)
  a, b = rng.normal(size=(2, B, R)).astype(np.float32)

  def loss(params):
    out = score(DENSE, chunk, response_length=R, temperature=0.7)(params)
    return (out.logps * a + out.entropy * b).sum(), out

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def forward(cfg):
  run = jax.jit(model.forward, static_argnums=1)
  return jax.device_get(run(weights(cfg), cfg, *inputs()))


@pytest.mark.parametrize(
  ("cfg", "response_length", "temperature"),
  [(DENSE, R, 0.7), (MOE, 1, 1.3), (DENSE, T - 1, 0)],
)
def test_equals_the_log_softmax_of_the_forward(
  cfg, response_length, temperature
):
  tokens, _, _ = inputs()
  options = {"response_length": response_length, "temperature": temperature}
  out = jax.device_get(jax.jit(score(cfg, **options))(weights(cfg)))
  full = forward(cfg)

  logits = np.asarray(full.logits, np.float64) / (temperature or 1)
  logits -= logits.max(-1, keepdims=True)
  table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  entropy = -(np.exp(table) * table).sum(-1)
  for column, t in enumerate(range(T - response_length, T)):
    expected = table[np.arange(B), t - 1, tokens[:, t]]
    np.testing.assert_allclose(out.logps[:, column], expected, atol=2e-5)
    np.testing.assert_allclose(
      out.entropy[:, column], entropy[:, t - 1], atol=2e-5
    )
  assert out.logps.shape == out.entropy.shape == (B, response_length)
  if cfg.num_experts:
    np.testing.assert_array_equal(out.experts, full.experts)
  else:
    assert set(out[2:]) == {None}
  assert np.std(out.entropy) > 0.005
  assert np.isfinite(out.logps).all()


@functools.cache
def with_routes(cfg, replay, seed):
  """`token_logprobs`, `hidden_states` and their random routes, if a seed."""
  routes = None
  if seed is not None:
    routes = random_routes(5, 2, cfg.num_layers, B, T, seed=seed)
  options = {"routes": routes, "replay": replay}
  both = lambda params: (
    score(cfg, response_length=R, **options)(params),
    model.hidden_states(params, cfg, *inputs(), **options),
  )
  return jax.device_get(jax.jit(both)(weights(cfg))), routes


@pytest.mark.parametrize(
  ("replay", "seed"), [(False, None), (False, 3), (True, 3)]
)
def test_the_routing_is_that_of_the_predicting_positions(replay, seed):
  (out, full), routes = with_routes(MOE, replay, seed)
  np.testing.assert_array_equal(out.experts, full.routing.experts)
  if replay:
    np.testing.assert_array_equal(out.experts, routes)
  for actual, expected in (
    (out.router_logps, full.routing.logps),
    (out.router_entropy, full.routing.entropy),
  ):
    np.testing.assert_allclose(actual, expected[:, :, S - 1 : -1], atol=1e-5)
  assert out.router_logps.shape == (2, B, R, 2)
  assert out.router_entropy.shape == (2, B, R)
  assert (out.dropped == 0).all()


def test_use_own_experts_replaces_the_routes():
  """With it a replay equals the free pass; without, that of the routes."""
  free, replayed = (
    with_routes(MOE, replay, seed)[0][0]
    for replay, seed in ((False, None), (True, 3))
  )
  routes = with_routes(MOE, True, 3)[1]

  def run(params, use_own_experts):
    options = {"routes": routes, "replay": True}
    options["use_own_experts"] = use_own_experts
    return score(MOE, response_length=R, **options)(params)

  run = jax.jit(run)
  for use_own_experts, expected in ((True, free), (False, replayed)):
    out = run(weights(MOE), use_own_experts)
    np.testing.assert_array_equal(out.experts, expected.experts)
    np.testing.assert_allclose(out.logps, expected.logps, atol=1e-5)
    np.testing.assert_allclose(
      out.router_logps, expected.router_logps, atol=1e-5
    )


CLOSE = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def test_chunks_change_neither_value_nor_gradient():
  """13 tokens a row in chunks of 4, the last one padded."""
  whole, in_chunks = (gradient(n)(weights(DENSE)) for n in (256, 4))
  jax.tree.map(CLOSE, in_chunks, whole)


def wanted_tokens():
  """[B, R] bool: 8 of the 26 tokens, in both rows."""
  wanted = np.zeros((B, R), bool)
  wanted[0, 2:8], wanted[1, [0, 5]] = True, True
  return wanted


@pytest.mark.parametrize("chunk", [256, 2])
def test_wanted_tokens_get_what_all_tokens_get_and_the_others_0(chunk):
  """Values and gradients, in one chunk and in chunks of 4 tokens."""
  wanted = wanted_tokens()
  a, b = np.random.default_rng(2).normal(size=(2, B, R)).astype(np.float32)

  def loss(params, options, keep):
    run = score(DENSE, chunk, response_length=R, temperature=0.7, **options)
    out = run(params)
    return ((out.logps * a + out.entropy * b) * keep).sum(), out[:2]

  run = lambda *args: jax.jit(
    jax.grad(lambda params: loss(params, *args), has_aux=True)
  )(weights(DENSE))
  grads, outs = run({"wanted": wanted}, 1)
  all_grads, all_outs = run({}, wanted)
  jax.tree.map(CLOSE, grads, all_grads)
  for out, all_out in zip(outs, all_outs, strict=True):
    CLOSE(out[wanted], all_out[wanted])
    assert (out[~wanted] == 0).all()


def test_a_chunk_without_wanted_tokens_computes_no_logits(monkeypatch):
  """8 wanted tokens of 26 are 2 chunks of 4, forward and backward."""
  chunks, project = [], model.project_logits

  def counted(*args):
    jax.debug.callback(lambda: chunks.append(1))
    return project(*args)

  monkeypatch.setattr(model, "project_logits", counted)

  def loss(params, wanted):
    run = score(DENSE, 2, response_length=R, wanted=wanted)
    return run(params).logps.sum()

  run = jax.jit(loss)
  for wanted, expected in (
    (wanted_tokens(), 2), (np.zeros((B, R), bool), 0),
    (np.ones((B, R), bool), 7),
  ):  # fmt: skip
    chunks.clear()
    jax.block_until_ready(run(weights(DENSE), wanted))
    jax.effects_barrier()
    assert len(chunks) == expected


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
  def largest(chunk):
    """The size of the largest array with a vocabulary axis, in tokens."""
    forward = score(DENSE, chunk, response_length=R, temperature=0.7)
    f = gradient(chunk) if backward else forward
    traced = jax.make_jaxpr(f)(weights(DENSE))
    return max(
      np.prod(shape) // V for shape in shapes_in(traced.jaxpr) if V in shape
    )

  assert largest(256) == B * R  # in one chunk
  assert largest(4) == B * 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_float32_head_has_operands_of_float32_in_trainer_and_sampler(tied):
  plain = dataclasses.replace(DENSE, dtype="bfloat16", tie_embeddings=tied)
  exact = dataclasses.replace(plain, float32_head=True)
  params = weights(plain)
  tokens, positions, mask = inputs()
  run = jax.jit(model.hidden_states, static_argnums=1)
  hidden = run(params, plain, tokens, positions, mask).hidden
  head = np.float64(model.output_matrix(params, plain))
  logits = np.float64(hidden)[:, -R - 1 : -1] @ head
  expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  for cfg in plain, exact:
    logps = jax.jit(score(cfg, response_length=R))(params).logps
    sample = lambda params, rows, cfg=cfg: next_token.logits(
      decode_params(params, cfg), cfg, rows
    )
    rows = hidden[:, -R - 1 : -1].reshape(B * R, -1)
    trained = (
      logps - np.take_along_axis(expected, tokens[:, -R:, None], 2)[..., 0]
    )
    sampled = jax.jit(sample)(params, rows) - logits.reshape(B * R, -1)
    for gap in trained[mask[:, -R:]], sampled:
      assert np.abs(gap).max() < 1e-5 if cfg == exact else gap.max() > 1e-4


def kept_ids(rng, targets, vocab, K):
  """[B, K, R]: a token's own id, others, and some of them twice."""
  ids = rng.integers(0, vocab, (len(targets), K, targets.shape[1]))
  ids[:, rng.integers(K)] = targets
  ids[0, -1] = ids[0, 0] if K > 1 else ids[0, -1]
  return ids.astype(np.int32)


@pytest.mark.parametrize("chunk", [1024, 4])
def test_kept_ids_give_the_softmax_over_them_and_its_gradient(
  chunk, monkeypatch
):
  """Against a float64 oracle; 9 tokens, and in chunks of 4."""
  monkeypatch.setattr(logprobs, "_CHUNK", chunk)
  rng, D, temperature = np.random.default_rng(5), 6, 0.7
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  hidden, head, a, b = normal(3, 3, D), normal(D, V), normal(3, 3), normal(3, 3)
  targets = rng.integers(0, V, (3, 3)).astype(np.int32)
  ids = kept_ids(rng, targets, V, 5)
  likeliest, c = ids[:, 1:3], normal(3, 3, 2)  # of a head
  wanted = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]], bool)

  def loss(hidden, head):
    out = logprobs.logps_and_entropy(
      hidden, head, targets, DENSE, temperature, wanted, ids, likeliest
    )
    return sum((x * y).sum() for x, y in zip(out, (a, b, c), strict=True)), out

  run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  (_, (*found, of_head)), grads = run(hidden, head)

  x, w = np.float64(hidden), np.float64(head)
  expected = np.zeros((2, 3, 3))
  dx, dw = np.zeros_like(x), np.zeros_like(w)
  for i, t in zip(*np.nonzero(wanted), strict=True):
    kept = np.unique(ids[i, :, t])
    logits = x[i, t] @ w[:, kept] / temperature
    logp = logits - np.log(np.exp(logits).sum())
    p, own = np.exp(logp), kept == targets[i, t]
    entropy = -(p * logp).sum()
    expected[:, i, t] = logp[own][0], entropy
    g = a[i, t] * (own - p) - b[i, t] * p * (logp + entropy)
    for j in range(2):
      place = kept == likeliest[i, j, t]
      np.testing.assert_allclose(of_head[i, t, j], logp[place][0], atol=1e-5)
      g = g + c[i, t, j] * (place - p)
    dx[i, t] = w[:, kept] @ g / temperature
    dw[:, kept] += np.outer(x[i, t], g) / temperature
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert (np.asarray(of_head)[~wanted] == 0).all()
  for actual, oracle in zip(grads, (dx, dw), strict=True):
    np.testing.assert_allclose(actual, oracle, atol=2e-5)


def test_a_head_of_an_exact_model_is_refused():
  exact = dataclasses.replace(MOE, exact=True)
  options = {"cfg": exact, "temperature": 1.0, "head_ids_CH": [[0]]}
  with pytest.raises(ValueError, match="head_ids: expected None for a model"):
    model.target_logps(np.zeros((1, V)), [0], None, np.arange(V), **options)


@pytest.mark.parametrize("response_length", [-1, 0, T, T + 1])
def test_a_response_length_out_of_range_is_refused(response_length):
  with pytest.raises(ValueError, match=f"{response_length=} must .*1..{T - 1}"):
    score(DENSE, response_length=response_length)(weights(DENSE))


@pytest.mark.parametrize(
  ("some", "axis"), [(False, "expert"), (True, "expert"), (False, "context")]
)
def test_a_tied_model_on_a_mesh_equals_one_device(some, axis, monkeypatch):
  """Log-probs, entropies, gradients; of two sequences a row, with kept ids."""
  # Tokens of devices that share the vocabulary, of which some are wanted.
  monkeypatch.setattr(logprobs, "_CHUNK", 4 if some else 1024)
  cfg = dataclasses.replace(
    DENSE,
    vocab_size=74,
    embed_dim=16,
    head_dim=4,
    mlp_dim=8,
    remat="attention,stream",
  )
  rng = np.random.default_rng(0)
  mask = np.ones((8, 12), np.int32)
  mask[::2, :4] = 0
  mask[1::2, 5:] = 2
  tokens = rng.integers(0, 74, mask.shape).astype(np.int32)
  positions = np.arange(12) - np.where(mask == 2, 5, 0)
  params = weights(cfg)
  cotangent = rng.normal(size=(8, 6)).astype(np.float32)
  wanted = rng.random(cotangent.shape) < 0.3 if some else None
  kept = None
  if some or axis == "context":
    kept = kept_ids(rng, tokens[:, -6:], 74, 5)

  def loss(params):
    out = logprobs.token_logprobs(
      params,
      cfg,
      tokens,
      positions,
      mask,
      response_length=6,
      wanted=wanted,
      kept_ids=kept,
      head_ids=None if kept is None else kept[:, :2],
    )
    all_ = out.logps, out.entropy
    if kept is not None:
      all_ += out.head_logps[:, 0], out.head_logps[:, 1]
    return sum((x * cotangent).sum() for x in all_), all_

  run = lambda params: jax.jit(jax.grad(loss, has_aux=True))(params)
  expected = jax.device_get(run(params))
  mesh = sharding.make_mesh(**{"fsdp": 2, "tensor": 2, axis: 2})
  with jax.set_mesh(mesh):
    sharded = jax.device_put(params, model.shardings(params, mesh))
    actual = jax.device_get(run(sharded))
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 1))
