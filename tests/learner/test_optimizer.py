"""The schedule's values, and AdamW against a loop in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspo_jax import model
from gspo_jax.learner import optimizer
from gspo_jax.learner.optimizer import OptimConfig
from gspo_jax.runtime.errors import UserError

PLAIN = OptimConfig(learning_rate=0.1, warmup_steps=0, total_steps=100)
PARAMS = {
  "q": jnp.array([[1.0, -2.0], [0.5, 3.0]]),
  "norm": {"scale": jnp.array([1.0, 2.0])},
}
GRADS = {
  "q": jnp.array([[0.1, -0.2], [0.3, 0.0]]),
  "norm": {"scale": jnp.array([0.05, -0.1])},
}


def rates(steps, **options):
  schedule = optimizer.schedule(dataclasses.replace(PLAIN, **options))
  return np.array([schedule(t) for t in range(steps)])


def test_without_warmup_the_rate_is_the_peak():
  np.testing.assert_allclose(rates(300), 0.1)


def test_warmup_is_a_line_that_starts_above_zero():
  expected = np.minimum(np.arange(1, 31) / 10, 1) * 0.1
  np.testing.assert_allclose(rates(30, warmup_steps=10), expected, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 20])
def test_cosine_goes_from_the_peak_to_a_tenth(warmup):
  rate = rates(130, decay="cosine", warmup_steps=warmup)
  t = np.clip((np.arange(130) - warmup) / (100 - warmup), 0, 1)
  expected = 0.1 * (0.1 + 0.9 * (1 + np.cos(np.pi * t)) / 2)
  expected[:warmup] = 0.1 * np.arange(1, warmup + 1) / max(warmup, 1)
  np.testing.assert_allclose(rate, expected, rtol=1e-5)
  assert rate.max() == pytest.approx(0.1)
  np.testing.assert_allclose(rate[100:], 0.01, rtol=1e-5)


def test_two_steps_of_adamw():
  cfg = dataclasses.replace(
    PLAIN, warmup_steps=4, b1=0.8, b2=0.9, weight_decay=0.3, clip_norm=0.2
  )
  tx = optimizer.optimizer(cfg)
  update = jax.jit(tx.update)
  params, state = PARAMS, tx.init(PARAMS)
  flat = lambda tree: np.concatenate(
    [np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]
  )
  decays = np.array([0, 0, 1, 1, 1, 1])  # the scale's leaf comes first
  x, m, v = flat(params), 0, 0
  for t, factor in enumerate((1.0, -3.0)):
    grads = jax.tree.map(lambda g, f=factor: f * g, GRADS)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    g = flat(grads)
    g *= min(1, 0.2 / np.sqrt((g**2).sum()))
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
    step = m / (1 - 0.8 ** (t + 1))
    step /= np.sqrt(v / (1 - 0.9 ** (t + 1))) + 1e-8
    x = x - 0.1 * (t + 1) / 4 * (step + 0.3 * decays * x)
    np.testing.assert_allclose(flat(params), x, rtol=1e-4)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e6])
def test_the_norm_is_clipped_and_never_scaled_up(factor):
  tx = optimizer.optimizer(dataclasses.replace(PLAIN, clip_norm=0.25, b1=0.0))
  grads = jax.tree.map(lambda g: factor * g, GRADS)
  _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
  moment = optax.tree.get(state, "mu")
  norm = float(optax.tree.norm(grads))
  assert float(optax.tree.norm(moment)) == pytest.approx(min(norm, 0.25))
  direction = lambda tree: np.ravel(tree["q"] / optax.tree.norm(tree))
  np.testing.assert_allclose(direction(moment), direction(grads), rtol=1e-5)


@pytest.mark.parametrize("name", ["tiny", "qwen3-0.6b"])
def test_matrices_decay_and_norms_do_not(name):
  cfg = model.variant(
    name, vocab_size=11, num_layers=1, embed_dim=8, head_dim=4, mlp_dim=4
  )
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))
  params = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes)
  tx = optimizer.optimizer(dataclasses.replace(PLAIN, weight_decay=0.5))
  decay_only = lambda p: tx.update(
    jax.tree.map(jnp.zeros_like, p), tx.init(p), p
  )
  updates, _ = jax.jit(decay_only)(params)
  norms = 0
  for path, update in jax.tree.leaves_with_path(updates):
    norm = "norm" in jax.tree_util.keystr(path)
    np.testing.assert_allclose(update, 0.0 if norm else -0.05, rtol=1e-6)
    norms += norm
  assert norms == 5


@pytest.mark.parametrize(
  ("option", "value", "words"),
  [
    ("decay", "cosinus", "did you mean 'cosine'"),
    ("decay", "x", "constant, cosine"),
  ],
)
def test_bad_settings(option, value, words):
  with pytest.raises(UserError, match=words):
    dataclasses.replace(PLAIN, **{option: value})
