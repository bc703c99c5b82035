"""Warnings: each where it is due, once, with the numbers."""

from types import SimpleNamespace

import pytest

from gspo_jax import train
from gspo_jax.data import tokenizers
from gspo_jax.learner.health import (
  HealthChecks,
  clip_range_warnings,
  require_exact,
  require_finite,
  require_responses,
)
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.losses import METHODS
from gspo_jax.program.config import parse
from gspo_jax.runtime.errors import UserError

HEALTHY = {
  "ratio/moved": 0.5, "ratio/sequence_std": 2e-4, "clip_frac/token": 0.1,
  "mismatch/sequence_abs_mean": 1e-7, "ratio/first_minibatch_std": 0.0,
  "grad/norm": 1.0, "optim/learning_rate": 1e-6, "reward/mean": 0.25,
  "reward/mixed_groups": 0.1,
}  # fmt: skip


def checks(name="gspo", *, minibatches=4, **keys):
  return HealthChecks(
    ObjectiveConfig(name, **keys),
    minibatches=minibatches,
    off_policy=False,
    truncated_sampling=False,
  )


def test_warnings_are_printed_once_with_the_numbers(capsys):
  check = checks()
  check(HEALTHY)
  assert capsys.readouterr().out == ""
  for _ in range(2):
    check(HEALTHY | {"ratio/moved": 0.0})
    check(HEALTHY | {"mismatch/sequence_abs_mean": 5e-4})
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2
  assert "exactly 1 over 4 updates" in lines[0]
  assert "5.0e-04" in lines[1]
  assert "clip_low=3.0e-04" in lines[1]


def test_two_passes_over_the_same_weights_that_differ(capsys):
  noisy = HEALTHY | {"ratio/first_minibatch_std": 2e-5}
  checks()(noisy)
  line = capsys.readouterr().out
  assert "ratio/first_minibatch_std=2.0e-05" in line
  assert "--xla_gpu_deterministic_ops=true" in line
  # With the sampler's log-probs it is the gap between sampler and trainer.
  checks(old_logps="sampler")(noisy)
  assert capsys.readouterr().out == ""


def test_a_ratio_of_one_is_right_where_no_update_has_moved_the_policy(capsys):
  unmoved = HEALTHY | {"ratio/moved": 0.0}
  checks(minibatches=1)(unmoved)
  checks()(unmoved | {"grad/norm": 0.0})
  checks()(unmoved | {"optim/learning_rate": 0.0})
  assert capsys.readouterr().out == ""


def test_a_gap_inside_the_clip_range_is_no_fault(capsys):
  checks("grpo")(HEALTHY | {"mismatch/sequence_abs_mean": 0.1})
  assert capsys.readouterr().out == ""


def test_a_gap_that_collapses_runs_with_the_samplers_log_probs(capsys):
  metrics = HEALTHY | {"mismatch/token_abs_mean": 0.023}
  checks("grpo")(metrics)
  checks("grpo", old_logps="sampler")(
    HEALTHY | {"mismatch/token_abs_mean": 0.005}
  )
  assert capsys.readouterr().out == ""
  checks("grpo", old_logps="sampler")(metrics)
  line = capsys.readouterr().out
  assert "differ by 0.023 nats a token (mismatch/token_abs_mean)" in line
  assert "--config.objective.old_logps=recompute" in line


def test_an_iteration_without_mixed_groups_has_no_signal(capsys):
  check, equal = checks(), HEALTHY | {"reward/mixed_groups": 0.0}
  for _ in range(2):
    check(equal)
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith("warning: no signal: ")
  assert "reward/mixed_groups is 0, reward/mean 0.25" in line
  checks("ppo")(equal)
  assert capsys.readouterr().out == ""


def test_a_run_in_which_nothing_is_clipped_says_so(capsys):
  """Once, and only where ratios move and none has ever been clipped."""
  unclipped = HEALTHY | {"clip_frac/token": 0.0}
  check = checks()
  for _ in range(9):
    check(unclipped)
  check(unclipped | {"ratio/moved": 0.0, "grad/norm": 0.0})
  assert capsys.readouterr().out == ""
  for _ in range(9):
    check(unclipped)
  (line,) = capsys.readouterr().out.splitlines()
  assert "nothing was clipped in 10 iterations" in line
  assert "ratio/sequence_std is 2.0e-04" in line
  assert "the clip range is 0.0003, 0.0004" in line
  once = checks()
  once(HEALTHY)
  sapo = checks("sapo")
  for check in [once, sapo] * 10:
    check(unclipped)
  bare = {
    k: x
    for k, x in HEALTHY.items()
    if k.split("/")[0] not in ("ratio", "clip_frac")
  }
  checks()(bare | {"ratio/first_minibatch_std": 0.0})  # of a loss of one's own
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("gspo:clip_low=0.2,clip_high=0.28",
     ["hardly anything will be clipped at clip_low=0.2, clip_high=0.28"]),
    ("gspo_token:clip_high=0.2", ["hardly anything will be clipped at clip_h"]),
    ("gspo:clip_low=3.0", ["hardly anything will be clipped at clip_low=3"]),
    ("grpo:clip_low=3.0", ["nothing will be clipped from below at clip_low=3"]),
    ("dapo:clip_low=3e-4,clip_high=4e-4", ["nearly all will be clipped"]),
    ("ppo:clip_high=0", ["nearly all will be clipped at clip_high=0"]),
    ("gmpo:clip_low=1.5", []),  # clips log-ratios
    ("gspo:clip_low=3e-3,clip_high=4e-3", []),
    ("gspo:clip_low=0.015,clip_high=0.02", ["0.02, for gspo clips the ratio"]),
    ("cispo:cap=1e3", []),
    ("cispo:cap=1", []),
    ("cispo:cap=0.28", ["a cap of 0.28 scales nearly every"]),
    *((name, []) for name in METHODS),
  ],
)  # fmt: skip
def test_a_clip_range_of_another_ratio_is_a_warning(name, words):
  lines = clip_range_warnings(ObjectiveConfig(name))
  for line, part in zip(lines, words, strict=True):
    assert line.startswith(f"objective.name={name!r}: ")
    assert part in line


@pytest.mark.parametrize(
  ("changes", "warnings"),
  [
    ({}, ["exactly 1 over 2 updates", "no signal", "clip_low=3.0e-04"]),
    ({"objective.name": "ppo"}, ["exactly 1 over 2 updates"]),
    ({"objective.kl_coef": 0.1, "objective.kl_estimator": "k1"},
     ["exactly 1 over 2 updates", "clip_low=3.0e-04"]),
    ({"rollout.max_staleness": 1},
     ["exactly 1 over 2 updates", "no signal"]),
    ({"sampler.top_k": 3, "learner.minibatches": 1},
     ["no signal", "clip_low=3.0e-04"]),
    ({"sampler.min_p": 0.1, "sampler.kept_ids": 0, "learner.minibatches": 1},
     ["sampler.kept_ids=0", "no signal", "clip_low=3.0e-04"]),
  ],
)  # fmt: skip
def test_a_run_checks_what_its_config_calls_for(
  debug_config, capsys, changes, warnings
):
  debug_config.learner.minibatches = 2
  debug_config.update_from_flattened_dict(changes)
  program = SimpleNamespace(tokenizer=tokenizers.load("bytes"))
  experiment = SimpleNamespace(config=parse(debug_config), program=program)
  faults = {"ratio/moved": 0.0, "mismatch/sequence_abs_mean": 0.01}
  check = train._health_checks(experiment)
  check(HEALTHY | faults | {"reward/mixed_groups": 0.0})
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == len(warnings)
  for part, line in zip(warnings, lines, strict=True):
    assert part in line


def test_a_number_that_is_not_finite_stops_the_run():
  metrics = {"reward/mean": 0.5, "grad/norm": float("nan")}
  with pytest.raises(FloatingPointError, match="grad/norm is nan at step 7"):
    require_finite(metrics, 7)


def test_a_token_whose_bits_differ_stops_an_exact_run():
  name = "mismatch/exact_tokens_differ"
  require_exact({name: 0.0}, 7, lambda: 1 / 0)
  # No token of the first minibatch is learned from.
  require_exact({}, 7, lambda: 1 / 0)
  gap = {"mismatch/token_abs_mean": 3e-4}
  expected = r"step 7 .* 1.5% of .* 3.0e-04 nats; here\. That step"
  with pytest.raises(ArithmeticError, match=expected):
    require_exact({name: 0.015} | gap, 7, lambda: "here")


def test_overlong_filtering_of_all_responses_stops_the_run():
  require_responses(ObjectiveConfig(), 1.0, 7)
  mask = ObjectiveConfig(truncated="mask")
  require_responses(mask, 0.9, 7)
  with pytest.raises(UserError, match=r"truncated='mask': all .* of step 7"):
    require_responses(mask, 1.0, 7)
