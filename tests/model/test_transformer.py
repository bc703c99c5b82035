"""The decoder against one in NumPy, in float64.

The NumPy decoder has no padding, packing, scans or batches: it gets the real
tokens of one row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import weights

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.runtime import sharding

B, T = 3, 9
STARTS = np.array([0, 2, 5])  # left padding of each row
# A large epsilon and a small theta, so that a misplaced one has an effect.
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
  tie_embeddings=True,
  rope_theta=50.0,
  norm_eps=0.05,
  unroll=1,
  dtype="float32",
)
MOE = dataclasses.replace(
  DENSE, num_experts=5, experts_per_token=2, tie_embeddings=False
)
RAW = dataclasses.replace(MOE, norm_topk_prob=False, unroll=2)
# test_hf.py has biases, norms over heads and stretched rotary embeddings.
CONFIGS = {"dense, tied": DENSE, "moe": MOE, "moe, raw weights": RAW}
every_model = pytest.mark.parametrize("name", CONFIGS)
jitted = jax.jit(model.forward, static_argnums=1)


def batch(seed=0):
  """Tokens, positions and mask of rows padded on the left."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, DENSE.vocab_size, (B, T))
  mask = np.arange(T) >= STARTS[:, None]
  positions = np.maximum(np.arange(T) - STARTS[:, None], 0)
  return tokens.astype(np.int32), positions.astype(np.int32), mask


def forward(cfg, tokens, positions, mask):
  """Output in NumPy; compiled once for bool and int masks."""
  mask = np.asarray(mask, np.int32)
  out = jitted(weights(cfg), cfg, tokens, positions, mask)
  return jax.device_get(out)


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def silu(x):
  return x / (1 + np.exp(-x))


def norm(x, scale, eps):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale["scale"]


def turn(x_TH, cfg):
  """Feature i and i + H/2 are the two parts of a number that is rotated."""
  half = x_TH.shape[1] // 2
  frequencies = cfg.rope_theta ** (-np.arange(half) / half)
  turns = np.outer(np.arange(len(x_TH)), frequencies)
  z = (x_TH[:, :half] + 1j * x_TH[:, half:]) * np.exp(1j * turns)
  return np.concatenate([z.real, z.imag], 1)


def attention(p, cfg, x_TD):
  out = np.zeros_like(x_TD)
  for h in range(cfg.num_heads):
    g = h // (cfg.num_heads // cfg.num_kv_heads)
    q, k, v = x_TD @ p["q"][:, h], x_TD @ p["k"][:, g], x_TD @ p["v"][:, g]
    q = norm(q, p["q_norm"], cfg.norm_eps)
    k = norm(k, p["k_norm"], cfg.norm_eps)
    scores = turn(q, cfg) @ turn(k, cfg).T / np.sqrt(cfg.head_dim)
    scores[np.triu_indices(len(x_TD), 1)] = -np.inf
    out += softmax(scores) @ v @ p["o"][h]
  return out


def experts_of_token(p, cfg, x_D, routes_k=None):
  probs = softmax(x_D @ p["router"])
  experts = np.argsort(-probs)[: cfg.experts_per_token]
  if routes_k is not None:
    experts = routes_k
  total = probs[experts].sum() if cfg.norm_topk_prob else 1.0
  out = 0.0
  for e in experts:
    gate, up = np.split(x_D @ p["gate_up"][e], 2)
    out += probs[e] / total * (silu(gate) * up) @ p["down"][e]
  return out, experts


def feed_forward(p, cfg, x_TD, routes_Tk=None):
  if cfg.num_experts:
    routes_Tk = [None] * len(x_TD) if routes_Tk is None else routes_Tk
    each = functools.partial(experts_of_token, p["moe"], cfg)
    out, experts = zip(*map(each, x_TD, routes_Tk), strict=True)
    return np.stack(out), np.stack(experts)
  p = p["mlp"]
  return (silu(x_TD @ p["gate"]) * (x_TD @ p["up"])) @ p["down"], None


def reference(params, cfg, tokens_T, routes_LTk=None):
  """Logits [T, V] and experts [L, T, k] (or Nones) of one sequence."""
  routes_LTk = routes_LTk if routes_LTk is not None else [None] * 9
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x_TD, experts = params["embed"][tokens_T], []
  for i in range(cfg.num_layers):
    p = jax.tree.map(lambda x, i=i: x[i], params["layers"])
    h = norm(x_TD, p["attention_norm"], cfg.norm_eps)
    x_TD = x_TD + attention(p["attention"], cfg, h)
    h = norm(x_TD, p["mlp_norm"], cfg.norm_eps)
    out, layer_experts = feed_forward(p, cfg, h, routes_LTk[i])
    x_TD = x_TD + out
    experts.append(layer_experts)
  x_TD = norm(x_TD, params["final_norm"], cfg.norm_eps)
  head = params["embed"].T if cfg.tie_embeddings else params["head"]
  return x_TD @ head, experts


@every_model
def test_logits_equal_the_reference(name):
  cfg = CONFIGS[name]
  tokens, positions, mask = batch()
  out = forward(cfg, tokens, positions, mask)
  assert out.logits.dtype == jnp.float32
  assert out.logits.shape == (B, T, cfg.vocab_size)
  assert np.isfinite(out.logits).all()  # padding included
  for b, start in enumerate(STARTS):
    logits, experts = reference(weights(cfg), cfg, tokens[b, start:])
    np.testing.assert_allclose(out.logits[b, start:], logits, atol=2e-5)
    if cfg.num_experts:
      np.testing.assert_array_equal(out.experts[:, b, start:], experts)
    else:
      assert out.experts is None


@every_model
def test_padding_tokens_have_no_effect(name):
  cfg = CONFIGS[name]
  tokens, positions, mask = batch()
  other = np.where(mask, tokens, (tokens + 7) % cfg.vocab_size)
  moved = np.where(mask, positions, 77)
  a = forward(cfg, tokens, positions, mask).logits
  b = forward(cfg, other, moved, mask).logits
  np.testing.assert_allclose(a[mask], b[mask], atol=1e-6)
  assert np.abs(a[~mask] - b[~mask]).max() > 0.1


@every_model
def test_packed_sequences_equal_separate_rows(name):
  cfg = CONFIGS[name]
  tokens, _, _ = batch()
  # Ids name the sequences in any order; 0 is padding, also in the middle.
  mask = np.array([[5, 5, 5, 2, 2, 2, 2, 0, 0]] * B, np.int32)
  mask[1] = [3, 3, 0, 1, 1, 1, 1, 1, 1]
  positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 0]] * B, np.int32)
  positions[1] = [0, 1, 0, 0, 1, 2, 3, 4, 5]
  packed = forward(cfg, tokens, positions, mask).logits
  for b, segment in ((0, 5), (0, 2), (1, 3), (1, 1)):
    here = mask[b] == segment
    alone, _ = reference(weights(cfg), cfg, tokens[b, here])
    np.testing.assert_allclose(packed[b, here], alone, atol=2e-5)


# Routing Replay.


def random_routes(cfg, rows=B, seed=7):
  """Routes [L, rows, T, k] that no router chose."""
  rng = np.random.default_rng(seed)
  shape = (cfg.num_layers, rows, T, cfg.num_experts)
  order = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
  return order[..., : cfg.experts_per_token].astype(np.uint8)


def replayed(cfg, params, routes, replay=True):
  """`HiddenStates` and logits."""
  out = model.hidden_states(params, cfg, *batch(), routes=routes, replay=replay)
  return out, model.unembed(params, cfg, out.hidden)


jit_replayed = jax.jit(replayed, static_argnums=(0, 3))
UNROLLED = dataclasses.replace(RAW, remat="attention,stream")


@pytest.mark.parametrize("cfg", [MOE, UNROLLED], ids=["scan", "unroll, remat"])
def test_replay_equals_the_reference_with_the_same_routes(cfg):
  routes, (tokens, _, _) = random_routes(cfg), batch()
  out, logits = jit_replayed(cfg, weights(cfg), routes)
  np.testing.assert_array_equal(out.routing.experts, routes)
  for b, start in enumerate(STARTS):
    row_routes = routes[:, b, start:]
    expected, _ = reference(weights(cfg), cfg, tokens[b, start:], row_routes)
    np.testing.assert_allclose(logits[b, start:], expected, atol=2e-5)


def test_the_gradient_under_replay_equals_differences_of_the_reference():
  """Unrolled and rematerialised.

  Without replay, see the parity with transformers in test_hf.py; scanned and
  rematerialised, the next test.
  """
  cfg = UNROLLED
  routes, (tokens, _, mask) = random_routes(cfg), batch()
  rng = np.random.default_rng(5)
  shape = (B, T, cfg.vocab_size)
  cotangent = (rng.normal(size=shape) * mask[..., None]).astype(np.float32)

  def loss(params):
    return (replayed(cfg, params, routes)[1] * cotangent).sum()

  grads = jax.device_get(jax.jit(jax.grad(loss))(weights(cfg)))
  assert np.abs(grads["layers"]["moe"]["router"]).max((1, 2)).min() > 1e-2

  def differenced(layer, name):
    shape = weights(cfg)["layers"][layer][name].shape
    direction = rng.normal(size=shape)

    def moved(step):
      params = jax.tree.map(np.float64, weights(cfg))
      params["layers"][layer][name] += step * direction
      return sum(
        (
          reference(params, cfg, tokens[b, s:], routes[:, b, s:])[0]
          * cotangent[b, s:]
        ).sum()
        for b, s in enumerate(STARTS)
      )

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    return np.vdot(grads["layers"][layer][name], direction), slope

  for layer, names in (("moe", ("router", "gate_up")), ("attention", "qkvo")):
    for name in names:
      slopes = differenced(layer, name)
      np.testing.assert_allclose(*slopes, rtol=1e-3, atol=1e-3)


def test_a_model_on_a_mesh_equals_one_device():
  """With the heads of a bias and of a norm split, replay, rematerialised."""
  cfg = dataclasses.replace(
    DENSE,
    vocab_size=24,
    qk_norm_over_heads=True,
    attention_bias=True,
    num_experts=8,
    experts_per_token=2,
    remat="attention,stream",
  )
  rng = np.random.default_rng(8)
  tokens = rng.integers(0, 24, (8, T)).astype(np.int32)
  mask = np.arange(T) >= rng.integers(0, 4, (8, 1))
  routes, cotangent = random_routes(cfg, 8), rng.normal(size=(8, T, 24))

  def loss(params):
    out = model.hidden_states(
      params, cfg, tokens, mask.cumsum(1), mask, routes=routes, replay=True
    )
    hidden = jnp.where(mask[..., None], out.hidden, 0)
    logits = model.unembed(params, cfg, hidden)
    return (logits * cotangent).sum(), (logits, out.routing)

  run = lambda p: jax.jit(jax.grad(loss, has_aux=True))(p)
  expected = jax.device_get(run(weights(cfg)))
  mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
  with jax.set_mesh(mesh):
    params = jax.device_put(weights(cfg), model.shardings(weights(cfg), mesh))
    actual = jax.device_get(run(params))
  for name, x in params["layers"]["attention"].items():
    if name.endswith("bias"):
      assert x.sharding.shard_shape(x.shape)[1:] == (x.shape[1] // 2, 3)
  np.testing.assert_array_equal(actual[1][1].experts, routes)
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5 * max(np.abs(b).max(), 1))


def test_impossible_routes_are_refused():
  routes, cache = random_routes(MOE), kv.empty(MOE, B, T)
  encode = functools.partial(model.hidden_states, weights(MOE), MOE, *batch())
  with pytest.raises(ValueError, match="replay=True needs routes"):
    encode(replay=True)
  with pytest.raises(ValueError, match="with a cache: expected None"):
    encode(cache, routes=routes)


@functools.cache
def backward_operations(remat):
  """The number of operations of the backward pass, on two devices an axis."""
  cfg = model.variant("tiny", dtype="float32", remat=remat, unroll=1)
  params = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
  tokens = np.ones((4, 8), np.int32)
  loss = lambda p: model.hidden_states(
    p, cfg, tokens, tokens, tokens
  ).hidden.sum()
  with jax.set_mesh(sharding.make_mesh(fsdp=2, expert=2, tensor=2)):
    return str(jax.make_jaxpr(jax.grad(loss))(params)).count(" = ")


@pytest.mark.parametrize("name", model.KEPT)
def test_what_a_block_keeps_is_not_computed_again(name):
  """On a TPU "attention" is kept inside the kernel, too."""
  assert backward_operations(name) < backward_operations("full")


def test_bf16_is_close_and_its_logits_are_float32():
  low = dataclasses.replace(DENSE, dtype="bfloat16")
  *_, mask = inputs = batch()
  exact = forward(DENSE, *inputs).logits[mask]
  rough = forward(low, *inputs).logits[mask]
  assert rough.dtype == jnp.float32
  gap = np.abs(exact - rough)
  assert 0 < gap.mean() < 0.02
  # Logits rounded to bf16 would have no bits below these.
  assert (rough != rough.astype(jnp.bfloat16)).any()


@pytest.mark.parametrize(
  ("platform", "layers", "unroll", "scans"),
  [
    ("cpu", 2, None, 0),
    ("cpu", 9, None, 1),
    ("tpu", 2, None, 1),
    ("cpu", 2, 1, 1),
    ("tpu", 2, 2, 0),
  ],
)
def test_a_small_model_on_a_cpu_has_no_scan_over_layers(
  platform, layers, unroll, scans, monkeypatch
):
  cfg = dataclasses.replace(DENSE, num_layers=layers, unroll=unroll)
  params = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  run = lambda params: model.hidden_states(params, cfg, *batch()).hidden
  assert str(jax.make_jaxpr(run)(params)).count(" scan[") == scans


def test_init_scales_by_the_inputs_that_are_summed():
  cfg = model.variant("tiny", num_kv_heads=2, num_layers=3)
  key = jax.random.key(0, impl="rbg")  # compiles in half the time
  params = jax.device_get(jax.jit(model.init, static_argnums=1)(key, cfg))
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
  layers, D = params["layers"], cfg.embed_dim
  attended = cfg.num_heads * cfg.head_dim
  fans = [
    (params["embed"], D),
    (params["head"], D),
    *((layers["attention"][name], D) for name in "qkv"),
    (layers["attention"]["o"], attended),
    (layers["moe"]["router"], D),
    (layers["moe"]["gate_up"], D),
    (layers["moe"]["down"], cfg.mlp_dim),
  ]
  for x, fan in fans:
    assert float(x.std()) * fan**0.5 == pytest.approx(1, rel=0.08)
  for scale in (layers["attention"]["q_norm"], params["final_norm"]):
    assert (scale["scale"] == 1).all()
  q = layers["attention"]["q"]
  assert not (q[0] == q[1]).any()  # another random key for every layer


def test_unstacked_layers_are_the_stack_in_the_models_dtype():
  low = dataclasses.replace(MOE, dtype="bfloat16")
  params = jax.jit(model.unstack_layers, static_argnums=1)(weights(MOE), low)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  for i, layer in enumerate(params["layers"]):
    down = weights(MOE)["layers"]["moe"]["down"][i]
    np.testing.assert_allclose(layer["moe"]["down"], down, rtol=1e-2)
