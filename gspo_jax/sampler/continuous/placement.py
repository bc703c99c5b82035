"""Even loads: responses move from full shards to empty ones.

A response waits on the shard of its row of the samples. Lengths differ, also
between groups: one shard's responses end while others still wait on another.
So responses that have not begun start on a shard where none waits. And each
decode step waits for the shard that reads the most cached tokens, so running
responses move with their pages. On the other shard a response gets the row of a
finished one, which gets its row in return. At the end of the call the swaps of
rows are undone.

All hosts choose the same moves, from the same results. A host knows the slots,
rows and pages of its own shards alone, and fills in these.

Dimension letters as in `continuous/__init__`; D shards, n moves of a shard.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from gspo_jax.runtime.sharding import Moves
from gspo_jax.sampler.continuous.config import ShardSizes
from gspo_jax.sampler.continuous.paged_decode import SegmentResults
from gspo_jax.sampler.continuous.scheduler import Request, Scheduler

# Responses move when the fullest shard has a quarter more cached tokens than
# the mean, until it has a twentieth more, and then not for some segments.
# docs/rollouts.md has what this gives and costs on a pod.
_MOST, _LEAST, _SEGMENTS = 1.25, 1.05, 8


class Migration(NamedTuple):
  """What the devices move; arrays of this host's shards, one after another."""

  pages: list[Moves]  # one call each
  slots: Moves
  slot_rows: np.ndarray  # [n] int32 a shard, where a moved slot's tokens go
  rows: Moves


class Placement:
  """Moves the responses of one call between its shards.

  `own` are this host's shards; each shard has `rows` of the samples.
  """

  def __init__(
    self, sizes: ShardSizes, shards: int, own: Sequence[int], rows: int
  ):
    self._sizes, self._shards, self._own = sizes, shards, list(own)
    self._rows = rows
    self.swaps: list[Moves] = []
    # Responses that wait on each shard, on all hosts.
    self._queues: list[deque[int]] = [deque() for _ in range(shards)]
    self._request_of: Callable[[int], Request] | None = None
    self._segments = 0  # since the last migration
    self._stuck_at = 0  # running responses when no move was of use
    self._cached_DM = np.zeros((shards, 0), int)  # tokens of running responses
    # Cached tokens, summed over segments: of the fullest shard, and the mean.
    self._most = self._mean = 0.0
    self._above_D = np.zeros(shards)  # what each was above the mean as fullest
    self._start, self._all_segments = time.monotonic(), 0

  @property
  def _few(self) -> int:
    """Moves of a shard in a call."""
    return max(1, self._sizes.slots // 8)

  def update(self, results: SegmentResults) -> None:
    self._segments += 1
    self._results = results
    cached_M = np.where(results.active, results.num_cached, 0)
    self._cached_DM = cached_M.reshape(self._shards, -1)
    cached_D = self._cached_DM.sum(1)
    most, mean = cached_D.max(), cached_D.mean()
    self._most, self._mean = self._most + most, self._mean + mean
    self._above_D[cached_D.argmax()] += most - mean
    self._all_segments += 1

  def slowest(self) -> tuple[int, str]:
    """The shard that the others wait for, and by how much, in words."""
    ratio = self._most / max(self._mean, 1)
    seconds = (time.monotonic() - self._start) / max(self._all_segments, 1)
    words = f"{ratio:.2f} x the mean cached tokens, {seconds:.2g} s a segment"
    return int(self._above_D.argmax()), words

  def is_uneven(self) -> bool:
    """Whether responses should move before the next segment."""
    running = np.count_nonzero(self._cached_DM)
    if self._segments < _SEGMENTS or running == self._stuck_at:
      return False
    cached_D = self._cached_DM.sum(1)
    return bool(cached_D.max() > _MOST * cached_D.mean())

  def queue(
    self,
    queues: Sequence[Sequence[int]],
    request_of: Callable[[int], Request],
  ) -> None:
    """Lets responses that wait start on another shard; see `Engine.queue`."""
    self._queues, self._request_of = list(map(deque, queues)), request_of

  def can_lend(self, facts: SimpleNamespace) -> bool:
    """Whether responses wait on one shard, and on another none."""
    waiting_D = facts.num_waiting
    return bool(self._request_of and waiting_D.any() and not waiting_D.all())

  def lend(
    self, schedulers: Mapping[int, Scheduler], facts: SimpleNamespace
  ) -> list[Moves]:
    """Lets the last responses in full queues start on shards without a queue.

    After all results were applied. `schedulers` are of own shards, by number;
    `facts` has attributes of the schedulers of all shards. Returns the
    exchanges of rows, in order.
    """
    assert self._request_of
    # The first ones of a queue have begun, on their shard.
    for queue, count in zip(self._queues, facts.num_queued, strict=True):
      while len(queue) > count:
        queue.popleft()
    swaps = []
    for giver, taker in self._loans(facts):
      response = self._queues[giver].pop()
      self._queues[taker].append(response)
      row = new_row = 0  # on another host
      if giver in schedulers:
        row = schedulers[giver].withdraw()
      if taker in schedulers:
        request = self._request_of(response)
        new_row = request.row = schedulers[taker].free_row()
        schedulers[taker].submit(request)
      swaps.append(((giver, row, taker, new_row), (taker, new_row, giver, row)))
    calls = self._in_calls(swaps, self._few, self._rows)
    self.swaps += calls
    return calls

  def _loans(self, facts) -> list[tuple[int, int]]:
    """(from shard, to shard) of each response."""
    sizes, loans, waiting = self._sizes, [], facts.num_waiting
    # Of the longest prompt, and of a response in its first segment.
    tokens = sizes.max_prompt_length + sizes.segment_tokens(1)
    starts = np.minimum(
      np.minimum(sizes.slots, self._rows) - facts.num_active,
      facts.num_spare_pages // (-(-tokens // sizes.page_size) + 1),
    )
    takes = np.where(waiting == 0, starts, 0)
    gives = np.where(waiting == 0, 0, facts.num_queued - np.maximum(starts, 0))
    while gives.max() > 0 and takes.max() > 0:
      loans.append((int(gives.argmax()), int(takes.argmax())))
      gives[loans[-1][0]] -= 1
      takes[loans[-1][1]] -= 1
    return loans

  def migrate(
    self, schedulers: Mapping[int, Scheduler], facts: SimpleNamespace
  ) -> Migration | None:
    """Moves responses; arguments as of `lend`. None: nothing moves."""
    self._segments = 0
    sizes, D, page_size = self._sizes, self._shards, self._sizes.page_size
    b, n = self._rows, self._few
    slots, rows = _MoveList(D, n, sizes.slots), _MoveList(D, n, b)
    slot_rows, pages = np.zeros((D, n), np.int32), []
    for giver, slot, taker in self._choices(facts, n):
      cached = int(self._cached_DM[giver, slot])
      num_pages, at = -(-cached // page_size), giver * sizes.slots + slot
      of_slot = ("response", "num_tokens", "stop_at")
      values = {name: int(getattr(self._results, name)[at]) for name in of_slot}
      row = new_row = new_slot = 0  # on another host
      old_pages = new_pages = [0] * num_pages
      if giver in schedulers:
        row, old_pages = schedulers[giver].remove(slot, num_pages)
      if taker in schedulers:
        new_slot, new_row, new_pages = schedulers[taker].insert(
          num_pages, num_cached=cached, **values
        )
      place = slots.add(giver, slot, taker, new_slot)
      slot_rows[taker, place] = taker * b + new_row
      rows.add(giver, row, taker, new_row)
      rows.add(taker, new_row, giver, row)
      pages += [
        (giver, old, taker, new)
        for old, new in zip(old_pages, new_pages, strict=True)
      ]
    if not pages:
      self._stuck_at = int(np.count_nonzero(self._cached_DM))
      return None
    self.swaps.append(rows.moves(self._own))
    return Migration(
      # A quarter of a slot's pages from each shard: all layers of them are in
      # memory twice.
      self._in_calls(
        [(page,) for page in pages],
        -(-sizes.pages_per_slot // 4),
        sizes.num_pages,
      ),
      slots.moves(self._own),
      slot_rows[self._own].ravel(),
      self.swaps[-1],
    )

  def _choices(self, facts, n) -> list[tuple[int, int, int]]:
    """(from shard, slot, to shard), at most n of each; a shard does not give
    and take."""
    sizes, cached_DM = self._sizes, self._cached_DM.copy()
    load_D, running_D = cached_DM.sum(1), (cached_DM > 0).sum(1)
    # A response needs a slot, and the row of one that does not run.
    idle_D = min(sizes.slots, self._rows) - running_D
    idle_D = np.where(facts.num_waiting > 0, 0, idle_D)
    # All visitors, and one more response, fit if they grow to their longest.
    most = (sizes.num_pages - 1) // sizes.pages_per_slot - 1
    takes_D = np.minimum(np.minimum(idle_D, n), most - facts.num_visitors)
    room_D, gives_D = facts.num_spare_pages.copy(), np.full(len(load_D), n)
    choices: list[tuple[int, int, int]] = []
    gave_D, took_D = np.zeros((2, len(load_D)), bool)
    while True:
      giver = int(load_D.argmax())
      can_take_D = (takes_D > 0) & ~gave_D
      taker = int(np.where(can_take_D, load_D, np.inf).argmin())
      done = load_D[giver] <= _LEAST * load_D.mean()
      if done or not can_take_D[taker] or took_D[giver] or not gives_D[giver]:
        return choices
      # Half of the difference is best; less than all of it is an improvement.
      half = (load_D[giver] - load_D[taker]) / 2
      cached_M = cached_DM[giver]
      pages_M = -(-(cached_M + sizes.segment_tokens(1)) // sizes.page_size)
      smaller_M = (cached_M > 0) & (cached_M < 2 * half)
      fits_M = smaller_M & (pages_M <= room_D[taker])
      slot = int(np.where(fits_M, abs(cached_M - half), np.inf).argmin())
      if not smaller_M.any():
        return choices
      if not fits_M[slot]:
        takes_D[taker] = 0
        continue
      choices.append((giver, slot, taker))
      load_D[giver] -= cached_M[slot]
      load_D[taker] += cached_M[slot]
      room_D[taker] -= pages_M[slot]
      cached_DM[giver, slot] = 0
      gave_D[giver] = took_D[taker] = True
      gives_D[giver] -= 1
      takes_D[taker] -= 1

  def _in_calls(self, groups, n: int, nowhere: int) -> list[Moves]:
    """Moves (from shard, slice, to shard, slice); a group is in one call."""
    calls = []
    while groups:
      call, left = _MoveList(self._shards, n, nowhere), []
      for group in groups:
        if all(call.has_room(giver, taker) for giver, _, taker, _ in group):
          for move in group:
            call.add(*move)
        else:
          left.append(group)
      calls.append(call.moves(self._own))
      groups = left
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

  def moves(self, shards: list[int]) -> Moves:
    of = lambda x: x[shards].ravel()
    return Moves(of(self._sent), of(self._source), of(self._target))
