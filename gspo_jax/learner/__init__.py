"""Scored responses become a better policy: the objective and its update.

Other wings take these modules:
  train_step      TrainState, Learner, and `update`
  train_batch     TrainBatch
  packing         samples become packed rows
  credit          rewards become advantages
  objective       the config of the objective
  policy_loss     its loss
  optimizer, critic, reference_pass, cold_start
  health          warnings about metrics
"""
