"""Packed batches of rows with one response each, and their rows again."""

import dataclasses

import jax
import jax.numpy as jnp
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
  lead = lambda x: jnp.asarray(x)[order].reshape(*shape, *x.shape[1:])
  used = jnp.full(minibatches, shape[1], jnp.int32)
  return PackedBatch(jax.tree.map(lead, rows), used)


def join(batch: PackedBatch, order=None) -> TrainBatch:
  """The rows of `cut`, in the order that they had before, as numpy arrays."""
  back = None if order is None else np.argsort(order)

  def flat(x):
    x = x.reshape(-1, *x.shape[3:])
    return x if back is None else x[back]

  return jax.tree.map(flat, jax.device_get(batch.rows))


def by_response(
  batch: PackedBatch, lengths, width: int
) -> dict[str, np.ndarray]:
  """The fields of response tokens as [B, width]; else zeros."""
  rows = jax.device_get(batch.rows)
  mask, columns = rows.response_mask, rows.response_mask.shape[-1]
  index = rows.response_index[mask]
  # The tokens of a response are in one row, in their order.
  order = np.argsort(index, kind="stable")
  lengths = np.where(np.isin(np.arange(len(lengths)), index), lengths, 0)
  place = np.arange(width) < lengths[:, None]
  found = {}
  for field in dataclasses.fields(TrainBatch):
    x = getattr(rows, field.name)
    if x is None:
      continue
    if field.name in ("experts", "router_logps"):
      x = np.moveaxis(x, -3, -2)[..., -columns:, :, :]
    if x.shape[: mask.ndim] == mask.shape:
      tokens = x[mask][order]
      found[field.name] = np.zeros(place.shape + tokens.shape[1:], x.dtype)
      found[field.name][place] = tokens
  return found
