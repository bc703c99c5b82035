"""What is read is what the run's own writer wrote."""

import json
import math

import numpy as np
import pytest
from make_run import CONFIG, make_run

from gspo_jax import metrics
from gspo_jax.losses import EDGES
from gspo_jax.report import run


def read(folder):
  return run.read([str(folder)])[0]


def test_a_run_is_what_its_writer_wrote(tmp_path):
  counts = list(range(len(EDGES) - 1))
  with metrics.Writer(tmp_path, total_steps=2, resume_step=0) as writer:
    writer.write(0, {"eval/x": 0.5})
    for step in (1, 2):
      spread = {"ratio/x": counts, "moe/x": [step, math.nan]}
      writer.write(step, {"loss": math.nan if step == 1 else 2.0}, spread)
    writer.samples(2, [("q", "ä\x00", "r", 1.0)])
  run = read(tmp_path)
  np.testing.assert_array_equal(run.scalars["loss"].steps, [1, 2])
  np.testing.assert_array_equal(run.scalars["loss"].values, [np.nan, 2])
  assert (run.first("loss"), run.last("eval/x")) == (2.0, 0.5)
  assert math.isnan(run.last("none"))
  histogram, layers = run.spreads["ratio/x"], run.spreads["moe/x"]
  np.testing.assert_array_equal(histogram.values, [counts, counts])
  np.testing.assert_allclose(histogram.edges[1:-1], EDGES[1:-1], rtol=1e-5)
  assert layers.edges is None
  np.testing.assert_array_equal(layers.values, [[1, np.nan], [2, np.nan]])
  assert "ä\\x00" in run.samples[2]
  assert (run.last_step, run.config) == (2, {})


def test_clips_are_the_config_s_or_the_method_s(tmp_path):
  own = {"clip_low": 3e-4, "clip_high": 4e-4}
  assert read(make_run(tmp_path / "a", 1)).clips() == own
  asked = {**CONFIG, "objective": {"name": "gspo", "clip_low": 0.01}}
  assert read(make_run(tmp_path / "b", 1, config=asked)).clips() == {
    "clip_low": 0.01,
    "clip_high": 4e-4,
  }
  assert read(make_run(tmp_path / "c", 1, config=None)).clips() == {}


@pytest.mark.parametrize(
  ("workdirs", "names"),
  [
    (["runs/a"], ["a"]),
    (["runs/a/", "gs://b/c"], ["a", "c"]),
    (["x/run", "y/run"], ["x/run", "y/run"]),
    (["run", "run"], ["run (1)", "run (2)"]),
  ],
)
def test_names_tell_one_from_another(workdirs, names):
  assert run.names(workdirs) == names


def test_layers_that_changed_in_number_are_those_of_the_end(tmp_path):
  rows = [{"step": 1, "x": [1]}, {"step": 2, "x": [1, 2]}]
  (tmp_path / "metrics.jsonl").write_text("")
  (tmp_path / "distributions.jsonl").write_text(
    "\n".join(map(json.dumps, rows))
  )
  np.testing.assert_array_equal(read(tmp_path).spreads["x"].values, [[1, 2]])
