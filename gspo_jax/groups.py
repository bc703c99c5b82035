"""Whole groups of rows, picked from batches of answers on the devices."""

import dataclasses

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.sampler import SamplerConfig, Samples, nothing


def merge(kept, new, index: jax.Array):
  """Groups `index` of the 2 P groups that `kept` and `new` have end to end.

  Args:
    kept: a pytree of [P * G, ...], the rows of a group side by side. A scalar,
      such as a count of steps, is added to that of `new`.
    new: the same.
    index: [P] integers below 2 P.

  Returns:
    The same pytree of P groups in the order of `index`.
  """
  count = len(index)
  old = index < count
  from_kept, from_new = (
    jnp.where(old, index, 0),
    jnp.where(old, 0, index - count),
  )

  def pick(a, b):
    cut = lambda x: x.reshape(count, -1, *x.shape[1:])
    first = old.reshape(count, *[1] * a.ndim)
    # Not of the two joined: XLA would pass them between devices three times.
    both = jnp.where(first, cut(a)[from_kept], cut(b)[from_new])
    return both.reshape(a.shape)

  def join(a, b):
    if a.ndim == 0:
      return a + b
    if a.ndim < 3:
      return pick(a, b)
    # By its second axis, the layers of routing: whole arrays pass between
    # devices, and these are the largest of all.
    swap = lambda x: x.swapaxes(0, 1)
    return swap(jax.lax.map(lambda ab: pick(*ab), (swap(a), swap(b))))

  return jax.tree.map(join, kept, new)


def take(
  samples: Samples,
  index: jax.Array,
  *,
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
) -> Samples:
  """Groups `index` of samples, and a group of which nothing is drawn for -1.

  The count of slot-steps is that of all.

  Args:
    samples: of Q groups, without routing.
    index: [N] integers from -1 on, below Q.
    cfg: the model; static.
    sampler: how they are drawn; static.
  """
  group, steps = sampler.group_size, samples.slot_steps
  empty = nothing(len(index), 0, cfg, sampler)
  cut = lambda x: x.reshape(-1, group, *x.shape[1:])

  def pick(x, empty):
    there = (index >= 0).reshape(-1, *[1] * x.ndim)
    found = cut(x)[jnp.maximum(index, 0)]
    return jnp.where(there, found, cut(empty)).reshape(empty.shape)

  bare = lambda s: dataclasses.replace(s, slot_steps=None)
  picked = jax.tree.map(pick, bare(samples), bare(empty))
  return dataclasses.replace(picked, slot_steps=steps)
