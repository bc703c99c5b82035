"""Where activations are rounded to 16 bits: at the same places in any program.

By default XLA keeps more bits where that is cheap, in each program elsewhere.
Sampler and trainer then differ by more than GSPO's clip range of 3e-4. Two
things prevent it: `OPTIONS` for the compiler, and `rounded` where elementwise
operations follow one another, for LLVM drops a rounding between two of them
even so (seen with jaxlib 0.10.2 on x86-64).
"""

import jax
import jax.numpy as jnp

# Compiler options of every program that a policy runs in.
OPTIONS = {"xla_allow_excess_precision": False}


def rounded(x: jax.Array, dtype) -> jax.Array:
  """float32 numbers as `dtype`, through a rounding that no compiler drops."""
  if dtype == jnp.float32:
    return x
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def wide(x: jax.Array) -> jax.Array:
  """Activations in float32, to compute with and then to be `rounded`."""
  return x.astype(jnp.float32)
