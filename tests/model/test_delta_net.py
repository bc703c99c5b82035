"""The gated delta rule against its recurrence in float64, token by token."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_libtpu

from gspo_jax.model import delta_net, exact, rounding
from gspo_jax.plan import chips, hlo
from gspo_jax.plan import compile as plan_compile
from gspo_jax.runtime import sharding

B, G, R, K, V, W = 2, 2, 2, 8, 6, 4
M, X = G * R, 2 * K + R * V
EPS = 1e-6


def normal(rng, *shape):
  return rng.normal(size=shape).astype(np.float32)


def operands(T, rate=1.0, seed=0):
  """(queries, keys and values; b; a), and the weights of a device's heads."""
  rng = np.random.default_rng(seed)
  inputs = tuple(normal(rng, B, T, *shape) for shape in [(G, X), (M,), (M,)])
  weights = {
    "conv": normal(rng, G, X, W),
    "A_log": np.log(rate) + 0.3 * normal(rng, M),
    "dt_bias": normal(rng, M),
  }
  return inputs, weights


def row_segments(*lengths):
  return np.repeat(np.arange(len(lengths)), lengths)


SEGMENTS = {
  1: (row_segments(1), row_segments(1)),
  63: (row_segments(63), row_segments(5, 31, 27)),
  64: (row_segments(63, 1), row_segments(1, 63)),
  65: (row_segments(65), row_segments(33, 31, 1)),
  512: (row_segments(512), row_segments(1, 63, 65, 127, 3, 200, 53)),
}


def silu(x):
  return x / (1 + np.exp(-x))


def by_token(inputs, weights, segments):
  """The recurrence of one row in float64: outputs [T, M, V] and the state."""
  x, b, a = (np.float64(x) for x in inputs)
  weights = {name: np.float64(x) for name, x in weights.items()}
  unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS)
  state, outs = np.zeros((M, K, V)), []
  for t in range(len(x)):
    first = max(0, t - W + 1)
    own = [s for s in range(first, t + 1) if segments[s] == segments[t]]
    x_t = silu(sum(x[s] * weights["conv"][..., W - 1 - (t - s)] for s in own))
    q_t, k_t, v_t = np.split(x_t, [K, 2 * K], -1)
    q_t, k_t = unit(q_t).repeat(R, 0), unit(k_t).repeat(R, 0)
    v_t = v_t.reshape(M, V)
    if t and segments[t] != segments[t - 1]:
      state = np.zeros_like(state)
    step = np.log1p(np.exp(a[t] + weights["dt_bias"]))
    state *= np.exp(-np.exp(weights["A_log"]) * step)[:, None, None]
    error = v_t - np.einsum("mkv,mk->mv", state, k_t)
    error /= 1 + np.exp(-b[t])[:, None]
    state += k_t[:, :, None] * error[:, None]
    outs.append(np.einsum("mkv,mk->mv", state, q_t) * K**-0.5)
  return np.array(outs), state


ZEROS = (
  np.zeros((B, M, K, V), np.float32),
  np.zeros((B, G, W - 1, X), np.float32),
)


jitted = jax.jit(delta_net.mix)


def mix(inputs, weights, segments, real, states=ZEROS):
  return jax.device_get(jitted(inputs, weights, segments, real, states))


@pytest.mark.parametrize("T", SEGMENTS)
@pytest.mark.parametrize("rate", [0.02, 1.0, 20.0])  # nats a token, about
def test_chunks_equal_the_recurrence(T, rate):
  inputs, weights = operands(T, rate)
  segments = np.stack(SEGMENTS[T])
  out, (state, _) = mix(inputs, weights, segments, np.ones((B, T), bool))
  for row in range(B):
    expected, last = by_token([x[row] for x in inputs], weights, segments[row])
    scale = np.abs(expected).max()
    np.testing.assert_allclose(out[row], expected, atol=1e-5 * scale)
    scale = np.abs(last).max()
    np.testing.assert_allclose(state[row], last, atol=1e-5 * scale)


def test_no_gradient_crosses_a_border():
  """Exactly 0 at all other segments, finite and not 0 at its own tokens."""
  T = 65
  segments = np.stack([row_segments(33, 31, 1), row_segments(7, 2, 56)])
  cotangent = normal(np.random.default_rng(1), B, T, M, V)

  @jax.jit
  @jax.grad
  def gradient(inputs, weights, segment):
    real = np.ones((B, T), bool)
    out, _ = delta_net.mix(inputs, weights, segments, real, ZEROS)
    here = (segments == segment)[..., None, None]
    return jnp.where(here, out * cotangent, 0).sum()

  for rate, segment in itertools.product((0.02, 20.0), range(3)):
    for x in jax.device_get(gradient(*operands(T, rate), segment)):
      assert np.isfinite(x).all()
      assert not x[segments != segment].any()
      assert x[segments == segment].any()


def test_gradients_equal_differences():
  """Of every input and weight, in float64."""
  with jax.enable_x64(True):
    T = 70
    inputs, weights = operands(T)
    segments = np.stack([row_segments(70), row_segments(40, 30)])
    real = np.ones((B, T), bool)
    tree = jax.tree.map(np.float64, (inputs, weights))
    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=(B, T, M, V))

    @jax.jit
    def loss(tree):
      out, _ = delta_net.mix(
        *tree, segments, real, jax.tree.map(np.float64, ZEROS)
      )
      return (out * cotangent).sum()

    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), tree)
    at = lambda h: loss(jax.tree.map(lambda x, d: x + h * d, tree, direction))
    measured = (at(1e-3) - at(-1e-3)) / 2e-3
    grads = jax.device_get(jax.grad(loss)(tree))
    products = jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)
    total = sum(jax.tree.leaves(products))
    np.testing.assert_allclose(total, measured, rtol=2e-3)


@pytest.mark.parametrize("ends", [(1, 2, 3, 4, 5), (3, 70, 71, 72)])
def test_passes_over_a_row_equal_one_pass(ends):
  """Prefill, then tokens: states carry over."""
  T = ends[-1]
  inputs, weights = operands(T)
  real = lambda n: np.ones((B, n), bool)
  none = lambda n: np.zeros((B, n), int)
  whole, last = mix(inputs, weights, none(T), real(T))
  outs, start, states = [], 0, ZEROS
  for end in ends:
    part = tuple(x[:, start:end] for x in inputs)
    n = end - start
    out, states = mix(part, weights, none(n), real(n), states)
    outs.append(out)
    start = end
  scale = np.abs(whole).max()
  np.testing.assert_allclose(np.concatenate(outs, 1), whole, atol=3e-6 * scale)
  for a, b in zip(states, last, strict=True):
    np.testing.assert_allclose(a, b, atol=3e-6)


def test_an_exact_token_has_the_same_bits_in_every_program():
  """In a row of two sequences, and alone: a padded prefill, then tokens."""
  inputs, weights = operands(52)
  segments = np.stack([row_segments(28, 24), row_segments(52)])

  def passed(exactly, *args):
    with exact.exactly(exactly):
      return delta_net.mix(*args)

  def loss(exactly, inputs, weights):
    real = np.ones(segments.shape, bool)
    out, _ = passed(exactly, inputs, weights, segments, real, ZEROS)
    return jnp.sin(out).sum(), out

  jit = functools.partial(jax.jit, compiler_options=rounding.OPTIONS)
  grad = jit(jax.grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
  (found, out), expected = (grad(x, inputs, weights) for x in (True, False))
  for x, y in zip(*map(jax.tree.leaves, ((found, out), expected)), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)
  run = jit(functools.partial(passed, True))
  states = tuple(x[:1] for x in ZEROS)
  for start, end, count in ((28, 44, 13), (41, 42, 1), (42, 43, 1)):
    part = tuple(x[:1, start:end] for x in inputs)
    none = np.zeros((1, end - start), int)
    real = np.arange(end - start)[None] < count
    alone, states = run(part, weights, none, real, states)
    same = out[:1, start : start + count]
    np.testing.assert_array_equal(alone[:, :count], same)


@pytest.mark.parametrize("T", [1, 9])
def test_padding_on_the_right_leaves_the_states(T):
  """Bit for bit, if a row has no other token; else as without the padding."""
  inputs, weights = operands(T)
  rng = np.random.default_rng(3)
  before = normal(rng, B, M, K, V), normal(rng, B, G, W - 1, X)
  lengths = np.array([0, T - 2 if T > 2 else T])
  real = np.arange(T) < lengths[:, None]
  none = np.zeros((B, T), int)
  out, after = mix(inputs, weights, none, real, before)
  for a, b in zip(after, before, strict=True):
    np.testing.assert_array_equal(a[0], b[0])
  n = lengths[1]
  part = tuple(x[:, :n] for x in inputs)
  alone, states = mix(part, weights, none[:, :n], real[:, :n] | True, before)
  np.testing.assert_allclose(out[1, :n], alone[1], atol=2e-6)
  for a, b in zip(after, states, strict=True):
    np.testing.assert_allclose(a[1], b[1], atol=2e-6)


def test_a_state_after_a_prompt_padded_on_the_left():
  """The convolution's inputs of padding are not those of the next token."""
  inputs, weights = operands(6)
  padding = 4
  segments = np.array([0] * padding + [1] * 2)[None].repeat(B, 0)
  _, states = mix(inputs, weights, segments, np.ones((B, 6), bool))
  part = tuple(x[:, padding:] for x in inputs)
  ones = np.ones((B, 2), int)
  _, alone = mix(part, weights, ones, ones.astype(bool))
  for a, b in zip(states, alone, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)
  assert not states[1][:, :, 0].any()


def test_a_tpu_has_longer_chunks_and_another_solver(monkeypatch):
  inputs, weights = operands(300)
  segments = np.stack([row_segments(300), row_segments(130, 1, 169)])
  real = np.ones((B, 300), bool)
  expected, _ = mix(inputs, weights, segments, real)
  monkeypatch.setattr(delta_net.sharding, "platform", lambda: "tpu")
  traced = jax.jit(lambda *x: delta_net.mix(*x)).trace(
    inputs, weights, segments, real, ZEROS
  )
  assert "triangular_solve" in str(traced.jaxpr)
  out, _ = traced.lower().compile()(inputs, weights, segments, real, ZEROS)
  np.testing.assert_allclose(out, expected, atol=1e-5)


def test_equal_keys_without_decay_stay_finite():
  """The inverse of I + A by powers of A would overflow."""
  T = 512
  inputs, weights = operands(T, rate=1e-6)
  x, b, a = inputs
  x[..., K : 2 * K] = x[:, :1, :, K : 2 * K]
  weights["conv"][:, K : 2 * K] = 1
  inputs = x, np.full_like(b, 8.0), a
  segments = np.zeros((B, T), int)
  out, _ = mix(inputs, weights, segments, np.ones((B, T), bool))
  expected, _ = by_token([x[0] for x in inputs], weights, segments[0])
  np.testing.assert_allclose(out[0], expected, atol=1e-4)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_a_layer_of_qwen3_6_compiles_for_a_tpu(topology):
  """Forward and backward pass of 4,096 tokens; the plan knows all of it."""
  plan_compile.prepare()
  where = chips.parse(topology)
  mesh = sharding.make_mesh(plan_compile.devices(where, 1)[:1])
  shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
    dims, dtype, sharding=sharding.replicated(mesh)
  )
  T, of_head = 4096, shape(32, dtype=jnp.float32)
  inputs = tuple(shape(1, T, *dims) for dims in [(16, 512), (32,), (32,)])
  weights = {"conv": shape(16, 512, 4), "A_log": of_head, "dt_bias": of_head}

  @functools.partial(jax.grad, argnums=(0, 1))
  def gradient(inputs, weights, segments):
    real = jnp.ones(segments.shape, bool)
    states = jnp.zeros((1, 32, 128, 128)), jnp.zeros((1, 16, 3, 512))
    return delta_net.mix(inputs, weights, segments, real, states)[0].sum()

  with jax.set_mesh(mesh):
    lowered = jax.jit(gradient).lower(
      inputs, weights, shape(1, T, dtype=jnp.int32)
    )
    compiled = plan_compile.compile_one(lowered)
  assert compiled.memory.temporaries < 0.5 * 2**30
  cost, by_cycles = (
    hlo.cost_of(
      compiled.text, where.chip, lambda *_: 1.0, devices=1, by_compiler=cycles
    )
    for cycles in (False, True)
  )
  for name, x in (("at best", cost), ("by cycles", by_cycles)):
    print(f"{topology}: {1e3 * x.scheduled:.2f} ms {name}")
  assert not cost.loops
  assert not cost.unknown_kernels
  assert cost.flops > 3 * T * 32 * 6 * 128 * 128
