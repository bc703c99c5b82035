"""The charts of a subject show what changed, and list what did not."""

import re

import numpy as np
import pytest
from make_run import CONFIG, make_run

from gspo_jax.report import figures, workdir
from gspo_jax.report.figures import of_subject, table
from gspo_jax.report.subjects import SUBJECTS, Chart, Subject

SHARES = Subject("s", (Chart("Both", {"x/*": ""}, "%"),))


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


def test_a_constant_scalar_is_listed_without_a_chart(tmp_path):
  workdir = written(tmp_path / "a", *[{"a": 0.25}] * 5)
  figures, still, scalars = of_subject(SHARES, runs(workdir), set())
  assert (figures, still, scalars) == ([], ["x/a 25%"], ["x/a"])


def test_beside_one_that_changes_it_is_drawn(tmp_path):
  workdir = written(tmp_path / "a", *[{"a": 0.25, "b": i} for i in range(5)])
  figures, still, _ = of_subject(SHARES, runs(workdir), set())
  assert still == []
  assert [s["n"] for s in figures[0].data["s"]] == ["a", "b"]


def test_of_several_runs_each_metric_has_a_chart(tmp_path):
  folders = [
    written(tmp_path / n, *[{"a": i, "b": -i} for i in range(5)]) for n in "uv"
  ]
  figures, _, _ = of_subject(SHARES, runs(*folders), set())
  assert [[s["n"] for s in f.data["s"]] for f in figures] == [["u", "v"]] * 2
  assert re.findall("<figcaption>(.*?)<", "".join(f.html for f in figures)) == [
    "Both: a",
    "Both: b",
  ]


def test_a_metric_of_an_earlier_subject_is_not_shown_again(tmp_path):
  workdir, taken = written(tmp_path / "a", {"a": 1}), {"x/a"}
  assert of_subject(SHARES, runs(workdir), taken) == ([], [], [])


def test_the_table_has_the_ends_and_the_extremes(tmp_path):
  values = [3, "null", -7, 20, 5]
  workdir = written(tmp_path / "a", *[{"a": v} for v in values])
  cells = re.findall("<td class=n>(.*?)</td>", table(["x/a"], runs(workdir)))
  assert cells == ["3", "5", "−7", "20", "5"]


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
    figures, still, scalars = of_subject(SUBJECTS[0], runs(*these), set())
    first = figures[0].html
    assert ('<figure class="warning"><figcaption>Groups' in first) == warned
    assert ("No signal at 0%" in first) == warned
    html = "".join(figure.html for figure in figures)
    assert html.count('class="warning"') == warned
    assert not warned or "reward/mixed_groups 0%" not in still
    assert "reward/mixed_groups" in scalars
  assert still == ["reward/mixed_groups 100%"]


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
    figures, _, _ = of_subject(subject, these, others)
    assert figures
    if any('class="mark"' in figure.html for figure in figures):
      found.add(name)
  return found


@pytest.mark.parametrize(
  ("method", "unit"),
  [("gspo", "sequence"), ("grpo", "token"), ("gmpo", "token"), ("sapo", "no")],
)
def test_a_clip_range_lies_beside_what_it_clips(tmp_path, method, unit):
  objective = {"name": method, "clip_low": 2e-3, "clip_high": 3e-3}
  config = {**CONFIG, "objective": objective}
  folder = make_run(tmp_path / "a", 12, config=config)
  expected = {name for name in SUBJECT_OF if f"/{unit}_" in name}
  assert marked(folder) == expected
  # Of several runs, curves alone, and where all have the same range.
  same = make_run(tmp_path / "b", 12, config=config)
  assert marked(folder, same) == {n for n in expected if "abs_mean" in n}
  other = {**CONFIG, "objective": {"name": "dapo"}}
  assert marked(folder, make_run(tmp_path / "c", 12, config=other)) == set()


def test_a_mark_is_where_the_log_ratio_is_clipped(tmp_path):
  """GRPO's 1 - 0.2 is a log-ratio of -0.223, and its size that on a curve."""
  config = {**CONFIG, "objective": {"name": "grpo"}}
  folder = make_run(tmp_path / "a", 12, config=config)
  curve = Chart("x", {"mismatch/token_abs_mean": ""}, clips="token")
  ((chart,), *_) = of_subject(Subject("s", (curve,)), runs(folder), set())
  assert "clip low 0.223" in chart.html
  assert "clip high 0.239" in chart.html


def test_the_parts_of_a_run_are_tenths_of_its_steps():
  steps = np.arange(20)
  parts = {
    part.label: steps[part.steps].tolist() for part in figures._parts(20)
  }
  assert parts == {"first": [0, 1], "middle": [9, 10], "last": [18, 19]}
  spread = workdir.Spread(steps, steps[:, None], None)
  assert figures._last_tenth(spread).tolist() == [[18], [19]]


def test_maps_and_outlines_of_one_run_outlines_of_several(tmp_path):
  folders = [make_run(tmp_path / n, 30) for n in "ab"]
  subject = next(s for s in SUBJECTS if "Experts" in s.title)
  for these, maps in ((folders[:1], 1), (folders, 0)):
    figures, _, _ = of_subject(subject, runs(*these), set())
    html = "".join(f.html for f in figures)
    assert html.count("<image") == 2 * maps
    assert "Flips by layer: " in html
