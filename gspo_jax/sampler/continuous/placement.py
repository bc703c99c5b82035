"""The row of the samples that each response has, and even loads of shards.

A response starts on the shard of its row. Each decode step waits for the shard
that reads the most cached tokens, and lengths differ, also between groups. So
while no response waits for a slot, running ones move with their pages from the
fullest shards to the emptiest. There a response takes the row of a finished
one, which gets its row in return. At the end of the call `swaps` are undone.

Dimension letters as in `continuous/__init__`; D shards, n moves of a shard.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.runtime.sharding import Moves
from gspo_jax.sampler.continuous.config import ShardSizes
from gspo_jax.sampler.continuous.scheduler import Scheduler

# Responses move when the fullest shard has a quarter more cached tokens than
# the mean, until it has a twentieth more, and then not for some segments.
# Lengths of a lognormal distribution (mean a quarter of 16,384, sigma 1), 512
# groups of 16 on 64 shards: 386 moves, and the tokens of the fullest shards are
# 1.17 times the mean, in place of 1.51. Half these limits: 898 moves, 1.10.
_MOST, _LEAST, _SEGMENTS = 1.25, 1.05, 8


class Migration(NamedTuple):
  """What the devices move; arrays of all shards, one after another."""

  pages: list[Moves]  # one call each
  slots: Moves
  slot_rows: np.ndarray  # [D * n] int32, where a moved slot's tokens go
  rows: Moves


class Placement:
  """Of the responses of one call."""

  def __init__(self, num_tokens: np.ndarray, sizes: ShardSizes, shards: int):
    """`num_tokens` [B] are tokens of each response before the call."""
    self._sizes, self._shards = sizes, shards
    self.response = np.arange(len(num_tokens))  # [B] the response of each row
    self.num_tokens = num_tokens.copy()  # [B] of it, before the call
    self.swaps: list[Moves] = []
    self._segments = 0  # since the last migration

  def should_migrate(self, schedulers: Sequence[Scheduler]) -> bool:
    """Whether responses should move before the next segment; counts it."""
    self._segments += 1
    if self._segments < _SEGMENTS or any(s.num_waiting for s in schedulers):
      return False
    tokens = [s.num_tokens.sum() for s in schedulers]
    return max(tokens) > _MOST * np.mean(tokens)

  def migrate(self, schedulers: Sequence[Scheduler]) -> Migration | None:
    """Moves responses between schedulers that know all results; None: none.

    A shard only gives or only takes.
    """
    self._segments = 0
    sizes, D, per_shard = self._sizes, self._shards, self._rows_per_shard
    n = max(1, sizes.slots // 8)
    slots = _MoveList(D, n, sizes.slots)
    rows = _MoveList(D, n, per_shard)
    slot_rows, pages = np.zeros((D, n), np.int32), []
    loads = np.array([s.num_tokens.sum() for s in schedulers])
    gives, takes = np.zeros((2, D), bool)
    while (choice := self._choose(schedulers, loads, gives, takes)) and (
      slots.has_room(choice[0], choice[2])
    ):
      fullest, slot, emptiest = choice
      moved = int(schedulers[fullest].num_tokens[slot])
      running = schedulers[fullest].remove(slot)
      new_slot, row, new_pages = schedulers[emptiest].insert(running)
      at = slots.add(fullest, slot, emptiest, new_slot)
      slot_rows[emptiest, at] = emptiest * per_shard + row
      rows.add(fullest, running.row, emptiest, row)
      rows.add(emptiest, row, fullest, running.row)
      pages += [
        (fullest, old, emptiest, new)
        for old, new in zip(running.pages, new_pages, strict=True)
      ]
      here, there = fullest * per_shard + running.row, slot_rows[emptiest, at]
      for x in (self.response, self.num_tokens):
        x[[here, there]] = x[[there, here]]
      loads[fullest] -= moved
      loads[emptiest] += moved
      gives[fullest] = takes[emptiest] = True
    if not gives.any():
      return None
    self.swaps.append(rows.moves)
    return Migration(
      self._page_moves(pages), slots.moves, slot_rows.ravel(), rows.moves
    )

  @property
  def _rows_per_shard(self):
    return len(self.response) // self._shards

  def _choose(self, schedulers, loads, gives, takes):
    """The fullest shard, a slot of it, the emptiest shard; None for none."""
    fullest = int(loads.argmax())
    emptiest = int(np.where(gives, np.inf, loads).argmin())
    if loads[fullest] <= _LEAST * loads.mean() or takes[fullest]:
      return None
    # Half of the difference is best; less than all of it is an improvement.
    half = (loads[fullest] - loads[emptiest]) / 2
    tokens_M = schedulers[fullest].num_tokens
    is_smaller_M = (tokens_M > 0) & (tokens_M < 2 * half)
    distance_M = np.where(is_smaller_M, abs(tokens_M - half), np.inf)
    slot = int(distance_M.argmin())
    source, target = schedulers[fullest], schedulers[emptiest]
    if not is_smaller_M[slot] or not target.has_room_for(slot, source):
      return None
    return fullest, slot, emptiest

  def _page_moves(self, pages) -> list[Moves]:
    """Moves of pages (from shard, page, to shard, page), few in each call."""
    calls = []
    while pages:
      call = _MoveList(
        self._shards, self._sizes.pages_per_slot, self._sizes.num_pages
      )
      left = []
      for page in pages:
        if call.has_room(page[0], page[2]):
          call.add(*page)
        else:
          left.append(page)
      calls.append(call.moves)
      pages = left
    return calls


class _MoveList:
  """The `Moves` of all shards, at most n to and from each."""

  def __init__(self, shards: int, n: int, nowhere: int):
    self._sent, self._source = np.zeros((2, shards, n), np.int32)
    self._target = np.full((shards, n), nowhere, np.int32)
    self._num_sent, self._num_stored = np.zeros((2, shards), int)

  def has_room(self, source: int, target: int) -> bool:
    n = self._sent.shape[1]
    return self._num_sent[source] < n and self._num_stored[target] < n

  def add(self, source: int, what: int, target: int, where: int) -> int:
    """Moves a slice; returns its place among those that `target` stores."""
    i, k = self._num_sent[source], self._num_stored[target]
    self._sent[source, i], self._target[target, k] = what, where
    self._source[target, k] = source * self._sent.shape[1] + i
    self._num_sent[source] += 1
    self._num_stored[target] += 1
    return int(k)

  @property
  def moves(self) -> Moves:
    return Moves(*(x.ravel() for x in (self._sent, self._source, self._target)))
