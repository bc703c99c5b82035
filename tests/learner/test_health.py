"""Warnings: given when they are due, once, with the numbers."""

import types

import pytest

from gspo_jax import train
from gspo_jax.data import tokenizers
from gspo_jax.learner.health import HealthChecks, require_finite
from gspo_jax.program.config import parse

HEALTHY = {
  "ratio/moved": 0.5,
  "mismatch/sequence_abs_mean": 1e-7,
  "ratio/first_minibatch_std": 0.0,
  "grad/norm": 1.0,
  "optim/learning_rate": 1e-6,
  "reward/mean": 0.25,
  "reward/mixed_groups": 0.1,
}
GSPO = {
  "updates": 4,
  "clip_low": 3e-4,
  "recomputed": True,
  "compares": True,
  "truncates": False,
}


def test_warnings_are_given_once_and_name_the_numbers(capsys):
  watch = HealthChecks(**GSPO)
  watch(HEALTHY)
  assert capsys.readouterr().out == ""
  for _ in range(2):
    watch(HEALTHY | {"ratio/moved": 0.0})
    watch(HEALTHY | {"mismatch/sequence_abs_mean": 5e-4})
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2
  assert "exactly 1 over 4 updates" in lines[0]
  assert "5.0e-04" in lines[1]
  assert "clip_low=3.0e-04" in lines[1]


def test_a_policy_whose_passes_differ(capsys):
  noisy = HEALTHY | {"ratio/first_minibatch_std": 2e-5}
  HealthChecks(**GSPO)(noisy)
  line = capsys.readouterr().out
  assert "ratio/first_minibatch_std=2.0e-05" in line
  assert "--xla_gpu_deterministic_ops=true" in line
  HealthChecks(**GSPO | {"recomputed": False})(noisy)  # the sampler's own gap
  assert capsys.readouterr().out == ""


def test_one_update_a_rollout_may_have_a_ratio_of_one(capsys):
  HealthChecks(**GSPO | {"updates": 1})(HEALTHY | {"ratio/moved": 0.0})
  HealthChecks(**GSPO)(HEALTHY | {"ratio/moved": 0.0, "grad/norm": 0.0})
  HealthChecks(**GSPO)(
    HEALTHY | {"ratio/moved": 0.0, "optim/learning_rate": 0.0}
  )
  assert capsys.readouterr().out == ""


def test_a_gap_inside_the_clip_range_is_no_news(capsys):
  HealthChecks(**GSPO | {"clip_low": 0.2})(
    HEALTHY | {"mismatch/sequence_abs_mean": 0.1}
  )
  assert capsys.readouterr().out == ""


def test_an_iteration_without_a_mixed_group_is_told_once(capsys):
  watch, row = HealthChecks(**GSPO), HEALTHY | {"reward/mixed_groups": 0.0}
  for _ in range(2):
    watch(row)
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith("warning: no signal: ")
  assert "reward/mixed_groups is 0, reward/mean 0.25" in line
  HealthChecks(**GSPO | {"compares": False})(
    row
  )  # a critic learns from these, too
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
  ("changes", "told"),
  [
    ({}, ["exactly 1 over 2 updates", "no signal", "clip_low=3.0e-04"]),
    ({"objective.name": "ppo"}, ["exactly 1 over 2 updates"]),
    ({"objective.kl_coef": 0.1, "objective.kl_estimator": "k1"},
     ["exactly 1 over 2 updates", "clip_low=3.0e-04"]),
    ({"rollout.one_step_off_policy": True}, ["exactly 1 over 2 updates", "no signal"]),
    ({"sampler.top_k": 3, "learner.minibatches": 1},
     ["top-k, top-p", "no signal", "clip_low=3.0e-04"]),
  ],
)  # fmt: skip
def test_what_a_run_watches_for(debug_config, capsys, changes, told):
  debug_config.learner.minibatches = 2
  debug_config.update_from_flattened_dict(changes)
  program = types.SimpleNamespace(tokenizer=tokenizers.load("bytes"))
  run = types.SimpleNamespace(config=debug_config, program=program)
  sick = {"ratio/moved": 0.0, "mismatch/sequence_abs_mean": 0.01}
  train._watch(run)(HEALTHY | sick | {"reward/mixed_groups": 0.0})
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == len(told)
  assert all(part in line for part, line in zip(told, lines, strict=True))


def test_the_clip_range_is_the_methods_own_unless_asked(debug_config):
  assert parse(debug_config).objective.method_settings() == {
    "clip_low": 3e-4,
    "clip_high": 4e-4,
  }
  debug_config.objective.name = "grpo"
  debug_config.objective.clip_high = 0.5
  assert parse(debug_config).objective.method_settings() == {
    "clip_low": 0.2,
    "clip_high": 0.5,
  }


def test_truncated_sampling_is_announced(capsys):
  HealthChecks(**GSPO | {"truncates": True})
  assert "truncated distribution" in capsys.readouterr().out


def test_a_number_that_is_not_finite_stops_the_run():
  row = {"reward/mean": 0.5, "grad/norm": float("nan")}
  with pytest.raises(FloatingPointError, match="grad/norm is nan at step 7"):
    require_finite(row, 7)
