"""The studies: plans, published results, runs that go on, what runs count."""

import importlib
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from repository import ROOT

from gspo_jax.configs import common
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.program.rules import check_training
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from studies import arguments, runs, study, weight_errors
from studies.clip_fraction import run as clip_fraction
from studies.expert_flips import run as expert_flips
from studies.gradient_noise import run as gradient_noise
from studies.published_model import run as published_model
from studies.ratio_spread import run as ratio_spread
from studies.stability import run as stability

FOLDER = ROOT / "studies"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/run.py"))
each_study = pytest.mark.parametrize("name", NAMES)


def module(name, part):
  return importlib.import_module(f"studies.{name}.{part}")


@each_study
def test_a_study_has_a_section_with_its_commands(name):
  assert f"`python -m studies.{name}.run`" in (FOLDER / "README.md").read_text()
  config = module(name, "config")
  command = re.search(rf"studies/{name}/config.py:(\S+)", config.__doc__)
  config.get_config(command[1])


@each_study
def test_a_plan(name):
  """Each run has its own config; seeds are in order, and share cold starts."""
  run, make = module(name, "run"), module(name, "config").get_config
  planned, configs, starts = run.plan(quick=False), set(), {}
  for one in planned:
    config = make(arguments.write(**one))
    configs.add(config.to_json())
    assert not config.cold_start.gate  # a miss would end the study
    free = ("method", "rate", "old", "staleness", "error")
    alike = arguments.write(**{k: v for k, v in one.items() if k not in free})
    starts.setdefault(alike, set()).add(runs.cold_start(config))
  assert len(configs) == len(planned)
  assert all(len(names) == 1 for names in starts.values())
  assert len(set.union(*starts.values())) == len(starts)
  choice = getattr(run, "CHOICE", None)  # the seed that chooses a rate
  seeds = [one["seed"] for one in planned]
  seeds = seeds[seeds.count(choice) :]
  assert choice not in seeds
  assert seeds == sorted(seeds)
  assert len(set(seeds)) >= 3


@each_study
def test_planned_configs_build(name):
  """All are checked, and the last is built."""
  make = module(name, "config").get_config
  # Only one of the learning rates and seeds.
  shape = lambda one: {k: v for k, v in one.items() if k != "rate"}
  planned = [p for p in module(name, "run").plan(quick=False) if not p["seed"]]
  for text in {arguments.write(**shape(one)) for one in planned}:
    config = make(text)
    if config.model.checkpoint:  # a folder that is not everywhere
      config = make(f"{text},quick=1")
    parsed = parse(runs.of_package(config))
    check_training(parsed, 1)
    assert settings.model_config(parsed.model).num_experts
  build_program(parsed, sharding.make_mesh(jax.devices()[:1]))


def test_a_cold_start_depends_on_how_its_batch_is_cut():
  config = module("clip_fraction", "config").get_config()
  before = runs.cold_start(config)
  other = module("gradient_noise", "config").get_config()
  assert runs.cold_start(other) == before  # the two share it
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


# What measuring depends on besides the config of a run.
KEPT = {
  "gradient_noise": gradient_noise.FULL._asdict(),
  "ratio_spread": {"first": ratio_spread.FIRST, "bins": ratio_spread.BINS,
   "batches": ratio_spread.BATCHES},
}  # fmt: skip


@each_study
def test_a_published_result_follows_from_its_runs(name, tmp_path):
  """The plan still has them: else all would be made again."""
  result = json.loads((FOLDER / name / "result.json").read_text())
  rows = result["runs"]
  make, run = module(name, "config").get_config, module(name, "run")
  follows = hasattr(run, "CHOICE")  # the plan, from results
  planned = run.plan(False, rows) if follows else run.plan(False)
  names = {
    runs.digest(make(arguments.write(**p)), KEPT.get(name)) for p in planned
  }
  assert {row["run"] for row in rows} <= names
  findings = json.loads(json.dumps(runs.plain(run.summarize(rows))))
  assert findings
  assert {key: result[key] for key in findings} == findings
  module(name, "figure").draw(result, tmp_path / "figure.png")
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
  assert f"]({name}/figure.png)" in (FOLDER / "README.md").read_text()


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


def test_a_finished_run_is_not_repeated_and_another_is_refused(tmp_path):
  config = module("clip_fraction", "config").get_config("quick=1")
  saved = json.loads(config.to_json_best_effort())
  (tmp_path / "run_config.json").write_text(json.dumps(saved))
  rows = [{"step": 0}, {"step": 1, "x": 2.0}, {"step": 2, "x": None}]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "metrics.jsonl").write_text(lines)
  (tmp_path / "distributions.jsonl").write_text('{"edges": []}\n{"step": 1}\n')
  record = {"seconds": 1.5, "commit": "abc", "failure": "", "finished": True}
  (tmp_path / "study.json").write_text(json.dumps(record))
  run = runs.finish(config, tmp_path)
  assert run.curve("x") == [[1, 2.0]]
  assert run.mean("x") == 2.0
  assert math.isnan(run.mean("y"))
  assert run.distributions == [{"step": 1}]
  assert run.seconds == 1.5
  config.optim.learning_rate = 1.0
  with pytest.raises(UserError, match=r"optim\.learning_rate"):
    runs.finish(config, tmp_path)


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


def test_errors_are_in_the_weights_that_a_run_samples_with_alone():
  rng = np.random.default_rng(0)
  normal = lambda *shape: np.float32(rng.normal(size=shape))
  layers = {
    "norm": normal(4, 64),
    "q": normal(4, 64, 64),
    "router": normal(4, 64, 8),
  }
  change = jax.jit(weight_errors.with_error, static_argnums=0)

  def off(error, seed=0):
    changed = change(error, layers, jax.random.key(seed))
    return {name: np.abs(changed[name] - x).max() for name, x in layers.items()}

  largest = np.abs(layers["q"]).max()
  for error, steps in ("int:8", 127), ("int:3", 3), ("int:2", 1):
    found = off(error)
    assert 0 < found["q"] <= largest / steps / 2 * 1.001
    assert found["norm"] == found["router"] == 0
  assert 0 < off("float8")["q"] <= largest * 2**-4
  noise = off("router:0.5")
  assert noise["q"] == noise["norm"] == 0 < noise["router"] < 0.5 * 6
  assert noise == off("router:0.5")
  assert noise != off("router:0.5", seed=1)
  with pytest.raises(ValueError, match=r"int:BITS"):
    off("int4")


def test_an_exact_number_is_not_rounded():
  x = np.arange(-3.0, 4.0, dtype=np.float32)[np.arange(64) % 7]
  assert (jax.jit(weight_errors.rounded, static_argnums=1)(x, 3) == x).all()


STEPS = 10


def synthetic_run(until=STEPS, every=5):
  """A run that has pass@1 .4 before and .8 after, and ends after `until`."""
  config = SimpleNamespace(num_steps=STEPS, eval=SimpleNamespace(every=every))
  numbers = {
    "reward/mean": 0.5,
    "clip_frac/token": 0.1,
    "moe/expert_flip_rate": 0.02,
  }
  rows = [{"step": 0, "eval/pass@1": 0.4}] if every else []
  rows += [{"step": step} | numbers for step in range(1, until + 1)]
  if until == STEPS:
    rows[-1]["eval/pass@1"] = 0.8
  spreads = [{"moe/layer_flip_rate": [0.01, 0.03]}] * until
  failure = "" if until == STEPS else "grad/norm is nan"
  return runs.Run(config, None, rows, spreads, 2.0, "abc", failure)


@pytest.mark.parametrize("until", [0, 3])
def test_a_run_that_ended_early_continues_at_0(until):
  run = synthetic_run(until)
  assert run.carried("eval/pass@1") == [[0, 0.4], [5, 0.0], [10, 0.0]]
  rewards = [0.5] * until + [0.0] * (STEPS - until)
  expected = [[step, x] for step, x in enumerate(rewards, 1)]
  assert run.carried("reward/mean") == expected
  never = synthetic_run(until, every=0)  # it has no row of step 0
  assert never.carried("eval/pass@1") == [[STEPS, 0.0]]
  assert never.carried("reward/mean") == expected
  whole = synthetic_run()
  assert whole.carried("eval/pass@1") == [[0, 0.4], [10, 0.8]]
  assert whole.mean("clip_frac/token") == pytest.approx(0.1)


def test_a_run_without_an_iteration_has_no_share_and_a_score_of_0():
  results = [
    {"method": method, "rate": "3e-4", "seed": seed}
    | clip_fraction.measure(synthetic_run(0 if seed == 1 else STEPS))
    for seed in range(3)
    for method in clip_fraction.METHODS
  ]
  (row,) = clip_fraction.summarize(results)["table"]
  shares = row["gspo"]["clipped tokens"]
  assert (shares["n"], shares["mean"]) == (2, pytest.approx(0.1))
  assert row["gspo"]["broke off"] == 1
  assert row["gspo"]["final"]["mean"] == pytest.approx(1.6 / 3)


def test_expert_flips_are_of_one_update_of_two():
  found = expert_flips.measure(synthetic_run())
  assert found["flips"] == pytest.approx(0.04)
  assert found["by layer"] == pytest.approx([0.02, 0.06])
  assert found["curve"][0] == [1, 0.04]


@pytest.mark.parametrize(
  ("scores", "rewards", "failure", "collapsed"),
  [
    ([0.40, 0.80, 0.70], [0.5] * 9, "", False),
    ([0.40, 0.36], [0.5] * 9, "", False),  # less than .05 below the start
    ([0.40, 0.34], [0.5] * 9, "", True),
    ([0.30, 0.44], [0.9] * 5 + [0.44] * 5, "", True),  # under half of its best
    ([0.30, 0.44], [0.9] * 5 + [0.46] * 5, "", False),
    ([0.30, 0.44], [0.1, 0.9, 0.1, 0.1, 0.1, 0.1], "", False),  # one is chance
    ([0.40, 0.80], [0.5] * 2, "", False),
    ([0.40, 0.80], [0.5] * 9, "grad/norm is nan at step 3", True),
  ],
)
def test_collapse(scores, rewards, failure, collapsed):
  assert bool(stability.collapse(scores, rewards, failure)) == collapsed


@pytest.mark.parametrize(
  ("rewards", "rates", "chosen"),
  [({}, ["1e-5", "3e-5"], "1e-5"),
   ({"1e-5": 0.3, "3e-5": 0.3}, ["1e-5", "3e-5"], "1e-5"),
   ({"1e-5": 0.3, "3e-5": 0.4}, ["1e-5", "3e-5", "1e-4"], "3e-5"),
   ({"1e-5": 0.3, "3e-5": 0.4, "1e-4": 0.5}, ["1e-5", "3e-5", "1e-4"], "1e-4"),
   ({"1e-5": 0.3, "3e-5": 0.4, "1e-4": 0.4}, ["1e-5", "3e-5", "1e-4"], "3e-5")],
)  # fmt: skip
def test_published_model_chooses_a_learning_rate(rewards, rates, chosen):
  trial = {"method": "gmpo", "seed": published_model.CHOICE, "iterations": 5}
  results = [
    trial | {"rate": rate, "last reward": reward}
    for rate, reward in rewards.items()
  ]
  # Runs of another seed, length or method have no say.
  others = {"seed": 0, "iterations": 10}, {"iterations": 10}, {"method": "gspo"}
  results += [trial | {"rate": "3e-5", "last reward": 1.0} | o for o in others]
  planned = published_model.plan(False, results)
  planned = [one for one in planned if one["method"] == "gmpo"]
  expected = [trial | {"rate": rate} for rate in rates]
  expected += [
    {"method": "gmpo", "rate": chosen, "seed": seed, "iterations": 10}
    for seed in range(3)
  ]
  assert planned == expected


def test_a_run_is_trained_unless_the_result_has_it(tmp_path, monkeypatch):
  """The seconds are those of training and measuring."""
  clock = iter(range(0, 10_000, 30))
  monkeypatch.setattr(study, "FOLDER", tmp_path)
  monkeypatch.setattr(study.time, "monotonic", lambda: next(clock))
  monkeypatch.setattr(study.Study, "train", lambda *_: synthetic_run())
  drawn = SimpleNamespace(draw=lambda record, path: None)
  config = lambda text: ConfigDict({"text": text})
  drawn.get_config = config
  monkeypatch.setattr(importlib, "import_module", lambda name: drawn)
  measured = []

  def sweep(*seeds, planned=None, kept=None, flags=()):
    swept = study.Study("old_logps", "Of nothing.", flags)
    measure = lambda run: measured.append(run) or {"none": math.nan}
    planned = planned or [{"seed": seed} for seed in seeds]
    swept.sweep(planned, measure, lambda results: {}, kept=kept)
    return json.loads((tmp_path / "old_logps" / "result.json").read_text())

  first = sweep(0, 1)
  assert first["seconds"] == 64
  assert first["runs"][1]["none"] is None
  grown = sweep(0, 1, 2)
  assert grown["runs"][:2] == first["runs"]
  assert len(measured) == grown["runs finished"] == 3
  assert sweep(9, flags=["--plot"]) == grown  # it only draws
  monkeypatch.setattr(study.Study, "train", stop)
  with pytest.raises(KeyboardInterrupt):  # in the second of five runs
    sweep(0, 7, 1, 2, 8)
  assert len(sweep(0, 1, 2)["runs"]) == 3  # no earlier run is lost
  monkeypatch.setattr(study.Study, "train", lambda *_: synthetic_run())
  sweep(0, kept={"n": (1, 2)})  # measured otherwise: another run
  sweep(0, kept={"n": (1, 2)})
  assert len(measured) == 4

  def grows(results):  # one seed more after each run
    made = {row["seed"] for row in results}
    return [{"seed": s} for s in (5, 6, 7) if s == 5 or s - 1 in made]

  for _ in range(2):  # the second time, nothing is left to do
    rows = sweep(planned=grows)["runs"]
    assert [row["seed"] for row in rows] == [5, 6, 7]
  assert len(measured) == 7


def stop(*_):
  raise KeyboardInterrupt


@pytest.mark.slow
@each_study
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
