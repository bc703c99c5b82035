"""Scored responses become a better policy: the objective and its update.

Others take `train_step` (`TrainState`, `Learner`, `update`), `train_batch`
(`TrainBatch`), `packing` (how samples become one, and which rows they share),
`credit` (rewards become advantages), `objective`, `optimizer`, `critic`,
`reference_pass`, `cold_start` and `health`.
"""

__all__ = [
  "cold_start",
  "credit",
  "critic",
  "health",
  "objective",
  "optimizer",
  "packing",
  "reference_pass",
  "train_batch",
  "train_step",
]
