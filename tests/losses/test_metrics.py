"""Metrics: they add, and the value of an empty one is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.losses import EDGES, Histogram, Mean, Std


@pytest.mark.parametrize("scalar", [float, np.float32, jnp.float32])
def test_values_of_metrics(scalar):
  assert Mean(scalar(6), scalar(4)).value() == 1.5
  assert type(Mean(scalar(6), scalar(4)).value()) is float
  assert Std(scalar(4), scalar(10), scalar(2)).value() == 1.0
  assert np.isnan(Mean(scalar(0), scalar(0)).value())
  assert np.isnan(Std(scalar(0), scalar(0), scalar(0)).value())


@pytest.mark.parametrize(
  ("count", "expected"),
  [(4.0, [1, 1.5, 0]), ([4.0, 2.0, 0.0], [1, 3, np.nan]), (0.0, [np.nan] * 3)],
)  # fmt: skip
def test_mean_of_vectors(count, expected):
  mean = Mean(jnp.array([4.0, 6.0, 0.0]), jnp.array(count)).value()
  np.testing.assert_array_equal(mean, expected)
  assert isinstance(mean, np.ndarray)


def test_std_is_that_of_the_values_under_the_mask():
  rng = np.random.default_rng(0)
  values, mask = rng.normal(size=(4, 9)), rng.random((4, 9)) < 0.6
  dirty = jnp.where(mask, values, jnp.nan)
  np.testing.assert_allclose(
    Std.of(dirty, mask).value(), values[mask].std(), rtol=1e-5
  )


def test_edges():
  assert len(EDGES) == 60
  np.testing.assert_array_equal(EDGES, -EDGES[::-1])
  assert (np.diff(EDGES) > 0).all()
  np.testing.assert_allclose(EDGES[[0, 1, 29, 30, 34, 58, 59]], [
    -np.inf, -10, -1e-6, 1e-6, 1e-5, 10, np.inf,
  ])  # fmt: skip


def test_histogram_is_that_of_numpy():
  rng = np.random.default_rng(0)
  values = 10 ** rng.uniform(-8, 2, (50, 40)) * rng.choice([-1, 1], (50, 40))
  values = values.astype(np.float32)
  values[0, :5] = 0, np.inf, -np.inf, 1e30, -1e30
  values[1, :5] = np.nan  # never counted
  mask = rng.random((50, 40)) < 0.7
  counts = jax.jit(Histogram.of)(jnp.array(values), jnp.array(mask)).value()
  edges = EDGES.astype(np.float32)
  counted = values[mask & ~np.isnan(values)]
  np.testing.assert_array_equal(counts, np.histogram(counted, edges)[0])
  assert counts.sum() == len(counted) < mask.sum()
  assert counts.dtype == np.float32


def test_a_common_shift_counts_in_the_std_about_zero_only():
  """As does a single value."""
  values, mask = jnp.full((4, 1), 3e-3), jnp.ones((4, 1), bool)
  assert Std.of(values, mask).value() < 1e-6
  for n in (1, 4):
    value = Std.about_zero(values[:n], mask[:n]).value()
    assert value == pytest.approx(3e-3, rel=1e-5)
