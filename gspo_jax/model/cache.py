"""The KV cache as explicit state: a prompt stored once, answers beside it.

Dimension key: B rows, P prompts, G answers a prompt (B = P * G), T new tokens,
S slots, N query heads, K key-value heads, R = N / K, H head width.

Each layer's keys and values are [B, K, S, H]: with the layers unrolled, this
order decodes in place on a TPU, where [layers, B, S, K, H] copies the cache.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gspo_jax.model import attention
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.rounding import rounded
from gspo_jax.runtime.sharding import BATCH_AXES, constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Prompts whose keys and values are shared by the rows of a group.

  Attributes:
    k: per layer, [P, K, S, H].
    v: per layer, [P, K, S, H].
    valid: [P, S] bool, false at padding.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  valid: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of the tokens seen so far.

  Attributes:
    k: per layer, [B, K, S, H].
    v: per layer, [B, K, S, H].
    valid: [B, S] bool, false at padding and at slots not yet written.
    length: [] int32, slots written.
    prefix: what came before slot 0, shared by B / P rows; or None.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  valid: jax.Array
  length: jax.Array
  prefix: Prefix | None = None

  def mark(self, mask_BT: jax.Array) -> "Cache":
    """Notes which of the T tokens about to be written are real."""
    valid = jax.lax.dynamic_update_slice(
      self.valid, mask_BT.astype(bool), (0, self.length)
    )
    return dataclasses.replace(self, valid=valid)

  def attend(self, layer: int, q_BTNH, k_BTKH, v_BTKH):
    """Appends one layer's keys and values, then attends to all before them.

    Returns:
      The attention output [B, T, N, H], and the layer's new (k, v).
    """
    at = (0, 0, self.length, 0)
    write = lambda old, new_BTKH: jax.lax.dynamic_update_slice(
      old, new_BTKH.swapaxes(1, 2), at
    )
    k_BKSH, v_BKSH = write(self.k[layer], k_BTKH), write(self.v[layer], v_BTKH)
    B, T, N, H = q_BTNH.shape
    K = k_BKSH.shape[1]
    q_BKRTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)

    slot_S = jnp.arange(k_BKSH.shape[2])
    causal_TS = slot_S <= self.length + jnp.arange(T)[:, None]
    seen_BTS = causal_TS & self.valid[:, None, :]
    parts = [(_scores(q_BKRTH, k_BKSH, seen_BTS), v_BKSH)]
    if self.prefix is not None:
      prefix = self.prefix
      P = prefix.valid.shape[0]
      # The G rows of a prompt become G * T queries against its one copy.
      q_PKRTH = _join_groups(q_BKRTH, P)
      seen_PTS = prefix.valid[:, None, :]
      scores = _scores(q_PKRTH, prefix.k[layer], seen_PTS)
      parts.insert(0, (scores, prefix.v[layer]))
    out_BKRTH = _combine(parts, B, T)
    out_BTNH = out_BKRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return out_BTNH, (k_BKSH, v_BKSH)

  def extend(self, k, v, mask_BT: jax.Array) -> "Cache":
    """The cache after a forward pass over T tokens."""
    length = self.length + mask_BT.shape[1]
    return dataclasses.replace(self, k=k, v=v, length=length)


def empty(cfg: ModelConfig, batch: int, slots: int) -> Cache:
  """A cache of `batch` rows with `slots` free slots, in the model's dtype."""
  shape = (batch, cfg.num_kv_heads, slots, cfg.head_dim)
  zeros = lambda: tuple(
    constrain(jnp.zeros(shape, cfg.dtype), BATCH_AXES, "tensor")
    for _ in range(cfg.num_layers)
  )
  valid = constrain(jnp.zeros((batch, slots), bool), BATCH_AXES)
  return Cache(zeros(), zeros(), valid, jnp.int32(0))


def from_prefill(k: jax.Array, v: jax.Array, mask_BT: jax.Array) -> Cache:
  """Of keys and values stacked over layers, [L, B, K, T, H]."""
  valid = mask_BT.astype(bool)
  return Cache(tuple(k), tuple(v), valid, jnp.int32(valid.shape[1]))


def share_prefix(
  cache: Cache, cfg: ModelConfig, group: int, slots: int
) -> Cache:
  """Turns a prefilled cache into the prefix of `group` answers a row."""
  fresh = empty(cfg, cache.valid.shape[0] * group, slots)
  prefix = Prefix(cache.k, cache.v, cache.valid)
  return dataclasses.replace(fresh, prefix=prefix)


def grow(cache: Cache, slots: int) -> Cache:
  """The same cache with room for `slots` tokens."""
  extra = slots - cache.valid.shape[1]
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))
  return dataclasses.replace(
    cache,
    k=tuple(map(pad, cache.k)),
    v=tuple(map(pad, cache.v)),
    valid=jnp.pad(cache.valid, ((0, 0), (0, extra))),
  )


def _join_groups(x_BKRTH, P):
  B, K, R, T, H = x_BKRTH.shape
  x = x_BKRTH.reshape(P, B // P, K, R, T, H).transpose(0, 2, 3, 1, 4, 5)
  return x.reshape(P, K, R, (B // P) * T, H)


def _split_groups(x_PKRTH, B, T):
  P, K, R, GT, H = x_PKRTH.shape
  x = x_PKRTH.reshape(P, K, R, GT // T, T, H).transpose(0, 3, 1, 2, 4, 5)
  return x.reshape(B, K, R, T, H)


def _scores(q_BKRTH, k_BKSH, seen_BTS):
  scores = jnp.einsum(
    "bkrth,bksh->bkrts",
    q_BKRTH,
    k_BKSH,
    preferred_element_type=jnp.float32,
  )
  scores *= q_BKRTH.shape[-1] ** -0.5
  return jnp.where(seen_BTS[:, None, None], scores, attention.MASKED)


def _combine(parts, B, T):
  """One softmax over several stretches of keys, without joining them."""
  stretch = lambda x: _split_groups(x, B, T)
  top = [stretch(s.max(-1, keepdims=True)) for s, _ in parts]
  top = jnp.maximum(*top) if len(top) == 2 else top[0]
  total, out = 0.0, 0.0
  for scores, v_BKSH in parts:
    rows = scores.shape[0]
    base = top if rows == B else _join_groups(top, rows)
    weights = jnp.exp(scores - base)
    total += stretch(weights.sum(-1, keepdims=True))
    out += stretch(attention.weigh("bkrts,bksh->bkrth", weights, v_BKSH))
  return rounded(out / total, parts[0][1].dtype)
