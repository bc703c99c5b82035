"""The two products of attention: scores, and weighted values."""

import functools

import jax.numpy as jnp

from gspo_jax.model.exact import noinline
from gspo_jax.runtime import sharding

MASKED = -1e30  # finite: a query without any key gives a finite output


def default_scale(scale: float | None, H: int) -> float:
  """What scores are multiplied by, H^-0.5 by default; H is a key's width."""
  return H**-0.5 if scale is None else scale


def products(q_XQH, k_XSH):
  """The products of queries and keys [..., Q, S], summed in float32.

  The second operand is transposed first: of few queries and many keys on a CPU
  this should be the queries.
  """
  multiply = functools.partial(
    jnp.einsum, "...ah,...bh->...ab", preferred_element_type=jnp.float32
  )
  few = q_XQH.shape[-2] <= min(8, k_XSH.shape[-2] // 8)
  if few and sharding.platform() == "cpu":
    return noinline(multiply)(k_XSH, q_XQH).swapaxes(-1, -2)
  return multiply(q_XQH, k_XSH)


def weigh(subscripts: str, weights, values):
  """An einsum of float32 weights with values of any dtype, summed in float32.

  Except on a CPU the weights are rounded anyway; the explicit cast avoids a
  float32 copy of the values.
  """
  if sharding.platform() != "cpu":
    weights = weights.astype(values.dtype)
  values = values.astype(weights.dtype)
  return jnp.einsum(
    subscripts, weights, values, preferred_element_type=jnp.float32
  )
