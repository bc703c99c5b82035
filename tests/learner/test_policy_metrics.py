"""Metrics of a policy and of its routing, from arrays made by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import random_routes

from gspo_jax import model
from gspo_jax.learner import policy_metrics, train_batch
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import EDGES
from gspo_jax.sampler.samples import Prompts

CFG = model.variant("tiny")
B, S, R, L, E, K = 6, 3, 4, 2, CFG.num_experts, CFG.experts_per_token
LENGTHS = np.array([4, 1, 2, 0, 4, 4], np.int32)


@pytest.fixture(scope="module")
def inputs():
  """A batch, and the old policy's pass over it."""
  rng = np.random.default_rng(0)
  uniform = lambda *shape: rng.random(shape, np.float32)
  batch = train_batch.unpacked(
    Prompts(np.zeros((B, S), np.int32), np.full(B, S, np.int32)),
    np.zeros((B, R), np.int32),
    LENGTHS,
  )
  batch = dataclasses.replace(batch, sampler_logps=jnp.asarray(-uniform(B, R)))
  router_entropy = uniform(L, B, R)
  router_entropy[:, ~np.asarray(batch.response_mask)] = np.nan  # never read
  experts = rng.integers(0, E // 2, (L, B, S + R, K)).astype(np.uint8)
  out = TokenLogprobs(
    logps=-uniform(B, R),
    entropy=uniform(B, R),
    experts=experts,
    router_entropy=router_entropy,
    dropped=np.array([2, 3], np.int32),
  )
  return batch, out


@pytest.fixture(scope="module")
def metrics(inputs):
  batch, out = inputs
  return policy_metrics.old_policy_metrics(out, batch, CFG)


def test_metrics_of_the_routing(inputs, metrics):
  batch, out = inputs
  mask = np.asarray(batch.response_mask)
  expected = [layer[mask].mean() for layer in out.router_entropy]
  entropy = metrics["moe/layer_router_entropy"].value()
  np.testing.assert_allclose(entropy, expected, rtol=1e-5)
  # The tokens that predict the response, each before its response token.
  predicting = out.experts[:, :, S - 1 : -1]
  counts = [
    np.bincount(layer[mask].ravel(), minlength=E) for layer in predicting
  ]
  load = [count.max() / count.mean() for count in counts]
  np.testing.assert_allclose(
    metrics["moe/layer_load_max"].value(), load, rtol=1e-5
  )
  for name in ("router_entropy", "load_max"):
    layers = metrics[f"moe/layer_{name}"].value()
    mean = metrics[f"moe/{name}"].value()
    assert mean == pytest.approx(layers.mean(), rel=1e-5)


def test_the_mismatch_is_recomputed_less_sampled(inputs, metrics):
  batch, out = inputs
  mask = np.asarray(batch.response_mask)
  gap = out.logps - np.asarray(batch.sampler_logps)
  means = [row[m].mean() for row, m in zip(gap, mask, strict=True) if m.any()]
  for unit, values in (("token", gap[mask]), ("sequence", means)):
    counts = metrics[f"mismatch/{unit}_gap"].value()
    np.testing.assert_array_equal(counts, np.histogram(values, EDGES)[0])
    mean = metrics[f"mismatch/{unit}_abs_mean"].value()
    assert mean == pytest.approx(np.abs(values).mean(), rel=1e-5)


def test_entropy_of_response_tokens_and_dropped_choices(inputs, metrics):
  batch, out = inputs
  mean = out.entropy[np.asarray(batch.response_mask)].mean()
  assert metrics["policy/entropy"].value() == pytest.approx(mean, rel=1e-5)
  assert metrics["moe/dropped"].value() == 2 + 3  # over layers


MASK = np.arange(R) < LENGTHS[:, None]


def test_flips_are_old_experts_that_are_not_chosen():
  """Of the tokens before those of the response."""
  old, new = (random_routes(E, K, B, L, S + R, seed=seed) for seed in (0, 1))
  new[0, 0] = old[0, 0]
  flips = jax.jit(policy_metrics.expert_flips)(new, old, MASK)
  for layer in range(L):
    gone = [
      len({*old[b, layer, S - 1 + r]} - {*new[b, layer, S - 1 + r]})
      for b, r in np.argwhere(MASK)
    ]
    assert flips.value()[layer] == pytest.approx(np.mean(gone) / K)
  assert 0 < flips.value()[0] < flips.value()[1] < 1
  reordered = policy_metrics.expert_flips(old[..., ::-1], old, MASK)
  assert not reordered.value().any()


def test_the_shift_is_a_mean_over_layers_and_experts():
  rng = np.random.default_rng(2)
  old, new = rng.normal(size=(2, B, L, R, K)).astype(np.float32)
  shift = policy_metrics.router_shift(new, old)
  expected = np.abs(new - old).mean((1, 3))
  np.testing.assert_allclose(shift, expected, rtol=1e-5)
  assert not policy_metrics.router_shift(old, old).any()
  total = lambda x: policy_metrics.router_shift(x, old).sum()
  assert not jax.grad(total)(jnp.asarray(new)).any()
