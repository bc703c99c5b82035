"""The pixels of a heat map are its numbers: the picture is decoded here."""

import base64
import io
import re

import matplotlib.image
import numpy as np
import pytest

from gspo_jax.losses import EDGES
from gspo_jax.report import heat
from gspo_jax.report.workdir import Spread

BINS = len(EDGES) - 1


def pictures(html):
  found = re.findall(r"base64,([\w+/=]+)", html)
  return [
    matplotlib.image.imread(io.BytesIO(base64.b64decode(f))) for f in found
  ]


def counts_at(value, n):
  row = np.zeros(BINS)
  row[np.searchsorted(EDGES, value, side="right") - 1] = n
  return row


def test_a_histogram_lies_at_its_value_whatever_its_number():
  rows = np.stack([counts_at(0.02, 7), counts_at(-0.02, 900)])
  spread = Spread(np.array([1, 2]), rows, EDGES)
  light, dark = pictures(heat.histogram_map("t", spread, "", {}).html)
  darkest = light.sum(-1).argmin(axis=0)
  assert darkest[0] < len(light) / 2 < darkest[1]  # positive numbers are above
  assert darkest[0] + darkest[1] == len(light) - 1
  np.testing.assert_array_equal(dark.sum(-1).argmax(axis=0), darkest)


def test_layers_are_rows_from_below_and_nan_is_nothing():
  values = np.array([[0.0, 0.1, 0.4], [0.0, np.nan, 0.2]])
  spread = Spread(np.array([1, 2]), values, None)
  figure = heat.layer_map("t", spread, "", "%")
  light, _ = pictures(figure.html)
  shade = 3 - light.sum(-1)[::-1].T
  assert shade[0].argmax() == 2
  assert shade[0, 2] > shade[1, 2] > shade[0, 1] > shade[0, 0] == shade[1, 1]
  assert "40%" in figure.html


@pytest.mark.parametrize("value", [-3.0, -0.02, -1e-5, 3e-4, 0.5, 9.0])
def test_place_is_monotonic_and_inside_the_bin(value):
  at = heat.place(value, EDGES)
  i = np.searchsorted(EDGES, value, side="right") - 1
  assert i <= at <= i + 1
  assert heat.place(value * 1.01, EDGES) != at


def steps_below(html):
  middle = r'x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]+)'
  texts = re.findall(middle, html)
  return [step for _, step in texts], [float(x) for x, _ in texts]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_step_is_named_in_the_middle_of_its_stretch(steps):
  numbers = np.arange(1, steps + 1)
  for draw, last, edges in (
    (heat.histogram_map, {}, EDGES),
    (heat.layer_map, "", None),
  ):
    width = BINS if edges is not None else 2
    spread = Spread(numbers, np.ones((steps, width)), edges)
    named, places = steps_below(draw("t", spread, "", last).html)
    assert named == [str(n) for n in numbers]
    stretch = (388 - 46) / steps
    np.testing.assert_allclose(
      places, 46 + stretch * (numbers - 0.5), atol=0.06
    )


def test_a_long_map_ends_at_its_last_step():
  spread = Spread(np.arange(1, 1001), np.ones((1000, 2)), None)
  named, places = steps_below(heat.layer_map("t", spread, "", "").html)
  assert named == ["200", "400", "600", "800", "1,000"]
  assert places[-1] == pytest.approx(388, abs=0.3)


def test_a_model_of_one_layer_has_no_second_one():
  html = heat.profiles(
    "t", [heat.Outline("a", 0, np.array([0.5]))], "%", ""
  ).html
  assert re.findall(r'text-anchor="middle">([^<]*)<', html) == ["layer 0"]


def test_outlines_are_shares():
  rows = [
    heat.Outline("a", 0, counts_at(0.02, 5)),
    heat.Outline("b", 1, counts_at(0.02, 500)),
  ]
  html = heat.outlines("t", rows, EDGES, "").html
  first, second = re.findall(r'class="line" d="([^"]+)"', html)
  assert first == second


def test_nothing_counted_is_still_a_picture():
  spread = Spread(np.array([1]), np.zeros((1, BINS)), EDGES)
  html = heat.histogram_map("t", spread, "", {"clip": 3e-4}).html
  assert "nan" not in html
  html = heat.outlines(
    "t", [heat.Outline("a", 0, np.zeros(BINS))], EDGES, ""
  ).html
  assert ">100%<" in html
  heat.profiles("t", [heat.Outline("a", 0, np.full(3, np.nan))], "%", "")
