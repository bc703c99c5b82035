"""The experts of one device, in chunks: dropless, exact, in bounded memory.

The router decides how many rows a device gets. A buffer for the worst case
would be many times too large, and a buffer for the mean would drop tokens. So a
device processes chunks of 1.25 times the mean: one if the load is even.

Dimension key: M tokens, D model width, e experts of this device, k experts a
token, F hidden width of one expert, A rows of a chunk; a row is a pair of a
token and one of its experts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspo_jax.model import exact, lora
from gspo_jax.model.grouped_matmul import gated
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding

SLACK = 1.25  # rows of a chunk / mean load
_TILE = 128  # a chunk's rows: a multiple of this, or all rows


def chunk_rows(rows: int, num_shards: int) -> int:
  """The rows of a chunk where all devices together have so many."""
  return -(-int(SLACK * rows) // (num_shards * _TILE)) * _TILE


def project_down(h_AF, weights_A, down, sizes_e, limit):
  """`w * down(gated(gate x, up x))` of the gates and ups of rows: [A, D].

  Rows are sorted by expert; those beyond the sum of `sizes_e` are undefined.
  """

  def weigh(h_AF, weights_A):  # on F columns, rather than after `down`, on D
    gate, up = jnp.split(h_AF, 2, axis=-1)
    h = gated(gate, up, limit) * wide(weights_A)[:, None]
    return rounded(h, h_AF.dtype)

  h = exact.chosen(weigh, axes=1)(h_AF, weights_A)
  return lora.grouped_product(h, down, sizes_e, weights_A)


def apply(
  x_MD, weights_Mk, experts_Mk, gate_up, down, *, num_shards: int, limit=None
):
  """The weighted sum [M, D] over this device's experts; the rows processed.

  `experts_Mk` counts from this device's first expert; numbers outside 0..e-1
  are experts of other devices. `num_shards` devices share all experts. Weights
  have the dtype of `x_MD`; `gate_up` is [e, D, 2F], `down` is [e, F, D].
  """
  (M, k), e = experts_Mk.shape, len(gate_up.weight)
  max_rows = M * min(k, e)
  A = min(max_rows, chunk_rows(M * k, num_shards))
  local_Mk = (experts_Mk >= 0) & (experts_Mk < e)
  key = jnp.where(local_Mk, experts_Mk, e).reshape(-1)
  ends_e = jnp.cumsum(jnp.bincount(key, length=e + 1)[:e])
  order = jnp.argsort(key, stable=True)[:max_rows]
  order = jnp.pad(order, (0, -max_rows % A))
  operands = _Operands(
    x_MD, weights_Mk.reshape(-1), gate_up, down, order, ends_e
  )
  return _chunks(operands, k, A, limit)


class _Operands(NamedTuple):
  x_MD: jax.Array  # tokens
  weights: jax.Array  # [M * k] routing weights
  gate_up: lora.Experts  # [e, D, 2F], with adapters or without
  down: lora.Experts  # [e, F, D]
  # Rows sorted by expert: row i is token i // k. Rows for other devices last.
  order: jax.Array
  ends_e: jax.Array  # the end of each expert's rows in `order`


def _chunk(operands: _Operands, start, A):
  """The rows [A] of a chunk, 2**30 after its last, and its group sizes [e]."""
  ends_e = operands.ends_e
  sizes_e = jnp.diff(jnp.clip(ends_e - start, 0, A), prepend=0)
  rows = jax.lax.dynamic_slice_in_dim(operands.order, start, A)
  return jnp.where(jnp.arange(A) < sizes_e.sum(), rows, 2**30), sizes_e


def _take(x, i):
  return jnp.take(x, i, axis=0, mode="clip")


def _add_to_tokens(total_MD, rows, values_AD, k):
  """The total plus, for each token, the values of its rows.

  A GPU would scatter in any order, so that two passes would differ; there each
  token gathers its rows, and their sum is rounded once.
  """
  if sharding.platform() != "gpu":
    return total_MD.at[rows // k].add(values_AD, mode="drop")
  (M, _), A = total_MD.shape, len(rows)
  row_Mk = jnp.full(M * k, A).at[rows].set(jnp.arange(A), mode="drop")
  values_MkD = jnp.take(
    values_AD, row_Mk.reshape(M, k), axis=0, mode="fill", fill_value=0
  )
  added_MD = values_MkD.sum(1, dtype=jnp.float32)
  return rounded(wide(total_MD) + added_MD, total_MD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _chunks(operands: _Operands, k, A, limit):
  """Processes all rows, chunk by chunk; the output of `apply`.

  JAX cannot differentiate a loop of unknown length in reverse mode. So the
  gradient is another loop, in which JAX differentiates each chunk. This also
  keeps a kernel's undefined rows out of all sums.
  """
  body, state = _steps(operands, k, A, limit)
  # Without a gradient nothing of a chunk is kept: one loop runs all chunks.
  step = lambda state: body(state, _widen(operands, state[0], k, A))
  more = lambda state: state[0] < operands.ends_e[-1]
  return jax.lax.while_loop(more, step, state)[1:]


def _widen(operands: _Operands, start, k, A):
  """The first half of a chunk: gates and ups, concatenated, [A, 2F]."""
  rows, sizes_e = _chunk(operands, start, A)
  x_AD = _take(operands.x_MD, rows // k)
  return lora.grouped_product(x_AD, operands.gate_up, sizes_e)


def _steps(operands: _Operands, k, A, limit):
  """The second half of a chunk, and the state before the first chunk."""
  x_MD, weights, _, down, _, ends_e = operands

  def body(state, h_AF):
    start, y_MD, num_rows = state
    rows, sizes_e = _chunk(operands, start, A)
    y = project_down(h_AF, _take(weights, rows), down, sizes_e, limit)
    y_MD = _add_to_tokens(y_MD, rows, y, k)
    return start + A, y_MD, num_rows + sizes_e.sum()

  zeros = jnp.zeros_like(x_MD), jnp.zeros_like(ends_e[-1])
  return body, (jnp.int32(0), *zeros)


def _forward(operands: _Operands, k, A, limit):
  body, state = _steps(operands, k, A, limit)
  h_AF = checkpoint_name(_widen(operands, 0, k, A), "hidden")
  return _run(body, state, h_AF, operands, k)[1:], (operands, h_AF)


def _run(body, state, h_AF, operands: _Operands, k):
  """The first chunk from its hidden rows, then the other chunks, if any."""
  A, state = len(h_AF), body(state, h_AF)
  if operands.order.size <= A:
    return state
  # In a branch: with an even load nothing is copied into a loop's state.
  more = lambda state: state[0] < operands.ends_e[-1]
  step = lambda state: body(state, _widen(operands, state[0], k, A))
  loop = lambda state: jax.lax.while_loop(more, step, state)
  return jax.lax.cond(more(state), loop, lambda state: state, state)


def _backward(k, A, limit, residuals, cotangents):
  operands, h_AF = residuals
  x_MD, weights, gate_up, down, _, _ = operands
  dy_MD, _ = cotangents

  def body(state, h_AF):
    start, dx_MD, dweights, dgate_up, ddown = state
    rows, sizes_e = _chunk(operands, start, A)
    second = functools.partial(project_down, sizes_e=sizes_e, limit=limit)
    _, pull = jax.vjp(second, h_AF, _take(weights, rows), down)
    dh_AF, dweights_A, ddown_chunk = pull(_take(dy_MD, rows // k))
    first = functools.partial(lora.grouped_product, sizes_e=sizes_e)
    _, pull = jax.vjp(first, _take(x_MD, rows // k), gate_up)
    dx_AD, dgate_up_chunk = pull(dh_AF)
    return (
      start + A,
      _add_to_tokens(dx_MD, rows, dx_AD, k),
      dweights.at[rows].add(dweights_A, mode="drop"),
      jax.tree.map(jnp.add, dgate_up, dgate_up_chunk),
      jax.tree.map(jnp.add, ddown, ddown_chunk),
    )

  zeros = jax.tree.map(jnp.zeros_like, (x_MD, weights, gate_up, down))
  state = _run(body, (jnp.int32(0), *zeros), h_AF, operands, k)
  return (_Operands(*state[1:], None, None),)


_chunks.defvjp(_forward, _backward)
