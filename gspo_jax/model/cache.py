"""The KV cache as explicit state: one prefix per prompt, shared by its group.

Dimension key: B rows, P prompts, G responses a prompt (B = P * G), T new
tokens, S slots, N query heads, K key-value heads, U = N / K, H head width.

Each layer has an array [B, K, S, H]: a TPU decodes in place in it, and would
copy the whole cache if it were [layers, B, S, K, H].
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspo_jax.model import attention
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.rounding import rounded, stored, wide
from gspo_jax.runtime.sharding import BATCH_AXES, constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Keys and values of prompts, shared by the rows of each group."""

  k: tuple[jax.Array, ...]  # per layer, [P, K, S, H]
  v: tuple[jax.Array, ...]  # as k
  valid: jax.Array  # [P, S] bool, false at padding

  def slots(self):
    """[P, S], counted from the responses' first slot: the last token has -1."""
    slot_S = jnp.arange(self.valid.shape[1])
    last_P1 = jnp.where(self.valid, slot_S, 0).max(1, keepdims=True)
    return slot_S - last_P1 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of the tokens so far."""

  k: tuple[jax.Array, ...]  # per layer, [B, K, S, H]
  v: tuple[jax.Array, ...]  # as k
  valid: jax.Array  # [B, S] bool, false at padding and at slots not yet written
  length: jax.Array  # [] int32, slots written
  # The tokens before slot 0, shared by B / P rows; or None.
  prefix: Prefix | None = None

  def mark_valid(self, mask_BT: jax.Array) -> "Cache":
    """Sets `valid` for the T slots that are written next; 0 is padding."""
    valid = jax.lax.dynamic_update_slice(
      self.valid, mask_BT.astype(bool), (0, self.length)
    )
    return dataclasses.replace(self, valid=valid)

  def attend(
    self,
    layer: int,
    q_BTNH,
    k_BTKH,
    v_BTKH,
    *,
    window: int | None = None,
    sinks_N=None,
  ):
    """Writes one layer's keys and values, then attends to all tokens so far.

    Windows and sinks as in `attention.attend`. With a window, padding must not
    separate the tokens of a row; a prompt in the prefix may have it on the left
    or on the right, but not the responses on the left. Returns the attention
    output [B, T, N, H] and the layer's new (k, v).
    """
    start = (0, 0, self.length, 0)
    write = lambda old, new_BTKH: jax.lax.dynamic_update_slice(
      old, new_BTKH.swapaxes(1, 2).astype(old.dtype), start
    )
    k_BKSH, v_BKSH = write(self.k[layer], k_BTKH), write(self.v[layer], v_BTKH)
    B, T, N, H = q_BTNH.shape
    K = k_BKSH.shape[1]
    q_BKUTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    q_BKUTH = q_BKUTH.astype(k_BKSH.dtype)

    slot_S = jnp.arange(k_BKSH.shape[2])
    query_T1 = self.length + jnp.arange(T)[:, None]  # slots
    visible_TS = slot_S <= query_T1
    if window is not None:
      visible_TS &= query_T1 - slot_S < window
    visible_BTS = visible_TS & self.valid[:, None, :]
    parts = [(_scores(q_BKUTH, k_BKSH, visible_BTS), v_BKSH)]
    if self.prefix is not None:
      prefix = self.prefix
      P = prefix.valid.shape[0]
      # The G rows of a prompt become G * T queries of its one copy.
      q_PKUTH = _join_groups(q_BKUTH, P)
      visible_PTS = prefix.valid[:, None, :]
      if window is not None:
        near_PTS = query_T1 - prefix.slots()[:, None] < window
        visible_PTS &= jnp.tile(near_PTS, (1, B // P, 1))
      scores = _scores(q_PKUTH, prefix.k[layer], visible_PTS)
      parts.insert(0, (scores, prefix.v[layer]))
    out_BKUTH = rounded(_combine(parts, B, T, sinks_N), q_BTNH.dtype)
    out_BTNH = out_BKUTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return out_BTNH, (k_BKSH, v_BKSH)

  def append(self, k, v, mask_BT: jax.Array) -> "Cache":
    length = self.length + mask_BT.shape[1]
    return dataclasses.replace(self, k=k, v=v, length=length)


def empty(cfg: ModelConfig, batch: int, slots: int) -> Cache:
  """A cache for values in `cfg.dtype`."""
  shape = (batch, cfg.num_kv_heads, slots, cfg.head_dim)
  zeros = lambda: tuple(
    constrain(jnp.zeros(shape, stored(cfg.dtype)), BATCH_AXES, "tensor")
    for _ in range(cfg.num_layers)
  )
  valid = constrain(jnp.zeros((batch, slots), bool), BATCH_AXES)
  return Cache(zeros(), zeros(), valid, jnp.int32(0))


def from_prefill(k: jax.Array, v: jax.Array, mask_BT: jax.Array) -> Cache:
  """A full cache of keys and values stacked over layers, [L, B, K, T, H]."""
  valid = mask_BT.astype(bool)
  return Cache(tuple(k), tuple(v), valid, jnp.int32(valid.shape[1]))


def share_prefix(
  cache: Cache, cfg: ModelConfig, group_size: int, slots: int
) -> Cache:
  """An empty cache of P * G rows, whose prefix is the cache of P prompts."""
  responses = empty(cfg, cache.valid.shape[0] * group_size, slots)
  prefix = Prefix(cache.k, cache.v, cache.valid)
  return dataclasses.replace(responses, prefix=prefix)


def grow(cache: Cache, slots: int) -> Cache:
  """The same cache, padded to `slots` slots."""
  extra = slots - cache.valid.shape[1]
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))
  return dataclasses.replace(
    cache,
    k=tuple(map(pad, cache.k)),
    v=tuple(map(pad, cache.v)),
    valid=jnp.pad(cache.valid, ((0, 0), (0, extra))),
  )


def _join_groups(x_BKUTH, P):
  B, K, U, T, H = x_BKUTH.shape
  x = x_BKUTH.reshape(P, B // P, K, U, T, H).transpose(0, 2, 3, 1, 4, 5)
  return x.reshape(P, K, U, (B // P) * T, H)


def _split_groups(x_PKUTH, B, T):
  P, K, U, GT, H = x_PKUTH.shape
  x = x_PKUTH.reshape(P, K, U, GT // T, T, H).transpose(0, 3, 1, 2, 4, 5)
  return x.reshape(B, K, U, T, H)


def _scores(q_BKUTH, k_BKSH, visible_BTS):
  scores = jnp.einsum(
    "bkuth,bksh->bkuts", q_BKUTH, k_BKSH, preferred_element_type=jnp.float32
  )
  scores *= q_BKUTH.shape[-1] ** -0.5
  return jnp.where(visible_BTS[:, None, None], scores, attention.MASKED)


def _combine(parts, B, T, sinks_N):
  """One softmax over the keys of all parts: [B, K, U, T, H] float32.

  A part is (scores, values): of the P prefixes, or of the B responses.
  """
  to_rows = lambda x: _split_groups(x, B, T)
  maxima = [to_rows(scores.max(-1, keepdims=True)) for scores, _ in parts]
  maximum = functools.reduce(jnp.maximum, maxima)
  total, out = 0.0, 0.0
  if sinks_N is not None:
    sinks = wide(sinks_N).reshape(*maximum.shape[1:3], 1, 1)
    maximum = jnp.maximum(maximum, sinks)
    total = jnp.exp(sinks - maximum)
  for scores, v_BKSH in parts:
    rows = scores.shape[0]
    shift = maximum if rows == B else _join_groups(maximum, rows)
    weights = jnp.exp(scores - shift)
    total += to_rows(weights.sum(-1, keepdims=True))
    out += to_rows(attention.weigh("bkuts,bksh->bkuth", weights, v_BKSH))
  return out / total
