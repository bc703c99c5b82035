"""The KV cache as explicit state: one prefix per prompt, shared by its group.

Dimension key: B rows, P prompts, G responses a prompt (B = P * G), T new
tokens, S slots, N query heads, K key-value heads, U = N / K, H head width, V
width of a value head.

Each layer has arrays [B, K, S, H]: a TPU decodes in place in them, and would
copy the whole cache if it were [layers, B, S, K, H].
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspo_jax.model import exact, exact_attention
from gspo_jax.model.attention_products import (
  MASKED,
  default_scale,
  products,
  weigh,
)
from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.rounding import rounded, stored, wide
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import BATCH_AXES, constrain

# By layer, its arrays; a layer may have none.
Arrays = tuple[tuple[jax.Array, ...], ...]


def token_shapes(cfg: ModelConfig, layer: Layer) -> tuple[tuple[int, int], ...]:
  """Heads and width of what a layer keeps of each token.

  Keys and values; with MLA one latent, whose first columns are the value too; a
  gated DeltaNet keeps nothing.
  """
  if layer.mixer == "mla":
    return ((1, cfg.kv_lora_rank + cfg.rotary_width),)
  if layer.mixer == "attention":
    return ((cfg.num_kv_heads, cfg.head_dim),) * 2
  return ()


def state_shapes(
  cfg: ModelConfig, layer: Layer
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """What a layer keeps of each sequence, whatever its length.

  Of a gated DeltaNet, for each head, the state and the last inputs of the
  convolution; see delta_net.py.
  """
  if layer.mixer != "delta_net":
    return ()
  key_heads, heads = cfg.linear_num_key_heads, cfg.linear_num_value_heads
  key, value = cfg.linear_key_head_dim, cfg.linear_value_head_dim
  channels = 2 * key + heads // key_heads * value
  tail = key_heads, cfg.linear_conv_kernel_dim - 1, channels
  return (
    jax.ShapeDtypeStruct((heads, key, value), jnp.float32),
    jax.ShapeDtypeStruct(tail, stored(cfg.dtype)),
  )


def has_states(cfg: ModelConfig) -> bool:
  return any(state_shapes(cfg, layer) for layer in cfg.layers)


def empty_states(cfg: ModelConfig, batch: int) -> Arrays:
  """States before the first token, each [B, heads, ...]."""
  zeros = lambda x: constrain(
    jnp.zeros((batch, *x.shape), x.dtype), BATCH_AXES, "tensor"
  )
  return tuple(
    tuple(map(zeros, state_shapes(cfg, layer))) for layer in cfg.layers
  )


def heads_axis(arrays: tuple) -> str | None:
  """The mesh axis of a layer's heads, by its arrays or their shapes.

  None for the latent of MLA, which has no heads: it is alone, keys and values
  are two.
  """
  return "tensor" if len(arrays) == 2 else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Keys and values of prompts, shared by the rows of each group."""

  kv: Arrays  # as of Cache, [P, K, S, H]
  valid: jax.Array  # [P, S] bool, false at padding

  def slots(self):
    """[P, S], counted from the responses' first slot: the last token has -1."""
    slot_S = jnp.arange(self.valid.shape[1])
    last_P1 = jnp.where(self.valid, slot_S, 0).max(1, keepdims=True)
    return slot_S - last_P1 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """What the layers keep of the tokens so far."""

  kv: Arrays  # of each token, [B, K, S, H]; see `token_shapes`
  states: Arrays  # of each row; see `state_shapes`
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
    v_BTKV=None,
    *,
    value_dim: int | None = None,
    window: int | None = None,
    sinks_N=None,
    scale: float | None = None,
  ):
    """Writes one layer's keys and values, then attends to all tokens so far.

    Windows, sinks and scale as in `attention.attend`. Without values, a value
    is the first `value_dim` (V) columns of its key. With a window, padding must
    not separate the tokens of a row; a prompt in the prefix may have it on the
    left or on the right, but not the responses on the left. Returns the
    attention output [B, T, N, V] and the layer's new arrays.
    """
    start = (0, 0, self.length, 0)
    write = lambda old, new_BTKH: jax.lax.dynamic_update_slice(
      old, new_BTKH.swapaxes(1, 2).astype(old.dtype), start
    )
    new = (k_BTKH,) if v_BTKV is None else (k_BTKH, v_BTKV)
    updated = tuple(map(write, self.kv[layer], new))
    if exact.is_on():
      heads = heads_axis(updated)
      attend = sharding.shard_map(
        functools.partial(
          exact_attention.of_cache,
          value_dim=value_dim,
          window=window,
          scale=default_scale(scale, q_BTNH.shape[3]),
        ),
        (
          PartitionSpec(BATCH_AXES, None, "tensor"),
          PartitionSpec(BATCH_AXES),
          PartitionSpec(),
          PartitionSpec(BATCH_AXES, heads),
          PartitionSpec("tensor"),
        ),
        PartitionSpec(BATCH_AXES, None, "tensor"),
      )
      length = self.length + q_BTNH.shape[1]
      return attend(q_BTNH, self.valid, length, updated, sinks_N), updated
    k_BKSH = updated[0]
    # The values of keys, or the values.
    values = lambda arrays: arrays[-1][..., :value_dim]
    B, T, N, H = q_BTNH.shape
    K = k_BKSH.shape[1]
    q_BKUTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    q_BKUTH = q_BKUTH.astype(k_BKSH.dtype)
    scale = default_scale(scale, H)

    slot_S = jnp.arange(k_BKSH.shape[2])
    query_T1 = self.length + jnp.arange(T)[:, None]  # slots
    visible_TS = slot_S <= query_T1
    if window is not None:
      visible_TS &= query_T1 - slot_S < window
    visible_BTS = visible_TS & self.valid[:, None, :]
    scores = _scores(q_BKUTH, k_BKSH, visible_BTS, scale)
    parts = [(scores, values(updated))]
    if self.prefix is not None:
      prefix = self.prefix
      P = prefix.valid.shape[0]
      # The G rows of a prompt become G * T queries of its one copy.
      q_PKUTH = _join_groups(q_BKUTH, P)
      visible_PTS = prefix.valid[:, None, :]
      if window is not None:
        near_PTS = query_T1 - prefix.slots()[:, None] < window
        visible_PTS &= jnp.tile(near_PTS, (1, B // P, 1))
      scores = _scores(q_PKUTH, prefix.kv[layer][0], visible_PTS, scale)
      parts.insert(0, (scores, values(prefix.kv[layer])))
    out_BKUTV = rounded(_combine(parts, B, T, sinks_N), q_BTNH.dtype)
    out_BTNV = out_BKUTV.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)
    return out_BTNV, updated

  def append(self, arrays: Arrays, mask_BT: jax.Array) -> "Cache":
    """With the new arrays of all layers."""
    kv, states = separate(arrays, self.kv)
    length = self.length + mask_BT.shape[1]
    return dataclasses.replace(self, kv=kv, states=states, length=length)


def separate(arrays: Arrays, kv: Sequence[tuple]) -> tuple[Arrays, Arrays]:
  """What layers keep of tokens, if `kv` has something of them; the states."""
  pairs = list(zip(arrays, kv, strict=True))
  of_tokens = tuple(new if old else () for new, old in pairs)
  return of_tokens, tuple(() if old else new for new, old in pairs)


def empty(cfg: ModelConfig, batch: int, slots: int) -> Cache:
  """A cache for values in `cfg.dtype`."""

  def zeros(layer):
    shapes = token_shapes(cfg, layer)
    return tuple(
      constrain(
        jnp.zeros((batch, heads, slots, width), stored(cfg.dtype)),
        BATCH_AXES,
        heads_axis(shapes),
      )
      for heads, width in shapes
    )

  kv = tuple(map(zeros, cfg.layers))
  valid = constrain(jnp.zeros((batch, slots), bool), BATCH_AXES)
  return Cache(kv, empty_states(cfg, batch), valid, jnp.int32(0))


def from_prefill(
  arrays: Sequence[tuple], cfg: ModelConfig, mask_BT: jax.Array
) -> Cache:
  """A full cache of what each layer returns."""
  kv, states = separate(arrays, [token_shapes(cfg, x) for x in cfg.layers])
  valid = mask_BT.astype(bool)
  return Cache(kv, states, valid, jnp.int32(valid.shape[1]))


def share_prefix(
  cache: Cache, cfg: ModelConfig, group_size: int, slots: int
) -> Cache:
  """An empty cache of P * G rows, whose prefix is the cache of P prompts."""
  responses = empty(cfg, cache.valid.shape[0] * group_size, slots)
  repeat = lambda x: constrain(
    jnp.repeat(x, group_size, axis=0), BATCH_AXES, "tensor"
  )
  return dataclasses.replace(
    responses,
    states=jax.tree.map(repeat, cache.states),
    prefix=Prefix(cache.kv, cache.valid),
  )


def grow(cache: Cache, slots: int) -> Cache:
  """The same cache, padded to `slots` slots."""
  extra = slots - cache.valid.shape[1]
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))
  return dataclasses.replace(
    cache,
    kv=jax.tree.map(pad, cache.kv),
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


def _scores(q_BKUTH, k_BKSH, visible_BTS, scale):
  B, K, U, T, H = q_BKUTH.shape
  scores = products(q_BKUTH.reshape(B, K, U * T, H), k_BKSH)
  scores = scores.reshape(B, K, U, T, k_BKSH.shape[2]) * scale
  return jnp.where(visible_BTS[:, None, None], scores, MASKED)


def _combine(parts, B, T, sinks_N):
  """One softmax over the keys of all parts: [B, K, U, T, V] float32.

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
  for scores, v_BKSV in parts:
    rows = scores.shape[0]
    shift = maximum if rows == B else _join_groups(maximum, rows)
    weights = jnp.exp(scores - shift)
    total += to_rows(weights.sum(-1, keepdims=True))
    out += to_rows(weigh("bkuts,bksv->bkutv", weights, v_BKSV))
  return out / total
