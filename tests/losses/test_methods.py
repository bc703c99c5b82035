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
  assert rows(lambda row: not row.normalize_std) == list(oracles.FIXED_LENGTH)
  assert rows(lambda row: row.critic) == ["ppo"]
  assert rows(lambda row: row.one_advantage) == list(oracles.PER_SEQUENCE)
  of_sequences = list(oracles.SEQUENCE_RATIO)
  assert rows(lambda row: row.unit == "sequence") == of_sequences
  assert rows(lambda row: row.clips != "ratio") == list(oracles.UNCLIPPED)
  log_ratio = ["gmpo", "rspo", "ctpo"]
  assert rows(lambda row: row.clips == "log_ratio") == log_ratio
  assert rows(lambda row: row.clips) == rows(
    lambda row: "clip_low" in row.numbers
  )
