"""Whole groups of rows, picked from two batches of answers on the devices."""

import jax
import jax.numpy as jnp


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
