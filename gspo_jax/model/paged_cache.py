"""The KV cache in pages: a row's tokens lie wherever there was a free page.

Dimension key: B rows, P prompts, C pages a prompt, T tokens, N query heads, K
key-value heads, H head width, n pages, S tokens a page, W most pages a row.

Each layer's keys and values are [K, n, S, H], as jax's TPU kernel takes them;
there, j narrow heads lie side by side, [K / j, n, S, j * H]. On a mesh, rows
and pages are split alike: a device's rows read and write only its own pages,
and numbers of pages count from its first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspo_jax.model import paged_attention
from gspo_jax.model.config import ModelConfig
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import BATCH_AXES, constrain

_ROWS = PartitionSpec(BATCH_AXES)
_HEADS = PartitionSpec(BATCH_AXES, None, "tensor")  # [B, T, heads, H]
_KEPT = PartitionSpec("tensor", BATCH_AXES)  # [K, n, S, H]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """Keys and values of the tokens seen so far; fed one token a row at a time.

  Attributes:
    k: per layer, [K / j, n, S, j * H]; j is 1 but on a TPU.
    v: likewise.
    table: [B, W] int32, the pages of each row, in the order of its tokens; any
      valid number where it has none. Rows may share pages that are full.
    lengths: [B] int32, tokens there. An active row has a page for one more.
    active: [B] bool; the other rows write nothing, and what they read is
      finite garbage.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  table: jax.Array
  lengths: jax.Array
  active: jax.Array

  def mark(self, mask_BT: jax.Array) -> "Pages":
    """Notes which rows are fed a real token; T is 1."""
    return dataclasses.replace(self, active=mask_BT[:, 0].astype(bool))

  def extend(self, k, v, mask_BT: jax.Array) -> "Pages":
    """The state after a forward pass that gave each layer's `k` and `v`."""
    lengths = self.lengths + mask_BT[:, 0].astype(jnp.int32)
    return dataclasses.replace(self, k=k, v=v, lengths=lengths)

  def attend(self, layer: int, q_BTNH, k_BTKH, v_BTKH):
    """Writes one token's key and value a row, then attends to all of the row.

    Returns:
      The attention output [B, T, N, H], and the layer's new (k, v).
    """
    kept = self.k[layer], self.v[layer]
    attend = sharding.shard_map(
      _attend,
      in_specs=((_HEADS,) * 3, (_KEPT,) * 2, (_ROWS,) * 3),
      out_specs=(_HEADS, (_KEPT,) * 2),
    )
    rows = self.table, self.lengths, self.active
    return attend((q_BTNH, k_BTKH, v_BTKH), kept, rows)


def empty(
  cfg: ModelConfig, *, rows: int, pages: int, page: int, most: int
) -> Pages:
  """Nothing written, nobody active.

  Args:
    cfg: the model; zeros are in its dtype.
    rows: B, of all devices together.
    pages: n, of all devices together.
    page: S, tokens of a page.
    most: W, pages of the longest row.
  """
  K, H = cfg.num_kv_heads, cfg.head_dim
  j = paged_attention.side_by_side(K, H)
  shape = K // j, pages, page, j * H
  zeros = lambda: tuple(
    constrain(jnp.zeros(shape, cfg.dtype), "tensor", BATCH_AXES)
    for _ in range(cfg.num_layers)
  )
  of_rows = lambda *shape: constrain(
    jnp.zeros((rows, *shape), jnp.int32), BATCH_AXES
  )
  table, lengths = of_rows(most), of_rows()
  active = constrain(jnp.zeros(rows, bool), BATCH_AXES)
  return Pages(zeros(), zeros(), table, lengths, active)


def store(pages: Pages, k, v, numbers: jax.Array) -> Pages:
  """Writes prefilled prompts into pages; in place where `pages` is donated.

  Args:
    pages: the state.
    k: per layer, [P, K, T, H], T = C * S.
    v: per layer, [P, K, T, H].
    numbers: [P, C] int32, where each S tokens go; n or more: nowhere.
  """

  def local(kept, new, numbers_PC):
    def write(old_KnSH, new_PKTH):
      K, _, S, width = old_KnSH.shape
      (P, C), H = numbers_PC.shape, new_PKTH.shape[-1]
      parts = new_PKTH.reshape(P, K, -1, C, S, H).transpose(1, 0, 3, 4, 2, 5)
      parts = parts.reshape(K, P, C, S, width)
      return old_KnSH.at[:, numbers_PC].set(parts, mode="drop")

    return jax.tree.map(write, kept, new)

  prompts = PartitionSpec(BATCH_AXES, "tensor")
  write = sharding.shard_map(local, (_KEPT, prompts, _ROWS), _KEPT)
  kept = write((pages.k, pages.v), (tuple(k), tuple(v)), numbers)
  return dataclasses.replace(pages, k=kept[0], v=kept[1])


def copy(pages: Pages, source: jax.Array, target: jax.Array) -> Pages:
  """Page `target` := page `source`; in place where `pages` is donated.

  Args:
    pages: the state.
    source: [B] int32; none is a target, too.
    target: [B] int32; n or more: nothing is copied.
  """

  def local(kept, source_B, target_B):
    return jax.tree.map(
      lambda x: x.at[:, target_B].set(x[:, source_B], mode="drop"), kept
    )

  write = sharding.shard_map(local, (_KEPT, _ROWS, _ROWS), _KEPT)
  k, v = write((pages.k, pages.v), source, target)
  return dataclasses.replace(pages, k=k, v=v)


def _attend(new, kept, rows):
  q_BTNH, *new = new
  table_BW, lengths_B, active_B = rows
  B = len(lengths_B)
  K, n, S, width = kept[0].shape
  page_B = table_BW[jnp.arange(B), lengths_B // S]
  page_B = jnp.where(active_B, page_B, n)
  at = (paged_attention.every_head(K), page_B, lengths_B % S)
  k_KnSH, v_KnSH = (
    old.at[at].set(x.reshape(B, K, width).swapaxes(0, 1), mode="drop")
    for old, x in zip(kept, new, strict=True)
  )
  seen_B = jnp.where(active_B, lengths_B + 1, 0)
  out_BNH = paged_attention.read(q_BTNH[:, 0], k_KnSH, v_KnSH, table_BW, seen_B)
  return out_BNH[:, None], (k_KnSH, v_KnSH)
