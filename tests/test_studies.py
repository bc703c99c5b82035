"""The studies: their configs build, their runs are identified, they run."""

import importlib
import json
import math
import re
import subprocess
import sys

import jax
import pytest
from repository import ROOT

from gspo_jax.configs import common
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from studies import arguments, runs

FOLDER = ROOT / "studies"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/run.py"))
of_each = pytest.mark.parametrize("name", NAMES)


def module(name, part):
  return importlib.import_module(f"studies.{name}.{part}")


@of_each
def test_has_a_config_and_a_section_with_its_command(name):
  text = (FOLDER / "README.md").read_text()
  assert (FOLDER / name / "config.py").exists()
  assert f"`python -m studies.{name}.run`" in text
  if (FOLDER / name / "result.json").exists():
    assert f"]({name}/figure.png)" in text


def test_every_folder_is_a_study():
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
  run = module(name, "run")
  choice = getattr(run, "CHOICE", None)  # the seed that chooses a rate
  seeds = [one["seed"] for one in run.plan(quick=False)]
  seeds = seeds[seeds.count(choice) :]
  assert choice not in seeds
  assert seeds == sorted(seeds)
  assert len(set(seeds)) >= 3


@of_each
def test_planned_configs_build(name):
  mesh = sharding.make_mesh(jax.devices()[:1])
  make = module(name, "config").get_config
  # Only one of the learning rates and seeds.
  of_shape = lambda one: {k: v for k, v in one.items() if k != "rate"}
  planned = [p for p in module(name, "run").plan(quick=False) if not p["seed"]]
  for text in {arguments.write(**of_shape(one)) for one in planned}:
    config = make(text)
    if config.model.checkpoint:  # a folder that is not everywhere
      config = make(f"{text},quick=1")
    assert build_program(parse(config), mesh).cfg.num_experts


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
    free = ("method", "rate", "old", "staleness")
    alike = arguments.write(**{k: v for k, v in one.items() if k not in free})
    config = make(arguments.write(**one))
    assert not config.cold_start.gate  # a miss would end the study
    shared.setdefault(alike, set()).add(runs.cold_start(config))
  names = [next(iter(found)) for found in shared.values()]
  assert all(len(found) == 1 for found in shared.values())
  assert len(set(names)) == len(names)


@pytest.mark.parametrize(
  ("a", "b"),
  [
    (("clip_fraction", "seed=2"), ("gradient_noise", "seed=2")),
    (("stability", "regime=long,seed=2"), ("ratio_spread", "seed=2")),
  ],
)
def test_two_studies_share_a_cold_start(a, b):
  configs = [module(name, "config").get_config(text) for name, text in (a, b)]
  first, second = map(runs.cold_start, configs)
  assert first == second


def test_a_cold_start_depends_on_how_its_batch_is_cut():
  config = module("clip_fraction", "config").get_config()
  before = runs.cold_start(config)
  config.eval.prompts = 8
  assert runs.cold_start(config) == before  # there is no gate
  config.learner.micro_batch_size = 16
  assert runs.cold_start(config) != before


def test_arguments_are_read_in_the_type_of_their_default():
  text = arguments.write(rate="3e-4", seed=7)
  found = arguments.read(text, rate=1.0, seed=0, method="gspo")
  assert (found.rate, found.seed, found.method) == (3e-4, 7, "gspo")
  for wrong in ("sead=1", "seed=1.5", "seed"):
    with pytest.raises(ValueError, match=r"sead|1\.5|''"):
      arguments.read(wrong, seed=0)


def test_a_finished_run_is_not_repeated_and_another_is_refused(tmp_path):
  config = module("clip_fraction", "config").get_config("quick=1")
  workdir = tmp_path / "run"
  workdir.mkdir()
  saved = json.loads(config.to_json_best_effort())
  (workdir / "run_config.json").write_text(json.dumps(saved))
  rows = [{"step": 0}, {"step": 1, "x": 2.0}, {"step": 2, "x": None}]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (workdir / "metrics.jsonl").write_text(lines)
  (workdir / "distributions.jsonl").write_text('{"edges": []}\n{"step": 1}\n')
  record = {"seconds": 1.5, "commit": "abc", "failure": "", "finished": True}
  (workdir / "study.json").write_text(json.dumps(record))
  run = runs.finish(config, workdir)
  assert run.curve("x") == [[1, 2.0]]
  assert run.mean("x") == 2.0
  assert math.isnan(run.mean("y"))
  assert run.distributions == [{"step": 1}]
  assert run.seconds == 1.5
  config.optim.learning_rate = 1.0
  with pytest.raises(UserError, match=r"optim\.learning_rate"):
    runs.finish(config, workdir)


def test_a_non_finite_number_ends_the_run_and_not_the_study(
  tmp_path, monkeypatch
):
  config = module("clip_fraction", "config").get_config("quick=1")

  def breaks(config, workdir):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "distributions.jsonl").write_text('{"edges": []}\n')
    raise FloatingPointError("grad/norm is nan at step 1")

  monkeypatch.setattr(runs.train, "train_and_evaluate", breaks)
  assert runs.finish(config, tmp_path).failure == "grad/norm is nan at step 1"
  monkeypatch.undo()  # it is finished; otherwise it would train now
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


def test_json_has_null_for_nan_and_infinity(tmp_path):
  path = tmp_path / "a" / "b.json"
  runs.write(path, {"x": [math.nan, math.inf, 1.5], "y": {"z": (1, "w")}})
  wanted = {"x": [None, None, 1.5], "y": {"z": [1, "w"]}}
  assert json.loads(path.read_text()) == wanted


def git(folder, *words):
  who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
  subprocess.run(["git", *who, *words], cwd=folder, check=True)


def test_results_are_no_change_of_the_commit_and_all_else_is(tmp_path):
  left = tmp_path / "studies" / "one"
  left.mkdir(parents=True)
  (left / "result.json").write_text("1")
  (left / "run.py").write_text("1")
  git(tmp_path, "init", "--quiet")
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "--quiet", "--message=a")
  clean = runs.commit(tmp_path)
  (left / "result.json").write_text("2")
  (left / "figure.png").write_text("2")
  assert runs.commit(tmp_path) == clean
  assert "changes" not in clean
  (left / "run.py").write_text("2")
  assert runs.commit(tmp_path) == f"{clean} and changes"
  git(tmp_path, "checkout", "--quiet", "studies/one/run.py")
  (left / "new.py").write_text("2")
  assert runs.commit(tmp_path) == f"{clean} and changes"


SPREAD = module("ratio_spread", "run")
KEPT = {
  "gradient_noise": module("gradient_noise", "run").FULL._asdict(),
  "ratio_spread": {
    **{"first": SPREAD.FIRST, "bins": SPREAD.BINS},
    "batches": SPREAD.BATCHES,
  },
}


@of_each
def test_the_runs_of_a_result_are_still_planned(name):
  """Else a change of the configs would repeat all of them."""
  path = FOLDER / name / "result.json"
  if not path.exists():
    pytest.skip("no result yet")
  rows = json.loads(path.read_text())["runs"]
  make, run = module(name, "config").get_config, module(name, "run")
  follows = hasattr(run, "CHOICE")  # the plan, from results
  planned = run.plan(False, rows) if follows else run.plan(False)
  names = {
    runs.digest(make(arguments.write(**p)), KEPT.get(name)) for p in planned
  }
  assert {row["run"] for row in rows} <= names


def test_a_run_is_identified_by_its_config(monkeypatch):
  config = module("clip_fraction", "config").get_config()
  before = runs.digest(config)
  fewer = common.get_config()
  del fewer["continuous_batching"]  # keys whose values are the defaults
  monkeypatch.setattr(runs.common, "get_config", lambda: fewer)
  assert runs.digest(config) != before
  monkeypatch.undo()
  del config["continuous_batching"]
  assert runs.digest(config) == before
  assert runs.digest(config, {"n": 1}) != before
  config.optim.learning_rate = 1.0
  assert runs.digest(config) != before


@pytest.mark.slow
@of_each
def test_quick(name, tmp_path):
  command = [sys.executable, "-m", f"studies.{name}.run", "--quick"]
  before = sorted(FOLDER.rglob("*.json")) + sorted(FOLDER.rglob("*.png"))
  subprocess.run([*command, f"--workdir={tmp_path}"], cwd=ROOT, check=True)
  out = tmp_path / name / "quick"
  record = json.loads((out / "result.json").read_text())
  assert record["command"] == f"python -m studies.{name}.run --quick"
  assert record["seconds"] > 0
  assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
  after = sorted(FOLDER.rglob("*.json")) + sorted(FOLDER.rglob("*.png"))
  assert before == after
