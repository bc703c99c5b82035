"""The passes of the reference policy, teachers and critic before an update."""

import dataclasses
import functools
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
Pass = Callable[[TrainBatch], jax.Array]  # rows to [B, R] float32


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

  def logps(params, cfg, one: TrainBatch) -> jax.Array:
    return train_batch.response_logps(
      params, cfg, one, temperature=temperature
    ).logps

  # By the field that a pass fills in.
  passes: dict[str, Pass] = {}
  if state.reference is not None:
    reference = train_step.with_base(state.base, state.reference)
    passes["reference_logps"] = functools.partial(logps, reference, cfg)
  if teachers:
    models = zip(teachers, teacher_models, strict=True)
    each = [functools.partial(logps, *pair) for pair in models]
    passes["teacher_logps"] = functools.partial(_teacher_logps, each)
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


def _teacher_logps(teachers: Sequence[Pass], batch: TrainBatch) -> jax.Array:
  """[B, R] float32; runs only the teachers whose problems are in the rows."""
  if batch.teacher is None:
    return teachers[0](batch)
  total = zeros = jnp.zeros(batch.response_mask.shape)
  for i, logps in enumerate(teachers):
    mask = batch.response_mask & (batch.teacher == i)
    own = dataclasses.replace(batch, response_mask=mask)
    with jax.named_scope(TEACHERS):
      total += jax.lax.cond(
        mask.any(), functools.partial(logps, own), lambda: zeros
      )
  return total
