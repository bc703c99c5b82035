"""Rounding of activations to 16 bits at the same places in every program.

By default XLA keeps more bits where that is cheap, at other places in each
program. The log-probs of sampler and trainer then differ by more than GSPO's
clip range of 3e-4. `OPTIONS` turns that off. `rounded` is still needed between
two elementwise operations, where LLVM drops a rounding even so (seen with
jaxlib 0.10.2 on x86-64).
"""

import functools

import jax
import jax.numpy as jnp

from gspo_jax.runtime import sharding

# Compiler options of every program that runs a policy.
OPTIONS = {"xla_allow_excess_precision": False}


def recomputed(function):
  """`function`, whose backward pass starts from its arguments alone.

  For elementwise arithmetic: computing its intermediate results again takes
  less time than storing and reading them. Unlike `jax.checkpoint` it leaves no
  trace inside a block that is rematerialised itself.
  """

  @jax.custom_vjp
  def call(*args):
    return function(*args)

  def backward(args, cotangent):
    return jax.vjp(function, *args)[1](cotangent)

  call.defvjp(lambda *args: (function(*args), args), backward)
  return functools.wraps(function)(call)


def rounded(x: jax.Array, dtype) -> jax.Array:
  """Rounds float32 numbers to `dtype` in a way that no compiler drops."""
  if dtype == jnp.float32:
    return x
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def stored(dtype):
  """The dtype of arrays of `dtype` values that are written slice by slice.

  On a CPU, XLA writes a slice of a 16-bit array by converting the whole array
  to float32 and back. There the values are stored in float32.
  """
  return jnp.dtype("float32" if sharding.platform() == "cpu" else dtype)


def wide(x: jax.Array) -> jax.Array:
  """Casts activations to float32, for arithmetic that ends in `rounded`."""
  return x.astype(jnp.float32)
