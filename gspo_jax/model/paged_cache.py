"""The paged KV cache: a table gives the pages of each row.

Dimension key: B rows, P prompts, C pages a prompt, T tokens, N query heads, K
key-value heads, H head width, n pages, t tokens a page, W maximum pages a row.

Each layer's keys and values are [K, n, t, H], as JAX's TPU kernel takes them.
On a TPU j narrow heads lie side by side: [K / j, n, t, j * H]. On a mesh, the
rows of a device use only pages of this device, numbered from its first page.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.model import paged_attention
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.rounding import stored
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import BATCH_AXES, constrain

_ROWS = PartitionSpec(BATCH_AXES)
_HEADS = PartitionSpec(BATCH_AXES, None, "tensor")  # [B, T, heads, H]
_PAGES = PartitionSpec("tensor", BATCH_AXES)  # [K, n, t, H]
_SINKS = PartitionSpec("tensor")  # [N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """Keys and values of the tokens so far; a row gets one token at a time."""

  k: tuple[jax.Array, ...]  # per layer, [K / j, n, t, j * H]
  v: tuple[jax.Array, ...]  # as k
  # [B, W] int32, the pages of each row, in the order of its tokens; any valid
  # number in unused entries. Rows may share pages that are full.
  table: jax.Array
  lengths: jax.Array  # [B] int32, tokens; an active row has room for one more
  # [B] bool; the other rows write nothing, and their output is meaningless.
  active: jax.Array

  def mark_valid(self, mask_BT: jax.Array) -> "Pages":
    """Sets `active` for the next token; T is 1."""
    return dataclasses.replace(self, active=mask_BT[:, 0].astype(bool))

  def append(self, k, v, mask_BT: jax.Array) -> "Pages":
    lengths = self.lengths + mask_BT[:, 0].astype(jnp.int32)
    return dataclasses.replace(self, k=k, v=v, lengths=lengths)

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
    """Writes each row's new key and value, then attends to the whole row.

    Windows and sinks as in `attention.attend`. Returns the attention output
    [B, T, N, H] and the layer's new (k, v).
    """
    attend = sharding.shard_map(
      functools.partial(_attend, window=window),
      in_specs=((_HEADS,) * 3, (_PAGES,) * 2, (_ROWS,) * 3, _SINKS),
      out_specs=(_HEADS, (_PAGES,) * 2),
    )
    return attend(
      (q_BTNH, k_BTKH, v_BTKH),
      (self.k[layer], self.v[layer]),
      (self.table, self.lengths, self.active),
      sinks_N,
    )


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
  K, H = cfg.num_kv_heads, cfg.head_dim
  j = paged_attention.side_by_side(K, H)
  shape = K // j, num_pages, page_size, j * H
  zeros = lambda: tuple(
    constrain(jnp.zeros(shape, stored(cfg.dtype)), *_PAGES)
    for _ in range(cfg.num_layers)
  )
  table = jnp.zeros((num_slots, pages_per_slot), jnp.int32)
  lengths, active = jnp.zeros(num_slots, jnp.int32), jnp.zeros(num_slots, bool)
  rows = constrain((table, lengths, active), BATCH_AXES)
  return Pages(zeros(), zeros(), *rows)


def shardings(cfg: ModelConfig, mesh: jax.sharding.Mesh) -> Pages:
  pages = (NamedSharding(mesh, _PAGES),) * cfg.num_layers
  rows = NamedSharding(mesh, _ROWS)
  return Pages(pages, pages, rows, rows, rows)


def store(pages: Pages, k, v, numbers: jax.Array) -> Pages:
  """Writes prefilled prompts into pages; in place if `pages` is donated.

  k and v are [P, K, C * t, H] per layer. `numbers` [P, C] int32 are the pages
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

  prompts = PartitionSpec(BATCH_AXES, "tensor")
  write = sharding.shard_map(local, (_PAGES, prompts, _ROWS), _PAGES)
  k, v = write((pages.k, pages.v), (tuple(k), tuple(v)), numbers)
  return dataclasses.replace(pages, k=k, v=v)


def load(pages: Pages, numbers: jax.Array, head_dim: int):
  """The k and v that `store` wrote; undefined where a number is n or more."""

  def local(old, numbers_PC):
    def read(old_KntH):
      K, n, t, width = old_KntH.shape
      (P, C), H = numbers_PC.shape, head_dim
      parts = old_KntH[:, jnp.minimum(numbers_PC, n - 1)]
      parts = parts.reshape(K, P, C, t, width // H, H)
      return parts.transpose(1, 0, 4, 2, 3, 5).reshape(P, -1, C * t, H)

    return jax.tree.map(read, old)

  prompts = PartitionSpec(BATCH_AXES, "tensor")
  read = sharding.shard_map(local, (_PAGES, _ROWS), prompts)
  return read((pages.k, pages.v), numbers)


def copy(pages: Pages, source: jax.Array, target: jax.Array) -> Pages:
  """Copies page `source` to page `target`, both [B] int32; in place if donated.

  No source may be a target. A page whose target is n or more is not copied.
  """

  def local(old, source_B, target_B):
    return jax.tree.map(
      lambda x: x.at[:, target_B].set(x[:, source_B], mode="drop"), old
    )

  write = sharding.shard_map(local, (_PAGES, _ROWS, _ROWS), _PAGES)
  k, v = write((pages.k, pages.v), source, target)
  return dataclasses.replace(pages, k=k, v=v)


def _write(old, index, new):
  return old.at[index].set(new.astype(old.dtype), mode="drop")


def _attend(heads, pages, rows, sinks_N, *, window):
  """`Pages.attend` on one device; the arguments are grouped by sharding."""
  q_BTNH, *new = heads
  table_BW, lengths_B, active_B = rows
  B = len(lengths_B)
  K, n, t, width = pages[0].shape
  page_B = table_BW[jnp.arange(B), lengths_B // t]
  page_B = jnp.where(active_B, page_B, n)
  index = (paged_attention.every_head(K), page_B, lengths_B % t)
  k_KntH, v_KntH = (
    _write(old, index, x.reshape(B, K, width).swapaxes(0, 1))
    for old, x in zip(pages, new, strict=True)
  )
  visible_B = jnp.where(active_B, lengths_B + 1, 0)
  out_BNH = paged_attention.read(
    q_BTNH[:, 0],
    k_KntH,
    v_KntH,
    table_BW,
    visible_B,
    window=window,
    sinks_N=sinks_N,
  )
  return out_BNH[:, None], (k_KntH, v_KntH)
