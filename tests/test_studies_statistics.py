"""The numbers of the studies, by tables, textbooks, simulation, definition."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import DENSE
from scipy import stats

from gspo_jax import losses, model
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.logprobs import token_logprobs
from studies import intervals, measures, seeds
from studies.gradient_noise import gradients, quantities
from studies.ratio_spread import run as ratio_spread


def test_mean_has_the_interval_of_a_table():
  # mean 3, s = sqrt(2.5), t(.975, 4) = 2.776: 3 +- 2.776 sqrt(2.5 / 5)
  found = intervals.mean([1, 2, 3, 4, 5])
  assert found["mean"] == 3
  assert found["high"] - 3 == pytest.approx(1.963, abs=1e-3)
  assert 3 - found["low"] == pytest.approx(1.963, abs=1e-3)
  assert math.isnan(intervals.mean([2.0])["low"])
  assert math.isnan(intervals.mean([])["mean"])


def test_paired_is_of_the_differences():
  # differences 1, 2, 3: t = 2 / (1 / sqrt 3) = 3.464, 2 degrees of freedom;
  # there p = 1 - t / sqrt(t^2 + 2)
  found = intervals.paired([11, 22, 33], [10, 20, 30])
  assert found["mean"] == 2
  assert found["p"] == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-9)
  swapped = intervals.paired([10, 20, 30], [11, 22, 33])
  assert swapped["p"] == pytest.approx(found["p"])
  assert swapped["mean"] == -2
  assert intervals.paired([1, 2], [1, 2])["p"] == 1
  assert intervals.paired([2, 3], [1, 2])["p"] == 0
  assert math.isnan(intervals.paired([1], [0])["p"])


def test_holm_is_the_textbook_one():
  # Sorted .01, .02, .03, .04 times 4, 3, 2, 1, never falling.
  assert intervals.holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx(
    [0.06, 0.04, 0.06, 0.06]
  )
  assert intervals.holm([0.9, 0.8]) == [1.0, 1.0]
  low, none = intervals.holm([0.02, math.nan])
  assert low == pytest.approx(0.04)
  assert math.isnan(none)


def test_judge_says_which_way_and_only_where_p_of_all_is_small():
  found = [
    {"mean": mean, "p": p, "sd": 0.1, "n": 5}
    for mean, p in ((0.1, 0.01), (-0.1, 0.02), (0.1, 0.04), (0.1, math.nan))
  ]
  intervals.judge(found[:2])
  assert [one["verdict"] for one in found[:2]] == ["higher", "lower"]
  intervals.judge(found)
  verdicts = [one["verdict"] for one in found]
  assert verdicts == ["higher", *["not distinguished"] * 3]


def test_bootstrap_of_a_mean_is_near_students_interval():
  values = list(range(200))
  low, high = intervals.bootstrap(values, lambda x: x.mean())
  exact = intervals.mean(values)
  assert low == pytest.approx(exact["low"], abs=1.0)
  assert high == pytest.approx(exact["high"], abs=1.0)


@pytest.mark.parametrize(
  ("ends", "where"),
  [((0.1, 0.2), "within"), ((0.0, 0.04), "below"), ((0.3, 0.4), "above"),
   ((0.04, 0.1), "undecided"), ((0.1, 0.3), "undecided"),
   ((math.nan, math.nan), "undecided")],
)  # fmt: skip
def test_place(ends, where):
  found = dict(zip(("low", "high"), ends, strict=True))
  assert intervals.place(found, 0.05, 0.2) == where


@pytest.mark.parametrize(("n", "level"), [(5, 0.0125), (3, 0.05)])
def test_detectable_is_found_four_times_of_five(n, level):
  shift = intervals.detectable(2.0, n, level)
  draws = np.random.default_rng(0).normal(shift, 2.0, (20_000, n))
  p = stats.ttest_1samp(draws, 0.0, axis=1).pvalue
  assert abs(np.mean(p < level) - 0.8) < 0.01
  assert math.isnan(intervals.detectable(math.nan, 1, 0.05))


def test_seeds_are_paired_where_both_have_a_number():
  own = {0: {"x": 1.0}, 1: {"x": math.nan}, 2: {"x": 3.0}, 3: {"x": 4.0}}
  base = {3: {"x": 40.0}, 2: {"x": None}, 1: {"x": 20.0}, 0: {"x": 10.0}}
  assert seeds.pairs(own, base, "x") == ([1.0, 4.0], [10.0, 40.0])
  assert seeds.values(own, "x") == [1.0, 3.0, 4.0]


CLIPS = ((0.2, 0.27), (3e-4, 4e-4))  # of tokens and of sequences


@pytest.mark.parametrize("exponent", [-0.5, 0.0, 1.3])
def test_power_finds_the_exponent(exponent):
  sizes = np.array([3, 10, 20, 100])
  found = measures.power(sizes, 7 * sizes**exponent)
  assert math.isclose(found, exponent, abs_tol=1e-12)
  assert math.isnan(measures.power([1, 2], [0.0, 1.0]))


def answers(lengths, width, rng):
  mask = np.arange(width) < np.array(lengths)[:, None]
  # Values outside the mask are NaN, and must not be read.
  return np.where(mask, rng.standard_normal(mask.shape), np.nan), mask


def test_spread_is_of_responses_in_the_range_of_lengths():
  gaps, mask = answers([2, 5, 5, 9], 12, np.random.default_rng(0))
  result = measures.spread(gaps, mask, (3, 6), *CLIPS)
  tokens = np.concatenate([gaps[1, :5], gaps[2, :5]])
  means = [gaps[1, :5].mean(), gaps[2, :5].mean()]
  assert (result["answers"], result["tokens"], result["length"]) == (2, 10, 5.0)
  np.testing.assert_allclose(result["token_variance"], np.var(tokens, ddof=1))
  np.testing.assert_allclose(result["sequence_variance"], np.var(means, ddof=1))
  assert measures.spread(gaps, mask, (1, 4), *CLIPS) is None  # of one


def test_shares_outside():
  ratios = np.array([[0.79, 0.81, 1.26, 1.28], [1.0, 1.0, 1.0, 1.0]])
  mask = np.ones(ratios.shape, bool)
  result = measures.spread(np.log(ratios), mask, (4, 4), *CLIPS)
  assert result["token_outside"] == 2 / 8
  assert result["sequence_outside"] == 1 / 2


def test_independent_tokens_average_out_by_the_root_of_length():
  """Also where the means of two rollouts differ, which is no spread."""
  rng, lengths, stds = np.random.default_rng(1), (8, 32, 128), []
  for n in lengths:
    gaps, mask = answers([n] * 2000, n, rng)
    spreads = [measures.spread(gaps + x, mask, (n, n), *CLIPS) for x in (0, 3)]
    pooled = measures.pooled([*spreads, None])
    assert pooled["answers"] == 4000
    assert abs(pooled["token_std"] - 1) < 0.02
    stds.append(pooled["sequence_std"])
  assert abs(measures.power(lengths, stds) + 0.5) < 0.03


@pytest.mark.parametrize(
  ("exponent", "range_fits", "independence"),
  [
    (0.0, "within", "above"),
    (-0.2, "below", "above"),
    (-0.301, "below", "undecided"),  # less the tokens' .2
    (-0.5, "below", "below"),
  ],
)
def test_ratio_spread_judges_both_exponents(exponent, range_fits, independence):
  stds = lambda n, seed: {
    "token_std": 0.05 * n**0.2,
    "sequence_std": 0.01 * n ** (exponent + seed / 1000),
  }
  rest = {"tokens from": 1, "token_outside": 0.01, "sequence_outside": 0.9}
  results = []
  for seed in range(3):
    bins = [rest | {"length": n} | stds(n, seed) for n in (17.0, 59.0, 115.0)]
    exponents = ratio_spread.exponents(bins)
    results.append({"seed": seed, "exponents": exponents, "bins": bins})
  found = ratio_spread.summarize(results)
  assert found["one range for all"] == range_fits
  assert found["against -1/2"] == independence


def gram(parts):
  """[N, 2, K, D] -> [N, 2, K, 2, K]"""
  return np.einsum("nakd,nbld->nakbl", parts, parts)


def test_noise_is_unbiased():
  """For vectors of a given mean and covariance."""
  rng = np.random.default_rng(3)
  mean, scales = np.array([1.0, -2.0, 0.5]), np.array([1.0, 0.3, 2.0])
  grams = gram(rng.standard_normal((20_000, 2, 1, 3)) * scales + mean)
  noise, dot = measures.noise(grams, [1]), measures.dot(grams, [1])
  assert abs(noise.mean() / (scales**2).sum() - 1) < 0.03
  assert abs(dot.mean() / (mean**2).sum() - 1) < 0.03
  np.testing.assert_allclose(noise + dot, measures.energy(grams, [1]))


def test_noise_of_random_dropping_is_1():
  """Relative to the kept share: dropping terms does not reduce the noise."""
  rng = np.random.default_rng(0)
  responses = rng.standard_normal((200, 2, 8, 300))
  kept = rng.permuted(np.tile(np.arange(8) < 2, (200, 2, 1)), axis=-1)
  whole = responses.sum(2)
  dropped = (responses * kept[..., None]).sum(2)
  nothing = np.zeros_like(whole)
  parts = np.stack([whole, dropped - whole, nothing, nothing, nothing], 2)
  clipped = dict.fromkeys(gradients.METHODS, 0.0) | {"grpo": 0.75}
  assert next(iter(gradients.METHODS)) == "grpo"
  found = quantities.describe(gram(parts), {"clipped tokens": clipped})
  for method in gradients.METHODS:
    assert found["noise"][method]["mean"] == pytest.approx(1, abs=0.05)
  assert found["added"]["grpo"]["mean"] == pytest.approx(0.75**0.5, abs=0.05)
  assert found["added"]["gspo"]["mean"] == 0


CFG = dataclasses.replace(DENSE, vocab_size=11, num_layers=1)
N, G, S, R = 2, 4, 3, 6  # pairs of groups, responses, prompt and response


@functools.cache
def policy_and_pairs(moved):
  """A policy, and responses with old log-probs at a distance of `moved`."""
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (N, 2, G)
  tokens = jax.random.randint(keys[0], (*shape, S + R), 0, CFG.vocab_size)
  signs = np.float32([1, -1, 1, -1])[:, None]
  rows = {
    "tokens": tokens,
    "positions": np.broadcast_to(np.arange(S + R), tokens.shape),
    "segment_ids": np.ones(tokens.shape, np.int32),
    "response_mask": np.broadcast_to(np.arange(R) < R - 1, (*shape, R)),
    "old_logps": np.zeros((*shape, R), np.float32),
    "advantages": np.broadcast_to(signs, (*shape, R)),
    "response_index": np.zeros((*shape, R), np.int32),
  }
  params = model.init(keys[1], CFG)
  flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), TrainBatch(**rows))
  logps = logps_of(params, flat).reshape(*shape, R)
  old = logps + moved * jax.random.normal(keys[2], logps.shape)
  return params, TrainBatch(**rows | {"old_logps": old})


@jax.jit
def logps_of(params, rows):
  return token_logprobs(
    params,
    CFG,
    rows.tokens,
    rows.positions,
    rows.segment_ids,
    response_length=R,
  ).logps


# Compiled once for all tests.
grams_of = jax.jit(functools.partial(gradients.grams, cfg=CFG, temperature=1.0))


@functools.partial(jax.jit, static_argnums=0)
def direct(loss, params, rows, old=None):
  """The gradient of a loss, as one vector."""

  def total(params):
    x = logps_of(params, rows)
    o = jax.lax.stop_gradient(x) if old is None else old
    return loss(x, o, rows.advantages[:, 0], rows.response_mask)[0]

  leaves = jax.tree.leaves(jax.grad(total)(params))
  return jnp.concatenate([jnp.ravel(x) for x in leaves])


@pytest.mark.parametrize(
  "name",
  ["gspo", pytest.param("grpo", marks=pytest.mark.slow),
   pytest.param("grpo unclipped", marks=pytest.mark.slow)],
)  # fmt: skip
def test_grams_are_those_of_the_losses(name):
  params, rows = policy_and_pairs(0.3)
  grams, _ = grams_of(params, rows)
  added, noise = quantities.added(grams, name), quantities.noise(grams, name)
  energy = lambda x: (np.sum(x[0] ** 2) + np.sum(x[1] ** 2)) / 2
  for n in range(N):
    groups = [jax.tree.map(lambda x, i=(n, a): x[i], rows) for a in (0, 1)]
    method = [
      direct(gradients.METHODS[name], params, g, g.old_logps) for g in groups
    ]
    at_one = [direct(losses.grpo_loss, params, g) for g in groups]
    gaps = [a - b for a, b in zip(method, at_one, strict=True)]
    np.testing.assert_allclose(
      added[n], [energy(gaps), energy(at_one)], rtol=1e-4
    )
    np.testing.assert_allclose(
      noise[n],
      [np.sum((x[0] - x[1]) ** 2) / 2 for x in (method, at_one)],
      rtol=1e-4,
    )


def test_ratios_near_1_add_nothing_and_it_is_not_lost_in_rounding():
  """Within 1e-5 of 1 they add 1e-5 of the gradient, not float32's 1e-4."""
  grams, clipped = grams_of(*policy_and_pairs(0.0))
  for name in gradients.METHODS:
    assert quantities.rms(quantities.added(grams, name)) < 1e-5
    assert np.all(clipped[name] == 0)
  grams, _ = grams_of(*policy_and_pairs(1e-5))
  small = quantities.rms(quantities.added(grams, "grpo unclipped"))
  assert 1e-6 < small < 3e-5
  _, clipped = grams_of(*policy_and_pairs(0.05))
  assert np.mean(clipped["gspo"]) > 0.2  # sequences clip before tokens do
  assert np.all(clipped["grpo"] == 0)
  assert np.all(clipped["gspo unclipped"] == 0)
