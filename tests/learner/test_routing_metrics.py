"""Metrics of the routing, against loops over every token and expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import random_routes

from gspo_jax.learner import policy_metrics as routing

B, L, S, R, k, E = 3, 2, 4, 5, 2, 6
T = S + R


def mask():
  """[B, R]: the last row has no token at all."""
  return np.arange(R) < np.array([R, 2, 0])[:, None]


def predicting():
  """Every (row, place) whose next token is in the response."""
  return [(b, S - 1 + r) for b, r in np.argwhere(mask())]


def test_flips_are_old_experts_that_are_not_chosen():
  old, new = (random_routes(E, k, B, L, T, seed=seed) for seed in (0, 1))
  new[0, 0] = old[0, 0]
  flips = jax.jit(routing.expert_flips)(new, old, mask())
  for layer in range(L):
    gone = [
      len({*old[b, layer, t]} - {*new[b, layer, t]}) for b, t in predicting()
    ]
    assert flips.value()[layer] == pytest.approx(np.mean(gone) / k)
  assert 0 < flips.value()[0] < flips.value()[1] < 1


def test_the_order_of_experts_does_not_matter():
  old = random_routes(E, k, B, L, T)
  assert not routing.expert_flips(old[..., ::-1], old, mask()).value().any()


def test_the_shift_is_a_mean_over_layers_and_experts():
  rng = np.random.default_rng(2)
  old, new = rng.normal(size=(2, B, L, R, k)).astype(np.float32)
  shift = routing.router_shift(new, old)
  assert shift.shape == (B, R)
  for b, r in np.ndindex(B, R):
    apart = [
      abs(new[b, i, r, j] - old[b, i, r, j]) for i, j in np.ndindex(L, k)
    ]
    assert shift[b, r] == pytest.approx(np.mean(apart), rel=1e-5)
  assert not routing.router_shift(old, old).any()
  grad = jax.grad(lambda x: routing.router_shift(x, old).sum())(
    jnp.asarray(new)
  )
  assert not grad.any()
