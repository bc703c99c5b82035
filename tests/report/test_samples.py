"""Sample responses are shown unchanged, and a limited part of them."""

import re

from make_run import add_sample, make_run, runs

from gspo_jax.record.run_files import Sample, write_samples
from gspo_jax.report import samples


def block(folder):
  return samples.of_runs(runs(folder))


def written(folder, *rows):
  (folder / "metrics.jsonl").write_text("")
  write_samples(folder / "samples", 3, [Sample(3, *row) for row in rows])
  return folder


def test_a_card_has_problem_response_reference_and_reward(tmp_path):
  rows = [("2+2?", "it is\n<4>", "4", 1.0), ("q", "", "r", 0.25)]
  html = block(written(tmp_path, *rows))
  assert html.count("<article>") == 2
  assert '<pre class="problem">2+2?</pre>' in html
  assert "<pre>it is\n&lt;4&gt;</pre>" in html
  assert "reference <b>4</b>" in html
  assert re.findall("reward <b>(.*?)</b>", html) == ["1", "0.25"]


def test_of_many_steps_the_first_the_last_and_some_between(tmp_path):
  workdir = make_run(tmp_path / "x", 1)
  for step in range(2, 500):
    add_sample(workdir, step)
  html = block(workdir)
  steps = [int(s) for s in re.findall(r'data-step="(\d+)"', html)]
  assert (steps[0], steps[-1], len(steps)) == (1, 499, 24)
  assert "24 of 499 files" in html


def test_a_long_response_keeps_both_ends_and_its_length(tmp_path):
  workdir = make_run(tmp_path / "x", 1)
  add_sample(workdir, 1, response="begin" + "x" * 100_000 + "end")
  html = block(workdir)
  assert len(html) < 5000
  assert "begin" in html
  assert "end</pre>" in html
  assert "97,608 characters left out" in html
