"""Every feature of a rollout with every kind of episode: two iterations."""

import itertools
import math

import pytest
from metrics_of import rows_of

from gspo_jax.train import train_and_evaluate

SLOTS = {
  "continuous_batching.slots": 16,
  "continuous_batching.page_size": 4,
  "continuous_batching.prefill_chunk": 40,
}
TALKS = {
  "rollout.max_turns": 3,
  "reward.names": (),
  "sampler.max_new_tokens": 32,
  "reward.seconds": 120.0,
}
PLAYS = {
  "single": {},
  "environment": TALKS
  | {
    "data.source": "gspo_jax.tasks.games.guessing_problems",
    "rollout.environment": "guessing",
  },
  "agent": TALKS
  | {
    "data.source": "gspo_jax.tasks.games.calculator_problems",
    "rollout.environment": "openai:gspo_jax.tasks.calculator_agent.play",
  },
}
FEATURES = {
  "r2": {"objective.replay": "r2"},
  "r3": {"objective.replay": "r3"},
  "kept ids": {"sampler.top_p": 0.9, "sampler.temperature": 0.8},
  "speculation": {"continuous_batching.speculation": 2},
  "few pages": {"continuous_batching.num_pages": 96},
  "staleness": {"rollout.max_staleness": 1},
  "dynamic sampling": {"rollout.dynamic_sampling_rounds": 2},
  "lora": {"model.lora.rank": 2},
  "states": {"model.variant": "tiny-qwen3.5"},
  "latents": {"model.variant": "tiny-moonlight"},
  "own devices": {"sampler_mesh.devices": 4},
  "partial": {"rollout.max_tokens_per_iteration": 6},
  "turns": {"objective.credit": "turn", "objective.name": "gspo_token"},
  "sequences": {"rollout.max_sequences": 2},
  "teacher": {"objective.name": "gspo_token"},
}
# What the single response has no use for, and what ends with its iteration.
NO_CELLS = {("turns", "single"), ("sequences", "single")} | {
  ("partial", "environment"),
  ("partial", "agent"),
}
TOGETHER = ("r3", "kept ids", "speculation", "few pages", "staleness", "lora")
CELLS = [
  (play, (feature,))
  for feature, play in itertools.product(FEATURES, PLAYS)
  if (feature, play) not in NO_CELLS
]


@pytest.mark.parametrize(
  ("play", "features"),
  [*((play, TOGETHER) for play in PLAYS),
   *(pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS)],
)  # fmt: skip
def test_a_run_learns_from_what_was_sampled(
  play, features, debug_config, tmp_path
):
  changes = {
    "num_steps": 2,
    "data.prompts": 8,
    "learner.micro_batch_size": 8,
    "cold_start.steps": 0,
    "eval.every": 0,
    "reward.workers": 1,
    "objective.entropy_coef": 0.1,
    "optim.warmup_steps": 0,
  }
  for each in (SLOTS, PLAYS[play], *map(FEATURES.get, features)):
    changes |= each
  if "teacher" in features:
    teacher = debug_config.copy_and_resolve_references()
    teacher.update_from_flattened_dict(changes | {"num_steps": 1})
    train_and_evaluate(teacher, tmp_path / "teacher")
    changes["objective.distillation.teachers"] = (str(tmp_path / "teacher"),)
  debug_config.update_from_flattened_dict(changes)
  if features == TOGETHER:
    debug_config.model.num_layers = 1  # half of what is compiled
  train_and_evaluate(debug_config, tmp_path / "run")
  rows = [row for row in rows_of(tmp_path / "run") if row["step"]]
  assert [row["step"] for row in rows] == [1, 2]
  assert all(row["grad/norm"] > 0 for row in rows)
  assert all(map(math.isfinite, rows[0].values()))
  # The weights that sampled the first batch are those of its update.
  assert rows[0]["mismatch/token_abs_mean"] < 1e-4
