"""Group-relative advantages against NumPy in float64."""

import numpy as np
import pytest

from gspo_jax import group_relative_advantages


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_is_the_formula(normalize_std, ddof):
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


def test_worked_example():
  advantages = group_relative_advantages(np.array([[1, 0, 1, 0]]))
  np.testing.assert_allclose(advantages, [[1, -1, 1, -1]], atol=1e-5)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exact_zeros(normalize_std, eps, ddof):
  # Sizes and values whose mean rounds, so that r - mean is not 0.
  for size in (2, 3, 6, 7, 11, 13, 48):
    rewards = np.repeat([[0.1], [0.7], [1 / 3], [1e6 + 0.3]], size, axis=1)
    advantages = group_relative_advantages(
      rewards, normalize_std=normalize_std, eps=eps, ddof=ddof
    )
    np.testing.assert_array_equal(advantages, np.zeros((4, size)))


def test_groups_do_not_mix():
  rewards = np.random.default_rng(0).random((4, 6))
  together = group_relative_advantages(rewards)
  apart = [group_relative_advantages(rewards[i : i + 1])[0] for i in range(4)]
  np.testing.assert_allclose(together, apart, rtol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (4, 1), (4, 0)])
def test_other_shapes_are_refused(shape):
  with pytest.raises(ValueError, match=r"expected rewards \[P, G\], G >= 2"):
    group_relative_advantages(np.zeros(shape))


def test_ddof_needs_a_larger_group():
  with pytest.raises(ValueError, match="G >= 3"):
    group_relative_advantages(np.zeros((1, 2)), ddof=2)
