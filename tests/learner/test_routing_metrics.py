"""Metrics of the routing, against loops over every token and expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.learner import routing_metrics as routing

B, L, S, R, k, E = 3, 2, 4, 5, 2, 6
T = S + R


def random_experts(seed):
  """[B, L, T, k]; the experts of a token differ."""
  rng = np.random.default_rng(seed)
  order = rng.permuted(np.broadcast_to(np.arange(E), (B, L, T, E)), axis=-1)
  return order[..., :k].astype(np.uint8)


def mask():
  """[B, R]: the last row has no token at all."""
  return np.arange(R) < np.array([R, 2, 0])[:, None]


def predicting():
  """Every (row, place) whose next token is in the response."""
  return [(b, S - 1 + r) for b, r in np.argwhere(mask())]


def test_flips_are_old_experts_that_are_not_chosen():
  old, new = random_experts(0), random_experts(1)
  new[0, 0] = old[0, 0]
  flips = jax.jit(routing.flips)(new, old, mask())
  for layer in range(L):
    gone = [
      len({*old[b, layer, t]} - {*new[b, layer, t]}) for b, t in predicting()
    ]
    assert flips.value()[layer] == pytest.approx(np.mean(gone) / k)
  assert 0 < flips.value()[0] < flips.value()[1] < 1


def test_the_order_of_experts_does_not_matter():
  old = random_experts(0)
  assert not routing.flips(old[..., ::-1], old, mask()).value().any()


def test_flips_by_hand():
  old = np.zeros((1, 2, 2, 2), np.uint8)  # T = 2, R = 1: the first predicts
  new = old.copy()
  old[0, :, 0] = [[0, 1], [2, 3]]
  new[0, :, 0] = [[1, 0], [2, 5]]
  new[0, :, 1] = 4  # predicts no response token
  flips = routing.flips(new, old, np.ones((1, 1), bool))
  assert flips.value().tolist() == [0, 0.5]
  assert routing.over_layers(flips).value() == 0.25


def test_the_shift_is_a_mean_over_layers_and_experts():
  rng = np.random.default_rng(2)
  old, new = rng.normal(size=(2, B, L, R, k)).astype(np.float32)
  shift = routing.shift(new, old)
  assert shift.shape == (B, R)
  for b, r in np.ndindex(B, R):
    apart = [
      abs(new[b, i, r, j] - old[b, i, r, j]) for i, j in np.ndindex(L, k)
    ]
    assert shift[b, r] == pytest.approx(np.mean(apart), rel=1e-5)
  assert not routing.shift(old, old).any()
  grad = jax.grad(lambda x: routing.shift(x, old).sum())(jnp.asarray(new))
  assert not grad.any()


def test_the_busiest_expert_of_each_layer():
  experts = random_experts(3)
  experts[:, 1] = [0, 1]  # two experts do all the work of six
  tokens = routing.tokens(experts, mask(), E)
  counts = np.bincount(
    np.ravel([experts[b, 0, t] for b, t in predicting()]), minlength=E
  )
  expected = [counts.max() / counts.mean(), E / k]
  np.testing.assert_allclose(routing.Load(tokens).value(), expected, rtol=1e-6)
  mean = routing.MeanLoad(tokens).value()
  assert mean == pytest.approx(np.mean(expected))


def test_the_entropy_of_each_layer():
  entropies = np.random.default_rng(4).random((B, L, R)).astype(np.float32)
  entropies[~mask()[:, None].repeat(L, 1)] = np.nan  # never read
  means = routing.entropy(entropies, mask()).value()
  expected = [entropies[:, i][mask()].mean() for i in range(L)]
  np.testing.assert_allclose(means, expected, rtol=1e-5)


def test_means_of_layers_add_up_over_micro_batches():
  old, new = random_experts(0), random_experts(1)
  whole = routing.flips(new, old, mask())
  parts = [routing.flips(new[i], old[i], mask()[i]) for i in ([0], [1, 2])]
  both = jax.tree.map(lambda a, b: a + b, *parts)
  np.testing.assert_allclose(both.value(), whole.value(), rtol=1e-6)
