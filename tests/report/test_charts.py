"""The charts of a subject show what changed, and list what did not."""

import re

import numpy as np
import pytest
from make_run import CONFIG, make_run

from gspo_jax.losses import EDGES
from gspo_jax.report import charts, workdir
from gspo_jax.report.charts import COLOURS, number, of_subject, thin
from gspo_jax.report.subjects import SUBJECTS, Chart, Spreads, Subject
from gspo_jax.report.workdir import Series, Spread

SHARES = Subject("s", (Chart("Both", {"x/*": ""}, "%"),))
BINS = len(EDGES) - 1


def runs(*folders):
  return workdir.read([str(folder) for folder in folders])


def written(folder, *rows):
  folder.mkdir()
  lines = [
    "{"
    + f'"step": {i}, '
    + ", ".join(f'"x/{k}": {v}' for k, v in r.items())
    + "}"
    for i, r in enumerate(rows)
  ]
  (folder / "metrics.jsonl").write_text("\n".join(lines))
  return folder


def curves(folder, *rows, **chart):
  """The figure of the metrics x/* in these rows."""
  chart = Chart("t", {"x/*": ""}, **chart)
  these = runs(written(folder, *rows))
  (plot,) = of_subject(Subject("s", (chart,)), these, set()).plots
  return plot.figure


def heat(values, edges=None, unit=""):
  """The figures of a distribution [N, bins]: the heat map and the outlines."""
  values = np.array(values, float)
  spread = Spread(np.arange(1, len(values) + 1), values, edges)
  run = workdir.RunRecord("a", {}, {"x": spread}, {}, {}, 0)
  subject = Subject("s", (Spreads({"x": "t"}, unit),))
  return [p.figure for p in of_subject(subject, [run], set()).plots]


def counts_at(value, n):
  row = np.zeros(BINS)
  row[np.searchsorted(EDGES, value, side="right") - 1] = n
  return row


def names(figure):
  return [trace.name for trace in figure.data]


def test_a_constant_scalar_is_listed_without_a_chart(tmp_path):
  workdir = written(tmp_path / "a", *[{"a": 0.25}] * 5)
  plots, still, scalars = of_subject(SHARES, runs(workdir), set())
  assert (plots, still, scalars) == ([], ["x/a 25%"], ["x/a"])


def test_beside_one_that_changes_it_is_drawn(tmp_path):
  workdir = written(tmp_path / "a", *[{"a": 0.25, "b": i} for i in range(5)])
  plots, still, _ = of_subject(SHARES, runs(workdir), set())
  assert still == []
  assert names(plots[0].figure) == ["a", "b"]
  assert all(trace.showlegend for trace in plots[0].figure.data)
  assert plots[0].summary == "a 25% to 25%; b 0% to 400%"


def test_of_several_runs_each_metric_has_a_chart(tmp_path):
  rows = [{"a": i, "b": -i} for i in range(5)]
  u, v = written(tmp_path / "u", *rows), written(tmp_path / "v", *rows)
  w = written(tmp_path / "w", *[{"a": i} for i in range(5)])
  plots, _, _ = of_subject(SHARES, runs(u, w, v), set())
  assert [plot.title for plot in plots] == ["Both: a", "Both: b"]
  assert [names(plot.figure) for plot in plots] == [["u", "w", "v"], ["u", "v"]]
  # A run keeps its colour in the charts of metrics that another run lacks.
  found = [trace.line.color for trace in plots[1].figure.data]
  assert found == [COLOURS[0], COLOURS[2]]


def test_a_metric_of_an_earlier_subject_is_not_shown_again(tmp_path):
  workdir, taken = written(tmp_path / "a", {"a": 1}), {"x/a"}
  assert of_subject(SHARES, runs(workdir), taken) == ([], [], [])


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
  ("values", "log", "axis"),
  [
    ([0.2, 0.9], False, {"rangemode": "tozero"}),
    ([0.8, 0.9], False, {"rangemode": "normal"}),
    ([-0.1, 0.9], False, {"rangemode": "normal"}),
    ([0.3, 0.3], False, {"rangemode": "tozero"}),  # no negative shares
    ([1e-4, 1.0], True, {"type": "log"}),
    ([0.8, 0.9], True, {"rangemode": "normal"}),  # may have no tick of a log
    ([0, 0], True, {"rangemode": "tozero"}),
    (["null", "null"], True, {"rangemode": "tozero"}),
  ],
)
def test_the_vertical_axis(tmp_path, values, log, axis):
  found = curves(tmp_path / "a", *[{"a": v} for v in values], log=log)
  found = found.layout.yaxis.to_plotly_json()
  assert {k: found.get(k) for k in axis} == axis
  assert ("type" in found) == ("type" in axis)


def test_the_first_step_may_be_outside_of_the_axis(tmp_path):
  rows = [{"a": v} for v in (100, 1, 1.2, 0.9)]
  assert curves(tmp_path / "a", *rows).layout.yaxis.range is None
  low, high = curves(tmp_path / "b", *rows, skip_first=True).layout.yaxis.range
  assert 0 < low < 0.9 < 1.2 < high < 2
  null = [{"a": "null"}] * 3
  figure = curves(tmp_path / "c", *null, skip_first=True)
  assert figure.layout.yaxis.range[0] < figure.layout.yaxis.range[1]


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
  rows = [{"a": i} for i in range(3)]
  folder, other = (written(tmp_path / n, *rows) for n in ("<b>&amp;", "b"))
  (plot,) = of_subject(SHARES, runs(folder, other), set()).plots
  assert names(plot.figure) == ["&lt;b&gt;&amp;amp;", "b"]
  chart = Chart("<a href='x'>y</a>", {"x/*": ""})
  (plot,) = of_subject(Subject("s", (chart,)), runs(folder), set()).plots
  assert "<" not in plot.figure.layout.title.text
  assert plot.title == chart.title


def test_no_signal_is_a_warning_first_in_its_subject(tmp_path):
  none = {"reward/mixed_groups": 0.0}
  folders = [
    make_run(tmp_path / "none", 4, scalars=none),
    make_run(tmp_path / "some", 4),
    make_run(tmp_path / "all", 4, scalars={"reward/mixed_groups": 1.0}),
  ]
  for these, warned in (
    (folders[:1], True),
    (folders[:2], True),
    (folders[1:2], False),
    (folders[2:], False),
  ):
    plots, still, scalars = of_subject(SUBJECTS[0], runs(*these), set())
    assert [plot.warning for plot in plots] == [
      warned,
      *[False] * (len(plots) - 1),
    ]
    assert ("No signal at 0%" in plots[0].note) == warned
    assert not warned or "reward/mixed_groups 0%" not in still
    assert "reward/mixed_groups" in scalars
    assert not warned or plots[0].title == "Groups with mixed rewards"
    assert still == ["reward/mixed_groups 100%"] or these != folders[2:]


SUBJECT_OF = {
  "ratio/token_log": "Size of",
  "ratio/sequence_log": "Size of",
  "mismatch/token_gap": "Sampler and",
  "mismatch/sequence_gap": "Sampler and",
  "mismatch/token_abs_mean": "Sampler and",
  "mismatch/sequence_abs_mean": "Sampler and",
}


def marked(*folders):
  """The metrics beside which a clip range is drawn."""
  these, found = runs(*folders), set()
  for name, title in SUBJECT_OF.items():
    subject = next(s for s in SUBJECTS if s.title.startswith(title))
    others = {
      n for workdir in these for n in (*workdir.scalars, *workdir.spreads)
    } - {name}
    plots, _, _ = of_subject(subject, these, others)
    assert plots
    drawn = [
      len(p.figure.layout.shapes) + str(names(p.figure)).count("clip ")
      for p in plots
    ]
    assert set(drawn) in ({0}, {2})
    if drawn[0]:
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
  config = {**CONFIG, "objective": objective}
  folder = make_run(tmp_path / "a", 12, config=config)
  expected = {name for name in SUBJECT_OF if f"/{unit}_" in name}
  assert marked(folder) == expected
  # Of several runs where all have the same range.
  same = make_run(tmp_path / "b", 12, config=config)
  assert marked(folder, same) == expected
  other = {**CONFIG, "objective": {"name": "dapo"}}
  assert marked(folder, make_run(tmp_path / "c", 12, config=other)) == set()


def test_a_mark_is_where_the_log_ratio_is_clipped(tmp_path):
  """GRPO's 1 - 0.2 is a log-ratio of -0.223, and its size that on a curve."""
  config = {**CONFIG, "objective": {"name": "grpo"}}
  folder = make_run(tmp_path / "a", 12, config=config)
  curve = Chart("x", {"mismatch/token_abs_mean": ""}, clips="token")
  ((plot,), *_) = of_subject(Subject("s", (curve,)), runs(folder), set())
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
  heat_map, outlines = heat([counts_at(0.02, 7), counts_at(-0.02, 900)], EDGES)
  (trace,) = heat_map.data
  shares = np.array(trace.customdata)
  names = [trace.y[i] for i in shares.argmax(axis=0)]
  assert names == ["0.018 to 0.032", "-0.032 to -0.018"]
  np.testing.assert_allclose(shares.sum(axis=0), 1)
  first, last = outlines.data
  assert sorted(first.y) == sorted(last.y) == [*[0] * (len(first.y) - 1), 1]


def test_layers_are_rows_and_nan_is_nothing():
  values = [[0.0, 0.1, 0.4], [0.0, np.nan, 0.2]]
  heat_map, outlines = heat(values, unit="%")
  (trace,) = heat_map.data
  np.testing.assert_allclose(trace.z, [[0, 0], [0.1, 0], [0.4, 0.2]], 1e-6)
  assert (trace.zmin, trace.zmax) == (0, pytest.approx(0.4))
  np.testing.assert_array_equal(trace.y, [0, 1, 2])
  np.testing.assert_allclose(outlines.data[0].y, [0, 0.1, 0.4], 1e-6)


@pytest.mark.parametrize("n", [1, 2, 160, 161, 5000])
def test_the_columns_of_a_map_are_of_equal_width(n):
  heat_map, _ = heat(np.arange(n)[:, None] + [[0.0, 1.0]])
  (trace,) = heat_map.data
  assert len(trace.x) == np.shape(trace.z)[1] <= 160
  # A number at its step stays at its step, however many are in a column.
  np.testing.assert_allclose(trace.z[1], trace.x, rtol=1e-6)
  assert len(set(np.diff(trace.x)[:-1])) <= 1


def test_nothing_counted_is_still_a_picture():
  for figures in (
    heat(np.zeros((1, BINS)), EDGES),
    heat(np.full((1, 3), np.nan)),
    heat([[0.5]]),
  ):
    assert "NaN" not in "".join(figure.to_json() for figure in figures)
    assert figures[0].data[0].zmax > 0


def test_the_parts_of_a_run_are_tenths_of_its_steps():
  parts = lambda n: {
    label: values.tolist()
    for label, values in charts._tenths(
      Spread(np.arange(n), np.arange(n)[:, None], None)
    )
  }
  assert parts(20) == {"first": [0.5], "middle": [9.5], "last": [18.5]}
  assert parts(2) == {"first": [0], "last": [1]}
  assert parts(1) == {"last": [0]}


def test_maps_and_outlines_of_one_run_outlines_of_several(tmp_path):
  folders = [make_run(tmp_path / n, 30) for n in "ab"]
  subject = next(s for s in SUBJECTS if "Experts" in s.title)
  for these, maps, lines in (
    (folders[:1], 1, ["first", "middle", "last"]),
    (folders, 0, ["a", "b"]),
  ):
    plots, _, _ = of_subject(subject, runs(*these), set())
    kinds = [p.figure.data[0].type for p in plots]
    assert kinds.count("heatmap") == maps
    (outlines,) = (p for p in plots if p.title.startswith("Flips by layer: "))
    assert names(outlines.figure) == lines


@pytest.mark.parametrize(
  ("value", "unit", "text"),
  [
    (0.0, "", "0"),
    (0.12345, "", "0.123"),
    (-12.345, "", "-12.3"),
    (999.7, "", "1,000"),
    (12345.0, "tokens", "12,345 tokens"),
    (3e-4, "", "0.0003"),
    (1.26e-7, "", "1.26e-07"),
    (0.0013, "%", "0.13%"),
    (1.0, "%", "100%"),
    (float("nan"), "%", "-"),
  ],
)
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
