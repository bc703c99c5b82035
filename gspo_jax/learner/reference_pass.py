"""The passes of the reference policy, teachers and critic before an update."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.learner import critic, train_batch, train_step
from gspo_jax.learner.train_batch import MICRO_BATCHES, PackedBatch, TrainBatch
from gspo_jax.learner.train_step import TrainState

# The named scope of conditionals that run one of several teachers or skip it;
# `plan` counts all of them by it.
TEACHERS = "teachers"


def add_reference_and_values(
  state: TrainState,
  batch: PackedBatch,
  teachers: Sequence[model.Params] = (),
  teacher: jax.Array | None = None,
  *,
  cfg: model.ModelConfig,
  temperature: float,
  teacher_models: Sequence[model.ModelConfig] = (),
) -> PackedBatch:
  """The batch with the log-probs of reference and teachers, and with values.

  All log-probs are of softmax(logits / temperature), as the policy's. `teacher`
  is [B] int32, which of several teachers scores a response.
  """
  rows, counts = batch
  if teacher is not None:
    rows = dataclasses.replace(rows, teacher=teacher[rows.response_index])

  # By the field that a pass fills in.
  passes: dict[str, Callable[[TrainBatch], jax.Array]] = {}
  if state.reference is not None:
    reference = train_step.with_base(state.base, state.reference)
    passes["reference_logps"] = lambda one: (
      train_batch.response_logps(
        reference, cfg, one, temperature=temperature
      ).logps
    )
  if teachers:
    passes["teacher_logps"] = lambda one: _teacher_logps(
      teachers, teacher_models, one, temperature
    )
  if (of_critic := state.critic) is not None:
    passes["values"] = lambda one: critic.values(of_critic.params, cfg, one)

  def minibatch(m, fields):
    def micro_batch(a, fields):
      one = jax.tree.map(lambda x: x[m, a], rows)
      return {
        name: x.at[m, a].set(passes[name](one)) for name, x in fields.items()
      }

    with jax.named_scope(MICRO_BATCHES):
      return jax.lax.fori_loop(0, counts[m], micro_batch, fields)

  fields = {name: getattr(rows, name) for name in passes}
  fields = jax.lax.fori_loop(0, len(counts), minibatch, fields)
  return PackedBatch(dataclasses.replace(rows, **fields), counts)


def _teacher_logps(
  params: Sequence[model.Params],
  models: Sequence[model.ModelConfig],
  batch: TrainBatch,
  temperature: float,
) -> jax.Array:
  """[B, R] float32; runs only the teachers whose problems are in the rows."""

  def logps(i, mask):
    own = dataclasses.replace(batch, response_mask=mask)
    return train_batch.response_logps(
      params[i], models[i], own, temperature=temperature
    ).logps

  if batch.teacher is None:
    return logps(0, batch.response_mask)
  total = jnp.zeros(batch.response_mask.shape)
  for i in range(len(params)):
    mask = batch.response_mask & (batch.teacher == i)
    with jax.named_scope(TEACHERS):
      total += jax.lax.cond(
        mask.any(),
        lambda i=i, mask=mask: logps(i, mask),
        lambda: jnp.zeros(batch.response_mask.shape),
      )
  return total
