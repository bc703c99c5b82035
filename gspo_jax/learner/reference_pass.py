"""The passes of the reference policy and of the critic before an update."""

import dataclasses

from gspo_jax import model
from gspo_jax.learner import critic, train_batch, train_step
from gspo_jax.learner.train_batch import PackedBatch, TrainBatch
from gspo_jax.learner.train_step import TrainState


def add_reference_and_values(
  state: TrainState,
  batch: PackedBatch,
  *,
  cfg: model.ModelConfig,
  temperature: float,
) -> PackedBatch:
  """The batch with the reference's log-probs and the critic's values."""

  def forward(micro_batch: TrainBatch):
    fields = {}
    if state.reference is not None:
      reference = train_step.with_base(state.base, state.reference)
      fields["reference_logps"] = train_batch.response_logps(
        reference, cfg, micro_batch, temperature=temperature
      ).logps
    if state.critic is not None:
      fields["values"] = critic.values(state.critic.params, cfg, micro_batch)
    return fields

  present = {"reference_logps": state.reference, "values": state.critic}
  names = [name for name, x in present.items() if x is not None]
  fields = batch.map(forward, *names)
  return batch._replace(rows=dataclasses.replace(batch.rows, **fields))
