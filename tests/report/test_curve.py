"""Few points stand for many, and no spike is lost."""

import numpy as np

from gspo_jax.report.curve import columns, thin
from gspo_jax.report.workdir import Series


def test_a_short_series_is_itself():
  steps, values = np.arange(5), np.array([1.0, np.nan, 3, 2, np.nan])
  curve = thin(Series(steps, values), 5)
  np.testing.assert_array_equal(curve.middle, values)
  assert curve.last == 2
  assert not curve.thinned


def test_a_spike_is_in_the_band():
  values = np.random.default_rng(0).normal(size=5000)
  values[1234] = 50
  values[77] = np.nan
  values[4999] = 0.25
  curve = thin(Series(np.arange(1, 5001), values), 240)
  assert curve.thinned
  assert len(curve.steps) == 240
  assert curve.high.max() == 50
  assert curve.low.min() == np.nanmin(values)
  assert (curve.low <= curve.middle).all()
  assert (curve.middle <= curve.high).all()
  assert curve.steps[-1] == 5000
  assert curve.last == 0.25


def test_a_bucket_without_a_number_is_a_gap():
  values = np.ones(1000)
  values[400:600] = np.nan
  curve = thin(Series(np.arange(1000), values), 10)
  np.testing.assert_array_equal(
    np.isnan(curve.middle), [*[0] * 4, 1, 1, *[0] * 4]
  )


def test_columns_keep_the_sums():
  rng = np.random.default_rng(0)
  for n, most, width in ((1, 160, 1), (7, 160, 7), (5000, 160, 160)):
    values = rng.poisson(3, (n, 5)).astype(float)
    edges, sums, counts = columns(np.arange(1, n + 1), values, most)
    assert sums.shape == (width, 5)
    np.testing.assert_array_equal(sums.sum(0), values.sum(0))
    assert counts.sum() == n * 5
    assert (edges[0], edges[-1]) == (1, n + 1)
