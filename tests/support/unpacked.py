"""Packed batches of rows with one response each, and their rows again."""

import dataclasses

import jax
import numpy as np

from gspo_jax.learner.train_batch import PackedBatch, TrainBatch


def cut(
  rows: TrainBatch, minibatches=1, micro_batch_size=None, order=None
) -> PackedBatch:
  """Rows [B, ...] in micro-batches, all of them computed.

  Args:
    rows: one response each.
    minibatches: M.
    micro_batch_size: rows of one forward pass; None: all of a minibatch.
    order: [B], the rows in their new order; None: as they are.
  """
  B = rows.tokens.shape[0]
  size = B // minibatches if micro_batch_size is None else micro_batch_size
  shape = minibatches, B // minibatches // size, size
  order = np.arange(B) if order is None else np.asarray(order)
  lead = lambda x: x[order].reshape(*shape, *x.shape[1:])
  used = np.full(minibatches, shape[1], np.int32)
  return PackedBatch(jax.tree.map(lead, rows), used)


def join(batch: PackedBatch, order=None) -> TrainBatch:
  """The rows of `cut`, in the order that they had before."""
  back = None if order is None else np.argsort(order)

  def flat(x):
    x = x.reshape(-1, *x.shape[3:])
    return x if back is None else x[back]

  return jax.tree.map(flat, batch.rows)


def by_response(
  batch: PackedBatch, lengths, width: int
) -> dict[str, np.ndarray]:
  """The fields of response tokens as [B, width], from rows packed in any way.

  Zeros behind a response, and where it was not packed.
  """
  rows = jax.device_get(batch.rows)
  flat = lambda x: x.reshape(-1, x.shape[-1])
  index = flat(rows.response_index)[flat(rows.response_mask)]
  # The tokens of a response are in one row, in their order.
  order = np.argsort(index, kind="stable")
  lengths = np.where(np.isin(np.arange(len(lengths)), index), lengths, 0)
  place = np.arange(width) < lengths[:, None]
  found = {}
  for field in dataclasses.fields(TrainBatch):
    x = getattr(rows, field.name)
    if x is None or x.shape != rows.response_mask.shape:
      continue
    found[field.name] = np.zeros(place.shape, x.dtype)
    found[field.name][place] = flat(x)[flat(rows.response_mask)][order]
  return found
