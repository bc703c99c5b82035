"""The studies: their configs build, their numbers are right, they run."""

import importlib
import json
import math
import os
import re
import subprocess
import sys

import jax
import pytest
from conftest import ROOT

from gspo_jax import program, sharding
from gspo_jax.errors import UserError
from studies import arguments, intervals, runs
from studies.stability.run import collapse

FOLDER = ROOT / "studies"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/run.py"))
OF_RUNS = ["clip_fraction", "expert_flips", "old_logps", "stability"]
of_each = pytest.mark.parametrize("name", OF_RUNS)


def module(name, part):
  return importlib.import_module(f"studies.{name}.{part}")


@pytest.mark.parametrize("name", NAMES)
def test_has_a_config_a_section_and_a_command_that_is_so(name):
  text = (FOLDER / "README.md").read_text()
  assert (FOLDER / name / "config.py").exists()
  assert f"`python -m studies.{name}.run`" in text
  assert f"]({name}/figure.png)" in text


def test_every_folder_is_a_study():
  assert set(OF_RUNS) <= set(NAMES)
  folders = {path.name for path in FOLDER.iterdir() if path.is_dir()}
  assert folders - {"__pycache__"} == set(NAMES)


@of_each
def test_every_planned_run_has_a_config_of_its_own(name):
  planned = module(name, "run").plan(quick=False)
  make = module(name, "config").get_config
  configs = {make(arguments.write(**one)).to_json() for one in planned}
  assert len(configs) == len(planned)


@of_each
def test_first_seed_comes_first(name):
  seeds = [one["seed"] for one in module(name, "run").plan(quick=False)]
  assert seeds == sorted(seeds)
  assert len(set(seeds)) >= 3


@of_each
def test_planned_configs_build(name):
  mesh = sharding.make_mesh(jax.devices()[:1])
  make = module(name, "config").get_config
  # Of all learning rates and seeds, one.
  of_shape = lambda one: {k: v for k, v in one.items() if k != "rate"}
  planned = [p for p in module(name, "run").plan(quick=False) if not p["seed"]]
  for text in {arguments.write(**of_shape(one)) for one in planned}:
    assert program.build(make(text), mesh).cfg.num_experts


@of_each
def test_the_command_of_a_config_is_in_its_head(name):
  head = module(name, "config").__doc__
  command = re.search(rf"studies/{name}/config.py:(\S+)", head)
  module(name, "config").get_config(command[1])


@of_each
def test_methods_of_a_seed_share_their_cold_start(name):
  make = module(name, "config").get_config
  shared = {}
  for one in module(name, "run").plan(quick=False):
    free = ("method", "rate", "old")
    alike = arguments.write(**{k: v for k, v in one.items() if k not in free})
    config = make(arguments.write(**one))
    shared.setdefault(alike, set()).add(runs.cold_start(config))
  names = [next(iter(found)) for found in shared.values()]
  assert all(len(found) == 1 for found in shared.values())
  assert len(set(names)) == len(names)


def test_two_studies_share_the_default_cold_start():
  clip = module("clip_fraction", "config").get_config("seed=2")
  off = module("stability", "config").get_config("regime=off_policy,seed=2")
  assert runs.cold_start(clip) == runs.cold_start(off)


def test_arguments_are_read_in_the_type_of_their_default():
  text = arguments.write(rate="3e-4", seed=7)
  found = arguments.read(text, rate=1.0, seed=0, method="gspo")
  assert (found.rate, found.seed, found.method) == (3e-4, 7, "gspo")
  for wrong in ("sead=1", "seed=1.5", "seed"):
    with pytest.raises(ValueError, match=r"sead|1\.5|''"):
      arguments.read(wrong, seed=0)


def test_mean_has_the_interval_of_a_table():
  # mean 3, s = sqrt(2.5), t(.975, 4) = 2.776: 3 +- 2.776 sqrt(2.5 / 5)
  found = intervals.mean([1, 2, 3, 4, 5])
  assert found["mean"] == 3
  assert found["high"] - 3 == pytest.approx(1.963, abs=1e-3)
  assert 3 - found["low"] == pytest.approx(1.963, abs=1e-3)
  assert math.isnan(intervals.mean([2.0])["low"])


def test_paired_is_of_the_differences():
  # differences 1, 2, 3: t = 2 / (1 / sqrt 3) = 3.464, 2 degrees of freedom;
  # there p = 1 - t / sqrt(t^2 + 2)
  found = intervals.paired([11, 22, 33], [10, 20, 30])
  assert found["mean"] == 2
  assert found["p"] == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-9)
  swapped = intervals.paired([10, 20, 30], [11, 22, 33])
  assert swapped["p"] == pytest.approx(found["p"])
  assert swapped["mean"] == -2
  assert intervals.paired([1, 2], [1, 2])["p"] == 1
  assert intervals.paired([2, 3], [1, 2])["p"] == 0
  assert math.isnan(intervals.paired([1], [0])["p"])


def test_holm_is_the_textbook_one():
  # Sorted .01, .02, .03, .04 times 4, 3, 2, 1, never falling.
  assert intervals.holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx(
    [0.06, 0.04, 0.06, 0.06]
  )
  assert intervals.holm([0.9, 0.8]) == [1.0, 1.0]
  low, none = intervals.holm([0.02, math.nan])
  assert low == pytest.approx(0.04)
  assert math.isnan(none)


def test_judge_says_which_way_and_only_where_p_of_all_is_small():
  found = [
    {"mean": 0.1, "p": 0.01},
    {"mean": -0.1, "p": 0.02},
    {"mean": 0.1, "p": 0.04},
    {"mean": 0.1, "p": math.nan},
  ]
  intervals.judge(found[:2])
  assert [one["verdict"] for one in found[:2]] == ["better", "worse"]
  intervals.judge(found)
  assert [one["verdict"] for one in found] == [
    "better",
    "not distinguished",
    "not distinguished",
    "not distinguished",
  ]


def test_bootstrap_of_a_mean_is_near_students_interval():
  values = list(range(200))
  low, high = intervals.bootstrap(values, lambda x: x.mean())
  exact = intervals.mean(values)
  assert low == pytest.approx(exact["low"], abs=1.0)
  assert high == pytest.approx(exact["high"], abs=1.0)
  assert intervals.bootstrap([5, 5], lambda x: x.mean()) == (5, 5)


@pytest.mark.parametrize(
  ("values", "failure", "collapsed"),
  [
    ([0.40, 0.80, 0.70], "", False),
    ([0.40, 0.36], "", False),  # less than .05 below the start
    ([0.40, 0.34], "", True),
    ([0.30, 0.90, 0.44], "", True),  # under half of its peak
    ([0.30, 0.90, 0.46], "", False),
    ([0.40, 0.80], "grad/norm is nan at step 3", True),
  ],
)
def test_collapse(values, failure, collapsed):
  assert bool(collapse(list(enumerate(values)), failure)) == collapsed


def test_a_finished_run_is_not_repeated_and_another_is_refused(tmp_path):
  config = module("clip_fraction", "config").get_config("quick=1")
  workdir = tmp_path / "run"
  workdir.mkdir()
  saved = json.loads(config.to_json_best_effort())
  saved["cold_start"]["dir"] = "elsewhere"  # where it lies is no difference
  (workdir / "run_config.json").write_text(json.dumps(saved))
  rows = [{"step": 0}, {"step": 1, "x": 2.0}, {"step": 2, "x": None}]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (workdir / "metrics.jsonl").write_text(lines)
  (workdir / "distributions.jsonl").write_text('{"edges": []}\n{"step": 1}\n')
  record = {"seconds": 1.5, "commit": "abc", "failure": "", "finished": True}
  (workdir / "study.json").write_text(json.dumps(record))
  run = runs.finish(config, workdir)
  assert run.curve("x") == [[1, 2.0]]
  assert run.mean("x", 1, 2) == 2.0
  assert math.isnan(run.mean("x", 2, 2))
  assert run.distributions == [{"step": 1}]
  assert run.seconds == 1.5
  config.optim.learning_rate = 1.0
  with pytest.raises(UserError, match=r"optim\.learning_rate"):
    runs.finish(config, workdir)


def test_a_broken_number_ends_the_run_and_not_the_study(tmp_path, monkeypatch):
  config = module("clip_fraction", "config").get_config("quick=1")

  def breaks(config, workdir):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "distributions.jsonl").write_text('{"edges": []}\n')
    raise FloatingPointError("grad/norm is nan at step 1")

  monkeypatch.setattr(runs.train, "train_and_evaluate", breaks)
  assert runs.finish(config, tmp_path).failure == "grad/norm is nan at step 1"
  monkeypatch.undo()  # finished: it would train now, if it tried
  assert runs.finish(config, tmp_path).failure


def test_a_sigterm_stops_the_study_and_its_seconds_count(tmp_path, monkeypatch):
  config = module("clip_fraction", "config").get_config("quick=1")
  stops = lambda config, workdir: None
  monkeypatch.setattr(runs.train, "train_and_evaluate", stops)
  (tmp_path / "study.json").write_text('{"seconds": 40, "finished": false}')
  with pytest.raises(SystemExit):
    runs.finish(config, tmp_path)
  record = json.loads((tmp_path / "study.json").read_text())
  assert not record["finished"]
  assert record["seconds"] >= 40


def test_json_has_null_for_what_is_no_number(tmp_path):
  path = tmp_path / "a" / "b.json"
  runs.write(path, {"x": [math.nan, math.inf, 1.5], "y": {"z": (1, "w")}})
  wanted = {"x": [None, None, 1.5], "y": {"z": [1, "w"]}}
  assert json.loads(path.read_text()) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick(name, tmp_path):
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  command = [sys.executable, "-m", f"studies.{name}.run", "--quick"]
  before = sorted(FOLDER.rglob("*.json")) + sorted(FOLDER.rglob("*.png"))
  subprocess.run(
    [*command, f"--workdir={tmp_path}"], cwd=ROOT, env=env, check=True
  )
  out = tmp_path / name / "quick"
  record = json.loads((out / "result.json").read_text())
  assert record["command"] == f"python -m studies.{name}.run --quick"
  assert record["seconds"] > 0
  assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
  after = sorted(FOLDER.rglob("*.json")) + sorted(FOLDER.rglob("*.png"))
  assert before == after
