"""What holds for Qwen3 also holds where layers differ, or the router does.

Parity with transformers is in test_hf.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspo_jax import model
from gspo_jax.learner import optimizer
from gspo_jax.model import cache as kv
from gspo_jax.runtime import sharding

B, T = 4, 12
SLOW = pytest.mark.slow
# Several periods behind the first layers; a window shorter than a row.
FAMILIES = {
  "glm": model.variant("tiny-glm-4.5", num_layers=4, n_group=4, topk_group=2),
  "minimax": model.variant("tiny-minimax-m2"),
  "gpt-oss": dataclasses.replace(
    model.variant("tiny-gpt-oss", num_layers=4),
    pattern=(model.Layer(window=5), model.Layer()),
  ),
  "qwen2-moe": model.variant(
    "qwen1.5-moe-a2.7b",
    **{"num_layers": 2, "embed_dim": 32, "mlp_dim": 16, "shared_dim": 24},
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 258},
    **{"num_experts": 8, "experts_per_token": 2},
  ),
}
# The others share their code with these and with Qwen3.
each_family = pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name in ("glm", "gpt-oss") else [SLOW])
    for name in FAMILIES
  ],
)


@functools.cache
def config(name):
  return dataclasses.replace(
    FAMILIES[name], dtype="float32", remat="attention,stream", unroll=1
  )


@functools.cache
def params(name):
  """Random numbers, also where a new model has zeros."""
  rng = np.random.default_rng(3)
  move = lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(np.float32)
  return jax.tree.map(move, model.init(jax.random.key(0), config(name)))


def batch():
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 256, (B, T)).astype(np.int32)
  return tokens, np.tile(np.arange(T), (B, 1)), np.ones((B, T), np.int32)


def outputs(cfg, params, routes=None):
  """The hidden states, the experts, and the gradient of their weighted sum."""

  def loss(params):
    replay = {"routes": routes, "replay": routes is not None}
    out = model.hidden_states(params, cfg, *batch(), **replay)
    cotangent = np.random.default_rng(2).standard_normal(out.hidden.shape)
    return (out.hidden * cotangent).mean(), (out.hidden, out.routing)

  return jax.value_and_grad(loss, has_aux=True)(params)


jit_outputs = jax.jit(outputs, static_argnums=0)


@functools.cache
def scanned(name):
  return jax.device_get(jit_outputs(config(name), params(name), routes(name)))


def routes(name):
  """Experts that no router chose, for the layers that have experts."""
  cfg = config(name)
  shape = (cfg.num_moe_layers, B, T, cfg.num_experts)
  order = np.broadcast_to(np.arange(shape[-1]), shape)
  order = np.random.default_rng(7).permuted(order, axis=-1)
  return order[..., : cfg.experts_per_token].astype(np.uint8)


def assert_close(a, b, atol):
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
  jax.tree.map(close, a, b)


@each_family
def test_a_loop_over_all_layers_equals_the_scan_over_periods(name):
  cfg = dataclasses.replace(config(name), unroll=config(name).num_layers)
  (_, (hidden, routing)), grads = scanned(name)
  (_, (other, _)), others = jit_outputs(cfg, params(name), routes(name))
  np.testing.assert_array_equal(routing.experts, routes(name))
  assert_close(hidden, other, 1e-5)
  assert_close(grads, others, 1e-6)


@pytest.mark.parametrize(
  "name",
  [
    "gpt-oss",
    *(pytest.param(n, marks=SLOW) for n in FAMILIES if n[:3] != "gpt"),
  ],
)
def test_a_mesh_gives_what_one_device_gives(name):
  """With heads, experts, tokens and weights split, and routes replayed."""
  mesh = sharding.make_mesh(data=1, fsdp=1, context=2, expert=2, tensor=2)
  with jax.set_mesh(mesh):
    placed = jax.device_put(params(name), model.shardings(params(name), mesh))
    out = jit_outputs(config(name), placed, routes(name))
  ((_, (hidden, _)), grads), ((_, (other, _)), others) = scanned(name), out
  assert_close(hidden, jax.device_get(other), 2e-5)
  assert_close(grads, jax.device_get(others), 1e-5)


@each_family
def test_packed_sequences_do_not_see_each_other(name):
  """A row of two equals two rows, and their gradients do not mix."""
  cfg, weights = config(name), params(name)
  tokens, _, _ = batch()
  ends = np.array([5, T])
  mask = np.tile(np.repeat([1, 2], [5, T - 5]), (B, 1)).astype(np.int32)
  positions = np.tile(np.r_[:5, : T - 5], (B, 1))

  def hidden(embed, tokens, positions, mask):
    moved = weights | {"embed": embed}
    return model.hidden_states(moved, cfg, tokens, positions, mask).hidden

  run = jax.jit(hidden)
  packed = run(weights["embed"], tokens, positions, mask)
  for start, end in ((0, ends[0]), (ends[0], T)):
    here = np.s_[:, start:end]
    alone = run(weights["embed"], tokens[here], positions[here], mask[here])
    np.testing.assert_allclose(packed[here], alone, rtol=0, atol=2e-5)
  # Each token has its own row of the embedding.
  own = np.arange(B * T, dtype=np.int32).reshape(B, T)
  first = lambda embed: (hidden(embed, own, positions, mask)[:, :5] ** 2).sum()
  grads = jax.jit(jax.grad(first))(weights["embed"])[: B * T].reshape(B, T, -1)
  assert np.abs(grads[:, :5]).max() > 1e-2
  np.testing.assert_array_equal(grads[:, 5:], 0)


@each_family
def test_decoding_with_a_cache_equals_one_pass(name):
  cfg, weights = config(name), params(name)
  tokens, positions, mask = batch()
  mask = np.arange(T) >= np.array([0, 1, 3, 4])[:, None]  # padding on the left
  positions = np.maximum(mask.cumsum(1) - 1, 0)
  run = jax.jit(model.hidden_states, static_argnums=1)
  whole = run(weights, cfg, tokens, positions, mask)
  cache, layers = kv.empty(cfg, B, T), model.unstack_layers(weights, cfg)
  hidden = []
  for start, end in ((0, 6), *((i, i + 1) for i in range(6, T))):
    cut = lambda x, start=start, end=end: x[:, start:end]
    out = run(layers, cfg, *map(cut, (tokens, positions, mask)), cache)
    cache = out.cache
    hidden.append(out.hidden)
  hidden = np.concatenate(hidden, 1)
  np.testing.assert_allclose(
    hidden[mask], whole.hidden[mask], rtol=0, atol=2e-5
  )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_leaves_the_choice_bias_alone(kind):
  """Though all gradients, also those of zero, are decayed."""
  name = f"{kind}:weight_decay=0.1"
  update = optimizer.optimizer(optimizer.OptimConfig(name=name))
  grads = scanned("glm")[1]
  state = update.init(params("glm"))
  changes, _ = update.update(grads, state, params("glm"))
  new = optax.apply_updates(params("glm"), changes)
  bias = params("glm")["layers"]["moe"]["choice_bias"]
  np.testing.assert_array_equal(grads["layers"]["moe"]["choice_bias"], 0)
  np.testing.assert_array_equal(new["layers"]["moe"]["choice_bias"], bias)
  assert np.abs(bias).min() > 0
  router = lambda tree: np.asarray(tree["layers"]["moe"]["router"])
  assert np.abs(router(new) - router(params("glm"))).max() > 1e-6


def test_weights_for_decoding_keep_the_choice_bias_in_float32():
  cfg = dataclasses.replace(config("glm"), dtype="bfloat16")
  layer = model.unstack_layers(params("glm"), cfg)["layers"][-1]
  bias = params("glm")["layers"]["moe"]["choice_bias"][-1]
  np.testing.assert_array_equal(layer["moe"]["choice_bias"], bias)
  assert layer["moe"]["router"].dtype == jnp.bfloat16
