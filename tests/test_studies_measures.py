"""The measures of the studies of ratios and gradients, by definition."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import losses, model
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.logprobs import token_logprobs
from studies import measures
from studies.gradient_noise import gradients, quantities

EVERY = ((0.2, 0.27), (3e-4, 4e-4))  # clip ranges of tokens and sequences
CFG = model.ModelConfig(
  vocab_size=11,
  num_layers=1,
  embed_dim=8,
  num_heads=2,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=8,
  dtype="float32",
)


@pytest.mark.parametrize("exponent", [-0.5, 0.0, 1.3])
def test_power_finds_the_exponent(exponent):
  sizes = np.array([3, 10, 20, 100])
  assert math.isclose(
    measures.power(sizes, 7 * sizes**exponent), exponent, abs_tol=1e-12
  )


def test_power_of_zero_or_of_one_point_is_nan():
  assert math.isnan(measures.power([1, 2], [0.0, 1.0]))
  assert math.isnan(measures.power([5], [1.0]))


def answers(lengths, width, rng):
  mask = np.arange(width) < np.array(lengths)[:, None]
  # Values outside the mask are NaN, and must not be read.
  return np.where(mask, rng.standard_normal(mask.shape), np.nan), mask


def test_spread_is_of_responses_in_the_range_of_lengths():
  gaps, mask = answers([2, 5, 5, 9], 12, np.random.default_rng(0))
  result = measures.spread(gaps, mask, (3, 6), *EVERY)
  tokens = np.concatenate([gaps[1, :5], gaps[2, :5]])
  means = [gaps[1, :5].mean(), gaps[2, :5].mean()]
  assert (result["answers"], result["tokens"], result["length"]) == (2, 10, 5.0)
  np.testing.assert_allclose(result["token_variance"], np.var(tokens, ddof=1))
  np.testing.assert_allclose(result["sequence_variance"], np.var(means, ddof=1))


def test_spread_needs_two_responses():
  gaps, mask = answers([2, 5], 6, np.random.default_rng(0))
  assert measures.spread(gaps, mask, (1, 4), *EVERY) is None
  assert measures.spread(gaps, mask, (7, 9), *EVERY) is None


def test_shares_outside():
  ratios = np.array([[0.79, 0.81, 1.26, 1.28], [1.0, 1.0, 1.0, 1.0]])
  mask = np.ones(ratios.shape, bool)
  result = measures.spread(np.log(ratios), mask, (4, 4), *EVERY)
  assert result["token_outside"] == 2 / 8
  assert result["sequence_outside"] == 1 / 2


def test_independent_tokens_average_out_by_the_root_of_length():
  rng, lengths, stds = np.random.default_rng(1), (8, 32, 128), []
  for n in lengths:
    gaps, mask = answers([n] * 4000, n, rng)
    pooled = measures.pooled([measures.spread(gaps, mask, (n, n), *EVERY)])
    assert abs(pooled["token_std"] - 1) < 0.02
    stds.append(pooled["sequence_std"])
  assert abs(measures.power(lengths, stds) + 0.5) < 0.02


def test_pooled_ignores_differences_of_the_means():
  rng = np.random.default_rng(2)
  gaps, mask = answers([4] * 50, 4, rng)
  once = measures.spread(gaps, mask, (4, 4), *EVERY)
  shifted = measures.spread(gaps + 3, mask, (4, 4), *EVERY)
  pooled = measures.pooled([once, None, shifted])
  assert pooled["answers"] == 100
  np.testing.assert_allclose(pooled["token_std"] ** 2, once["token_variance"])
  assert measures.pooled([None]) is None


def test_noise_is_unbiased():
  """For vectors of a given mean and covariance."""
  rng = np.random.default_rng(3)
  mean, scales = np.array([1.0, -2.0, 0.5]), np.array([1.0, 0.3, 2.0])
  parts = rng.standard_normal((20_000, 2, 1, 3)) * scales + mean
  grams = np.einsum("nakd,nbld->nakbl", parts, parts)
  noise, dot = measures.noise(grams, [1]), measures.dot(grams, [1])
  assert abs(noise.mean() / (scales**2).sum() - 1) < 0.03
  assert abs(dot.mean() / (mean**2).sum() - 1) < 0.03
  np.testing.assert_allclose(noise + dot, measures.energy(grams, [1]))


def test_parts_of_a_gradient_are_summed():
  parts = np.random.default_rng(4).standard_normal((5, 2, 3, 7))
  grams = np.einsum("nakd,nbld->nakbl", parts, parts)
  whole = parts @ np.eye(7)
  whole = 2 * whole[:, :, 0] - whole[:, :, 2]
  squares = (whole[:, 0] - whole[:, 1]) ** 2
  np.testing.assert_allclose(
    measures.noise(grams, [2, 0, -1]), squares.sum(-1) / 2
  )


def pairs(moved, *, N=2, G=4, S=3, R=6):
  """A policy, and responses with old log-probs at a distance of `moved`."""
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (N, 2, G)
  tokens = jax.random.randint(keys[0], (*shape, S + R), 0, CFG.vocab_size)
  rows = TrainBatch(
    tokens=tokens,
    positions=np.broadcast_to(np.arange(S + R), tokens.shape),
    segment_ids=np.ones(tokens.shape, np.int32),
    response_mask=np.broadcast_to(np.arange(R) < R - 1, (*shape, R)),
    old_logps=np.zeros((*shape, R), np.float32),
    advantages=np.broadcast_to(
      np.float32([1, -1, 1, -1])[:, None], (*shape, R)
    ),
  )
  params = model.init(keys[1], CFG)
  logps = np.stack(
    [[score(params, group(rows, n, a)) for a in (0, 1)] for n in range(N)]
  )
  noise = jax.random.normal(keys[2], logps.shape)
  return params, rows.__class__(
    **{**vars(rows), "old_logps": logps + moved * noise}
  )


def group(rows, n, a):
  return jax.tree.map(lambda x: x[n, a], rows)


@jax.jit
def score(params, rows):
  return token_logprobs(
    params,
    CFG,
    rows.tokens,
    rows.positions,
    rows.segment_ids,
    response_length=rows.response_mask.shape[1],
  ).logps


# Compiled once for all tests.
grams_of = jax.jit(functools.partial(gradients.grams, cfg=CFG, temperature=1.0))


@functools.partial(jax.jit, static_argnums=0)
def direct(loss, params, rows, old=None):
  """The gradient of a loss, as one vector."""

  def total(params):
    x = score(params, rows)
    o = jax.lax.stop_gradient(x) if old is None else old
    return loss(x, o, rows.advantages[:, 0], rows.response_mask)[0]

  leaves = jax.tree.leaves(jax.grad(total)(params))
  return jnp.concatenate([jnp.ravel(x) for x in leaves])


@pytest.mark.parametrize(
  "name",
  [
    "gspo",
    pytest.param("grpo", marks=pytest.mark.slow),
    pytest.param("grpo unclipped", marks=pytest.mark.slow),
  ],
)
def test_grams_are_those_of_the_losses(name):
  params, rows = pairs(moved=0.3)
  grams, _ = grams_of(params, rows)
  loss = gradients.METHODS[name]
  for n in range(2):
    each = [group(rows, n, a) for a in (0, 1)]
    method = [direct(loss, params, g, g.old_logps) for g in each]
    on_policy = [direct(losses.grpo_loss, params, g) for g in each]
    added, noise = quantities.added(grams, name), quantities.noise(grams, name)
    # [of the method, at ratio 1]
    squares = lambda x: (np.sum(x[0] ** 2) + np.sum(x[1] ** 2)) / 2
    np.testing.assert_allclose(
      added[n],
      [
        squares([a - b for a, b in zip(method, on_policy, strict=True)]),
        squares(on_policy),
      ],
      rtol=1e-4,
    )
    np.testing.assert_allclose(
      noise[n],
      [np.sum((x[0] - x[1]) ** 2) / 2 for x in (method, on_policy)],
      rtol=1e-4,
    )


def test_nothing_is_added_at_ratio_1():
  params, rows = pairs(moved=0.0)
  grams, clipped = grams_of(params, rows)
  for name in gradients.METHODS:
    assert quantities.rms(quantities.added(grams, name)) < 1e-5
    assert np.all(clipped[name] == 0)


def test_added_is_not_lost_in_rounding():
  """Ratios within 1e-5 of 1 add 1e-5 of the gradient, not float32's 1e-4."""
  params, rows = pairs(moved=1e-5)
  grams, _ = grams_of(params, rows)
  small = quantities.rms(quantities.added(grams, "grpo unclipped"))
  assert 1e-6 < small < 3e-5


def test_more_clipping_of_sequences_than_of_tokens():
  params, rows = pairs(moved=0.05)
  _, clipped = grams_of(params, rows)
  assert np.mean(clipped["gspo"]) > 0.2
  assert np.all(clipped["grpo"] == 0)
  assert np.all(clipped["gspo unclipped"] == 0)
