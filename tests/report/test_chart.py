"""Lines at the place of their numbers, with labels that do not overlap."""

import re

import numpy as np

from gspo_jax.report.chart import Axis, Line, line_chart, spaced
from gspo_jax.report.curve import thin
from gspo_jax.report.workdir import Series


def line(values, label="x", colour=0, points=240):
  values = np.array(values, float)
  return Line(
    label, colour, thin(Series(np.arange(len(values)), values), points)
  )


def paths(html, kind="line"):
  found = re.findall(rf'class="{kind}" d="M([\d. L-]*)Z?"', html)
  return [
    np.array(d.replace("L", " ").split(), float).reshape(-1, 2) for d in found
  ]


def test_a_line_is_proportional():
  (points,) = paths(line_chart("t", [line([0, 1, 2, 4])]).html)
  np.testing.assert_allclose(
    np.diff(points[:, 0]), np.diff(points[:, 0])[0], atol=0.11
  )
  rise = -np.diff(points[:, 1])
  np.testing.assert_allclose(rise / rise[0], [1, 1, 2], atol=0.02)


def test_a_gap_is_not_bridged_and_a_lone_point_is_a_dot():
  html = line_chart("t", [line([1, 2, np.nan, 3, np.nan, *[1] * 50])]).html
  assert [len(p) for p in paths(html)] == [2, 1, 50]
  assert html.count("<circle") == 1


def test_a_thinned_line_has_a_band_around_it():
  html = line_chart(
    "t", [line(np.random.default_rng(0).normal(size=900), points=30)]
  ).html
  (points,), (band,) = paths(html), paths(html, "band")
  assert len(band) == 2 * len(points)
  assert (band[:30, 1] <= points[:, 1]).all()
  assert (band[30:][::-1, 1] >= points[:, 1]).all()


def test_labels_have_the_last_value_and_do_not_overlap():
  lines = [line([0, v], f"l{i}", i) for i, v in enumerate((0.5, 0.5, 0.51))]
  html = line_chart("t", lines, Axis("%")).html
  found = re.findall(
    r'y="([\d.]+)" text-anchor="start" class="label">(\w+)', html
  )
  heights = sorted(float(y) for y, _ in found)
  assert {name for _, name in found} == {"l0", "l1", "l2"}
  assert min(np.diff(heights)) >= 24.9
  assert ">51%<" in html
  assert (
    "label"
    not in line_chart("t", lines, labels=False).html.split("aria-label")[1]
  )


def test_spaced_moves_only_what_is_too_near():
  assert spaced([20, 60, 100], 25, 10, 200) == [20, 60, 100]
  places = spaced([190, 195, 199], 25, 10, 200)
  assert places == [150, 175, 200]


def test_marks_are_on_the_page_and_on_the_axis():
  figure = line_chart(
    "t", [line([1e-7, 2e-7])], Axis(log=True), marks={"clip": 3e-4}
  )
  assert "clip 3e-4" in figure.html
  low, high = figure.data["y"][:2]
  assert low < 1e-7
  assert high > 3e-4


def test_the_first_step_may_be_cut_off():
  lines = [line([100, 1, 1.2, 0.9])]
  assert line_chart("t", lines).data["y"][1] > 100
  assert line_chart("t", lines, Axis(skip_first=True)).data["y"][1] < 2


def labels(html):
  """The texts of the vertical axis, and of the steps below it."""
  left = re.findall(r'text-anchor="end">([^<]*)<', html)
  return left[:-1], re.findall(r'text-anchor="middle">([^<]*)<', html)


def test_the_axis_of_a_constant_0_percent_has_no_negative_shares():
  html = line_chart("t", [line([0, 0])], Axis("%")).html
  assert labels(html) == (["0%", "50%", "100%"], ["0", "1"])
  html = line_chart("t", [line([1, 1])], Axis("%")).html
  assert labels(html)[0] == ["60%", "80%", "100%"]


def test_close_numbers_have_labels_of_their_own():
  html = line_chart("t", [line([10, 10, 10.125])]).html
  assert labels(html)[0] == ["10", "10.05", "10.1"]


def test_a_single_step_is_the_only_one_on_the_axis():
  lone = line([np.nan, np.nan, 0.5])
  lone = lone._replace(curve=thin(Series(np.array([3]), np.array([0.5])), 9))
  html = line_chart("t", [lone]).html
  assert labels(html)[1] == ["3"]
  assert line_chart("t", [line([5, 6])]).data["x"][:2] == [0, 1]
  assert "nan" not in html


def test_the_pointer_gets_the_points_of_the_line():
  (series,) = line_chart("t", [line([1, np.nan, 0.123456])]).data["s"]
  assert series == {"n": "x", "c": 0, "x": [0, 1, 2], "v": [1, None, 0.1235]}


def test_a_picture_has_a_description():
  html = line_chart("Loss", [line([0.5, np.nan, 0.25])], Axis("%")).html
  assert 'aria-label="Loss. x 50% to 25%"' in html
