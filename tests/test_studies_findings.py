"""The studies' findings in synthetic runs with a given outcome."""

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from studies import saved, study
from studies.clip_fraction import run as clip_fraction
from studies.expert_flips import run as expert_flips
from studies.gradient_noise import gradients, quantities
from studies.gradient_noise import run as gradient_noise
from studies.old_logps import run as old_logps
from studies.published_model import run as published_model
from studies.ratio_spread import run as ratio_spread
from studies.runs import Run
from studies.stability import run as stability

STEPS = 10


def synthetic_run(
  *, score=(0.4, 0.8), until=STEPS, layers=(0.01, 0.03), **columns
):
  """A run of ten iterations with pass@1 of `score` before and after.

  It ends early after iteration `until`. Columns have __ for a /.
  """
  constant = {
    "reward/mean": 0.5,
    "clip_frac/token": 0.1,
    "clip_frac/sequence": 0.2,
    "response/length": 40.0,
    "ratio/token_std": 0.05,
    "ratio/sequence_std": 0.01,
    "kl/old_new": 1e-3,
    "moe/expert_flip_rate": 0.02,
    "moe/load_max": 2.0,
    "mismatch/sequence_abs_mean": 1e-3,
    "mismatch/token_abs_mean": 1e-2,
    "time/iteration": 1.5,
    "grad/norm": 1.0,
  } | {name.replace("__", "/"): value for name, value in columns.items()}
  rows = [{"step": 0, "eval/pass@1": score[0]}]
  rows += [{"step": step} | constant for step in range(1, until + 1)]
  if until == STEPS:
    rows[-1]["eval/pass@1"] = score[1]
  spreads = [
    {"step": step, "moe/layer_flip_rate": list(layers)}
    for step in range(1, until + 1)
  ]
  config = SimpleNamespace(
    num_steps=STEPS, eval=SimpleNamespace(every=5), seed=0
  )
  failure = "" if until == STEPS else f"grad/norm is nan at step {until + 1}"
  return Run(config, None, rows, spreads, 2.0, "abc", failure)


def test_a_run_that_ended_early_continues_at_0():
  run = synthetic_run(until=3)
  assert run.carried("eval/pass@1") == [[0, 0.4], [5, 0.0], [10, 0.0]]
  rewards = run.carried("reward/mean")
  assert [step for step, _ in rewards] == list(range(1, 11))
  assert [value for _, value in rewards] == [0.5] * 3 + [0.0] * 7
  assert run.mean("clip_frac/token") == pytest.approx(0.1)  # of what it had
  whole = synthetic_run()
  assert whole.carried("eval/pass@1") == whole.curve("eval/pass@1")


@pytest.mark.parametrize("until", [0, 3])
def test_a_run_without_evaluations_continues_after_its_last_step(until):
  """Without `eval.every` a run has no row of step 0."""
  run = synthetic_run(until=until)
  run = run._replace(rows=run.rows[1:])
  run.config.eval.every = 0
  assert run.carried("eval/pass@1") == [[10, 0.0]]
  rewards = run.carried("reward/mean")
  assert [step for step, _ in rewards] == list(range(1, 11))
  assert [value for _, value in rewards] == [0.5] * until + [0.0] * (10 - until)


def of_seeds(module, settings, n=4):
  """Results of `n` seeds: {setting as pairs: run of a seed's wobble}."""
  wobble = np.linspace(-0.01, 0.01, n)
  return [
    dict(setting) | {"seed": seed} | module.measure(make(wobble[seed]))
    for seed in range(n)
    for setting, make in settings.items()
  ]


def clipping(gspo, grpo):
  """Shares and final scores of two methods, as a row of the table."""
  setting = lambda method: (("method", method), ("rate", "3e-4"))
  make = lambda share, score: (
    lambda w: synthetic_run(
      clip_frac__token=share * (1 + w), score=(0.4, score + w)
    )
  )
  settings = {setting("gspo"): make(*gspo), setting("grpo"): make(*grpo)}
  (row,) = clip_fraction.summarize(of_seeds(clip_fraction, settings))["table"]
  return row


def test_clip_fraction_compares_gspo_with_grpo():
  row = clipping(gspo=(0.15, 0.8), grpo=(0.0013, 0.6))
  assert row["gspo"]["clipped tokens"]["mean"] == pytest.approx(0.15)
  assert row["clipped, gspo over grpo"]["mean"] == pytest.approx(
    115.4, rel=0.01
  )
  assert row["clipped, gspo over grpo"]["tenfold"] == "within"
  assert row["pass@1, gspo less grpo"]["mean"] == pytest.approx(0.2)
  assert row["pass@1, gspo less grpo"]["verdict"] == "higher"
  row = clipping(gspo=(0.0013, 0.6), grpo=(0.15, 0.8))
  assert row["clipped, gspo over grpo"]["tenfold"] == "below"
  assert row["pass@1, gspo less grpo"]["verdict"] == "lower"


def test_clip_fraction_of_nothing_clipped_counts_one_token():
  row = clipping(gspo=(0.1, 0.8), grpo=(0.0, 0.8))
  assert row["clipped, gspo over grpo"]["mean"] == pytest.approx(1e4, rel=0.01)


def test_clip_fraction_leaves_out_runs_without_an_iteration():
  results = [
    {"method": m, "rate": "3e-4", "seed": seed}
    | clip_fraction.measure(synthetic_run(until=0 if seed == 1 else STEPS))
    for seed in range(3)
    for m in clip_fraction.METHODS
  ]
  (row,) = clip_fraction.summarize(results)["table"]
  shares = row["gspo"]["clipped tokens"]
  assert (shares["n"], shares["mean"]) == (2, pytest.approx(0.1))
  assert row["gspo"]["broke off"] == 1
  assert row["gspo"]["final"]["mean"] == pytest.approx(1.6 / 3)


def flipping(rate_of):
  """expert_flips.summarize of three seeds, where a setting flips that often."""
  every = [
    setting
    | {"seed": seed}
    | expert_flips.measure(
      synthetic_run(moe__expert_flip_rate=rate_of(setting) * (1 + seed / 100))
    )
    for seed in range(3)
    for setting in expert_flips.SETTINGS
  ]
  return expert_flips.summarize(every)


def test_expert_flips_are_of_one_update_of_two():
  found = expert_flips.measure(synthetic_run(moe__expert_flip_rate=0.02))
  assert found["flips"] == pytest.approx(0.04)
  assert found["by layer"] == pytest.approx([0.02, 0.06])
  assert found["curve"][0] == [1, 0.04]


def test_expert_flips_are_judged_by_a_tenth_and_by_depth():
  found = flipping(lambda s: 0.05 if s["layers"] == 8 else 0.01)
  places = {row["layers"]: row["about 10 %"] for row in found["table"]}
  assert places == {8: "within", 2: "below"}
  assert found["eight layers less two"]["verdict"] == "higher"
  found = flipping(lambda s: 0.01 if s["layers"] == 8 else 0.2)
  places = {row["layers"]: row["about 10 %"] for row in found["table"]}
  assert places == {8: "below", 2: "above"}
  assert found["eight layers less two"]["verdict"] == "lower"


def test_expert_flips_of_a_run_without_an_iteration():
  run = expert_flips.measure(synthetic_run(until=0))
  assert math.isnan(run["flips"])
  good = expert_flips.measure(synthetic_run())
  results = [
    expert_flips.BASE | {"seed": 0} | run,
    expert_flips.BASE | {"seed": 1} | good,
  ]
  (row,) = expert_flips.summarize(results)["table"]
  assert row["flips"]["n"] == 1
  assert row["broke off"] == 1
  assert len(row["by layer"]) == 2
  (row,) = expert_flips.summarize(results[:1])["table"]
  assert row["by layer"] == []


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


def stable(finals, seeds=5, until=None):
  """Rows by method of the regime `long`; `until`: where a method breaks off."""
  results = [
    {"regime": "long", "method": method, "seed": seed}
    | stability.measure(
      synthetic_run(
        score=(0.4, final + 0.01 * seed + 0.003 * (seed * i % 3)),
        until=(until or {}).get(method, STEPS),
      )
    )
    for seed in range(seeds)
    for i, (method, final) in enumerate(finals.items())
  ]
  found = stability.summarize(results)
  return {row["method"]: row for row in found["table"]}, found["curves"]


def test_stability_compares_each_method_with_grpo():
  rows, _ = stable({"grpo": 0.6, "grpo+r2": 0.6, "gspo": 0.8, "gmpo": 0.5})
  assert rows["gspo"]["against grpo"]["mean"] == pytest.approx(0.2, abs=0.01)
  verdicts = {m: row["against grpo"].get("verdict") for m, row in rows.items()}
  assert verdicts["gspo"] == "higher"
  assert verdicts["gmpo"] == "lower"
  assert verdicts["grpo+r2"] == "not distinguished"
  assert verdicts["grpo"] is None
  assert 0 < rows["grpo+r2"]["against grpo"]["detectable"] < 0.05
  assert rows["gspo"]["token ratio std"]["mean"] == pytest.approx(0.05)


def test_only_five_collapses_against_none_are_significant():
  methods = {"grpo": 0.6, "grpo+r2": 0.6, "gspo": 0.6, "gmpo": 0.6, "rspo": 0.1}
  rows, _ = stable(methods, until={"grpo": 3})
  assert rows["grpo"]["collapses"] == 5
  assert rows["gspo"]["collapses"] == 0
  assert rows["grpo"]["final"]["mean"] == 0
  # 2 / C(10, 5) = 1 / 126, times four
  assert rows["gspo"]["collapses p of all"] == pytest.approx(4 / 126)
  assert rows["rspo"]["collapses p of all"] == 1
  rows, _ = stable(methods | {"gspo": 0.1}, until={"grpo": 3}, seeds=4)
  assert rows["grpo+r2"]["collapses p of all"] > 0.05


def test_curves_count_the_runs_that_ended_early():
  _, curves = stable({"grpo": 0.6, "gspo": 0.6}, until={"grpo": 3})
  found = {c["method"]: dict(c["points"]) for c in curves}
  assert found["grpo"][3]["mean"] == 0.5
  assert found["grpo"][4]["mean"] == 0.0
  assert found["grpo"][10]["n"] == 5
  assert found["gspo"][10]["mean"] == 0.5


def harmed(gspo, grpo):
  """old_logps.summarize, where the sampler's log-probs cost that much."""
  results = [
    {"method": method, "old": old, "seed": seed}
    | old_logps.measure(
      synthetic_run(
        score=(
          0.4,
          0.8
          + 0.02 * seed
          - (old == "sampler") * (harm + 0.002 * ((seed + i) % 3)),
        )
      )
    )
    for seed in range(4)
    for i, (method, harm) in enumerate((("gspo", gspo), ("grpo", grpo)))
    for old in old_logps.OLD
  ]
  found = old_logps.summarize(results)
  rows = {row["method"]: row["harm"] for row in found["table"]}
  return rows, found["grpo's harm less gspo's"]


def test_old_logps_judges_harm_and_who_has_more():
  rows, less = harmed(gspo=0.0, grpo=0.2)
  assert rows["gspo"]["harmless"] == "within"
  assert rows["grpo"]["harmless"] == "below"
  assert rows["grpo"]["verdict"] == "lower"
  assert less["verdict"] == "lower"
  assert less["mean"] == pytest.approx(-0.2, abs=0.01)
  rows, less = harmed(gspo=0.2, grpo=0.0)
  assert rows["gspo"]["harmless"] == "below"
  assert rows["grpo"]["verdict"] == "not distinguished"
  assert less["verdict"] == "higher"


def published(finals, accuracy, seeds=3):
  """published_model.summarize where methods end at that, from .2."""
  accuracy.update({(s, 0): 0.2 + 0.01 * s for s in range(seeds)})
  results = []
  for seed in range(seeds):
    starts = {}
    for i, (method, final) in enumerate(finals.items()):
      run = synthetic_run(until=0 if final is None else STEPS)
      run.config.seed = seed
      if final is not None:
        accuracy[seed, STEPS] = final + 0.01 * seed + 0.003 * (seed * i % 3)
      found = published_model.measure(run._replace(folder=Path("none")), starts)
      results.append({"method": method, "rate": "3e-5", "seed": seed} | found)
  run.config.seed = choice = published_model.CHOICE  # counts for nothing here
  found = published_model.measure(run._replace(folder=Path("none")), {})
  results.append({"method": "gspo", "rate": "1e-5", "seed": choice} | found)
  table = published_model.summarize(results)["table"]
  return {row["method"]: row for row in table}


def test_published_model_judges_when_all_seeds_are_there(monkeypatch):
  accuracy, asked = {}, []

  def measured(config, _, step):
    asked.append((config.seed, step))
    return accuracy[asked[-1]]

  monkeypatch.setattr(saved, "accuracy", measured)
  finals = {"grpo": 0.4, "gspo": 0.6, "dr_grpo": 0.4, "gmpo": None}
  rows = published(finals, accuracy)
  verdicts = {m: row["against grpo"].get("verdict") for m, row in rows.items()}
  assert verdicts["grpo"] is None
  assert verdicts["gspo"] == "higher"
  assert verdicts["dr_grpo"] == "not distinguished"
  assert verdicts["gmpo"] == "lower"
  assert rows["gmpo"]["final"]["mean"] == 0
  assert asked.count((0, 0)) == 1  # the methods of a seed share their start
  assert rows["gspo"]["clipped tokens"]["n"] == 3
  assert rows["gspo"]["learns"]["verdict"] == "higher"
  assert rows["gspo"]["learns"]["mean"] == pytest.approx(0.4, abs=0.01)
  for found in published(finals, accuracy, seeds=2).values():
    assert {"p", "verdict"}.isdisjoint(found["learns"] | found["against grpo"])


@pytest.mark.parametrize(
  ("rewards", "rates", "chosen"),
  [
    ({}, ["1e-5", "3e-5"], "1e-5"),
    ({"1e-5": 0.3}, ["1e-5", "3e-5"], "1e-5"),
    ({"1e-5": 0.3, "3e-5": 0.3}, ["1e-5", "3e-5"], "1e-5"),
    ({"1e-5": 0.3, "3e-5": 0.4}, ["1e-5", "3e-5", "1e-4"], "3e-5"),
    ({"1e-5": 0.3, "3e-5": 0.4, "1e-4": 0.5}, ["1e-5", "3e-5", "1e-4"], "1e-4"),
    ({"1e-5": 0.3, "3e-5": 0.4, "1e-4": 0.4}, ["1e-5", "3e-5", "1e-4"], "3e-5"),
  ],
)
def test_published_model_chooses_a_learning_rate(rewards, rates, chosen):
  choice = published_model.CHOICE
  own = {"method": "gmpo", "seed": choice, "iterations": 5}
  results = [
    own | {"rate": rate, "last reward": reward}
    for rate, reward in rewards.items()
  ]
  others = (
    {"seed": 0, "iterations": 10},
    {"iterations": 10},
    {"method": "gspo"},
  )
  results += [own | {"rate": "3e-5", "last reward": 1.0} | o for o in others]
  every = published_model.plan(False, results)
  own = [one for one in every if one["method"] == "gmpo"]
  tried = [one for one in own if one["seed"] == choice]
  assert [(one["rate"], one["iterations"]) for one in tried] == [
    (rate, 5) for rate in rates
  ]
  reported = [one for one in own if one["seed"] != choice]
  assert [
    (one["seed"], one["rate"], one["iterations"]) for one in reported
  ] == [(seed, chosen, 10) for seed in range(3)]


def spread(exponent, seed):
  """Bins where the sequence's spread goes with length by that exponent."""
  bins = [
    {
      "tokens from": low,
      "length": float(n),
      "token_std": 0.05 * n**0.2,
      "sequence_std": 0.01 * n ** (exponent + seed / 1000),
      "token_outside": 0.01,
      "sequence_outside": 0.9,
    }
    for low, n in ((1, 17), (25, 31), (46, 59), (74, 87), (102, 115))
  ]
  exponents = ratio_spread.exponents(bins)
  return {"exponents": exponents, "bins": bins, "pass@1": []}


@pytest.mark.parametrize(
  ("exponent", "range_fits", "independence"),
  [
    (0.0, "within", "above"),
    (-0.2, "below", "above"),
    (-0.301, "below", "undecided"),  # less the tokens' .2
    (-0.5, "below", "below"),
  ],
)
def test_ratio_spread_judges_both_exponents(exponent, range_fits, independence):
  results = [{"seed": s} | spread(exponent, s) for s in range(3)]
  found = ratio_spread.summarize(results)
  assert found["one range for all"] == range_fits
  assert found["against -1/2"] == independence
  slope = found["exponents"]["sequence_std"]["mean"]
  assert slope == pytest.approx(exponent + 0.001)
  assert found["exponents"]["token_std"]["mean"] == pytest.approx(0.2)


def grams_of(parts):
  """[N, 2, K, D] -> [N, 2, K, 2, K]"""
  return np.einsum("nakd,nbld->nakbl", parts, parts)


def test_noise_of_random_dropping_is_1():
  """Relative to the kept share: dropping terms does not reduce the noise."""
  rng = np.random.default_rng(0)
  answers = rng.standard_normal((200, 2, 8, 300))
  kept = rng.permuted(np.tile(np.arange(8) < 2, (200, 2, 1)), axis=-1)
  whole = answers.sum(2)
  dropped = (answers * kept[..., None]).sum(2)
  nothing = np.zeros_like(whole)
  parts = np.stack([whole, dropped - whole, nothing, nothing, nothing], 2)
  clipped = dict.fromkeys(gradients.METHODS, 0.0) | {"grpo": 0.75}
  assert next(iter(gradients.METHODS)) == "grpo"
  found = quantities.describe(grams_of(parts), {"clipped tokens": clipped})
  for method in gradients.METHODS:
    assert found["noise"][method]["mean"] == pytest.approx(1, abs=0.05)
  assert found["added"]["grpo"]["mean"] == pytest.approx(0.75**0.5, abs=0.05)
  assert found["added"]["gspo"]["mean"] == 0


def grown(exponents):
  """gradient_noise.summarize where {answers: (GRPO's, GSPO's)} were found."""
  results = [
    {
      "seed": seed,
      "exponents": {
        answers: dict.fromkeys(gradients.METHODS, 9.0)
        | {
          "grpo unclipped": grpo + seed / 100,
          "gspo unclipped": gspo - seed / 90,
        }
        for answers, (grpo, gspo) in exponents.items()
      },
    }
    for seed in range(4)
  ]
  return gradient_noise.summarize(results)["above 0 in both"]


def test_gradient_noise_has_to_grow_in_both():
  tests = ("grpo unclipped", "gspo unclipped", "grpo less gspo")
  holds = lambda *values: dict(zip(tests, values, strict=True))
  found = grown({"whole": (0.5, -0.3), "windows": (0.4, -0.3)})
  assert found == holds(True, False, True)
  found = grown({"whole": (0.5, -0.3), "windows": (0.0, -0.3)})
  assert found == holds(False, False, True)
  found = grown({"whole": (-0.3, 0.5), "windows": (-0.3, 0.4)})
  assert found == holds(False, True, False)


def measured_gradients(run, how):
  rng = np.random.default_rng(0)
  rows = [
    {"answers": answers, "length": n}
    | {
      q: {
        m: dict(
          zip(
            ("low", "mean", "high"), sorted(rng.uniform(1, 2, 3)), strict=True
          )
        )
        for m in gradients.METHODS
      }
      for q in ("added", "noise")
    }
    for answers in gradient_noise.ANSWERS
    for n in how.lengths
  ]
  del rows[0]["noise"]["gspo"]  # all was clipped
  exponents = {
    answers: dict(zip(gradients.METHODS, rng.normal(size=4), strict=True))
    for answers in gradient_noise.ANSWERS
  }
  return {"rows": rows, "exponents": exponents}


def measured_spread(run, first, bins):
  return spread(-0.4, int(run.folder.name))


STUDIES = (
  clip_fraction,
  expert_flips,
  gradient_noise,
  old_logps,
  published_model,
  ratio_spread,
  stability,
)


@pytest.mark.parametrize(
  ("module", "quick"),
  [
    *((study, True) for study in STUDIES),
    (ratio_spread, False),
    *(
      pytest.param(study, False, marks=pytest.mark.slow)
      for study in STUDIES
      if study is not ratio_spread
    ),
  ],
  ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_study_writes_its_result_and_its_figure(
  module, quick, tmp_path, monkeypatch
):
  name = module.__name__.split(".")[1]
  monkeypatch.setattr(study, "FOLDER", tmp_path / "studies")
  monkeypatch.setattr(gradient_noise, "measure", measured_gradients)
  monkeypatch.setattr(ratio_spread, "measure", measured_spread)
  monkeypatch.setattr(saved, "accuracy", lambda *_: 0.5)
  trained = []

  def train(self, config, name):
    trained.append(name)
    folder = tmp_path / str(len(trained))
    broken = len(trained) % 7 == 5
    return synthetic_run(until=0 if broken else STEPS)._replace(folder=folder)

  monkeypatch.setattr(study.Study, "train", train)
  flags = [f"--workdir={tmp_path}", *(["--quick"] if quick else [])]
  module.main(flags)
  out = tmp_path / (f"{name}/quick" if quick else f"studies/{name}")
  record = json.loads((out / "result.json").read_text())
  planned = module.plan(quick)
  assert len(trained) == record["runs finished"] == len(planned)
  assert record["seconds"] >= 2 * len(planned)
  figure = out / "figure.png"
  before = figure.read_bytes()
  figure.unlink()
  module.main([*flags, "--plot"])
  assert figure.read_bytes() == before
  module.main(flags)  # trains nothing: result.json has all runs
  assert json.loads((out / "result.json").read_text()) == record
  assert len(trained) == len(planned)


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

  def sweep(*seeds, planned=None, kept=None):
    swept = study.Study("old_logps", "Of nothing.", [])
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
