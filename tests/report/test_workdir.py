"""What is read is what MetricWriter wrote."""

import json
import math

import jax
import numpy as np
import pytest
from make_run import make_run, runs

from gspo_jax import losses
from gspo_jax.losses import EDGES
from gspo_jax.record import metric_writer
from gspo_jax.report import workdir
from gspo_jax.runtime.errors import UserError


def read(folder):
  return runs(folder)[0]


def test_a_run_is_what_its_writer_wrote(tmp_path):
  counts = list(range(len(EDGES) - 1))
  with metric_writer.MetricWriter(
    tmp_path, total_steps=2, resume_step=0
  ) as writer:
    writer.write(0, {"eval/x": 0.5})
    for step in (1, 2):
      spread = {"ratio/x": counts, "moe/x": [step, math.nan]}
      spread["moe/layer_x"] = [0.5] * len(counts)  # as many layers as bins
      samples = [("q", "ä\x00", "r", 1.0)] * (step == 2)
      loss = math.nan if step == 1 else 2.0
      writer.write(step, {"loss": loss}, spread, samples)
  workdir = read(tmp_path)
  np.testing.assert_array_equal(workdir.scalars["loss"].steps, [1, 2])
  np.testing.assert_array_equal(workdir.scalars["loss"].values, [np.nan, 2])
  assert workdir.scalars["loss"].finite().tolist() == [2]
  histogram, layers = workdir.spreads["ratio/x"], workdir.spreads["moe/x"]
  np.testing.assert_array_equal(histogram.values, [counts, counts])
  np.testing.assert_allclose(histogram.edges[1:-1], EDGES[1:-1], rtol=1e-5)
  assert layers.edges is workdir.spreads["moe/layer_x"].edges is None
  np.testing.assert_array_equal(layers.values, [[1, np.nan], [2, np.nan]])
  assert workdir.samples == {2: [(2, "q", "ä\x00", "r", 1.0)]}
  assert (workdir.last_step, workdir.config) == (2, {})


def test_steps_without_signal_are_those_without_a_mixed_group(tmp_path):
  def steps(name, objective="gspo", **row):
    named = {"name": objective}
    folder = make_run(tmp_path / name, 3, objective=named, scalars=row)
    return read(folder).without_signal().tolist()

  none = {"reward/mixed_groups": 0.0}
  assert steps("some") == []
  assert steps("none", **none) == [1, 2, 3]
  assert steps("critic", "ppo", **none) == []
  (tmp_path / "metrics.jsonl").write_text("")
  assert read(tmp_path).without_signal().tolist() == []


@pytest.mark.parametrize(
  ("objective", "unit", "ratios"),
  [({"name": "gspo_token:clip_low=0.01"}, "sequence", (0.99, 1 + 4e-4)),
   ({"name": "grpo:dual_clip=3"}, "token", (0.8, 1.27)),
   ({"name": "ppo:clip_low=1.0"}, "token", (0, 1.2)),
   ({"name": "rspo:clip_low=2"}, "token", (math.exp(-2), math.exp(0.4))),
   ({"name": "luspo"}, "sequence", (0.998, 1.0025)),
   ({"name": "cispo"}, "neither", ()), ({"name": "dppo_tv"}, "neither", ()),
   ({"name": "sapo"}, "neither", ()),
   ({"name": "new.loss:clip_low=1"}, "neither", ()), ({}, "neither", ())],
)  # fmt: skip
def test_clips_are_log_ratios_of_what_is_clipped(
  tmp_path, objective, unit, ratios
):
  run = read(make_run(tmp_path / "a", 1, objective=objective))
  other = {"token", "sequence"} - {unit}
  assert all(run.clips(unit) == {} for unit in other)
  bounds = dict(zip(("clip low", "clip high"), ratios, strict=False))
  if unit in ("token", "sequence"):
    clips = {k: math.exp(v) for k, v in run.clips(unit).items()}
    assert clips == pytest.approx({k: v for k, v in bounds.items() if v})


@pytest.mark.parametrize(
  "method", ["gspo", "grpo", "dr_grpo", "dapo", "ppo", "gmpo"]
)
def test_outside_the_clip_range_the_loss_has_no_gradient(tmp_path, method):
  run = read(make_run(tmp_path / method, 1, objective={"name": method}))
  clips = run.clips("token") or run.clips("sequence")
  low, high = clips["clip low"], clips["clip high"]
  bounds = [0.999 * low, 1.001 * low, 0.999 * high, 1.001 * high]
  log_ratios = np.float32([[bound] * 3 for bound in bounds])
  advantages = np.float32([-1, -1, 1, 1])
  loss = getattr(losses, f"{method}_loss")
  old, mask = np.zeros_like(log_ratios), np.ones_like(log_ratios)
  of = lambda logps: loss(logps, old, advantages, mask)
  gradient = jax.jit(jax.grad(of, has_aux=True))(log_ratios)[0]
  assert gradient.any(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
  ("workdirs", "names"),
  [(["runs/a"], ["a"]), (["runs/a/", "gs://b/c"], ["a", "c"]),
   (["x/run", "y/run"], ["x/run", "y/run"]),
   (["run", "run"], ["run (1)", "run (2)"])],
)  # fmt: skip
def test_names_tell_one_from_another(workdirs, names):
  assert workdir.names(workdirs) == names


@pytest.mark.parametrize(
  ("file", "text", "words"),
  [("metrics.jsonl", '{"step": 1, "x": "y"}', "x=y: expected a number or"),
   ("metrics.jsonl", '{"step": 1, "x": {}}', "x={}: expected a number or"),
   ("metrics.jsonl", f'{{"step": 1, "x": 1{"0" * 400}}}', "x=1000"),
   ("metrics.jsonl", f'{{"step": 1{"0" * 400}}}', "expected a step"),
   ("metrics.jsonl", '{"step": -1}', "expected a step"),
   ("distributions.jsonl", '{"step": 1, "x": 3}', "x=3: expected a list"),
   ("distributions.jsonl", '{"step": 1, "x": []}', "expected a list"),
   ("distributions.jsonl", '{"edges": null}', "edges=None: expected a list"),
   ("distributions.jsonl", '{"step": 1, "x": [[]]}',
    r"x=\[\]: expected a num"),
   ("run_config.json", "[]", "expected a JSON object"),
   ("run_config.json", "[" * 100_000, "not JSON"),
   ("run_config.json", '{"objective": []}', r"objective=\[\]: expected dict"),
   ("run_config.json", '{"num_steps": "x"}', "num_steps=x: expected int"),
   ("run_config.json", '{"model": {"variant": 3}}', "variant=3: expected str")],
)  # fmt: skip
def test_damaged_files_are_named(file, text, words, tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
  (tmp_path / file).write_text(f"{text}\n")
  with pytest.raises(UserError, match=words) as error:
    read(tmp_path)
  assert f"{tmp_path / file}:" in str(error.value)


def test_layers_that_changed_in_number_are_those_of_the_end(tmp_path):
  rows = [{"step": 1, "x": [1]}, {"step": 2, "x": [1, 2]}]
  (tmp_path / "metrics.jsonl").write_text("")
  (tmp_path / "distributions.jsonl").write_text(
    "\n".join(map(json.dumps, rows))
  )
  np.testing.assert_array_equal(read(tmp_path).spreads["x"].values, [[1, 2]])
