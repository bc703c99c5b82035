"""Advantages against NumPy in float64."""

import itertools

import jax
import numpy as np
import oracles
import pytest

from gspo_jax import (
  gdpo_advantages,
  generalized_advantages,
  group_relative_advantages,
  max_rl_advantages,
  pass_at_k_advantages,
  reinforce_plus_plus_advantages,
  rloo_advantages,
  whiten,
)
from gspo_jax.losses.advantages import turn_advantages


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_group_relative_advantages_equal_the_formula(normalize_std, ddof):
  rewards = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
  expected = []
  for group in rewards.astype(np.float64):
    std = group.std(ddof=ddof) + 0.01 if normalize_std else 1.0
    expected.append((group - group.mean()) / std)
  advantages = group_relative_advantages(
    rewards, normalize_std=normalize_std, ddof=ddof, eps=0.01
  )
  assert advantages.dtype == np.float32
  np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exact_zeros(normalize_std, eps, ddof):
  # Sizes and values whose mean rounds, so that r - mean is not 0.
  for size in (6, 7, 13):
    rewards = np.repeat([[0.1], [0.7], [1 / 3], [1e6 + 0.3]], size, axis=1)
    advantages = group_relative_advantages(
      rewards, normalize_std=normalize_std, eps=eps, ddof=ddof
    )
    np.testing.assert_array_equal(advantages, np.zeros((4, size)))


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (4, 1), (4, 0)])
def test_other_shapes_are_refused(shape):
  with pytest.raises(ValueError, match=r"expected rewards \[P, G\], G >= 2"):
    group_relative_advantages(np.zeros(shape))


def test_ddof_needs_a_larger_group():
  with pytest.raises(ValueError, match="G >= 3"):
    group_relative_advantages(np.zeros((1, 2)), ddof=2)


def random_rewards(shape=(5, 6), seed=0):
  return np.random.default_rng(seed).random(shape).astype(np.float32)


def test_rloo_compares_a_response_with_the_others():
  rewards = random_rewards()
  expected = [
    [x - np.delete(group, i).mean() for i, x in enumerate(group)]
    for group in rewards.astype(np.float64)
  ]
  np.testing.assert_allclose(rloo_advantages(rewards), expected, atol=1e-6)


def expected_gradient(advantages, size, p):
  """E[mean_i A_i d log P(r_i) / dp] over all groups of Bernoulli rewards."""
  groups = np.array([*itertools.product((0.0, 1.0), repeat=size)])
  score = (groups - p) / (p * (1 - p))
  terms = (np.asarray(advantages(groups), np.float64) * score).mean(1)
  return terms @ np.where(groups > 0, p, 1 - p).prod(1)


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("size", [2, 5])
def test_the_expected_gradient_is_that_of_the_objective(size, p):
  """RLOO's of p; MaxRL's of the first G - 1 terms of log p."""
  found = expected_gradient(rloo_advantages, size, p)
  np.testing.assert_allclose(found, 1, rtol=1e-5)
  found = expected_gradient(max_rl_advantages, size, p)
  terms = [(1 - p) ** (k - 1) for k in range(1, size)]
  np.testing.assert_allclose(found, sum(terms), rtol=1e-5)


def test_max_rl_weighs_a_problem_by_how_rarely_it_is_solved():
  rewards = np.tril(np.ones((6, 6)), -1)  # of row K, K are right
  expected = [
    [6 / k - 1 if right else -1 for right in row] if k else [0] * 6
    for k, row in enumerate(rewards)
  ]
  np.testing.assert_allclose(max_rl_advantages(rewards), expected, atol=1e-6)
  assert not np.any(max_rl_advantages(-rewards))
  # Their mean is near 0, and a division by it would mean nothing.
  assert not np.any(max_rl_advantages(np.array([[-1, 1, -0.9, 1.0]])))


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_normalizes_over_the_batch(baseline):
  rewards = random_rewards()
  expected = rewards.astype(np.float64)
  if baseline:
    expected = expected - expected.mean(1, keepdims=True)
  expected = (expected - expected.mean()) / (expected.std() + 0.01)
  found = reinforce_plus_plus_advantages(rewards, baseline=baseline, eps=0.01)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  if not baseline:  # and needs no group
    flat = reinforce_plus_plus_advantages(rewards.reshape(-1, 1), eps=0.01)
    np.testing.assert_array_equal(np.ravel(found), np.ravel(flat))


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
  rewards = np.tril(np.ones((7, 6)), -1)
  expected = np.zeros(rewards.shape)
  subsets = [*itertools.combinations(range(6), k)]
  for row, group in zip(expected, rewards, strict=True):
    passes = np.array([group[[*subset]].max() for subset in subsets])
    if passes.std():
      passes = (passes - passes.mean()) / passes.std()
      for i in range(6):
        with_i = [i in subset for subset in subsets]
        row[i] = passes[with_i].mean()
  found = pass_at_k_advantages(rewards, k=k)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  # Exact zeros: none right, all right, or fewer than k wrong.
  np.testing.assert_array_equal(np.asarray(found)[expected[:, 0] == 0], 0)
  if k == 1:
    grpo = group_relative_advantages(rewards, eps=0)
    np.testing.assert_allclose(found, grpo, atol=1e-5)


def test_gdpo_normalizes_each_reward_and_then_their_sum():
  rewards, weights = random_rewards((4, 5, 3)), [1.0, 0.25, -0.5]
  rewards *= np.float32([1, 100, 0.01])  # the scale of a reward is no weight
  rewards[0, 1:3, 0] = rewards[1, :4, 1] = rewards[2, :, 2] = np.nan
  rewards[3, :, 0] = 0.7
  sums = np.zeros((4, 5))
  for p, i, n in np.ndindex(4, 5, 3):
    group = rewards[p, :, n].astype(np.float64)
    group = group[~np.isnan(group)]
    if np.isfinite(rewards[p, i, n]) and np.ptp(group):
      centered = rewards[p, i, n] - group.mean()
      sums[p, i] += weights[n] * centered / group.std()
  expected = (sums - sums.mean()) / sums.std()
  found = gdpo_advantages(rewards, weights)
  np.testing.assert_allclose(found, expected, atol=1e-3)
  equal = np.full((2, 3, 2), 0.7, np.float32)
  assert not np.any(gdpo_advantages(equal, [1, 1]))
  with pytest.raises(ValueError, match=r"expected rewards \[P, G, N\] and wei"):
    gdpo_advantages(rewards, [1.0])


BY_GROUP = {
  "rloo": rloo_advantages,
  "max_rl": max_rl_advantages,
  "pass_at_k": lambda rewards: pass_at_k_advantages(rewards, k=2),
  "baseline": lambda rewards: reinforce_plus_plus_advantages(
    rewards, baseline=True
  ),
  "gdpo": lambda rewards: gdpo_advantages(rewards[..., None], np.ones(1)),
}


@pytest.mark.parametrize("name", BY_GROUP)
def test_a_group_has_the_mean_zero_and_equal_rewards_exact_zeros(name):
  rewards = np.round(random_rewards((8, 7)))
  # Values whose mean rounds, so that r - mean is not 0.
  rewards[:4] = np.float32([[0.1], [0.7], [1 / 3], [0]])
  found = np.asarray(BY_GROUP[name](rewards))
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found[:4], 0)
  assert np.all(np.abs(found[4:]).max(1) > 0.1)
  np.testing.assert_allclose(found.mean(1), 0, atol=1e-5)


@pytest.mark.parametrize("k", [0, 4])
def test_subsets_are_no_larger_than_a_group(k):
  with pytest.raises(ValueError, match="k up to G, got"):
    pass_at_k_advantages(np.ones((2, 3)), k=k)


def random_steps(discount=0.9, trace_decay=0.8):
  """r, V and a mask with holes and an empty row."""
  rng = np.random.default_rng(0)
  rewards, values = rng.normal(size=(2, 5, 9)).astype(np.float32)
  mask = rng.random((5, 9)) < 0.7
  mask[1], mask[2] = False, True
  keywords = {"discount": discount, "trace_decay": trace_decay}
  return rewards, values, mask, keywords


def test_generalized_advantages_equal_the_sums_of_the_paper():
  """A_t = sum_k (g l)^k d_t+k, over response tokens only."""
  rewards, values, mask, keywords = random_steps()
  g, decay = keywords.values()
  advantages, returns = generalized_advantages(
    rewards, values, mask, **keywords
  )
  expected = oracles.generalized_advantages(rewards, values, mask, g, decay)
  np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(
    returns, np.where(mask, expected + values, 0), rtol=1e-4, atol=1e-6
  )
  assert advantages.dtype == returns.dtype == np.float32


def test_generalized_advantages_of_packed_rows_are_those_of_each_sequence():
  """The last token of a sequence is followed by none of the next one."""
  rewards, values, mask, keywords = random_steps()
  alone = generalized_advantages(rewards, values, mask, **keywords)
  B, T = mask.shape
  ids = np.arange(1, B + 1).repeat(T)[None]  # all sequences in one row
  packed = generalized_advantages(
    *(x.reshape(1, -1) for x in (rewards, values, mask)),
    segment_ids=ids,
    **keywords,
  )
  for x, y in zip(packed, alone, strict=True):
    np.testing.assert_allclose(x.reshape(B, T), y, rtol=1e-6, atol=1e-6)


def test_generalized_advantages_never_read_masked_values():
  rewards, values, mask, keywords = random_steps()
  expected = generalized_advantages(rewards, values, mask, **keywords)
  garbage = np.resize([np.nan, np.inf, -np.inf], mask.shape).astype(np.float32)
  dirty = [np.where(mask, x, garbage) for x in (rewards, values)]
  with jax.debug_nans(True):
    result = generalized_advantages(*dirty, mask.astype(int), **keywords)
  jax.tree.map(np.testing.assert_array_equal, result, expected)
  assert not np.asarray(result)[:, ~mask].any()


def test_generalized_advantages_have_no_gradient():
  rewards, values, mask, keywords = random_steps()
  f = lambda v: sum(
    x.sum() for x in generalized_advantages(rewards, v, mask, **keywords)
  )
  assert not jax.grad(f)(values).any()


def test_other_shapes_of_generalized_advantages_are_refused():
  rewards, values, mask, _ = random_steps()
  for bad in (
    (rewards[:, 1:], values, mask), (rewards, values[1:], mask),
    (rewards[0], values[0], mask[0]),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=r"one shape \[B, T\]"):
      generalized_advantages(*bad)
  with pytest.raises(ValueError, match=r"segment_ids\.shape"):
    generalized_advantages(rewards, values, mask, segment_ids=mask[:1])
  with pytest.raises(ValueError, match=r"mask\.shape"):
    whiten(rewards[1:], mask)


def test_whitened_tokens_have_mean_zero_and_std_one():
  advantages, _, mask, _ = random_steps()
  dirty = np.where(mask, 3 + 5 * advantages, np.nan).astype(np.float32)
  with jax.debug_nans(True):
    white = np.asarray(whiten(dirty, mask, eps=0.0))
  tokens = 3 + 5 * advantages[mask].astype(float)
  np.testing.assert_allclose(
    white[mask], (tokens - tokens.mean()) / tokens.std(), rtol=1e-4, atol=1e-5
  )
  assert not white[~mask].any()


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.3])
def test_whitened_equal_tokens_are_exact_zeros(value, eps):
  mask = np.arange(7) < np.array([[3], [7], [0]])
  with jax.debug_nans(True):
    for m in (mask, np.zeros_like(mask)):
      white = whiten(np.where(m, value, 9.0), m, eps=eps)
      np.testing.assert_array_equal(white, np.zeros((3, 7)))


def turn_oracle(rewards, normalize_std, eps):
  """[P, G, K] in float64, one turn of one conversation at a time."""
  advantages = np.zeros(rewards.shape)
  for p, group in enumerate(np.float64(rewards)):
    for k in range(rewards.shape[2]):
      present = [g for g, row in enumerate(group) if not np.isnan(row[k])]
      to_go = np.array([np.nansum(group[g, k:]) for g in present])
      if not present or np.ptp(to_go) == 0:
        continue
      std = to_go.std() + eps if normalize_std else 1.0
      advantages[p, present, k] = (to_go - to_go.mean()) / std
  return advantages


@pytest.mark.parametrize("normalize_std", [True, False])
def test_turn_advantages_equal_the_formula(normalize_std):
  rng = np.random.default_rng(0)
  rewards = rng.integers(-1, 3, (6, 5, 4)).astype(np.float32)
  turns = rng.integers(1, 5, (6, 5))
  rewards[np.arange(4) >= turns[..., None]] = np.nan
  rewards[0] = np.where(np.isnan(rewards[0]), np.nan, 0.0)  # all equal
  advantages = jax.jit(turn_advantages, static_argnames="normalize_std")(
    rewards, normalize_std=normalize_std, eps=0.01
  )
  expected = turn_oracle(rewards, normalize_std, 0.01)
  np.testing.assert_allclose(advantages, expected, atol=1e-5)
  assert not np.asarray(advantages)[0].any()
  assert len({*np.round(np.asarray(advantages)[1].ravel(), 4)}) > 3
