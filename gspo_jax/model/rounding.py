"""Products and rounding of 16-bit activations, the same in every program.

By default XLA keeps extra bits, at different places in different programs. Then
the log-probs of sampler and trainer differ by more than GSPO's clip range of
3e-4. `OPTIONS` turns this off. `rounded` is still needed between two
elementwise operations, where LLVM drops a rounding (jaxlib 0.10.2 on x86-64).

On a CPU, XLA uses AMX or AVX512-BF16 only for `x @ w` of two matrices stored
row by row, with a float32 result (jaxlib 0.10.2). `matmul` and its gradients
have this form. They set the layout of local arrays only: XLA would gather
others.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from gspo_jax.model import exact
from gspo_jax.runtime import sharding

# Compiler options of every program that runs a policy.
OPTIONS = {"xla_allow_excess_precision": False}


def recomputed(function, whole: int = 0):
  """`function`, with a backward pass that starts from its arguments alone.

  Computing elementwise results again is faster than storing and reading them.
  Exact if `model.exact`: for `whole` see `exact.by_tokens`.
  """
  ordinary = exact.with_gradient_of(function, function)
  exactly = exact.by_tokens(function, whole)

  @functools.wraps(function)
  def call(*args):
    return (exactly if exact.is_on() else ordinary)(*args)

  return call


def rounded(x: jax.Array, dtype) -> jax.Array:
  """Rounds float32 numbers to `dtype` in a way that no compiler drops."""
  if dtype == jnp.float32:
    return x
  if exact.in_kernel():  # Mosaic drops no rounding
    return x.astype(dtype)
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def stored(dtype):
  """The dtype in which `dtype` values are stored if they are written by slices.

  On a CPU float32: for each slice XLA would convert a whole 16-bit array.
  """
  return jnp.dtype("float32" if sharding.platform() == "cpu" else dtype)


def wide(x: jax.Array) -> jax.Array:
  """Casts activations to float32, for arithmetic that ends in `rounded`."""
  return x.astype(jnp.float32)


def matmul(x, weights, axes: int = 1):
  """Sums over the last `axes` axes of `x` and the first ones of `weights`.

  On a CPU the operands become matrices: with more axes, the gradient of the
  weights would copy them, a fifth of a dense model's update. There 16-bit
  products support `jax.grad` and `jax.vjp`, but not `jax.jvp`.
  """
  if sharding.platform() != "cpu" and not exact.is_on():
    return jnp.tensordot(x, weights, axes)
  rows, columns = x.shape[:-axes], weights.shape[axes:]
  summed = math.prod(weights.shape[:axes])
  x_MK, w_KN = x.reshape(-1, summed), weights.reshape(summed, -1)
  if exact.is_on():
    y_MN = _exact_product(x_MK, w_KN)
  elif x.dtype == jnp.float32:
    y_MN = x_MK @ w_KN
  else:
    y_MN = rounded(_product(x_MK, w_KN), x.dtype)
  return y_MN.reshape(*rows, *columns)


def matmul_float32(x, weights):
  """`x @ weights`, not rounded: float32 [..., N] of [..., K] and [K, N].

  The gradient of a 16-bit product is rounded to 16 bits before it is
  multiplied, as a TPU does by default. On a CPU it has no `jax.jvp`.
  """
  narrow = sharding.platform() == "cpu" and x.dtype != jnp.float32
  if exact.is_on() or narrow:
    product = _exact_product_float32 if exact.is_on() else _product
    y_MN = product(x.reshape(-1, x.shape[-1]), weights)
    return y_MN.reshape(*x.shape[:-1], -1)
  return jnp.matmul(x, weights, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _product(x_MK, w_KN):
  if exact.has_kernels():
    return exact.product(x_MK, w_KN, jnp.float32)
  if sharding.is_local():
    by_rows = Layout(major_to_minor=(0, 1))
    x_MK, w_KN = (with_layout_constraint(a, by_rows) for a in (x_MK, w_KN))
  return jnp.matmul(x_MK, w_KN, preferred_element_type=jnp.float32)


def _backward(operands, dy_MN):
  x_MK, w_KN = operands
  dy_MN = rounded(dy_MN, x_MK.dtype)
  dx_MK = _product(dy_MN, w_KN.T)
  dw_KN = _product(x_MK.T, dy_MN)
  return rounded(dx_MK, x_MK.dtype), rounded(dw_KN, w_KN.dtype)


_product.defvjp(lambda x, w: (_product(x, w), (x, w)), _backward)


def _rounded_product(x_MK, w_KN):
  if exact.has_kernels():
    return exact.product(x_MK, w_KN, x_MK.dtype)
  return rounded(_product(x_MK, w_KN), x_MK.dtype)


_exact_product_float32 = exact.by_tokens(_product, whole=1, axes=1)
_exact_product = exact.by_tokens(_rounded_product, whole=1, axes=1)
