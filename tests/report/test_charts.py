"""The charts of a section show what changed; nothing in a name is markup."""

import re

import numpy as np
import pytest
from make_run import make_run, runs
from metrics_page import ROWS

from gspo_jax.losses import EDGES
from gspo_jax.report import charts
from gspo_jax.report.charts import COLOURS, number, of_section, thin
from gspo_jax.report.workdir import RunRecord, Series, Spread

BINS = len(EDGES) - 1


def written(folder, *rows):
  """A run with these numbers of metrics of section x."""
  folder.mkdir()
  lines = [
    ", ".join([f'{{"step": {i}', *(f'"x/{k}": {v}' for k, v in row.items())])
    for i, row in enumerate(rows)
  ]
  (folder / "metrics.jsonl").write_text("}\n".join(lines) + "}\n")
  return folder


def plots(*these, section="x"):
  return of_section(charts.sections(these)[section], these)


def curves(folder, *rows):
  """The figure of the only metric in these rows."""
  (plot,) = plots(*runs(written(folder, *rows)))
  return plot.figure


def outlines(*values, name="x/t", edges=None):
  """The figure of a distribution [N, bins] of each of some runs."""
  these = [
    RunRecord(
      f"run {i}",
      {},
      {name: Spread(np.arange(1, len(v) + 1), np.array(v, float), edges)},
      {},
      {},
      0,
    )
    for i, v in enumerate(values)
  ]
  (plot,) = plots(*these, section=name.partition("/")[0])
  return plot.figure


def counts_at(value, n):
  row = np.zeros(BINS)
  row[np.searchsorted(EDGES, value, side="right") - 1] = n
  return row


def names(figure):
  return [trace.name for trace in figure.data]


def test_every_metric_has_a_section_and_the_unit_of_its_row():
  units = {"share": "%", "nats a token": "nats"}
  for name, in_docs, *_ in ROWS:
    name = re.sub("<.>", "8", name).replace("<name>", "gsm8k")
    expected = units.get(in_docs, in_docs)
    if expected not in ("%", "nats", "tokens", "s"):
      expected = ""
    assert charts.unit(name) == expected, name


def test_sections_hold_each_metric_once_in_order_of_number():
  names = ("odd", "eval/pass@16", "moe/x", "eval/pass@2", "eval/pass@8")
  run = RunRecord("a", dict.fromkeys(names), {"moe/l": None}, {}, {}, 0)
  assert charts.sections([run, run]) == {
    "eval": ["eval/pass@2", "eval/pass@8", "eval/pass@16"],
    "moe": ["moe/l", "moe/x"],
    "other": ["odd"],
  }


def test_metrics_of_one_word_and_unit_share_a_chart(tmp_path):
  row = {"a_low": 1, "a_high": 2, "a_share": 0.5, "b": 3, "ab": 4}
  (run,) = runs(written(tmp_path / "a", row))
  found = {plot.title: names(plot.figure) for plot in plots(run)}
  assert found == {
    "x/a": ["a_high", "a_low"],
    "x/a_share": ["a_share"],
    "x/ab": ["ab"],
    "x/b": ["b"],
  }


def test_a_constant_scalar_has_a_chart_beside_one_that_changes(tmp_path):
  (run,) = runs(written(tmp_path / "a", *[{"a": 0.25}] * 5))
  assert plots(run) == []
  rows = [{"a_share": 0.25, "a_b_share": i} for i in range(5)]
  (plot,) = plots(*runs(written(tmp_path / "b", *rows)))
  assert names(plot.figure) == ["a_b_share", "a_share"]
  assert all(trace.showlegend for trace in plot.figure.data)
  assert plot.summary == "a_b_share 0% to 400%; a_share 25% to 25%"


def test_of_several_runs_each_metric_has_a_chart(tmp_path):
  rows = [{"a_u": i, "a_v": -i} for i in range(5)]
  u, v = written(tmp_path / "u", *rows), written(tmp_path / "v", *rows)
  w = written(tmp_path / "w", *[{"a_u": i} for i in range(5)])
  found = plots(*runs(u, w, v))
  assert [plot.title for plot in found] == ["x/a_u", "x/a_v"]
  assert [names(plot.figure) for plot in found] == [["u", "w", "v"], ["u", "v"]]
  # A run keeps its colour in the charts of metrics that another run lacks.
  colours = [trace.line.color for trace in found[1].figure.data]
  assert colours == [COLOURS[0], COLOURS[2]]


def test_points_are_the_numbers_and_a_null_is_a_gap(tmp_path):
  figure = curves(tmp_path / "a", {"a": 1}, {"a": "null"}, {"a": 0.123456})
  (line,) = figure.data
  np.testing.assert_array_equal(line.x, [0, 1, 2])
  np.testing.assert_allclose(line.y, [1, np.nan, 0.123456])
  assert not line.connectgaps


def test_a_lone_point_of_a_long_line_is_a_dot(tmp_path):
  long = [{"a": i} for i in range(90)]
  assert curves(tmp_path / "a", *long).data[0].mode == "lines"
  long[50:53] = {"a": "null"}, {"a": 1}, {"a": "null"}
  assert curves(tmp_path / "b", *long).data[0].mode == "lines+markers"


@pytest.mark.parametrize(
  ("name", "values", "axis"),
  [
    ("a", [0.2, 0.9], {"rangemode": "tozero"}),
    ("a", [0.8, 0.9], {"rangemode": "normal"}),
    ("a", [-0.1, 0.9], {"rangemode": "normal"}),
    ("a", [0.3, 0.3], {"rangemode": "tozero"}),  # no negative shares
    ("norm", [1e-4, 1.0], {"type": "log"}),
    ("a_std", [0.8, 0.9], {"rangemode": "normal"}),  # a log may have no tick
    ("norm", [0, 0], {"rangemode": "tozero"}),
    ("norm", ["null", "null"], {"rangemode": "tozero"}),
  ],
)
def test_the_vertical_axis(tmp_path, name, values, axis):
  found = curves(tmp_path / "a", *[{name: v} for v in values])
  found = found.layout.yaxis.to_plotly_json()
  assert {k: found.get(k) for k in axis} == axis
  assert ("type" in found) == ("type" in axis)


def test_the_first_step_may_be_outside_of_the_axis_of_times():
  def axis(name, *values):
    run = RunRecord(
      "a", {name: Series(np.arange(4), np.array(values))}, {}, {}, {}, 3
    )
    (plot,) = of_section([name], [run])
    return plot.figure.layout.yaxis.range

  assert axis("x/a", 100, 1, 1.2, 0.9) is None
  low, high = axis("time/a", 100, 1, 1.2, 0.9)
  assert 0 < low < 0.9 < 1.2 < high < 2
  low, high = axis("time/a", *[np.nan] * 4)
  assert low < high


def test_few_steps_have_no_fractions_between_them(tmp_path):
  two = curves(tmp_path / "two", {"a": 1}, {"a": 1}).layout.xaxis
  assert (two.dtick, two.tickprefix) == (1, "step ")
  low, high = curves(tmp_path / "one", {"a": 1}).layout.xaxis.range
  assert -1 < low < 0 < high < 1


def test_long_lines_keep_every_spike():
  values = np.random.default_rng(0).normal(size=5000)
  values[1234], values[77], values[4999] = 50, np.nan, 0.25
  series = Series(np.arange(1, 5001), values)
  short = thin(series)
  assert len(short.steps) <= 1.01 * charts._POINTS
  assert (np.diff(short.steps) > 0).all()
  np.testing.assert_array_equal(short.values, values[short.steps - 1])
  assert {1, 78, 1235, 5000} <= set(short.steps.tolist())
  assert np.nanmin(short.values) == np.nanmin(values)
  few = Series(series.steps[:500], values[:500])
  assert thin(few) is few


def test_nothing_in_a_name_is_markup(tmp_path):
  rows = [{"<a href='y'>y<|a>": i} for i in range(3)]
  folder, other = (written(tmp_path / n, *rows) for n in ("<b>&amp;", "b"))
  (plot,) = plots(*runs(folder, other))
  assert names(plot.figure) == ["&lt;b&gt;&amp;amp;", "b"]
  assert "<" not in plot.figure.layout.title.text
  assert plot.title == "x/<a href='y'>y<|a>"


def marked(*folders):
  """The metrics beside which a clip range is drawn."""
  these, found = runs(*folders), set()
  for name in (
    charts.sections(these)["ratio"] + charts.sections(these)["mismatch"]
  ):
    (plot,) = of_section([name], these)
    shapes, traces = plot.figure.layout.shapes, str(names(plot.figure))
    drawn = len(shapes) + traces.count("clip ")
    assert drawn in (0, 2)
    if drawn:
      found.add(name)
  return found


@pytest.mark.parametrize(
  ("method", "unit"),
  [("gspo", "sequence"), ("grpo", "token"), ("gmpo", "token"), ("sapo", "no")],
)
def test_a_clip_range_lies_beside_what_it_clips(tmp_path, method, unit):
  clips = {"token": 2e-2, "sequence": 2e-4}.get(unit, 2e-3)
  name = f"{method}:clip_low={clips},clip_high={clips}"
  objective = {"name": method if unit == "no" else name}
  folder = make_run(tmp_path / "a", 12, objective=objective)
  ends = ("ratio/{}_log", "mismatch/{}_gap", "mismatch/{}_abs_mean")
  expected = {name.format(unit) for name in ends} if unit != "no" else set()
  assert marked(folder) == expected
  # Of several runs where all have the same range.
  same = make_run(tmp_path / "b", 12, objective=objective)
  assert marked(folder, same) == expected
  other = make_run(tmp_path / "c", 12, objective={"name": "dapo"})
  assert marked(folder, other) == set()


def test_a_mark_is_where_the_log_ratio_is_clipped(tmp_path):
  """GRPO's 1 - 0.2 is a log-ratio of -0.223, and its size that on a curve."""
  folder = make_run(tmp_path / "a", 12, objective={"name": "grpo"})
  (plot,) = of_section(["mismatch/token_abs_mean"], runs(folder))
  _, low, high = plot.figure.data
  assert (low.name, high.name) == ("clip low 0.223", "clip high 0.239")
  np.testing.assert_allclose((low.y, high.y), [[0.223] * 2, [0.239] * 2], 0.01)


@pytest.mark.parametrize("value", [-3.0, -0.02, -1e-5, 0, 3e-4, 0.5, 9.0])
def test_a_number_lies_in_its_bin(value):
  used = slice(3, BINS - 3)
  at = charts._place(value, EDGES, used)
  (i,) = np.flatnonzero(counts_at(value, 1))
  assert i - 3 - 0.5 <= at <= i - 3 + 0.5
  assert charts._place(value * 1.01 + 1e-9, EDGES, used) > at or value < 0


def test_a_histogram_lies_at_its_value_as_shares():
  figure = outlines([counts_at(0.02, 7), counts_at(-0.02, 900)], edges=EDGES)
  first, last = figure.data
  assert [line.x[np.argmax(line.y)] for line in (first, last)] == [
    "0.018 to 0.032",
    "-0.032 to -0.018",
  ]
  assert sorted(first.y) == sorted(last.y) == [*[0] * (len(first.y) - 1), 1]


def test_layers_are_places_and_nan_is_nothing():
  values = [[0.0, 0.1, 0.4], [0.0, np.nan, 0.2]]
  first, last = outlines(values, name="moe/flip_rate").data
  np.testing.assert_array_equal(first.x, [0, 1, 2])
  np.testing.assert_allclose(first.y, [0, 0.1, 0.4], 1e-6)
  np.testing.assert_allclose(last.y, [0, 0, 0.2], 1e-6)


def test_nothing_counted_is_still_a_picture():
  for figure in (
    outlines(np.zeros((1, BINS)), edges=EDGES),
    outlines(np.full((1, 3), np.nan)), outlines([[0.5]]),
  ):  # fmt: skip
    assert "NaN" not in figure.to_json()
    assert len(figure.data) == 1


def test_the_parts_of_a_run_are_tenths_of_its_steps():
  parts = lambda n: {
    label: values.tolist()
    for label, values in charts._tenths(
      Spread(np.arange(n), np.arange(n)[:, None], None)
    ).items()
  }
  assert parts(20) == {"first": [0.5], "middle": [9.5], "last": [18.5]}
  assert parts(2) == {"first": [0], "last": [1]}
  assert parts(1) == {"last": [0]}


def test_a_distribution_of_one_run_and_of_several():
  rows = np.arange(60).reshape(30, 2)
  one, two = outlines(rows), outlines(rows, rows + 1)
  assert names(one) == ["first", "middle", "last"]
  assert one.layout.showlegend
  assert names(two) == ["run 0", "run 1"]
  np.testing.assert_array_equal(two.data[0].y, one.data[2].y)
  np.testing.assert_array_equal(two.data[1].y, one.data[2].y + 1)


@pytest.mark.parametrize(
  ("value", "unit", "text"),
  [(0.0, "", "0"), (-12.345, "", "-12.3"), (999.7, "", "1,000"),
   (12345.0, "tokens", "12,345 tokens"), (1.26e-7, "", "1.26e-07"),
   (0.0013, "%", "0.13%"), (float("nan"), "%", "-")],
)  # fmt: skip
def test_number(value, unit, text):
  assert number(value, unit) == text


def test_labels_of_bins_do_not_touch():
  axis = charts._decades(EDGES, slice(0, BINS))
  places = np.sort(axis["tickvals"])
  assert np.diff(places).min() >= 4
  labels = dict(zip(axis["ticktext"], axis["tickvals"], strict=True))
  assert {"0", "1", "−1", "10<sup>-2</sup>", "−10<sup>-4</sup>"} <= set(labels)
  assert labels["10<sup>-2</sup>"] == charts._place(0.01, EDGES, slice(0, BINS))
  assert not re.search("e", "".join(labels))
