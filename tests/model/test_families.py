"""Families with layers of several kinds: packing, scans, meshes, biases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, each_family
from random_model import random_routes, weights

from gspo_jax import model
from gspo_jax.model import hf
from gspo_jax.runtime import sharding

ROWS, T = 4, 10


def gradient(cfg):
  """Jitted: gradients of `(logits * cotangent).sum()`, logits, routing."""

  def loss(params, tokens, positions, segments, routes, own, cotangent):
    inputs = params, cfg, tokens, positions, segments
    replay = {"routes": routes, "replay": True, "use_own_experts": own}
    out = model.hidden_states(*inputs, **replay)
    logits = model.unembed(params, cfg, out.hidden)
    return (logits * cotangent).sum(), (logits, out.routing)

  return jax.jit(jax.grad(loss, has_aux=True))


@functools.cache
def by_loop(name):
  cfg = FAMILIES[name]
  return gradient(dataclasses.replace(cfg, unroll=cfg.num_layers))


def routes_of(cfg):
  k = cfg.experts_per_token
  return random_routes(cfg.num_experts, k, cfg.num_moe_layers, ROWS, T)


@each_family
def test_a_packed_row_equals_single_rows_and_passes_no_gradient(name):
  """The segments have no token in common, so no row of the embedding."""
  cfg, rng = FAMILIES[name], np.random.default_rng(0)
  # The first row holds the next two.
  segments = np.zeros((ROWS, T), np.int32)
  segments[:3] = [1] * 4 + [2] * 6, [1] * 4 + [0] * 6, [2] * 6 + [0] * 4
  positions = np.tile(np.arange(T), (ROWS, 1))
  positions[0, 4:] -= 4
  tokens = rng.integers(0, 12, (ROWS, T)) + 12 * (segments == 2)
  for segment in 1, 2:
    tokens[segment, segments[segment] > 0] = tokens[0, segments[0] == segment]
  inputs = tokens, positions, segments, routes_of(cfg)
  for segment, others in ((1, slice(12, 24)), (2, slice(12))):
    here, alone = segments[0] == segment, segments[segment] > 0
    cotangent = np.zeros((ROWS, T, cfg.vocab_size), np.float32)
    cotangent[0, here] = 1
    grads, (logits, routing) = jax.device_get(
      by_loop(name)(weights(cfg), *inputs, True, cotangent)
    )
    experts = routing.experts
    np.testing.assert_allclose(
      logits[0, here], logits[segment, alone], atol=1e-5
    )
    np.testing.assert_array_equal(
      experts[:, 0, here], experts[:, segment, alone]
    )
    assert not grads["embed"][others].any()
    assert grads["embed"].any()


@each_family
def test_a_scan_and_a_mesh_equal_a_loop_over_layers(name):
  """With replay and without; on the mesh rematerialised, all axes split."""
  cfg, rng = FAMILIES[name], np.random.default_rng(0)
  tokens = rng.integers(0, 24, (ROWS, T)).astype(np.int32)
  positions, mask = np.indices(tokens.shape)[1], np.ones_like(tokens)
  cotangent = rng.normal(size=(ROWS, T, cfg.vocab_size)).astype(np.float32)
  inputs = tokens, positions, mask, routes_of(cfg)
  scan, on_mesh = (
    gradient(dataclasses.replace(cfg, unroll=1, remat=remat))
    for remat in ("none", "attention,stream")
  )
  mesh = sharding.make_mesh(context=2, expert=2, tensor=2)
  placed = jax.device_put(weights(cfg), model.shardings(weights(cfg), mesh))
  close = lambda atol: (
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=atol * max(np.abs(b).max(), 1)
    )
  )
  for own in False, True:
    loop = jax.device_get(by_loop(name)(weights(cfg), *inputs, own, cotangent))
    jax.tree.map(close(2e-5), scan(weights(cfg), *inputs, own, cotangent), loop)
    with jax.set_mesh(mesh):
      many = on_mesh(placed, *inputs, own, cotangent)
    jax.tree.map(close(3e-5), jax.device_get(many), loop)
    replayed = (loop[1][1].experts == inputs[-1]).all()
    assert replayed != own
  for path, grad in sharding.leaves_by_path(loop[0]).items():
    assert grad.any() != path.endswith("choice_bias"), path


def test_first_layers_are_computed_again_in_the_backward_pass():
  """No compiler merges what is computed again with the forward pass."""
  cfg = dataclasses.replace(
    FAMILIES["glm-4.5"],
    num_layers=3,
    first=(model.Layer(experts=False),) * 2,
    unroll=1,
  )
  tokens = np.ones((2, T), np.int32)

  def products(**changes):
    changed = dataclasses.replace(cfg, **changes)
    hidden = lambda p: model.hidden_states(p, changed, tokens, tokens, tokens)
    loss = jax.jit(jax.grad(lambda p: hidden(p).hidden.sum()))
    return loss.lower(weights(cfg)).compile().as_text().count(" dot(")

  stored, again = products(remat="none"), products(remat="full")
  # At least seven products of each first layer.
  assert again - stored > 2 * 7


@pytest.mark.parametrize(
  ("name", "ends"),
  [("glm-4.5", ["moe/choice_bias"]),
   ("qwen3.5", ["delta_net/A_log", "delta_net/dt_bias"])],
)  # fmt: skip
def test_some_parameters_are_never_rounded(name, ends, tmp_path):
  cfg = dataclasses.replace(FAMILIES[name], dtype="bfloat16")
  decoding = model.unstack_layers(weights(cfg), cfg)
  hf.save_hf(weights(cfg), cfg, tmp_path / "low", dtype="bfloat16")
  again = hf.load_hf(tmp_path / "low", cfg)["layers"]
  for end in ends:
    module, parameter = end.split("/")
    x = weights(cfg)["layers"][module][parameter]
    assert (x != x.astype(jnp.bfloat16)).all()
    layers = [layer[module] for layer in decoding["layers"] if module in layer]
    assert layers[0][parameter].dtype == np.float32
    np.testing.assert_array_equal([y[parameter] for y in layers], x)
    np.testing.assert_array_equal(again[module][parameter], x)
  assert not np.array_equal(
    again["moe"]["down"], weights(cfg)["layers"]["moe"]["down"]
  )
