"""The sparse MLP against a loop over experts, whatever the load."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.model.moe import MoE

B, T, D, E, F = 2, 12, 8, 5, 6
ALL = np.ones((B, T), bool)  # no padding
CASES = {
  "two of five": (2, True),
  "raw weights": (2, False),
  "one, raw": (1, False),
  "all of five": (5, True),
}
every_case = pytest.mark.parametrize("case", CASES)
# What the router adds to each expert: feature 0 of every token is 1.
LOADS = {
  "as it comes": [0, 0, 0, 0, 0],
  "all to one": [-9, -9, 30, -9, -9],
  "all to two": [-30, 20, -30, -30, 20],
  "one left out": [0, 0, 0, 0, -40],
}
every_load = pytest.mark.parametrize("load", LOADS)


@functools.cache
def config(case):
  k, normed = CASES[case]
  return model.variant(
    "tiny",
    embed_dim=D,
    mlp_dim=F,
    num_experts=E,
    experts_per_token=k,
    norm_topk_prob=normed,
    dtype="float32",
  )


def draw(load="as it comes"):
  """Parameters and tokens, the latter [B, T, D]."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  router, x = normal(D, E), normal(B, T, D)
  x[..., 0], router[0] = 1, LOADS[load]
  params = {
    "router": router,
    "gate_up": normal(E, D, 2 * F) / 2,
    "down": normal(E, F, D) / 2,
  }
  return params, x


@functools.cache
def compiled(case):
  """Output, experts, and the gradient of `sum(output * cotangent)`."""

  def loss(params, x, cotangent):
    y, (experts, _) = MoE(config(case)).apply({"params": params}, x, ALL)
    return (y * cotangent).sum(), (y, experts)

  return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@functools.cache
def compiled_dense(case):
  """As `compiled`, by running every expert on every token."""
  k, normed = CASES[case]

  def loss(params, x, cotangent):
    probs = jax.nn.softmax(x @ params["router"])
    kth = jnp.sort(probs, -1)[..., -k, None]
    weights = jnp.where(probs >= kth, probs, 0)
    if normed:
      weights /= weights.sum(-1, keepdims=True)
    gate, up = jnp.split(
      jnp.einsum("btd,edf->btef", x, params["gate_up"]), 2, -1
    )
    each = jnp.einsum(
      "btef,efd->bted", gate / (1 + jnp.exp(-gate)) * up, params["down"]
    )
    y = (each * weights[..., None]).sum(-2)
    return (y * cotangent).sum(), y

  return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def run(case, params, x):
  cotangent = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
  result = compiled(case)(params, x, cotangent)
  grads, (y, experts) = jax.device_get(result)
  return y, experts, grads, cotangent


def loop(case, params, x):
  """Float64, a token and an expert at a time."""
  k, normed = CASES[case]
  params = {name: p.astype(np.float64) for name, p in params.items()}
  y, chosen = np.zeros(x.shape), np.zeros((B, T, k), int)
  for b, t in np.ndindex(B, T):
    odds = np.exp(x[b, t] @ params["router"])
    odds /= odds.sum()
    chosen[b, t] = np.argsort(-odds)[:k]
    share = odds[chosen[b, t]].sum() if normed else 1
    for e in chosen[b, t]:
      gate, up = np.split(x[b, t] @ params["gate_up"][e], 2)
      hidden = gate / (1 + np.exp(-gate)) * up
      y[b, t] += odds[e] / share * hidden @ params["down"][e]
  return y, chosen


@every_load
@every_case
def test_output_equals_a_loop_over_experts(case, load):
  params, x = draw(load)
  y, experts, _, _ = run(case, params, x)
  expected, chosen = loop(case, params, x)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  if CASES[case][0] < E:  # the order among tiny weights is rounding
    np.testing.assert_array_equal(np.sort(experts), np.sort(chosen))
  assert np.abs(y).max(-1).min() > 1e-3  # no token came back empty


def test_the_loads_are_what_they_say():
  loads = {}
  for load in LOADS:
    _, experts, _, _ = run("two of five", *draw(load))
    loads[load] = np.bincount(experts.ravel(), minlength=E)
  assert loads["all to one"][2] == B * T
  assert loads["all to two"].tolist() == [0, B * T, 0, 0, B * T]
  assert loads["one left out"][4] == 0
  assert (loads["as it comes"] > 0).all()


@every_load
@every_case
def test_gradient_equals_that_of_running_every_expert(case, load):
  params, x = draw(load)
  _, _, grads, cotangent = run(case, params, x)
  expected, _ = compiled_dense(case)(params, x, cotangent)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
  jax.tree.map(close, grads, expected)


@every_case
def test_the_router_learns(case):
  _, _, (grads, _), _ = run(case, *draw())
  assert np.abs(grads["router"]).max() > 0.1
  assert (np.abs(grads["down"]).max((1, 2)) > 0).all()


@every_case
def test_permuting_tokens_permutes_outputs(case):
  params, x = draw()
  order = np.random.default_rng(2).permutation(B * T)
  move = lambda a: a.reshape(B * T, -1)[order].reshape(a.shape)
  y, experts, _, _ = run(case, params, x)
  moved, moved_experts, _, _ = run(case, params, move(x))
  np.testing.assert_allclose(moved, move(y), atol=1e-6)
  np.testing.assert_array_equal(moved_experts, move(experts))


def test_equal_experts_make_one_dense_mlp():
  params, x = draw()
  same = {n: np.broadcast_to(params[n][:1], params[n].shape) for n in params}
  y, _, _, _ = run("two of five", {**same, "router": params["router"]}, x)
  gate, up = np.split(x @ params["gate_up"][0], 2, -1)
  dense = (gate / (1 + np.exp(-gate)) * up) @ params["down"][0]
  np.testing.assert_allclose(y, dense, atol=2e-5)


def test_bf16_routes_in_float32():
  params, x = draw()
  # Logits 8, 8.01, ... are apart in float32 and equal in bf16, where the
  # lower expert would win.
  x[..., :2], x[..., 2:] = 1, 0
  params["router"][:2] = np.full(E, 8), np.arange(E) / 100
  y, (experts, _) = jax.jit(MoE(config("two of five")).apply)(
    {"params": params}, jnp.asarray(x, jnp.bfloat16), ALL
  )
  assert y.dtype == jnp.bfloat16
  assert (np.asarray(experts) == [4, 3]).all()
  expected, _ = loop("two of five", params, x)
  np.testing.assert_allclose(np.float64(y), expected, atol=0.05)
