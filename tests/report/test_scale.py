"""Numbers as text, and the ranges and ticks of axes."""

import numpy as np
import pytest

from gspo_jax.report.scale import Scale, duration, number, span, tick


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
    (1.5e6, "", "1.5M"),
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


def value_of(label):
  """The number that a label of an axis stands for."""
  text = label.rstrip("%").replace(",", "").replace("−", "-")
  scale = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1)
  return float(text.rstrip("kMG")) * scale / (100 if "%" in label else 1)


@pytest.mark.parametrize("unit", ["", "%"])
@pytest.mark.parametrize(
  ("low", "high"),
  [
    (99.8, 101.2),  # in three digits 100 comes twice
    (97, 108),  # 102.5 would be 102, and its neighbours 100 and 105
    (0.8501, 0.8502),
    (3e-4, 3.004e-4),
    (12_345, 12_347),
    (1e6, 1.0001e6),
    (-7.001, -7),
    (0, 0.06),
  ],
)
def test_labels_of_an_axis_are_its_ticks_and_no_two_are_alike(low, high, unit):
  ticks = span([low, high], 200, 10, log=False).ticks(4)
  labels = [tick(t, unit) for t in ticks]
  assert len(set(labels)) == len(labels) >= 2
  assert all(label.endswith(unit) for label in labels)
  np.testing.assert_allclose([value_of(x) for x in labels], ticks, rtol=1e-9)


@pytest.mark.parametrize(
  ("value", "low", "high"),
  [(0, 0, 1), (1, 0.5, 1), (0.9, 0.45, 1), (0.5, 0.25, 0.75)],
)
def test_a_constant_share_lies_on_an_axis_of_shares(value, low, high):
  scale = span([value, value], 200, 10, log=False, maximum=1.0)
  room = 0.06 * (high - low)
  assert scale.low == pytest.approx(low - room if low else 0)
  assert scale.high == pytest.approx(high + room)
  assert max(scale.ticks(4)) <= 1


def test_a_constant_number_has_as_much_room_below_as_above():
  for value in (-4.0, 3.0):
    scale = span([value] * 3, 0, 100, log=False)
    assert scale(value) == pytest.approx(50)


def test_whole_ticks_are_all_the_steps_that_there_are():
  assert Scale(2, 3, 0, 1).whole_ticks() == [2, 3]
  assert Scale(0.5, 1.5, 0, 1).whole_ticks() == [1]
  assert Scale(0, 30, 0, 1).whole_ticks() == [0, 10, 20, 30]


def test_zero_is_shown_where_it_is_near():
  assert span([0.2, 0.9], 0, 1, log=False).low == 0
  assert span([0.8, 0.9], 0, 1, log=False).low > 0.7


def test_decades_are_equally_long():
  scale = Scale(1e-4, 1.0, 0, 100, log=True)
  np.testing.assert_allclose(scale(np.array([1e-4, 1e-2, 1.0])), [0, 50, 100])
  assert scale(5.0) == 100  # what lies outside lies at the end
