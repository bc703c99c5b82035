"""The head of a page, the numbers of its metrics, and the config."""

import re

from make_run import CONFIG, make_run, runs

from gspo_jax.report import tables
from gspo_jax.report.charts import of_section


def test_a_run_that_goes_on_is_not_called_finished(tmp_path):
  going = make_run(tmp_path / "a", 7)
  done = make_run(tmp_path / "b", 20)
  unknown = make_run(tmp_path / "c", 5, config=None)
  assert [tables.steps(workdir) for workdir in runs(going, done, unknown)] == [
    "7 of 20 steps, running or stopped",
    "20 of 20 steps, finished",
    "5 steps",
  ]


def test_a_checkpoint_names_the_model_before_a_variant_does(tmp_path):
  model = {"checkpoint": "/models/Qwen3-8B/", "variant": "tiny"}
  workdir = make_run(tmp_path / "a", 1, config={**CONFIG, "model": model})
  assert tables.title(runs(workdir)) == "a · gspo · Qwen3-8B"


def test_time_and_rewards_are_those_of_the_rows(tmp_path):
  scalars = {"time/iteration": 60.0, "reward/mean": 0.25}
  workdir = make_run(tmp_path / "a", 12, scalars=scalars)
  html = tables.head(runs(workdir))
  assert "<dt>time in iterations</dt><dd>0:12:00</dd>" in html
  assert "<dt>an iteration</dt><dd>60 s</dd>" in html
  assert "0.25 → </span>0.25" in html


def test_rewards_that_are_no_shares_are_not_written_as_such(tmp_path):
  """Of rewards up to .5, which never reach the threshold of pass@k."""
  folder = make_run(tmp_path / "a", 12, average=0.01)
  html = tables.head(runs(folder))
  tiles = re.findall("<dt>(.*?), held out</dt><dd>(.*?)</dd>", html)
  assert [label for label, _ in tiles] == ["avg@n", "greedy", "pass@1"]
  assert [value.endswith("%") for _, value in tiles] == [False, False, True]
  assert tiles[0][1].endswith("0.008")
  with (folder / "metrics.jsonl").open("a") as file:  # another eval.samples
    file.write('{"step": 13, "eval/avg@2": 0.75}\n')
  assert ">0.75</dd>" in tables.head(runs(folder))
  (chart,) = of_section(["eval/avg@4"], runs(folder))
  assert "%" not in chart.summary


def test_no_signal_is_the_first_warning(tmp_path):
  folder = make_run(tmp_path / "a", 3, scalars={"reward/mixed_groups": 0.0})
  text = (folder / "metrics.jsonl").read_text()
  text = re.sub('("step": [23])', r'\1, "grad/odd": null', text)
  (folder / "metrics.jsonl").write_text(text)
  html = tables.head(runs(folder))
  warning = "No signal at 3 of 3 steps, first at step 1: "
  assert html.index("<h1>") < html.index(f'<ul class="warnings"><li>{warning}')
  nulls = html.index("grad/odd was not finite at step 2, 2 times")
  assert html.index(warning) < nulls < html.index('class="tiles"')
  healthy = make_run(tmp_path / "b", 3)
  assert "No signal" not in tables.head(runs(healthy))
  assert f"<li>a: {warning}" in tables.head(runs(folder, healthy))


def test_equal_configs(tmp_path):
  pair = [make_run(tmp_path / name, 1) for name in "ab"]
  assert "All the same." in tables.config(runs(*pair))
  without = make_run(tmp_path / "c", 1, config=None)
  assert tables.config(runs(without)) == ""


def test_the_numbers_are_the_ends_and_the_extremes(tmp_path):
  values = enumerate(["3", "-7", "20", "5", "null"])
  rows = [f'{{"step": {step}, "x": {x}}}' for step, x in values]
  (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
  html = tables.numbers(["x"], runs(tmp_path))
  cells = re.findall("<td class=n>(.*?)</td>", html)
  assert cells == ["3", "5", "-7", "20", "5"]
