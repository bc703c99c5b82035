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
    y, routing = MoE(config(case)).apply({"params": params}, x, ALL)
    return (y * cotangent).sum(), (y, routing.experts)

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


def loop(case, params, x, routes=None):
  """Float64, a token and an expert at a time; by the routes where given."""
  k, normed = CASES[case]
  params = {name: p.astype(np.float64) for name, p in params.items()}
  y, chosen = np.zeros(x.shape), np.zeros((B, T, k), int)
  for b, t in np.ndindex(B, T):
    odds = np.exp(x[b, t] @ params["router"])
    odds /= odds.sum()
    chosen[b, t] = np.argsort(-odds)[:k] if routes is None else routes[b, t]
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
  y, routing = jax.jit(MoE(config("two of five")).apply)(
    {"params": params}, jnp.asarray(x, jnp.bfloat16), ALL
  )
  assert y.dtype == jnp.bfloat16
  assert (np.asarray(routing.experts) == [4, 3]).all()
  expected, _ = loop("two of five", params, x)
  np.testing.assert_allclose(np.float64(y), expected, atol=0.05)


# Routing Replay.


def anywhere(case, seed=3):
  """Routes [B, T, k] that no router chose."""
  k, _ = CASES[case]
  rng = np.random.default_rng(seed)
  draw = lambda: rng.permutation(E)[:k]
  routes = [[draw() for _ in range(T)] for _ in range(B)]
  return np.array(routes, np.uint8)


@functools.cache
def compiled_routed(case, replay):
  """Output, routing, and the gradient of `sum(output * cotangent)`."""
  layer = MoE(config(case))

  def loss(params, x, cotangent, routes):
    y, routing = layer.apply({"params": params}, x, ALL, routes, replay)
    return (y * cotangent).sum(), (y, routing)

  return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def run_routed(case, params, x, routes, replay=True):
  cotangent = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
  out = compiled_routed(case, replay)(params, x, cotangent, routes)
  grads, (y, routing) = jax.device_get(out)
  return y, routing, grads, cotangent


def router_log_softmax(params, x):
  logits = np.float64(x) @ np.float64(params["router"])
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@every_load
@every_case
def test_replay_goes_where_it_is_sent(case, load):
  params, x = draw(load)
  routes = anywhere(case)
  y, routing, _, _ = run_routed(case, params, x, routes)
  np.testing.assert_array_equal(routing.experts, routes)
  assert routing.dropped == 0
  expected, _ = loop(case, params, x, routes)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("replay", [False, True])
@every_case
def test_the_routers_opinion_of_the_routes(case, replay):
  params, x = draw()
  routes = anywhere(case)
  _, routing, _, _ = run_routed(case, params, x, routes, replay)
  table = router_log_softmax(params, x)
  expected = np.take_along_axis(table, routes.astype(int), -1)
  np.testing.assert_allclose(routing.log_probs, expected, atol=1e-5)
  entropy = -(np.exp(table) * table).sum(-1)
  np.testing.assert_allclose(routing.entropy, entropy, atol=1e-5)
  assert routing.log_probs.dtype == routing.entropy.dtype == np.float32


@every_case
def test_without_replay_routes_change_nothing(case):
  params, x = draw()
  y, routing, grads, _ = run_routed(case, params, x, anywhere(case), False)
  free_y, free, free_grads, _ = run_routed(case, params, x, None, False)
  np.testing.assert_array_equal(routing.experts, free.experts)
  equal = np.testing.assert_array_equal
  jax.tree.map(equal, (y, grads), (free_y, free_grads))
  # Without routes, the opinion is of the experts chosen.
  table = router_log_softmax(params, x)
  chosen = np.take_along_axis(table, free.experts.astype(int), -1)
  np.testing.assert_allclose(free.log_probs, chosen, atol=1e-5)


@every_load
@every_case
def test_replaying_its_own_choice_changes_nothing(case, load):
  params, x = draw(load)
  y, free, grads, _ = run_routed(case, params, x, None, False)
  again_y, again, again_grads, _ = run_routed(case, params, x, free.experts)
  jax.tree.map(np.testing.assert_array_equal, again, free)

  # The weights are a softmax over k logits there, and a quotient here; what
  # that rounds is of the size of the largest terms, whatever they sum to.
  def close(a, b):
    scale = max(1, np.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)

  jax.tree.map(close, (again_y, again_grads), (y, grads))


@every_case
def test_the_router_learns_under_replay(case):
  """Its gradient is the slope of the loop, along every weight at once."""
  params, x = draw()
  routes = anywhere(case)
  _, _, (grads, _), cotangent = run_routed(case, params, x, routes)
  assert np.abs(grads["router"]).max() > 0.1
  way = np.random.default_rng(4).normal(size=(D, E))

  def loss(step):
    moved = params | {"router": np.float64(params["router"]) + step * way}
    return (loop(case, moved, x, routes)[0] * cotangent).sum()

  slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
  np.testing.assert_allclose((grads["router"] * way).sum(), slope, rtol=1e-4)


def test_no_gradient_goes_through_the_opinion():
  params, x = draw()

  def opinion(params, x):
    routes = anywhere("two of five")
    layer = MoE(config("two of five"))
    _, routing = layer.apply({"params": params}, x, ALL, routes, True)
    return routing.log_probs.sum() + routing.entropy.sum()

  grads = jax.grad(opinion, argnums=(0, 1))(params, jnp.asarray(x))
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_routes_of_padding_do_not_matter():
  params, x = draw()
  real = np.arange(B * T).reshape(B, T) % 3 > 0
  routes, others = anywhere("two of five"), anywhere("two of five", seed=5)
  layer = functools.partial(MoE(config("two of five")).apply, replay=True)

  def apply(routes):
    return jax.jit(layer)({"params": params}, x, real, routes)

  y, routing = apply(routes)
  other_y, _ = apply(np.where(real[..., None], routes, others))
  np.testing.assert_array_equal(y, other_y)
  assert not y[~real].any()
  assert routing.dropped == 0


@pytest.mark.parametrize(
  ("experts", "dtype"), [(256, "uint8"), (257, "uint16")]
)
def test_experts_are_numbered_in_as_few_bits_as_will_do(experts, dtype):
  cfg = model.variant("tiny", num_experts=experts)
  x, real = jnp.zeros((1, 1, cfg.embed_dim)), jnp.ones((1, 1), bool)
  shapes = jax.eval_shape(MoE(cfg).init_with_output, jax.random.key(0), x, real)
  assert shapes[0][1].experts.dtype == dtype
