"""The passes of the reference policy and the critic before an update."""

import dataclasses

import jax

from gspo_jax import model
from gspo_jax.learner import critic, train_batch, train_step
from gspo_jax.learner.train_batch import MICRO_BATCHES, PackedBatch
from gspo_jax.learner.train_step import TrainState


def add_reference_and_values(
  state: TrainState,
  batch: PackedBatch,
  *,
  cfg: model.ModelConfig,
  temperature: float,
) -> PackedBatch:
  """The batch with the reference's log-probs and the critic's values."""
  rows, counts = batch

  def minibatch(m, fields):
    def micro_batch(a, fields):
      one, new = jax.tree.map(lambda x: x[m, a], rows), {}
      if state.reference is not None:
        reference = train_step.with_base(state.base, state.reference)
        new["reference_logps"] = train_batch.response_logps(
          reference, cfg, one, temperature=temperature
        ).logps
      if state.critic is not None:
        new["values"] = critic.values(state.critic.params, cfg, one)
      return {name: x.at[m, a].set(new[name]) for name, x in fields.items()}

    with jax.named_scope(MICRO_BATCHES):
      return jax.lax.fori_loop(0, counts[m], micro_batch, fields)

  fields = {}
  if state.reference is not None:
    fields["reference_logps"] = rows.reference_logps
  if state.critic is not None:
    fields["values"] = rows.values
  fields = jax.lax.fori_loop(0, len(counts), minibatch, fields)
  return PackedBatch(dataclasses.replace(rows, **fields), counts)
