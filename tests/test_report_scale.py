"""Numbers read as people write them, and lie where their axis says."""

import numpy as np
import pytest

from gspo_jax.report.scale import Scale, duration, number, span


@pytest.mark.parametrize(
  ("value", "unit", "text"),
  [
    (0.0, "", "0"),
    (0.5, "", "0.5"),
    (0.12345, "", "0.123"),
    (-12.345, "", "−12.3"),
    (999.7, "", "1,000"),
    (9999.0, "", "9,999"),
    (12345.0, "tokens", "12.3k tokens"),
    (1.5e6, "", "1.50M"),
    (3e-4, "", "3e-4"),
    (1.26e-7, "", "1.3e-7"),
    (0.0013, "%", "0.13%"),
    (1.0, "%", "100%"),
    (float("nan"), "%", "-"),
  ],
)
def test_number(value, unit, text):
  assert number(value, unit) == text


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    (41.2, "41.2 s"),
    (99.7, "2 min"),
    (754.0, "13 min"),
    (11100.0, "3 h 05 min"),
    (200000.0, "2 d 7 h"),
    (float("nan"), "-"),
  ],
)
def test_duration(seconds, text):
  assert duration(seconds) == text


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.7, 42.0, 1e6])
def test_a_span_holds_its_values_and_its_ticks(log, size):
  values = size * np.array([1.0, 2.5, np.nan, 90.0])
  scale = span(values, 200, 10, log=log)
  places = scale(values[[0, 1, 3]])
  assert (np.diff(places) < 0).all()  # upwards
  assert places.min() >= 10
  assert places.max() <= 200
  ticks = scale.ticks(4)
  assert 2 <= len(ticks) <= 7
  assert all(scale.low * 0.99 <= t <= scale.high * 1.01 for t in ticks)


@pytest.mark.parametrize("values", [[], [0.0], [3.0, 3.0], [-2.0], [np.nan]])
@pytest.mark.parametrize("log", [False, True])
def test_a_span_of_nearly_nothing_has_a_length(values, log):
  scale = span(values, 200, 10, log=log)
  assert scale.low < scale.high
  assert np.isfinite(scale(1.0))
  assert scale.ticks()


def test_zero_is_shown_where_it_is_near():
  assert span([0.2, 0.9], 0, 1, log=False).low == 0
  assert span([0.8, 0.9], 0, 1, log=False).low > 0.7


def test_decades_are_equally_long():
  scale = Scale(1e-4, 1.0, 0, 100, log=True)
  np.testing.assert_allclose(scale(np.array([1e-4, 1e-2, 1.0])), [0, 50, 100])
  assert scale(5.0) == 100  # what lies outside lies at the end
