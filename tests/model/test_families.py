"""Families with layers of several kinds: packing, scans, meshes, frozen state.

Biases, sinks and choice biases are random, not zero as at first.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, each_family
from random_model import weights

from gspo_jax import model
from gspo_jax.model import hf
from gspo_jax.runtime import sharding

T = 9
forward = jax.jit(model.forward, static_argnums=1)


@each_family
def test_a_packed_row_equals_single_rows_and_passes_no_gradient(name):
  """The segments have no token in common, so no row of the embedding."""
  cfg, rng = FAMILIES[name], np.random.default_rng(0)
  segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
  positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
  tokens = rng.integers(0, 12, (1, T)) + 12 * (segments == 2)

  def loss(params, segment):
    out = model.forward(params, cfg, tokens, positions, segments)
    return jnp.where(segments[..., None] == segment, out.logits, 0).sum(), out

  run = jax.jit(jax.grad(loss, has_aux=True))
  for segment, others in ((1, slice(12, 24)), (2, slice(12))):
    grads, out = jax.device_get(run(weights(cfg), segment))
    here = segments[0] == segment
    n, single = here.sum(), np.zeros((1, T), np.int32)
    single[0, :n] = tokens[0, here]
    alone = forward(
      weights(cfg), cfg, single, np.arange(T)[None], (np.arange(T) < n)[None]
    )
    np.testing.assert_allclose(
      out.logits[0, here], alone.logits[0, :n], atol=1e-5
    )
    np.testing.assert_array_equal(
      out.experts[:, 0, here], alone.experts[:, 0, :n]
    )
    assert not grads["embed"][others].any()
    assert grads["embed"].any()


@each_family
def test_a_scan_equals_a_loop_over_layers(name):
  """With replay and rematerialised; gradients, too."""
  cfg, rng = FAMILIES[name], np.random.default_rng(0)
  tokens = rng.integers(0, 24, (2, T))
  positions, mask = np.indices((2, T))[1], np.ones((2, T), int)
  E, k, L = cfg.num_experts, cfg.experts_per_token, cfg.num_moe_layers
  order = rng.permuted(np.broadcast_to(np.arange(E), (L, 2, T, E)), axis=-1)
  routes = order[..., :k].astype(np.uint8)
  cotangent = rng.normal(size=(2, T, cfg.vocab_size))

  @functools.partial(jax.jit, static_argnums=0)
  @functools.partial(jax.grad, argnums=1, has_aux=True)
  def run(cfg, params):
    out = model.hidden_states(
      params, cfg, tokens, positions, mask, routes=routes, replay=True
    )
    logits = model.unembed(params, cfg, out.hidden)
    return (logits * cotangent).sum(), (logits, out.routing)

  change = functools.partial(dataclasses.replace, cfg)
  loop = jax.device_get(run(change(unroll=cfg.num_layers), weights(cfg)))
  np.testing.assert_array_equal(loop[1][1].experts, routes)
  for remat in ("none", "attention,stream"):
    scan = run(change(unroll=1, remat=remat), weights(cfg))
    for a, b in zip(*map(jax.tree.leaves, (scan, loop)), strict=True):
      np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 1))
  for path, grad in sharding.leaves_by_path(loop[0]).items():
    assert grad.any() != path.endswith("choice_bias"), path


@each_family
def test_a_mesh_gives_what_one_device_gives(name):
  """With heads, sinks, tokens and experts split, and what is not."""
  cfg = dataclasses.replace(FAMILIES[name], remat="full", unroll=1)
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 24, (4, T + 1)).astype(np.int32)
  positions, mask = np.indices(tokens.shape)[1], np.ones_like(tokens)
  cotangent = rng.normal(size=(*tokens.shape, cfg.vocab_size))

  @functools.partial(jax.grad, has_aux=True)
  def loss(params):
    out = model.forward(params, cfg, tokens, positions, mask)
    return (out.logits * cotangent).sum(), (out.logits, out.experts)

  one = jax.device_get(jax.jit(loss)(weights(cfg)))
  mesh = sharding.make_mesh(context=2, expert=2, tensor=2)
  with jax.set_mesh(mesh):
    placed = jax.device_put(weights(cfg), model.shardings(weights(cfg), mesh))
    many = jax.device_get(jax.jit(lambda p: loss(p))(placed))
  np.testing.assert_array_equal(one[1][1], many[1][1])
  for a, b in zip(*map(jax.tree.leaves, (many, one)), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5 * max(np.abs(b).max(), 1))


def test_first_layers_are_computed_again_in_the_backward_pass():
  """No compiler merges what is computed again with the forward pass."""
  cfg = dataclasses.replace(
    FAMILIES["glm-4.5"],
    num_layers=4,
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
  ("name", "module", "parameter"),
  [
    ("glm-4.5", "moe", "choice_bias"),
    ("qwen3.5", "delta_net", "A_log"),
    ("qwen3.5", "delta_net", "dt_bias"),
  ],
)
def test_some_parameters_are_never_rounded(name, module, parameter, tmp_path):
  cfg = dataclasses.replace(FAMILIES[name], dtype="bfloat16")
  x = weights(cfg)["layers"][module][parameter]
  assert (x != x.astype(jnp.bfloat16)).all()
  decoding = model.unstack_layers(weights(cfg), cfg)
  found = [
    layer[module][parameter] for layer in decoding["layers"] if module in layer
  ]
  assert found[0].dtype == np.float32
  np.testing.assert_array_equal(np.stack(found), x)
  hf.save_hf(weights(cfg), cfg, tmp_path / "low", dtype="bfloat16")
  again = hf.load_hf(tmp_path / "low", cfg)["layers"]
  np.testing.assert_array_equal(again[module][parameter], x)
  assert not np.array_equal(
    again["moe"]["down"], weights(cfg)["layers"]["moe"]["down"]
  )
