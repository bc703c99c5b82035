"""The table of methods agrees with the losses and their oracles."""

import oracles

from gspo_jax import losses
from gspo_jax.losses import METHODS


def test_every_public_policy_loss_has_its_row():
  public = {n for n in losses.__all__ if n.endswith("_loss")} - {"value_loss"}
  assert {f"{name}_loss" for name in METHODS} == public
  for name, method in METHODS.items():
    assert method.loss is getattr(losses, f"{name}_loss")


def test_a_row_says_what_its_loss_does():
  rows = lambda holds: [name for name, row in METHODS.items() if holds(row)]
  assert rows(lambda row: not row.normalize_std) == ["dr_grpo"]
  assert rows(lambda row: row.critic) == ["ppo"]
  assert rows(lambda row: row.one_advantage) == list(oracles.PER_SEQUENCE)
  assert rows(lambda row: row.unit == "sequence") == ["gspo", "gspo_token"]
  assert rows(lambda row: row.clips != "ratio") == list(oracles.UNCLIPPED)
  assert rows(lambda row: row.clips == "log_ratio") == ["gmpo", "rspo"]
  assert rows(lambda row: row.clips) == rows(
    lambda row: "clip_low" in row.numbers
  )
