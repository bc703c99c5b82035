"""The KV cache in pages: a row's tokens lie wherever there was a free page.

Dimension key: B rows, P prompts, C pages a prompt, T tokens, N query heads, K
key-value heads, R = N / K, H head width, n pages, S tokens a page, W most
pages a row, M (row, page) pairs of a block.

Each layer's keys and values are [K, n, S, H], as jax's TPU kernel takes them.
On a mesh, rows and pages are split alike: a device's rows read and write only
its own pages, and numbers of pages count from its first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspo_jax import sharding
from gspo_jax.model.config import ModelConfig
from gspo_jax.sharding import ROWS, constrain

_MASKED = -1e30  # finite: a row with no key to see stays finite
_LANES = 128
_TOKENS = 512  # of keys in VMEM at one time

_ROWS = PartitionSpec(ROWS)
_HEADS = PartitionSpec(ROWS, None, "tensor")  # [B, T, heads, H]
_KEPT = PartitionSpec("tensor", ROWS)  # [K, n, S, H]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """Keys and values of the tokens seen so far; fed one token a row at a time.

  Attributes:
    k: per layer, [K, n, S, H].
    v: per layer, [K, n, S, H].
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
    attend = sharding.island(
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
  shape = (cfg.num_kv_heads, pages, page, cfg.head_dim)
  zeros = lambda: tuple(
    constrain(jnp.zeros(shape, cfg.dtype), "tensor", ROWS)
    for _ in range(cfg.num_layers)
  )
  of_rows = lambda *shape: constrain(jnp.zeros((rows, *shape), jnp.int32), ROWS)
  table, lengths = of_rows(most), of_rows()
  active = constrain(jnp.zeros(rows, bool), ROWS)
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
      K, _, S, H = old_KnSH.shape
      parts = new_PKTH.reshape(-1, K, numbers_PC.shape[1], S, H)
      return old_KnSH.at[:, numbers_PC].set(parts.swapaxes(0, 1), mode="drop")

    return jax.tree.map(write, kept, new)

  prompts = PartitionSpec(ROWS, "tensor")
  write = sharding.island(local, (_KEPT, prompts, _ROWS), _KEPT)
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

  write = sharding.island(local, (_KEPT, _ROWS, _ROWS), _KEPT)
  k, v = write((pages.k, pages.v), source, target)
  return dataclasses.replace(pages, k=k, v=v)


def _attend(new, kept, rows):
  q_BTNH, *new = new
  table_BW, lengths_B, active_B = rows
  B, T, N, H = q_BTNH.shape
  K, n, S, _ = kept[0].shape
  page_B = table_BW[jnp.arange(B), lengths_B // S]
  page_B = jnp.where(active_B, page_B, n)
  at = (_each(K), page_B, lengths_B % S)
  k_KnSH, v_KnSH = (
    old.at[at].set(x_B1KH[:, 0].swapaxes(0, 1), mode="drop")
    for old, x_B1KH in zip(kept, new, strict=True)
  )
  q_BKRH = q_BTNH.reshape(B, K, N // K, H)
  seen_B = jnp.where(active_B, lengths_B + 1, 0)
  out_BKRH = read(q_BKRH, k_KnSH, v_KnSH, table_BW, seen_B)
  return out_BKRH.reshape(B, T, N, H), (k_KnSH, v_KnSH)


def _each(K):
  """Names the heads that `:` would: with that, a TPU turns the whole cache.

  For a slice of heads, XLA wants them beside H, but the kernel does not: two
  copies of all pages in every layer of every step.
  """
  return jnp.arange(K)[:, None]


def read(q_BKRH, k_KnSH, v_KnSH, table_BW, lengths_B):
  """Attention of one query a row and head to the first tokens of its pages.

  On a TPU by jax's kernel, which wants H in multiples of 128 and rounds keys
  and values to bfloat16; what it cannot take, and other platforms, by blocks.

  Args:
    q_BKRH: queries; R of them read the same key-value head.
    k_KnSH: keys.
    v_KnSH: values.
    table_BW: int32, the pages of each row.
    lengths_B: int32, tokens to see; 0 gives finite garbage.
  """
  fits = q_BKRH.shape[-1] % _LANES == 0 and q_BKRH.dtype == jnp.bfloat16
  kernel = sharding.platform() == "tpu" and fits
  attend = by_kernel if kernel else by_blocks
  return attend(q_BKRH, k_KnSH, v_KnSH, table_BW, lengths_B)


def by_kernel(q_BKRH, k_KnSH, v_KnSH, table_BW, lengths_B):
  """The TPU kernel of jax; a row of no tokens sees one."""
  from jax.experimental.pallas.ops.tpu import paged_attention as pa

  B, K, R, H = q_BKRH.shape
  S, W = k_KnSH.shape[2], table_BW.shape[1]
  most = max(1, _TOKENS // S)
  q_BNH = q_BKRH.reshape(B, K * R, H).astype(jnp.float32) * H**-0.5
  out_BNH = pa.paged_attention(
    q_BNH,
    k_KnSH,
    v_KnSH,
    jnp.maximum(lengths_B, 1),
    table_BW,
    pages_per_compute_block=max(d for d in range(1, most + 1) if W % d == 0),
  )
  return out_BNH.reshape(q_BKRH.shape).astype(q_BKRH.dtype)


def by_blocks(q_BKRH, k_KnSH, v_KnSH, table_BW, lengths_B):
  """Plain operations, whose cost follows the tokens that are there.

  The pages of all rows, one row after the other, make one list of (row, page)
  pairs. A loop of as many trips as the list needs takes M pairs at a time into
  a softmax that is rescaled whenever a row's maximum grows.
  """
  B, K = q_BKRH.shape[:2]
  S, M = k_KnSH.shape[2], max(1, B // 2)
  ends_B = jnp.cumsum(-(-lengths_B // S))

  def body(i, state):
    pair_M = i * M + jnp.arange(M)
    row_M, page_M, left_M = _look_up(pair_M, ends_B, table_BW, lengths_B, S)
    k_KMSH, v_KMSH = k_KnSH[_each(K), page_M], v_KnSH[_each(K), page_M]
    scores_MKRS = _scores(q_BKRH[row_M], k_KMSH, left_M)
    return _fold(state, row_M, scores_MKRS, v_KMSH)

  nothing_BKR = jnp.zeros(q_BKRH.shape[:-1])
  state = nothing_BKR + _MASKED, nothing_BKR, jnp.zeros(q_BKRH.shape)
  trips = -(-ends_B[-1] // M)
  _, total_BKR, out_BKRH = jax.lax.fori_loop(0, trips, body, state)
  # The largest score alone adds 1 to a total: only of no tokens is it less.
  out_BKRH /= jnp.maximum(total_BKR, 1)[..., None]
  return out_BKRH.astype(q_BKRH.dtype)


def _look_up(pair_M, ends_B, table_BW, lengths_B, S):
  """Row, page, and tokens from the start of the page to the end of the row.

  Pairs after the last are pages of the last row, with no token left in them.
  """
  B, W = table_BW.shape
  row_M = jnp.searchsorted(ends_B, pair_M, "right", method="compare_all")
  row_M = jnp.minimum(row_M, B - 1)
  start_M = jnp.where(row_M > 0, ends_B[row_M - 1], 0)
  nth_M = pair_M - start_M
  page_M = table_BW[row_M, jnp.minimum(nth_M, W - 1)]
  return row_M, page_M, lengths_B[row_M] - nth_M * S


def _scores(q_MKRH, k_KMSH, left_M):
  scores_MKRS = jnp.einsum(
    "mkrh,kmsh->mkrs", q_MKRH, k_KMSH, preferred_element_type=jnp.float32
  )
  seen_MS = jnp.arange(k_KMSH.shape[2]) < left_M[:, None]
  scores_MKRS *= q_MKRH.shape[-1] ** -0.5
  return jnp.where(seen_MS[:, None, None], scores_MKRS, _MASKED)


def _fold(state, row_M, scores_MKRS, v_KMSH):
  """Adds pairs to their rows' largest score, sum of weights and output."""
  old_BKR, total_BKR, out_BKRH = state
  top_BKR = old_BKR.at[row_M].max(scores_MKRS.max(-1))
  weights_MKRS = jnp.exp(scores_MKRS - top_BKR[row_M][..., None])
  part_MKRH = jnp.einsum(
    "mkrs,kmsh->mkrh",
    weights_MKRS.astype(v_KMSH.dtype),
    v_KMSH,
    preferred_element_type=jnp.float32,
  )
  shrink_BKR = jnp.exp(old_BKR - top_BKR)
  total_BKR = (total_BKR * shrink_BKR).at[row_M].add(weights_MKRS.sum(-1))
  out_BKRH = (out_BKRH * shrink_BKR[..., None]).at[row_M].add(part_MKRH)
  return top_BKR, total_BKR, out_BKRH
