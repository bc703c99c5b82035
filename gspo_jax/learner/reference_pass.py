"""The passes of the reference policy and of the critic before an update."""

import dataclasses

from gspo_jax import model
from gspo_jax.learner import critic, train_batch
from gspo_jax.learner.train_batch import PackedBatch, TrainBatch


def add_reference_and_values(
  batch: PackedBatch,
  cfg: model.ModelConfig,
  *,
  reference: model.Params | None,
  critic_params: model.Params | None,
  temperature: float,
) -> PackedBatch:
  """The batch with the reference's log-probs and the critic's values.

  `reference` and `critic_params` are weights, or None; `temperature` is the
  sampler's.
  """

  def forward(micro_batch: TrainBatch):
    fields = {}
    if reference is not None:
      fields["reference_logps"] = train_batch.response_logps(
        reference, cfg, micro_batch, temperature=temperature
      ).logps
    if critic_params is not None:
      fields["values"] = critic.values(critic_params, cfg, micro_batch)
    return fields

  names = []
  if reference is not None:
    names.append("reference_logps")
  if critic_params is not None:
    names.append("values")
  fields = batch.map(forward, *names)
  return batch._replace(rows=dataclasses.replace(batch.rows, **fields))
