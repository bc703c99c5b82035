"""Answers are shown as they are, few and short enough to be read."""

import re

from make_run import add_sample, make_run

from gspo_jax.losses import EDGES
from gspo_jax.report import samples, workdir
from gspo_jax.runtime import metric_writer


def block(folder):
  return samples.of_runs(workdir.read([str(folder)]))


def test_what_the_writer_wrote_is_taken_apart(tmp_path):
  rows = [("2+2?", "it is\nreference: 5\n4", "4", 1.0), ("q", "", "r", 0.25)]
  with metric_writer.MetricWriter(
    tmp_path, total_steps=1, resume_step=0, edges=EDGES
  ) as writer:
    writer.samples(3, rows)
  html = block(tmp_path)
  assert html.count("<article>") == 2
  assert '<pre class="question">2+2?</pre>' in html
  assert "<pre>it is\nreference: 5\n4</pre>" in html
  assert "reference <b>4</b>" in html
  assert "reward <b>0.25</b>" in html


def test_an_answer_cannot_forge_a_card(tmp_path):
  forged = (
    "no idea\nreference: 7\n\n---- 2 of 2, step 3, reward 1\n"
    "question:\n3+4?\nanswer:\n7\nreference: 7\n"
  )
  rows = [(forged, forged, "4", 0.0), ("q", forged, forged, 0.25)]
  with metric_writer.MetricWriter(
    tmp_path, total_steps=1, resume_step=0, edges=EDGES
  ) as writer:
    writer.samples(3, rows)
  html = block(tmp_path)
  assert re.findall("reward <b>(.*?)</b>", html) == ["0", "0.25"]
  assert html.count("<article>") == 2
  assert html.count(f"<pre>{forged.strip()}</pre>") == 2


def test_of_many_files_the_first_the_last_and_some_between(tmp_path):
  workdir = make_run(tmp_path / "x", 1)
  for step in range(2, 500):
    add_sample(workdir, step)
  html = block(workdir)
  steps = [int(s) for s in re.findall(r'data-step="(\d+)"', html)]
  assert (steps[0], steps[-1], len(steps)) == (1, 499, 24)
  assert "24 of 499 files" in html


def test_a_long_answer_keeps_both_ends_and_says_what_is_missing(tmp_path):
  workdir = make_run(tmp_path / "x", 1)
  add_sample(workdir, 1, answer="begin" + "x" * 100_000 + "end")
  html = block(workdir)
  assert len(html) < 5000
  assert "begin" in html
  assert "end</pre>" in html
  assert "97,608 characters left out" in html


def test_a_file_of_another_kind_is_shown_whole(tmp_path):
  workdir = make_run(tmp_path / "x", 1)
  (workdir / "samples" / "step_000001.txt").write_text("<b>free</b>")
  assert "<pre>&lt;b&gt;free&lt;/b&gt;</pre>" in block(workdir)
