"""Packing: responses with their prompts share rows of one width.

Padded to one width each, responses of several lengths cost what the longest
costs. Here several share a row, one after the other, and attention stays within
each. The kernels still compute the scores between sequences of a row, and mask
them: a token costs the attention of a whole row. The packing is computed on the
host from the lengths, the same on every host; `train_batch` moves the tokens.
"""

import bisect
import dataclasses
import heapq
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.runtime.key import key


@dataclasses.dataclass(frozen=True)
class PackingConfig:
  """The rows of a packed batch; static under jit.

  Attributes:
    width: W, columns of a row; no sequence is longer.
    minibatches: M, divides B, the number of sequences.
    micro_batch_size: divides B / M.
    shards: devices among which the rows of a micro-batch are split; divides
      `micro_batch_size`.
  """

  width: int = 0
  minibatches: int = key(4, "optimizer steps an iteration (GSPO, sec. 5.1)")
  micro_batch_size: int = key(
    64, "packed rows of a forward and backward pass, over all devices"
  )
  shards: int = 1


class Packing(NamedTuple):
  """Where each of B sequences stands in the rows of M minibatches.

  A minibatch has the rows of A micro-batches, enough for one sequence a row;
  the first `num_micro_batches` of them hold all its sequences.

  Attributes:
    row: [B] int32, counted through all minibatches, 0 to B - 1; B for an empty
      sequence, which has no place.
    offset: [B] int32, the column of its first token.
    num_micro_batches: [M] int32, micro-batches that hold sequences.
  """

  row: np.ndarray
  offset: np.ndarray
  num_micro_batches: np.ndarray


class RowTokens(NamedTuple):
  """Tokens of the micro-batches that passes over a batch run.

  Attributes:
    micro_batches: how many run.
    real: tokens of prompts and responses in their rows.
    computed: columns of all their rows, padding included.
  """

  micro_batches: int
  real: int
  computed: int


def shuffled_groups(key: jax.Array, groups: int, group_size: int) -> np.ndarray:
  """The sequences of whole groups in random order, [groups * group_size].

  Whole groups, so that the advantages of a group cancel inside a minibatch.
  """
  order = np.asarray(jax.random.permutation(key, groups))
  return (order[:, None] * group_size + np.arange(group_size)).reshape(-1)


def pack(lengths: np.ndarray, order: np.ndarray, cfg: PackingConfig) -> Packing:
  """Packs the sequences of each minibatch into as few micro-batches as it can.

  The rows of a minibatch are as evenly filled as the longest-first rule makes
  them, and those of a micro-batch are dealt to the shards by their tokens.

  Args:
    lengths: [B], tokens of each sequence, its prompt included; 0 for an empty
      one.
    order: [B], a permutation: minibatch m has the m-th part of it.
    cfg: the rows.

  Raises:
    ValueError: a sequence is longer than a row.
  """
  lengths, size = np.asarray(lengths), cfg.micro_batch_size
  if lengths.max(initial=0) > cfg.width:
    raise ValueError(f"a sequence of {lengths.max()} tokens, {cfg.width=}")
  B = len(lengths)
  row, offset = np.full(B, B, np.int32), np.zeros(B, np.int32)
  used = np.zeros(cfg.minibatches, np.int32)
  for m, members in enumerate(np.reshape(order, (cfg.minibatches, -1))):
    members = members[lengths[members] > 0]
    longest_first = members[np.argsort(-lengths[members], kind="stable")]
    rows = _rows(lengths[longest_first].tolist(), cfg.width, size)
    used[m] = -(-len(rows) // size)
    for place, (_, items) in zip(
      _places(len(rows), size, cfg.shards),
      sorted(rows, key=lambda row: -row[0]),
      strict=True,
    ):
      sequences = longest_first[items]
      row[sequences] = m * (B // cfg.minibatches) + place
      ends = np.cumsum(lengths[sequences])
      offset[sequences] = ends - lengths[sequences]
  return Packing(row, offset, used)


def one_a_row(order: np.ndarray, cfg: PackingConfig) -> Packing:
  """One sequence a row, as without packing; `order` as in `pack`."""
  B = len(order)
  micro_batches = B // cfg.minibatches // cfg.micro_batch_size
  return Packing(
    row=np.argsort(order).astype(np.int32),
    offset=np.zeros(B, np.int32),
    num_micro_batches=np.full(cfg.minibatches, micro_batches, np.int32),
  )


def row_tokens(
  lengths: np.ndarray,
  packing: Packing,
  cfg: PackingConfig,
  first: np.ndarray | int = 0,
) -> RowTokens:
  """The tokens of a pass over a packed batch.

  Args:
    lengths: [B], those that `pack` was given.
    packing: its result.
    cfg: the rows.
    first: [M] or one for all, the first micro-batch of each minibatch that the
      pass runs; it runs all further ones that hold sequences.
  """
  size, (M,) = cfg.micro_batch_size, packing.num_micro_batches.shape
  placed = packing.row < len(lengths)
  tokens = np.bincount(
    packing.row[placed] // size,
    np.asarray(lengths)[placed],
    len(lengths) // size,
  ).reshape(M, -1)
  first = np.broadcast_to(first, M)
  runs = np.arange(tokens.shape[1]) >= first[:, None]
  count = int(np.maximum(packing.num_micro_batches - first, 0).sum())
  return RowTokens(count, int(tokens[runs].sum()), count * size * cfg.width)


def _rows(lengths, width, multiple) -> list[tuple[int, list[int]]]:
  """Rows, as their tokens and the indices of their sequences.

  Best fit finds how few rows do; then each sequence goes into the emptiest of
  as many rows as their micro-batches have, if all fit so.
  """
  tight = _best_fit(lengths, width)
  most = min(len(lengths), -(-len(tight) // multiple) * multiple)
  return _emptiest_first(lengths, width, most) or tight


def _best_fit(lengths, width):
  """Each sequence goes into the fullest row that it fits; longest first."""
  rows, left = [], []  # left: (free columns, row), ascending
  for item, length in enumerate(lengths):
    at = bisect.bisect_left(left, (length, -1))
    if at == len(left):
      free, row = width, len(rows)
      rows.append((0, []))
    else:
      free, row = left.pop(at)
    rows[row] = rows[row][0] + length, [*rows[row][1], item]
    bisect.insort(left, (free - length, row))
  return rows


def _emptiest_first(lengths, width, most):
  """Each sequence goes into the emptiest of `most` rows; None if one fails."""
  heap = [(0, row, []) for row in range(most)]
  for item, length in enumerate(lengths):
    tokens, row, items = heap[0]
    if tokens + length > width:
      return None
    heapq.heapreplace(heap, (tokens + length, row, [*items, item]))
  return [(tokens, items) for tokens, _, items in heap]


def _places(count, micro_batch_size, shards) -> list[int]:
  """Places for `count` rows, fullest first: micro-batch by micro-batch.

  Within one, the rows are dealt to the shards, there and back, so that each
  shard has about as many tokens.
  """
  per_shard = micro_batch_size // shards
  there = np.arange(micro_batch_size).reshape(shards, per_shard).T
  there[1::2] = there[1::2, ::-1]
  dealt = there.reshape(-1)
  return [
    i // micro_batch_size * micro_batch_size + int(dealt[i % micro_batch_size])
    for i in range(count)
  ]
