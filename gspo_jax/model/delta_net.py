"""The gated DeltaNet of Qwen3-Next (arXiv 2412.06464, eq. 10).

Each value head has a state S [K, V] in place of keys and values:

  S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T,    o_t = S_t^T q_t

with a_t = exp(g_t), g_t <= 0, and b_t in (0, 1). The state begins at 0 in each
segment of a row. Before, queries, keys and values pass a short causal
convolution over the tokens of their segment, each channel by itself.

Dimension key: B rows, T tokens, c chunks of C tokens, D model width, G key
heads, R value heads of a key head, M = G * R value heads, K and V width of a
key and a value, X = 2 K + R V channels of a key head, W tokens of the
convolution. The state and the rule are float32.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from gspo_jax.model import exact
from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.layers import by_tokens, project, sum_over_tensor
from gspo_jax.model.rounding import recomputed, rounded, stored, wide
from gspo_jax.runtime import sharding

_CHUNK = {"tpu": 128, "cpu": 32}  # tokens; elsewhere 64
_BLOCK = 8  # rows that `_inverse` solves one by one
_NORM_EPS = 1e-6  # of the norm of queries and keys
_BY_HEAD = "conv", "A_log", "dt_bias"
_HEADS = PartitionSpec(sharding.BATCH_AXES, None, "tensor")  # [B, T, heads]
_STATES = PartitionSpec(sharding.BATCH_AXES, "tensor")  # [B, heads, ...]
_einsum = functools.partial(jnp.einsum, precision="highest")


@jax.named_scope("delta_net")
def gated_delta_net(
  x_BTD, weights, cfg: ModelConfig, layer: Layer, angles, segments_BT, cache, i
):
  """Returns the output [B, T, D] and the layer's states, as in a cache.

  A token of segment 0 is padding and leaves the states as they are. With a
  cache a row is one sequence.
  """
  del layer, angles
  if cache is None:
    return _mix_without_cache(x_BTD, weights, segments_BT, cfg)
  if exact.is_on():  # as in attention
    operands = _project, x_BTD, weights, "delta_net"
    inputs, z_BTMV = by_tokens(*operands, out=_HEADS)
  else:
    inputs, z_BTMV = _project(x_BTD, weights)
  by_head = {name: weights[name] for name in _BY_HEAD}
  apply = sharding.shard_map(
    lambda inputs, weights, real_BT, states: mix(
      inputs, weights, jnp.zeros(real_BT.shape, int), real_BT, states
    ),
    in_specs=(
      (_HEADS,) * len(inputs),
      PartitionSpec("tensor"),
      PartitionSpec(sharding.BATCH_AXES),
      _STATES,
    ),
    out_specs=(_HEADS, _STATES),
  )
  out_BTMV, states = apply(inputs, by_head, segments_BT != 0, cache.states[i])
  if not exact.is_on():
    return _output(out_BTMV, z_BTMV, weights, cfg), states
  combine = lambda both, weights: sum_over_tensor(
    _output(*jnp.split(both, 2, -1), weights, cfg)
  )
  operands = jnp.concatenate([out_BTMV, z_BTMV], -1), weights, "delta_net"
  return by_tokens(combine, *operands, place=_HEADS), states


def _project(x_BTD, weights):
  """The inputs of `mix`, and the gate z of the output [B, T, M, V].

  b is the logit of b_t, a is g_t before `softplus`, the bias and the rate.
  """
  heads = lambda name: checkpoint_name(project(x_BTD, weights, name), "heads")
  if "qkvz" in weights:
    x_BTGX, z = jnp.split(heads("qkvz"), [weights["conv"].shape[1]], -1)
    b, a = jnp.split(heads("ba"), 2, -1)
  else:
    x_BTGX, z, b, a = map(heads, ("qkv", "z", "b", "a"))
  by_head = lambda x, *width: x.reshape(*x.shape[:2], -1, *width)
  return (x_BTGX, by_head(b), by_head(a)), by_head(z, len(weights["norm"]))


def _output(out_BTMV, z_BTMV, weights, cfg):
  eps = jnp.float32(cfg.norm_eps)
  normed = _gated_norm(out_BTMV, z_BTMV, weights["norm"], eps)
  return project(normed, weights, "o", axes=2)


@functools.partial(recomputed, whole=2)
def _gated_norm(x, z, scale, eps):
  """`rms_norm(x) * silu(z)`, rounded once."""
  h = wide(x)
  h *= jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
  h *= wide(scale.astype(x.dtype)) * jax.nn.silu(wide(z))
  return rounded(h, x.dtype)


def _mix_without_cache(x_BTD, weights, segments_BT, cfg):
  """The T tokens in a shard_map over rows, tokens and heads.

  As in attention, a device exchanges all heads of its tokens for all tokens of
  its heads, and back.
  """

  def local(x_BTD, weights, segments_BT):
    inputs, z_BTMV = _project(x_BTD, weights)
    out_BTMV, states = _mix_all_tokens(inputs, weights, segments_BT, cfg)
    y_BTD = _output(out_BTMV, z_BTMV, weights, cfg)
    return sum_over_tensor(y_BTD), states

  heads = PartitionSpec(sharding.ROW_AXES, ("tensor", "context"))
  operands = x_BTD, weights, "delta_net", segments_BT
  return by_tokens(local, *operands, out=(sharding.TOKENS, heads))


def _mix_all_tokens(inputs, weights, segments_BT, cfg):
  """`mix`, with the tokens split over `context`."""
  C, G = sharding.size("context"), len(weights["conv"])
  K, V = cfg.linear_key_head_dim, cfg.linear_value_head_dim
  # With fewer key heads than devices, several devices get the same head: all of
  # its query and key, and a part of its values.
  copies = math.lcm(G, C) // G

  def divided(x, axis):
    if copies == 1:
      return x
    keys, values = jnp.split(x, [2 * K], axis + 1)
    keys = jnp.repeat(keys, copies, axis)
    values = values.reshape(*keys.shape[: axis + 1], -1, *x.shape[axis + 2 :])
    return jnp.concatenate([keys, values], axis + 1)

  def heads_here(name):
    x = weights[name]
    if name == "conv":
      x = divided(x, axis=0)
    n = len(x) // C
    start = sharding.index("context") * n
    return jax.lax.dynamic_slice_in_dim(x, start, n)

  exchange = lambda x: sharding.all_to_all(x, "context", split=2, join=1)
  x_BTGX, *others = inputs
  inputs = tuple(map(exchange, (divided(x_BTGX, axis=2), *others)))
  by_head = {name: heads_here(name) for name in _BY_HEAD}
  segments_BT = sharding.gather(segments_BT, "context", dim=1)
  # Before the first token; as `cache.state_shapes`, of a device's heads.
  (G, X, W), B = by_head["conv"].shape, len(segments_BT)
  state = jnp.zeros((B, len(by_head["A_log"]), K, V))
  tail = jnp.zeros((B, G, W - 1, X), stored(x_BTGX.dtype))
  real_BT, segments_BT = segments_BT != 0, _without_padding(segments_BT)
  out_BTMV, states = mix(inputs, by_head, segments_BT, real_BT, (state, tail))
  return sharding.all_to_all(out_BTMV, "context", split=1, join=2), states


def _without_padding(segments_BT):
  """Padding has the number of the segment before it, and so keeps its state."""
  token_T = jnp.arange(segments_BT.shape[1])
  real = jax.lax.cummax(jnp.where(segments_BT != 0, token_T, 0), axis=1)
  return jnp.take_along_axis(segments_BT, real, axis=1)


def mix(inputs, weights, segments_BT, real_BT, states):
  """The convolution and the rule, of all tokens of a device's heads.

  Args:
    inputs: by key head a query, a key and its values [B, T, G, X], and b and a
      [B, T, M], as they are projected.
    weights: those of `_BY_HEAD`.
    segments_BT: a state begins at 0 where it changes.
    real_BT: false at padding, which leaves the states.
    states: after earlier tokens of the first segment: S [B, M, K, V], and the
      last W - 1 inputs of the convolution [B, G, W - 1, X].

  Returns:
    The output [B, T, M, V], rounded once, and the states.
  """
  (x_BTGX, b_BTM, a_BTM), (state_BMKV, tail) = inputs, states
  (B, T, G, _), (_, M, K, V) = x_BTGX.shape, state_BMKV.shape
  windows, tail = _windows(
    x_BTGX, weights["conv"].shape[-1], segments_BT, real_BT, tail
  )
  x_BTGX, g_BTM, b_BTM = exact.chosen(_of_a_token, whole=3)(
    b_BTM, a_BTM, real_BT, windows, *(weights[name] for name in _BY_HEAD)
  )
  q_BTGK, k_BTGK, v_BTGX = jnp.split(x_BTGX, [K, 2 * K], -1)
  v_BTGRV = v_BTGX.reshape(B, T, G, -1, V)
  g_BTGR, b_BTGR = (x.reshape(B, T, G, -1) for x in (g_BTM, b_BTM))
  state = state_BMKV.reshape(B, G, -1, K, V)
  operands = q_BTGK, k_BTGK, v_BTGRV, g_BTGR, b_BTGR
  if exact.is_on():
    run = exact.with_gradient_of(_by_chunk, _by_token)
    state, out = run(state, *operands, segments_BT)
  elif T == 1:
    state, out = _step(state, *(x[:, 0] for x in operands))
    out = out[:, None]
  else:
    state, out = _by_chunk(state, *operands, segments_BT)
  out_BTMV = checkpoint_name(out.reshape(B, T, M, V), "attention")
  return out_BTMV, (state.reshape(state_BMKV.shape), tail)


def _windows(x_BTGX, W, segments_BT, real_BT, tail):
  """The W inputs of a token's convolution; and those the next token needs."""
  T = x_BTGX.shape[1]
  x_BTGX = jnp.where(real_BT[..., None, None], x_BTGX, 0)
  before = tail.swapaxes(1, 2).astype(x_BTGX.dtype)
  x = jnp.concatenate([before, x_BTGX], 1)
  first = jnp.repeat(segments_BT[:, :1], W - 1, axis=1)
  segments = jnp.concatenate([first, segments_BT], 1)
  same = lambda w: (segments[:, w : w + T] == segments_BT)[..., None, None]
  windows = [jnp.where(same(w), x[:, w : w + T], 0) for w in range(W)]
  # After the last real token. What is of another segment is no input of the
  # next token.
  end_B = jnp.where(real_BT, jnp.arange(1, T + 1), 0).max(1)
  at = end_B[:, None] + jnp.arange(W - 1)
  inside = jnp.take_along_axis(segments, at, 1) == segments_BT[:, -1:]
  last = jnp.take_along_axis(x, at[..., None, None], 1)
  last = jnp.where(inside[..., None, None], last, 0)
  return windows, last.swapaxes(1, 2).astype(tail.dtype)


def _of_a_token(b_BTM, a_BTM, real_BT, windows, conv_GXW, A_log, dt_bias):
  """The convolution, rounded once [B, T, G, X], and float32 g and b."""
  dtype = windows[0].dtype
  conv_GXW = wide(conv_GXW.astype(dtype))
  total = 0.0
  for w, x_BTGX in enumerate(windows):
    total += wide(x_BTGX) * conv_GXW[..., w]
  real = lambda x_BTM: jnp.where(real_BT[..., None], x_BTM, 0)
  rate_M = -jnp.exp(A_log)
  g_BTM = real(rate_M * jax.nn.softplus(wide(a_BTM) + dt_bias))
  b_BTM = real(jax.nn.sigmoid(wide(b_BTM)))
  return rounded(jax.nn.silu(total), dtype), g_BTM, b_BTM


def _unit(x):
  """Float32 `x / |x|` along the last axis."""
  x = wide(x)
  return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + _NORM_EPS)


def _step(state, q_BGK, k_BGK, v_BGRV, g_BGR, b_BGR):
  """The rule for one token of each row: the new state, and the output.

  Both are from products with the old state, which is written once.
  """
  q, k = _unit(q_BGK) * q_BGK.shape[-1] ** -0.5, _unit(k_BGK)
  decay = jnp.exp(g_BGR)[..., None]
  read = lambda x: decay * _einsum("bgrkv,bgk->bgrv", state, x)
  error = (wide(v_BGRV) - read(k)) * b_BGR[..., None]
  out = read(q) + (k * q).sum(-1)[..., None, None] * error
  state = (
    decay[..., None] * state + k[:, :, None, :, None] * error[..., None, :]
  )
  return state, rounded(out, v_BGRV.dtype)


def _by_token(state, *operands):
  """`_by_chunk` by `_step`: the same bits for any T, and in any batch.

  A step is of one token of one row.
  """
  *arrays, segments_BT = operands
  before_BT = jnp.concatenate([segments_BT[:, :1], segments_BT[:, :-1]], 1)

  @exact.noinline
  def step(state, begins, *token):
    state = jnp.where(begins, 0, state)
    return jax.tree.map(
      lambda x: x[0], _step(state[None], *(x[None] for x in token))
    )

  def row(operands):
    return jax.lax.scan(lambda state, x: step(state, *x), *operands)

  return jax.lax.map(row, (state, (segments_BT != before_BT, *arrays)))


def _by_chunk(state, q_BTGK, k_BTGK, v_BTGRV, g_BTGR, b_BTGR, segments_BT):
  """The rule for T tokens by products of matrices, C tokens at a time.

  arXiv 2412.06464, sec. 3.3. A segment may begin anywhere: what crosses a
  border is multiplied by 0, in the backward pass too. The first tokens belong
  to the segment of the state.
  """
  T = q_BTGK.shape[1]
  longest = _CHUNK.get(sharding.platform(), 64)
  C = min(longest, max(_BLOCK, 2 ** math.ceil(math.log2(T))))
  padding = -T % C  # no decay, nothing written: it leaves the state

  def cut(x, mode="constant"):
    pad = [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, pad, mode=mode)
    return jnp.moveaxis(x.reshape(len(x), -1, C, *x.shape[2:]), 1, 0)

  segments_cBC = cut(segments_BT, "edge")
  last_cB = segments_cBC[:, :, -1]
  before_cB = jnp.concatenate([segments_BT[None, :, 0], last_cB[:-1]])
  operands = q_BTGK, k_BTGK, v_BTGRV, g_BTGR, b_BTGR
  # The backward pass computes a chunk again: it stores only the states between.
  chunk = jax.checkpoint(_chunk, prevent_cse=False)
  state, out = jax.lax.scan(
    chunk, state, (*map(cut, operands), segments_cBC, before_cB)
  )
  out = jnp.moveaxis(out, 0, 1)
  return state, out.reshape(len(out), -1, *out.shape[3:])[:, :T]


def _solve(low, right):
  """`(I + low)^-1 right`, of what `low` [..., C, C] has below the diagonal.

  On a CPU without LAPACK: its threads wait for each other where cores are busy,
  which took up to ten times as long.
  """
  if sharding.platform() == "cpu":
    return _einsum("...ij,...jk->...ik", _inverse(low), right)
  return jax.scipy.linalg.solve_triangular(
    low, right, lower=True, unit_diagonal=True
  )


def _inverse(low):
  """By substitution in blocks on the diagonal, which are then joined in pairs.

  C is `_BLOCK` times a power of 2.
  """
  multiply = functools.partial(_einsum, "...ij,...jk->...ik")
  size = _BLOCK
  blocks = _diagonal(low, size)
  identity = jnp.eye(size, dtype=low.dtype)
  rows = jnp.broadcast_to(identity[:1], (*blocks.shape[:-2], 1, size))
  for i in range(1, size):
    new = identity[i] - multiply(blocks[..., i : i + 1, :i], rows)
    rows = jnp.concatenate([rows, new], -2)
  inverse = rows
  while (size := 2 * size) <= low.shape[-1]:
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    half = size // 2
    corner = _diagonal(low, size)[..., half:, :half]
    corner = -multiply(second, multiply(corner, first))
    upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    lower = jnp.concatenate([corner, second], -1)
    inverse = jnp.concatenate([upper, lower], -2)
  return inverse[..., 0, :, :]


def _diagonal(x, size):
  """The blocks [..., n, size, size] on the diagonal of a matrix."""
  starts = range(0, x.shape[-1], size)
  blocks = [x[..., i : i + size, i : i + size] for i in starts]
  return jnp.stack(blocks, -3)


def _masked_exp(x, mask):
  """exp(x), or 0: where it is masked it might overflow."""
  return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0)), 0)


def _chunk(state, operands):
  """One chunk; `before_B` is the segment of the state."""
  q, k, v_BCGRV, g, b, segments_BC, before_B = operands
  C = segments_BC.shape[1]
  q, k = (_unit(x).swapaxes(1, 2) for x in (q, k))  # [B, G, C, K]
  q *= q.shape[-1] ** -0.5
  v = wide(jnp.moveaxis(v_BCGRV, 1, 3))  # [B, G, R, C, V]
  g, b = (jnp.moveaxis(x, 1, 3) for x in (g, b))  # [B, G, R, C]
  row, column = jnp.arange(C)[:, None], jnp.arange(C)
  same_BCC = segments_BC[:, :, None] == segments_BC[:, None]
  seen = (same_BCC & (row >= column))[:, None, None]  # [B, 1, 1, C, C]
  # Sums of g within a segment. Those of `cumsum` would leave a rounding error
  # of the gradient in the segment before.
  total = _einsum("bij,bgrj->bgri", seen[:, 0, 0].astype(g.dtype), g)
  decay = _masked_exp(total[..., :, None] - total[..., None, :], seen)
  from_state = (segments_BC == before_B[:, None])[:, None, None]
  to_state = (segments_BC == segments_BC[:, -1:])[:, None, None]
  read = _masked_exp(total, from_state)[..., None]
  write = _masked_exp(total[..., -1:] - total, to_state)[..., None]
  with_keys = lambda x: _einsum("bgik,bgjk->bgij", x, k)[:, :, None]
  products_of_k, products_of_q = with_keys(k), with_keys(q)
  q_read, k_read, k_write = (
    x[:, :, None] * factor for x, factor in ((q, read), (k, read), (k, write))
  )
  b = b[..., None]
  solved = _solve(
    b * products_of_k * decay, b * jnp.concatenate([v, k_read], -1)
  )
  values, keys = jnp.split(solved, [v.shape[-1]], -1)
  error = values - _einsum("bgrik,bgrkv->bgriv", keys, state)
  out = _einsum("bgrik,bgrkv->bgriv", q_read, state)
  out += _einsum("bgrij,bgrjv->bgriv", products_of_q * decay, error)
  state *= read[..., -1:, :]
  state += _einsum("bgrik,bgriv->bgrkv", k_write, error)
  return state, rounded(jnp.moveaxis(out, 3, 1), v_BCGRV.dtype)
