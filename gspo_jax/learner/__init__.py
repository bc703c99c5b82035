"""Scored responses become a better policy: the objective and its update.

Other wings take `train_step` (`TrainState`, `Learner`, `update`), `train_batch`
(`TrainBatch`), `packing` (samples to batch), `credit` (rewards to advantages),
`objective`, `policy_loss`, `optimizer`, `critic`, `reference_pass`,
`cold_start` and `health`.
"""

__all__ = [
  "cold_start",
  "credit",
  "critic",
  "health",
  "objective",
  "optimizer",
  "packing",
  "policy_loss",
  "reference_pass",
  "train_batch",
  "train_step",
]
