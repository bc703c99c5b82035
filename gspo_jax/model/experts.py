"""The experts of one device, in chunks: dropless, exact, in bounded memory.

How many rows come to a device's experts is known only when the router has
spoken. A buffer for the worst case is many times too large, and one for the
mean drops tokens. So the rows are worked off in chunks of 1.25 times the mean:
one when the load is even, and a loop over the rest when it is not.

Dimension key: M tokens, D model width, e experts here, k experts a token, F
hidden width of one expert, R rows of a chunk; a row is a pair of a token and
one of its experts.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspo_jax.model import grouped_matmul
from gspo_jax.model.rounding import rounded, wide

_SLACK = 1.25  # a chunk over the mean load
_TILE = 128  # rows of a chunk come in multiples of this


def multiply(x_RD, weights_R, gate_up, down, sizes_e):
  """`w * down(silu(gate x) * up x)` of rows sorted by expert: [R, D].

  Rows beyond the groups hold what they may.
  """
  return _shrink(_widen(x_RD, gate_up, sizes_e), weights_R, down, sizes_e)


def _widen(x_RD, gate_up, sizes_e):
  """Gates and ups side by side, [R, 2F]."""
  return grouped_matmul.matmul(x_RD, gate_up.astype(x_RD.dtype), sizes_e)


def _shrink(h_RF, weights_R, down, sizes_e):
  gate, up = jnp.split(h_RF, 2, axis=-1)
  # Weighted here, on F columns, rather than after `down`, on D.
  h = nn.silu(wide(gate)) * wide(up) * wide(weights_R)[:, None]
  h = rounded(h, h_RF.dtype)
  return grouped_matmul.matmul(h, down.astype(h.dtype), sizes_e)


def apply(x_MD, weights_Mk, experts_Mk, gate_up, down, *, share: int):
  """What the experts here add to each token.

  Args:
    x_MD: tokens.
    weights_Mk: routing weights, in the type of `x_MD`.
    experts_Mk: chosen experts, counted from the first one here; those outside
      0..e-1 live elsewhere.
    gate_up: [e, D, 2F].
    down: [e, F, D].
    share: devices among which the experts are split.

  Returns:
    The sum over local experts [M, D], and the rows worked off, [] int32.
  """
  (M, k), e = experts_Mk.shape, gate_up.shape[0]
  most = M * min(k, e)
  tiles = -(-int(_SLACK * M * k) // (share * _TILE))
  R = min(most, tiles * _TILE)
  here_Mk = (experts_Mk >= 0) & (experts_Mk < e)
  key = jnp.where(here_Mk, experts_Mk, e).reshape(-1)
  ends_e = jnp.cumsum(jnp.bincount(key, length=e + 1)[:e])
  order = jnp.argsort(key, stable=True)[:most]
  order = jnp.pad(order, (0, -most % R))
  weights = weights_Mk.reshape(-1)
  return _chunks(x_MD, weights, gate_up, down, order, ends_e, k, R)


def _chunk(order, ends_e, start, R):
  """The pairs [R] of a chunk, out of range where it has fewer, and groups."""
  sizes_e = jnp.diff(jnp.clip(ends_e - start, 0, R), prepend=0)
  pairs = jax.lax.dynamic_slice_in_dim(order, start, R)
  return jnp.where(jnp.arange(R) < sizes_e.sum(), pairs, 2**30), sizes_e


def _take(x, i):
  return jnp.take(x, i, axis=0, mode="clip")


def _add(x, i, rows):
  return x.at[i].add(rows, mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _chunks(x_MD, weights, gate_up, down, order, ends_e, k, R):
  """As many chunks as there are rows for.

  Reverse mode cannot go through a loop of unknown length, hence the gradient by
  hand: again a loop over chunks, each differentiated by JAX. By hand, too, so
  that what a kernel leaves in the rows beyond its groups is added nowhere, and
  that the first chunk's hidden rows can be kept.
  """
  given = (x_MD, weights, gate_up, down, order, ends_e)
  widen, body, state = _steps(*given, k, R)
  again = lambda s: body(s, widen(s[0]))
  # Nothing to peel off, for no gradient is asked for: one copy to compile.
  return jax.lax.while_loop(lambda s: s[0] < ends_e[-1], again, state)[1:]


def _steps(x_MD, weights, gate_up, down, order, ends_e, k, R):
  """Both halves of a chunk, and the state before the first."""

  def widen(start):
    pairs, sizes_e = _chunk(order, ends_e, start, R)
    return _widen(_take(x_MD, pairs // k), gate_up, sizes_e)

  def body(state, h_RF):
    start, y_MD, done = state
    pairs, sizes_e = _chunk(order, ends_e, start, R)
    y = _shrink(h_RF, _take(weights, pairs), down, sizes_e)
    return start + R, _add(y_MD, pairs // k, y), done + sizes_e.sum()

  zeros = jnp.zeros_like(x_MD), jnp.zeros_like(ends_e[-1])
  return widen, body, (jnp.int32(0), *zeros)


def _forward(x_MD, weights, gate_up, down, order, ends_e, k, R):
  given = (x_MD, weights, gate_up, down, order, ends_e)
  widen, body, state = _steps(*given, k, R)
  h_RF = checkpoint_name(widen(0), "hidden")
  state = _repeat(body, widen, state, h_RF, order, ends_e)
  return state[1:], (*given, h_RF)


def _repeat(body, widen, state, h_RF, order, ends_e):
  """The first chunk, and the others if there are any.

  The first stands outside the loop, and the loop in a branch, so that an even
  load pays for no copy of what a loop carries.
  """
  state = body(state, h_RF)
  if order.size <= len(h_RF):
    return state
  more = lambda s: s[0] < ends_e[-1]
  again = lambda s: body(s, widen(s[0]))
  loop = lambda s: jax.lax.while_loop(more, again, s)
  return jax.lax.cond(more(state), loop, lambda s: s, state)


def _backward(k, R, kept, cotangents):
  x_MD, weights, gate_up, down, order, ends_e, h_RF = kept
  dy_MD, _ = cotangents

  def rows(start):
    pairs, sizes_e = _chunk(order, ends_e, start, R)
    return pairs, _take(x_MD, pairs // k), sizes_e

  def widen(start):
    _, x_RD, sizes_e = rows(start)
    return _widen(x_RD, gate_up, sizes_e)

  def body(state, h_RF):
    start, dx_MD, dweights, dgate_up, ddown = state
    pairs, x_RD, sizes_e = rows(start)
    shrink = functools.partial(_shrink, sizes_e=sizes_e)
    _, pull = jax.vjp(shrink, h_RF, _take(weights, pairs), down)
    dh_RF, dweight, dd = pull(_take(dy_MD, pairs // k))
    _, pull = jax.vjp(functools.partial(_widen, sizes_e=sizes_e), x_RD, gate_up)
    drows, dg = pull(dh_RF)
    return (
      start + R,
      _add(dx_MD, pairs // k, drows),
      _add(dweights, pairs, dweight),
      dgate_up + dg,
      ddown + dd,
    )

  zeros = map(jnp.zeros_like, (x_MD, weights, gate_up, down))
  state = (jnp.int32(0), *zeros)
  state = _repeat(body, widen, state, h_RF, order, ends_e)
  return (*state[1:], None, None)


_chunks.defvjp(_forward, _backward)
