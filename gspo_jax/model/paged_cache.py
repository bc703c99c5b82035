"""The paged KV cache: a table gives the pages of each row.

Dimension key: B rows, P prompts, C pages a prompt, T tokens, N query heads, K
key-value heads, H head width, V width of a value head, n pages, t tokens a
page, W maximum pages a row.

Each layer's keys and values are [K, n, t, H], as kernels take them. On a TPU j
narrow heads lie side by side: [K / j, n, t, j * H]. On a mesh, the rows of a
device use only pages of this device, numbered from its first page.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.model import cache as kv_cache
from gspo_jax.model import paged_attention
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.rounding import stored
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import BATCH_AXES, constrain

_ROWS = PartitionSpec(BATCH_AXES)
_HEADS = PartitionSpec(BATCH_AXES, None, "tensor")  # [B, T, heads, H]
_STATES = PartitionSpec(BATCH_AXES, "tensor")  # [B, heads, ...]
_SINKS = PartitionSpec("tensor")  # [N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """What the layers keep; each row gets T tokens at a time, or none."""

  kv: kv_cache.Arrays  # of tokens, [K / j, n, t, j * H]; see `token_shapes`
  states: kv_cache.Arrays  # of rows; see `state_shapes`
  # [B, W] int32, the pages of each row, in the order of its tokens; any valid
  # number in unused entries. Rows may share pages that are full.
  table: jax.Array
  lengths: jax.Array  # [B] int32, tokens; what is behind them is overwritten
  # [B] bool, rows that get tokens; [B, T] in `attend`: the first tokens of such
  # a row, for which its pages have room. The others are not written, and their
  # output is meaningless.
  active: jax.Array

  def mark_valid(self, mask_BT: jax.Array) -> "Pages":
    """Sets `active` for the next T tokens."""
    return dataclasses.replace(self, active=mask_BT.astype(bool))

  def append(self, arrays: kv_cache.Arrays, mask_BT: jax.Array) -> "Pages":
    """With the new arrays of all layers, after `mark_valid`."""
    kv, states = kv_cache.separate(arrays, self.kv)
    lengths = self.lengths + mask_BT.sum(1, dtype=jnp.int32)
    return Pages(kv, states, self.table, lengths, self.active[:, 0])

  def attend(
    self, layer: int, q_BTNH, k_BTKH, v_BTKV=None, *, sinks_N=None, **options
  ):
    """Writes the new keys and values; each token attends up to itself.

    Arguments and results are those of `cache.Cache.attend`.
    """
    pages = self.kv[layer]
    new = (k_BTKH,) if v_BTKV is None else (k_BTKH, v_BTKV)
    heads = PartitionSpec(BATCH_AXES, None, kv_cache.heads_axis(pages))
    attend = sharding.shard_map(
      functools.partial(_attend, **options),
      in_specs=(_HEADS, heads, _pages_spec(pages), _ROWS, _SINKS),
      out_specs=(_HEADS, _pages_spec(pages)),
    )
    rows = self.table, self.lengths, self.active
    return attend(q_BTNH, new, pages, rows, sinks_N)


def _pages_spec(pages: tuple) -> PartitionSpec:
  """Of a layer's pages [K, n, t, H]."""
  return PartitionSpec(kv_cache.heads_axis(pages), BATCH_AXES)


def _specs(kv: kv_cache.Arrays) -> tuple:
  return tuple(map(_pages_spec, kv))


def empty(
  cfg: ModelConfig,
  *,
  num_slots: int,
  num_pages: int,
  page_size: int,
  pages_per_slot: int,
) -> Pages:
  """An empty cache for values in `cfg.dtype`; no row is active.

  `num_slots` (B) and `num_pages` (n) are totals over all devices.
  """

  def zeros(layer):
    shapes = kv_cache.token_shapes(cfg, layer)
    return tuple(
      constrain(zeros_of(heads, width), *_pages_spec(shapes))
      for heads, width in shapes
    )

  def zeros_of(heads, width):
    j = paged_attention.side_by_side(heads, width)
    shape = heads // j, num_pages, page_size, j * width
    return jnp.zeros(shape, stored(cfg.dtype))

  table = jnp.zeros((num_slots, pages_per_slot), jnp.int32)
  lengths, active = jnp.zeros(num_slots, jnp.int32), jnp.zeros(num_slots, bool)
  rows = constrain((table, lengths, active), BATCH_AXES)
  kv = tuple(map(zeros, cfg.layers))
  return Pages(kv, kv_cache.empty_states(cfg, num_slots), *rows)


def shardings(cfg: ModelConfig, mesh: jax.sharding.Mesh) -> Pages:
  place = functools.partial(NamedSharding, mesh)
  by_layer = lambda shapes, spec: tuple(
    (place(spec(x)),) * len(x)
    for x in (shapes(cfg, layer) for layer in cfg.layers)
  )
  return Pages(
    by_layer(kv_cache.token_shapes, _pages_spec),
    by_layer(kv_cache.state_shapes, lambda _: _STATES),
    *(place(_ROWS),) * 3,
  )


def store(pages: Pages, kv: kv_cache.Arrays, numbers: jax.Array) -> Pages:
  """Writes prefilled prompts into pages; in place if `pages` is donated.

  `kv` are [P, K, C * t, H] by layer. `numbers` [P, C] int32 are the pages
  of each t tokens; n or more: not written.
  """

  def local(old, new, numbers_PC):
    def write(old_KntH, new_PKTH):
      K, _, t, width = old_KntH.shape
      (P, C), H = numbers_PC.shape, new_PKTH.shape[-1]
      parts = new_PKTH.reshape(P, K, -1, C, t, H).transpose(1, 0, 3, 4, 2, 5)
      parts = parts.reshape(K, P, C, t, width)
      return _write(old_KntH, (slice(None), numbers_PC), parts)

    return jax.tree.map(write, old, new)

  specs = _specs(pages.kv), _prompt_specs(pages.kv), _ROWS
  write = sharding.shard_map(local, specs, specs[0])
  return dataclasses.replace(pages, kv=write(pages.kv, kv, numbers))


def _prompt_specs(kv: kv_cache.Arrays) -> tuple:
  """Of the arrays [P, K, C * t, H] of prompts."""
  return tuple(
    PartitionSpec(BATCH_AXES, kv_cache.heads_axis(pages)) for pages in kv
  )


def load(pages: Pages, cfg: ModelConfig, numbers: jax.Array) -> kv_cache.Arrays:
  """What `store` wrote; undefined where a number is n or more."""
  widths = tuple(
    tuple(width for _, width in kv_cache.token_shapes(cfg, layer))
    for layer in cfg.layers
  )

  def local(old, numbers_PC):
    def read(old_KntH, H):
      K, n, t, width = old_KntH.shape
      P, C = numbers_PC.shape
      parts = old_KntH[:, jnp.minimum(numbers_PC, n - 1)]
      parts = parts.reshape(K, P, C, t, width // H, H)
      return parts.transpose(1, 0, 4, 2, 3, 5).reshape(P, -1, C * t, H)

    return jax.tree.map(read, old, widths)

  specs = _specs(pages.kv), _ROWS
  read = sharding.shard_map(local, specs, _prompt_specs(pages.kv))
  return read(pages.kv, numbers)


def copy(pages: Pages, source: jax.Array, target: jax.Array) -> Pages:
  """Copies page `source` to page `target`, both [B] int32; in place if donated.

  No source may be a target. A page whose target is n or more is not copied.
  """

  def local(old, source_B, target_B):
    return jax.tree.map(
      lambda x: x.at[:, target_B].set(x[:, source_B], mode="drop"), old
    )

  specs = _specs(pages.kv), _ROWS, _ROWS
  write = sharding.shard_map(local, specs, specs[0])
  return dataclasses.replace(pages, kv=write(pages.kv, source, target))


def exchange(kv: kv_cache.Arrays, moves: sharding.Moves) -> kv_cache.Arrays:
  """Copies pages between devices; in place if `kv` is donated."""
  local = lambda kv, moves: sharding.exchange(kv, moves, *BATCH_AXES, dim=1)
  specs = _specs(kv)
  return sharding.shard_map(local, (specs, _ROWS), specs)(kv, moves)


def copy_states(
  states: kv_cache.Arrays, source: kv_cache.Arrays, rows: jax.Array
) -> kv_cache.Arrays:
  """`states` [B, ...] with the rows `rows` [B] int32 of `source`.

  A device counts its rows of `source` from 0. Where it has no such row, the
  state stays as it is.
  """

  def local(states, source, rows_B):
    found_B = rows_B < len(jax.tree.leaves(source)[0])
    found_first_B = jnp.argsort(~found_B)

    # One by one and in place: a gather would take as much memory as all states.
    def copy(i, states):
      to = found_first_B[i]
      write = lambda old, new: old.at[to].set(new[rows_B[to]])
      return jax.tree.map(write, states, source)

    return jax.lax.fori_loop(0, found_B.sum(), copy, states)

  write = sharding.shard_map(local, (_STATES, _STATES, _ROWS), _STATES)
  return write(states, source, rows)


def _write(old, index, new):
  return old.at[index].set(new.astype(old.dtype), mode="drop")


def _attend(q_BTNH, new, pages, rows, sinks_N, **options):
  """`Pages.attend` on one device."""
  table_BW, lengths_B, active_BT = rows
  (B, T), (K, n, t, width) = active_BT.shape, pages[0].shape
  place_BT = lengths_B[:, None] + jnp.arange(T)
  page_BT = table_BW[jnp.arange(B)[:, None], place_BT // t]
  page_BT = jnp.where(active_BT, page_BT, n)
  index = page_BT.reshape(-1), (place_BT % t).reshape(-1)
  index = (paged_attention.every_head(K), *index)
  updated = tuple(
    _write(old, index, x.reshape(B * T, K, width).swapaxes(0, 1))
    for old, x in zip(pages, new, strict=True)
  )
  keys, values = (*updated, None)[:2]
  out_BTNV = paged_attention.read(
    q_BTNH,
    keys,
    values,
    table_BW,
    jnp.where(active_BT[:, 0], lengths_B + 1, 0),
    sinks_N=sinks_N,
    **options,
  )
  return out_BTNV, updated
