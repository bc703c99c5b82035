"""The Mixture-of-Experts layer against a loop over experts, for any load."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_oracle import weighted_sum
from random_model import random_routes

from gspo_jax import model
from gspo_jax.model import lora
from gspo_jax.model.moe import Routes, sparse_mlp
from gspo_jax.runtime import sharding

B, T, D, E, F = 2, 12, 8, 5, 6
ALL = np.ones((B, T), bool)  # no padding
CASES = {
  "two of five": (2, True),
  "one, raw weight": (1, False),
  "all of five": (5, True),
}
every_case = pytest.mark.parametrize("case", CASES)
# A bias of the router for each expert: feature 0 of every token is 1.
LOADS = {
  "no bias": [0, 0, 0, 0, 0],
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


def random_layer(load="no bias"):
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
def compiled(case, replay=False):
  """Output, routing, and the gradient of `sum(output * cotangent)`."""

  def loss(params, x, cotangent, routes):
    y, routing = sparse_mlp(
      x, params, config(case), ALL, Routes(routes, replay)
    )
    return (y * cotangent).sum(), (y, routing)

  return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("wide", [True, False])
def test_a_float32_router_has_operands_of_float32(wide):
  """Its probabilities are those of float64, in a bfloat16 model."""
  cfg = dataclasses.replace(
    config("all of five"), dtype="bfloat16", float32_router=wide
  )
  params, x = random_layer()
  x = jnp.asarray(x, jnp.bfloat16)
  cast = {"layers": {"moe": params}}
  cast = model.parameters.cast(cast, cfg)["layers"]["moe"]  # for decoding
  expected = router_log_softmax(params, x)
  for weights in params, cast:
    _, routing = jax.jit(sparse_mlp, static_argnums=2)(x, weights, cfg, ALL)
    at = routing.experts.astype(int)
    gap = routing.logps - np.take_along_axis(expected, at, 2)
    assert (np.abs(gap).max() < 1e-5) == wide


MASK = np.arange(T) < np.array([[T], [7]])  # padding ends the second row
MESHES = {
  "1": {},
  "8": {"context": 2, "expert": 2, "tensor": 2},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_losses_of_a_router_and_their_gradients(scores, mesh):
  """Against float64, with rows that are padded and any mesh."""
  rows, E = 4, 8
  cfg = dataclasses.replace(
    config("two of five"), scoring_func=scores, num_experts=E
  )
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  params = {
    "router": normal(D, E),
    "gate_up": normal(E, D, 2 * F),
    "down": normal(E, F, D),
  }
  x, real = normal(rows, T, D), np.tile(MASK, (2, 1))

  def losses(params, x):
    _, routing = sparse_mlp(x, params, cfg, real, Routes(losses=True))
    mean = lambda terms: jnp.where(real, terms, 0).sum() / real.sum()
    return jnp.stack([mean(routing.load_balance), mean(routing.z_loss)])

  both = jax.jit(lambda *args: (losses(*args), jax.jacrev(losses)(*args)))
  devices = jax.devices()[: int(mesh)]
  with jax.set_mesh(sharding.make_mesh(devices, **MESHES[mesh])):
    found, slopes = jax.device_get(both(params, x))

  h = np.float64(x[real])
  z = h @ np.float64(params["router"])
  total = np.exp(z).sum(1, keepdims=True)
  scored = np.exp(z) / total if scores == "softmax" else 1 / (1 + np.exp(-z))
  p = scored / scored.sum(1, keepdims=True)
  order = np.argsort(-scored, axis=1)[:, :2]
  f = np.bincount(order.ravel(), minlength=E) / len(h)
  np.testing.assert_allclose(
    found, [E * f @ p.mean(0), (np.log(total) ** 2).mean()], rtol=1e-5
  )
  slope = E * p * (f - (p @ f)[:, None])
  if scores == "sigmoid":
    slope *= 1 - scored
  outer = [slope, 2 * np.log(total) * np.exp(z) / total]
  expected = np.stack([h.T @ each for each in outer]) / len(h)
  np.testing.assert_allclose(slopes["router"], expected, rtol=1e-4, atol=1e-6)
  assert not slopes["down"].any()


COTANGENT = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)


def run(case, params, x, routes=None, replay=False):
  """Output, routing and gradients."""
  result = compiled(case, replay)(params, x, COTANGENT, routes)
  grads, (y, routing) = jax.device_get(result)
  return y, routing, grads


def router_log_softmax(params, x):
  logits = np.float64(x) @ np.float64(params["router"])
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def exact(cfg, params, x, routes=None):
  """A loop in float64: output, experts, gradients (of output * COTANGENT)."""
  flat = lambda x: x.reshape(B * T, -1)
  by_row = lambda x: x.reshape(B, T, -1)
  p = np.exp(flat(router_log_softmax(params, x)))
  experts = np.argsort(-p)[:, : cfg.experts_per_token]
  experts = experts if routes is None else flat(routes).astype(int)
  if cfg.norm_topk_prob:  # a softmax over the chosen experts, not over all
    p *= (experts[:, :, None] == np.arange(E)).any(1)
    p /= p.sum(1, keepdims=True)
  y, (dx, dweights, *of_experts), _ = weighted_sum(
    flat(x),
    np.take_along_axis(p, experts, 1),
    experts,
    *(lora.Experts(params[name]) for name in ("gate_up", "down")),
    None,
    flat(COTANGENT),
  )
  dp = np.zeros_like(p)
  np.put_along_axis(dp, experts, dweights, 1)
  dlogits = p * (dp - (p * dp).sum(1, keepdims=True))
  dx += dlogits @ np.float64(params["router"]).T
  grads = {"router": flat(x).T @ dlogits}
  for name, parts in zip(("gate_up", "down"), of_experts, strict=True):
    grads[name] = parts.weight
  return by_row(y), by_row(experts), (grads, by_row(dx))


def routes_of(case, seed=3):
  return random_routes(E, CASES[case][0], B, T, seed=seed)


@every_load
@every_case
def test_free_and_replayed_passes_equal_a_loop(case, load):
  """A layer that replays the experts that it chose gives the same numbers."""
  params, x = random_layer(load)
  table, own = router_log_softmax(params, x), None
  for replayed in "none", "any", "own":
    routes = {"none": None, "any": routes_of(case), "own": own}[replayed]
    y, routing, grads = run(case, params, x, routes, replay=routes is not None)
    own = routing.experts if routes is None else own
    expected, experts, exact_grads = exact(config(case), params, x, routes)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    if routes is not None:
      np.testing.assert_array_equal(routing.experts, routes)
    elif CASES[case][0] < E:  # the order among tiny weights is rounding
      np.testing.assert_array_equal(np.sort(own), np.sort(experts))
      assert np.abs(y).max(-1).min() > 1e-3  # of every token
    # Rounding errors are relative to the largest terms, not to the sum.
    for a, b in zip(*map(jax.tree.leaves, (grads, exact_grads)), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))
    at = np.take_along_axis(table, routing.experts.astype(int), -1)
    np.testing.assert_allclose(routing.logps, at, atol=1e-5)
    entropy = -(np.exp(table) * table).sum(-1)
    np.testing.assert_allclose(routing.entropy, entropy, atol=1e-5)
    assert routing.logps.dtype == routing.entropy.dtype == np.float32
    assert routing.dropped == 0


def test_bf16_routes_in_float32():
  params, x = random_layer()
  # Logits 8, 8.01, ... are apart in float32 and equal in bf16, where the
  # lower expert would win.
  x[..., :2], x[..., 2:] = 1, 0
  params["router"][:2] = np.full(E, 8), np.arange(E) / 100
  y, routing = jax.jit(sparse_mlp, static_argnums=2)(
    jnp.asarray(x, jnp.bfloat16), params, config("two of five"), ALL
  )
  assert y.dtype == jnp.bfloat16
  assert (np.asarray(routing.experts) == [4, 3]).all()
  expected, *_ = exact(config("two of five"), params, x)
  np.testing.assert_allclose(np.float64(y), expected, atol=0.05)


# Routing Replay.


@every_case
def test_without_replay_routes_change_nothing(case):
  """But where the log-probs are taken."""
  params, x = random_layer()
  routes = routes_of(case)
  y, routing, grads = run(case, params, x, routes)
  free_y, free, free_grads = run(case, params, x)
  equal = np.testing.assert_array_equal
  equal(routing.experts, free.experts)
  jax.tree.map(equal, (y, grads), (free_y, free_grads))
  table = router_log_softmax(params, x)
  expected = np.take_along_axis(table, routes.astype(int), -1)
  np.testing.assert_allclose(routing.logps, expected, atol=1e-5)


def test_the_routing_has_no_gradient():
  params, x = random_layer()

  def routing_sum(params, x):
    routes = routes_of("two of five")
    cfg = config("two of five")
    _, routing = sparse_mlp(x, params, cfg, ALL, Routes(routes, replay=True))
    return routing.logps.sum() + routing.entropy.sum()

  grads = jax.jit(jax.grad(routing_sum, argnums=(0, 1)))(params, x)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_routes_of_padding_do_not_matter():
  params, x = random_layer()
  real = np.arange(B * T).reshape(B, T) % 3 > 0
  routes, others = (routes_of("two of five", seed) for seed in (3, 5))
  cfg = config("two of five")
  apply = jax.jit(
    lambda routes: sparse_mlp(x, params, cfg, real, Routes(routes, True))
  )
  y, routing = apply(routes)
  other_y, _ = apply(np.where(real[..., None], routes, others))
  np.testing.assert_array_equal(y, other_y)
  assert not y[~real].any()
  assert routing.dropped == 0


@pytest.mark.parametrize(
  ("experts", "dtype"), [(256, "uint8"), (257, "uint16")]
)
def test_recorded_experts_take_as_few_bits_as_possible(experts, dtype):
  cfg = model.variant("tiny", num_experts=experts)
  x, real = jnp.zeros((1, 1, cfg.embed_dim)), jnp.ones((1, 1), bool)

  def layer(stacks):
    params = jax.tree.map(lambda x: x[0], stacks)
    return sparse_mlp(x, params, cfg, real)

  _, routing = jax.eval_shape(layer, model.shapes(cfg)["layers"]["moe"])
  assert routing.experts.dtype == dtype
