"""The statistics of the studies, by tables, textbooks and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from studies import intervals, seeds


def test_mean_has_the_interval_of_a_table():
  # mean 3, s = sqrt(2.5), t(.975, 4) = 2.776: 3 +- 2.776 sqrt(2.5 / 5)
  found = intervals.mean([1, 2, 3, 4, 5])
  assert found["mean"] == 3
  assert found["high"] - 3 == pytest.approx(1.963, abs=1e-3)
  assert 3 - found["low"] == pytest.approx(1.963, abs=1e-3)
  assert math.isnan(intervals.mean([2.0])["low"])


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
  rest = {"sd": 0.1, "n": 5}
  found = [
    {"mean": 0.1, "p": 0.01} | rest,
    {"mean": -0.1, "p": 0.02} | rest,
    {"mean": 0.1, "p": 0.04} | rest,
    {"mean": 0.1, "p": math.nan} | rest,
  ]
  intervals.judge(found[:2])
  assert [one["verdict"] for one in found[:2]] == ["higher", "lower"]
  intervals.judge(found)
  assert [one["verdict"] for one in found] == [
    "higher",
    "not distinguished",
    "not distinguished",
    "not distinguished",
  ]


def test_bootstrap_of_a_mean_is_near_students_interval():
  values = list(range(200))
  low, high = intervals.bootstrap(values, lambda x: x.mean())
  exact = intervals.mean(values)
  assert low == pytest.approx(exact["low"], abs=1.0)
  assert high == pytest.approx(exact["high"], abs=1.0)
  assert intervals.bootstrap([5, 5], lambda x: x.mean()) == (5, 5)


def test_mean_of_nothing_is_no_number():
  assert math.isnan(intervals.mean([])["mean"])
  assert math.isnan(intervals.paired([], [])["p"])


@pytest.mark.parametrize(
  ("ends", "where"),
  [
    ((0.1, 0.2), "within"),
    ((0.0, 0.04), "below"),
    ((0.3, 0.4), "above"),
    ((0.04, 0.1), "undecided"),
    ((0.1, 0.3), "undecided"),
    ((0.0, 1.0), "undecided"),
    ((math.nan, math.nan), "undecided"),
  ],
)
def test_place(ends, where):
  found = dict(zip(("low", "high"), ends, strict=True))
  assert intervals.place(found, 0.05, 0.2) == where


@pytest.mark.parametrize(("n", "level"), [(5, 0.05), (5, 0.0125), (3, 0.05)])
def test_detectable_is_found_four_times_of_five(n, level):
  shift = intervals.detectable(2.0, n, level)
  draws = np.random.default_rng(0).normal(shift, 2.0, (20_000, n))
  p = stats.ttest_1samp(draws, 0.0, axis=1).pvalue
  assert abs(np.mean(p < level) - 0.8) < 0.01


def test_detectable_of_one_is_no_number():
  assert math.isnan(intervals.detectable(math.nan, 1, 0.05))


def test_seeds_are_paired_where_both_have_a_number():
  own = {0: {"x": 1.0}, 1: {"x": math.nan}, 2: {"x": 3.0}, 3: {"x": 4.0}}
  base = {3: {"x": 40.0}, 2: {"x": None}, 1: {"x": 20.0}, 0: {"x": 10.0}}
  assert seeds.pairs(own, base, "x") == ([1.0, 4.0], [10.0, 40.0])
  assert seeds.values(own, "x") == [1.0, 3.0, 4.0]


def test_results_of_a_setting_by_seed():
  every = [
    {"a": a, "b": b, "seed": s} for a in "xy" for b in "uv" for s in (0, 1)
  ]
  assert seeds.of(every, a="x", b="v") == {0: every[2], 1: every[3]}
