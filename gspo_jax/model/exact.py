"""`model.exact`: operators that give a token the same bits in every program.

XLA sums and rounds by an operator's shapes, and by what the operator is merged
with. So a sampler, which has few tokens at a time, and a trainer, which has
many, differ in the last bits. Here whatever rounds has one shape in every
program: a function of single tokens takes `TOKENS` tokens at a time. A token's
results depend neither on its place in the block nor on the other tokens.
Attention is in exact_attention.py. The gradients are the ordinary ones.

Dimension key: B rows, T tokens of a row, M = B * T, C tokens of a block.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec

from gspo_jax.runtime import sharding

TOKENS = 64  # C

_on: contextvars.ContextVar[bool | str] = contextvars.ContextVar(
  "exact", default=False
)


@contextlib.contextmanager
def exactly(on: bool | str):
  """Inside, operators are exact, or not; "kernel": in a kernel, too."""
  token = _on.set(on)
  try:
    yield
  finally:
    _on.reset(token)


def is_on() -> bool:
  """Not for the forward rule of a `jax.custom_vjp`: JAX may trace it later."""
  return bool(_on.get())


def has_kernels() -> bool:
  """Whether exact products and sums are those of `exact_kernels`."""
  return is_on() and sharding.platform() == "tpu"


def in_kernel() -> bool:
  return _on.get() == "kernel"


def noinline(function: Callable) -> Callable:
  """`function`, which XLA on a CPU does not merge with what surrounds it.

  It would compute results again for each use of a broadcast element, even
  behind a `jax.lax.optimization_barrier`. A jit in `function` is not merged,
  either.
  """

  @functools.wraps(function)
  def call(*args):
    if sharding.platform() != "cpu":
      return function(*args)
    with set_xla_metadata(inlineable="false"):
      return jax.jit(function)(*args)

  return call


def by_tokens(function: Callable, whole: int = 0, axes: int = 2) -> Callable:
  """`function(*tokens, *whole)`, with the same bits in every program.

  Arrays of tokens, and the results, are [B, T, ...], or with one of `axes` [M,
  ...]; the last `whole` arguments are of all tokens. An argument may be None.
  The backward pass is that of `function`, of all tokens at a time, and starts
  from the arguments. On a TPU `function` has all tokens, too: what its products
  and `sums` do not do is done number by number.
  """

  def forward(*args):
    local = functools.partial(_in_blocks, function, len(args) - whole, axes)
    if sharding.platform() == "tpu":
      local = exactly(True)(function)
    if not sharding.is_local():
      rows = PartitionSpec(sharding.BATCH_AXES)
      place = sharding.TOKENS if axes == 2 else rows
      specs = (place,) * (len(args) - whole) + (PartitionSpec(),) * whole
      local = sharding.shard_map(local, specs, place)
    return local(*args)

  return with_gradient_of(function, forward)


def with_gradient_of(function: Callable, forward: Callable) -> Callable:
  """`forward`, with a backward pass that starts `function` from the arguments.

  Unlike `jax.checkpoint` it leaves no trace in a rematerialised block.
  """

  @exactly(False)
  def backward(args, cotangent):
    return jax.vjp(function, *args)[1](cotangent)

  call = jax.custom_vjp(forward)
  call.defvjp(lambda *args: (forward(*args), args), backward)
  return call


def sums(function: Callable) -> Callable:
  """`function(x, *whole)`, which sums along the last axis of `x`: [..., D]."""

  @functools.wraps(function)
  def call(x, *whole):
    if not has_kernels():
      return function(x, *whole)
    from gspo_jax.model import exact_kernels

    with exactly("kernel"):
      out = exact_kernels.rows(function, x.reshape(-1, x.shape[-1]), *whole)
    return out.reshape(*x.shape[:-1], -1)

  return call


def product(x_MK, w_KN, dtype):
  """`x @ w` in float32, rounded once to `dtype`: where `has_kernels`."""
  from gspo_jax.model import exact_kernels

  return exact_kernels.product(x_MK, w_KN, jnp.dtype(dtype))


def _in_blocks(function, first, axes, *args):
  tokens, whole = args[:first], args[first:]
  shape, C = tokens[0].shape[:axes], TOKENS
  M = math.prod(shape)
  count = -(-M // C)

  def padded(x):
    x = x.reshape(M, *x.shape[axes:])
    return jnp.pad(x, [(0, count * C - M), *[(0, 0)] * (x.ndim - 1)])

  tokens = jax.tree.map(padded, tokens)
  apart = noinline(function)

  def step(i):
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * C, C)
    lead = (1,) * (axes - 1)
    block = lambda x: cut(x).reshape(*lead, C, *x.shape[1:])
    outs = apart(*jax.tree.map(block, tokens), *whole)
    return jax.tree.map(lambda y: y.reshape(C, *y.shape[axes:]), outs)

  def body(i, outs):
    put = lambda out, y: jax.lax.dynamic_update_slice_in_dim(out, y, i * C, 0)
    return jax.tree.map(put, outs, step(i))

  if count == 1 and sharding.platform() == "cpu":
    outs = step(0)
  else:
    empty = lambda y: jnp.zeros((count * C, *y.shape[1:]), y.dtype)
    outs = jax.tree.map(empty, jax.eval_shape(step, 0))
    # Not a constant: XLA would merge the body of a loop of one step.
    steps = jax.lax.optimization_barrier(jnp.int32(count))
    outs = jax.lax.fori_loop(0, steps, body, outs)
  return jax.tree.map(lambda y: y[:M].reshape(*shape, *y.shape[1:]), outs)


def chosen(function: Callable, whole: int = 0, axes: int = 2) -> Callable:
  """`by_tokens` if operators are exact, else the function itself."""
  return by_tokens(function, whole, axes) if is_on() else function


def sum_in_order(x, axis: int):
  """The float32 sum along an axis, one slice after the other."""
  first, *rest = jnp.moveaxis(x, axis, 0).astype(jnp.float32)
  return functools.reduce(jnp.add, rest, first)
