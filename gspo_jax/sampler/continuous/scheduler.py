"""Assigns slots and pages: the host's half of continuous batching.

A prefix is the tokens that a response continues: a prompt, shared by all new
responses to it, or a prompt and the beginning of one response. All tokens of a
prefix but the last are prefilled; the first decode step feeds the last one.
Dimension letters as in `continuous/__init__`.

A round is `admit`, `allocate_pages`, a segment on the devices, `apply_results`.
While `can_look_ahead`, a round may begin before the last one's results are
applied. Requests may be submitted at any time. The slots of a prefix share its
full pages; each gets a copy of its partial last page. A prefix stays in the
pool until all its responses have finished. When pages run out, tokens that no
slot reads are evicted (and later prefilled again), then the newest responses
are preempted.

A scheduler that `keeps` tokens leaves those of finished responses in the pool;
what was kept first is evicted first. A prefix that begins with all kept tokens
of a response takes over their pages. Any other prefix shares the full pages of
the longest stored tokens that begin it.

A model may also have states, which are no pages. A prefill gives its state to
the slots that start in the same round. If more responses wait, it also stores
the state in a row, from which they start later. The queue is in order, so one
prefix at a time has a row; of two rows it takes the one that no slot reads in
this round. Without a row, a prefix is prefilled again. Kept tokens have no
state, so with such a model a scheduler keeps none.
"""

import collections
import dataclasses
from typing import Any

import numpy as np

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.config import PROMPT_ROWS, ShardSizes
from gspo_jax.sampler.samples import SamplingParams


@dataclasses.dataclass(eq=False)
class Request:
  """A response to sample, behind given tokens."""

  tokens: np.ndarray  # [T] int32, its prefix
  row: int  # of the shard's samples, which gets the response
  stop_at: int  # the row's tokens at which the response leaves its slot
  response: int  # its number, from which its random keys are made
  num_tokens: int = 0  # that the row already has, the last ones of `tokens`
  # First tokens of the prefix whose experts the row already has.
  num_recorded: int = 0
  stop_state: int = 0  # of `StopStrings` after `tokens`
  goes_on: bool = False  # its episode has begun: it starts before new ones
  params: SamplingParams | None = None  # None: as the sampler's
  owner: Any = None  # what the caller of `submit` wants to find again
  # Of the scheduler. Without a prefix it came from another shard.
  prefix: "Prefix | None" = None
  age: int = -1
  kept: "Prefix | None" = None  # its tokens in the pool, after its end


@dataclasses.dataclass(eq=False)
class Prefix:
  """First tokens of a sequence, and their pages in the pool."""

  tokens: np.ndarray  # none: kept, and not known to the host so far
  age: int
  requests: list[Request] = dataclasses.field(default_factory=list)
  pages: list[int] = dataclasses.field(default_factory=list)
  num_stored: int = 0  # tokens in the pages

  @property
  def num_cached(self) -> int:
    """Tokens to store: the first decode step feeds the last one."""
    return len(self.tokens) - 1


@dataclasses.dataclass
class Prefill:
  """A prefix to store first: all its tokens but the last."""

  prefix: Prefix
  pages: list[int]  # of these tokens; `num_pages` for one not to be written
  # Tokens that the pages hold, and that need not be computed. Other slots may
  # read full pages of these: do not write them.
  num_cached: int
  slots: list[int]  # that start from it in this round
  row: int = PROMPT_ROWS  # for the state; PROMPT_ROWS: it is not stored
  stage: int = 0  # 1: it reads pages that prefills of stage 0 write


@dataclasses.dataclass(frozen=True)
class Admission:
  """Requests that got a slot: prefill, then copy pages, then allocate pages.

  The arrays after `new` are [M] int32.
  """

  prefill: list[Prefill]
  new: np.ndarray  # [M] bool, slots that got a request
  num_cached: np.ndarray  # tokens of its prefix that the pages hold, or 0
  copy_source: np.ndarray  # the page to copy; `num_pages` for none
  copy_target: np.ndarray  # the page to copy it to; `num_pages` for none
  prompt_row: np.ndarray  # with the state to copy; PROMPT_ROWS for none


class Scheduler:
  """Assigns the slots and pages of one shard.

  Args:
    sizes: of the shard.
    rows: of the shard's samples.
    has_states: of the model.
    keeps: whether later requests may go on with finished responses.
    group_size: most rows to which a prefill writes the experts of its tokens;
      0: experts are not recorded. Where they are, a prefix may begin with
      stored tokens only if its row has their experts.
  """

  def __init__(
    self,
    sizes: ShardSizes,
    rows: int,
    *,
    has_states: bool = False,
    keeps: bool = False,
    group_size: int = 0,
  ):
    self._sizes, self._num_rows = sizes, rows
    self._has_states, self._keeps = has_states, keeps
    self._group_size = group_size
    M = sizes.slots
    # Preempted requests and those that go on, then new ones.
    self._first: collections.deque[Request] = collections.deque()
    self._queue: collections.deque[Request] = collections.deque()
    self._age = 0  # of the newest request or prefix
    self._prefixes: dict[int, Prefix] = {}  # by age, with requests
    self._same: dict[tuple, Prefix] = {}  # the last one of these tokens
    self.kept: dict[int, Prefix] = {}  # of finished responses, by age
    self._kept_of_row: dict[int, int] = {}  # the age of each row's last one
    # Of the newest admission: the stage of each prefill, and the prefixes that
    # slots start from. Their pages are written and copied after it.
    self._stages: dict[Prefix, int] = {}
    self._started: set[Prefix] = set()
    self._row = 0
    self._prefix_of_row: Prefix | None = None
    self._unknown_segments = 0  # planned, without results so far
    self._readers = np.zeros(sizes.num_pages, np.int64)
    self._free_pages = list(range(sizes.num_pages))
    self.slots: list[Request | None] = [None] * M
    self._active_M = np.zeros(M, bool)  # with a request
    # Of the response in each slot: its tokens, at how many it leaves, and how
    # many more the pages hold.
    self._num_tokens_M, self._stop_at_M, self._before_M = np.zeros(
      (3, M), np.int64
    )
    self._num_pages_M = np.zeros(M, np.int64)  # shared pages included
    self._table = np.zeros((M, sizes.pages_per_slot), np.int32)

  @property
  def num_waiting(self) -> int:
    return len(self._first) + len(self._queue)

  @property
  def num_queued(self) -> int:
    """Waiting responses that have not begun."""
    return len(self._queue)

  @property
  def num_active(self) -> int:
    return int(self._active_M.sum())

  @property
  def num_free_pages(self) -> int:
    return len(self._free_pages)

  @property
  def num_spare_pages(self) -> int:
    """Pages that are free after the next segment, if nothing is admitted."""
    return self.num_free_pages - int(self._missing_pages().sum())

  @property
  def num_visitors(self) -> int:
    """Running responses of other shards, which are never preempted."""
    return sum(r is not None and not r.prefix for r in self.slots)

  @property
  def can_look_ahead(self) -> bool:
    """Whether to plan a segment before the results of the last one are known.

    Not while responses wait: slots that just became idle would stay empty for a
    segment. Not if pages might run out: responses would be preempted too early.
    """
    return not self.num_waiting and self.num_spare_pages >= 0

  @property
  def may_go_on(self) -> bool:
    """Whether a response can have tokens left after all planned segments."""
    planned = self._unknown_segments * self._sizes.segment_steps
    left = self._num_tokens_M + planned < self._stop_at_M
    return bool((self._active_M & left).any())

  def submit(self, request: Request) -> None:
    """Queues a request; UserError if its prefix is empty.

    With its prefix it has at most `max_prompt_length + max_new_tokens` tokens.
    """
    if not len(request.tokens):
      raise UserError("a prefix has no tokens: expected at least 1")
    self._age += 1
    request.age = self._age
    same = self._key(request)
    prefix, most = self._same.get(same), self._group_size
    if not prefix or (most and (prefix.pages or len(prefix.requests) >= most)):
      prefix = self._same[same] = Prefix(request.tokens, self._age)
      self._prefixes[self._age] = prefix
    prefix.requests.append(request)
    request.prefix = prefix
    (self._first if request.goes_on else self._queue).append(request)

  def _key(self, request):
    # Experts of equal tokens may belong into other columns.
    return request.num_tokens, request.num_recorded, request.tokens.tobytes()

  def cancel(self, request: Request) -> None:
    """Ends a request; the results of all segments have been applied."""
    if request in self.slots:
      self._release_slot(self.slots.index(request))
    else:
      (self._first if request in self._first else self._queue).remove(request)
    self._finish(request)

  def withdraw(self) -> int:
    """Takes the last response out of the queue; its row."""
    request = self._queue.pop()
    self._finish(request)
    return request.row

  def free_row(self) -> int:
    """The row of a finished response."""
    taken = {r.row for r in (*self.slots, *self._first, *self._queue) if r}
    return next(row for row in range(self._num_rows) if row not in taken)

  def admit(self) -> Admission:
    """Gives idle slots to waiting requests, as far as pages go.

    A request is admitted if the pool has room for its first segment and for the
    next segment of all active responses; so this round does not preempt it.
    Tokens of finished and later responses are evicted to make room.
    """
    M, n = self._sizes.slots, self._sizes.num_pages
    full = lambda value: np.full(M, value, np.int32)
    new = np.zeros(M, bool)
    admission = Admission([], new, full(0), full(n), full(n), full(PROMPT_ROWS))
    idle = np.flatnonzero(~self._active_M).tolist()
    self._stages, self._started = {}, set()
    while idle and self.num_waiting:
      queue = self._first or self._queue
      self._reuse(queue[0])
      if not self._make_room(queue[0]):
        break
      request = queue.popleft()
      self._start(idle.pop(0), request, admission)
    if self._has_states and self.num_waiting and admission.prefill:
      last = admission.prefill[-1]
      if (self._first or self._queue)[0].prefix is last.prefix:
        self._row, self._prefix_of_row = 1 - self._row, last.prefix
        last.row = self._row
    return admission

  def _stored(self) -> list[Prefix]:
    stored = (*self.kept.values(), *self._prefixes.values())
    return [prefix for prefix in stored if prefix.pages]

  def num_known(self, tokens: np.ndarray) -> int:
    """How many of the first tokens are stored."""
    known = (
      _common(prefix.tokens[: prefix.num_stored], tokens)
      for prefix in self._stored()
    )
    return max(known, default=0)

  def _reuse(self, request: Request) -> None:
    """Lets a prefix begin with the pages of stored tokens that begin it."""
    prefix = request.prefix
    if not prefix or prefix.pages or not self._keeps:
      return
    limit = prefix.num_cached
    if self._group_size:
      limit = min(limit, request.num_recorded)
    page_size, most = self._sizes.page_size, 0
    best: Prefix | None = None
    # A request that goes on mostly does so with all that its row has.
    last = self.kept.get(self._kept_of_row.get(request.row, -1))
    if last and last.num_stored <= limit:
      count = _common(last.tokens[: last.num_stored], prefix.tokens)
      best, most = (last, count) if count == last.num_stored else (None, 0)
    for other in () if best else self._stored():
      if not len(other.tokens) or self._stages.get(other):
        continue
      if not (other.num_stored > most < limit):
        continue
      if other.tokens[most] != prefix.tokens[most]:
        continue  # it has no more in common than the best so far
      count = _common(other.tokens[: other.num_stored], prefix.tokens[:limit])
      if other.requests or count < other.num_stored:
        count = count // page_size * page_size
      if count > most:
        best, most = other, count
    if not best:
      return
    if not best.requests and most == best.num_stored:
      del self.kept[best.age]
      prefix.pages, prefix.num_stored = best.pages, most
      return
    prefix.pages = best.pages[: most // page_size]
    prefix.num_stored = most
    self._readers[prefix.pages] += 1
    if best in self._stages:
      self._stages[prefix] = 1

  def allocate_pages(self) -> tuple[np.ndarray, np.ndarray]:
    """Gives each slot the pages that the next segment can fill.

    A segment fills at most min(segment_tokens, remaining tokens) positions;
    earlier segments without results count, too. If pages run out, the newest
    responses are preempted: they return all pages and wait at the front of the
    queue. The oldest response is never preempted.

    Returns the pages of each slot in order, [M, W] int32, 0 where it has none;
    and [M] bool, the slots that decode.
    """
    while (missing_M := self._missing_pages()).sum() > self.num_free_pages:
      ages = [r.age if r and r.prefix else -1 for r in self.slots]
      slot = int(np.argmax(ages))
      request = self.slots[slot] if ages[slot] >= 0 else None
      if not self._evict(request.prefix if request else None):
        assert request  # `Placement` leaves room for all visitors
        self._first.appendleft(request)
        self._release_slot(slot)
    column_W = np.arange(self._sizes.pages_per_slot)
    num_pages_M = self._num_pages_M + missing_M
    allocated_MW = column_W >= self._num_pages_M[:, None]
    allocated_MW &= column_W < num_pages_M[:, None]
    self._table[allocated_MW] = self._pop_pages(int(missing_M.sum()))
    self._num_pages_M = num_pages_M
    self._unknown_segments += 1
    return self._table.copy(), self._active_M.copy()

  def apply_results(
    self, num_tokens: np.ndarray, active: np.ndarray
  ) -> list[tuple[Request, int]]:
    """Applies the oldest segment without results.

    `num_tokens` [M] counts the tokens of each row; `active` [M] is false where
    a response has left its slot. Returns these, and their tokens.
    """
    self._unknown_segments -= 1
    self._num_tokens_M[:] = num_tokens
    ended = []
    for slot in np.flatnonzero(self._active_M & ~np.asarray(active)).tolist():
      request = self.slots[slot]
      assert request
      ended.append((request, int(num_tokens[slot])))
      if self._keeps:
        self._keep(slot, request)
      self._release_slot(slot)
      self._finish(request)
    return ended

  def _finish(self, request):
    """Releases the pages of its prefix with the last response to it."""
    prefix = request.prefix
    if not prefix:
      return
    prefix.requests.remove(request)
    if not prefix.requests:
      self._release_pages(prefix.pages)
      del self._prefixes[prefix.age]
      if self._same.get(same := self._key(request)) is prefix:
        del self._same[same]

  def _keep(self, slot, request):
    """Keeps a finished response's tokens but the last, which was not fed."""
    count = int(self._before_M[slot] + self._num_tokens_M[slot])
    pages = self._table[slot, : -(-count // self._sizes.page_size)].tolist()
    self._readers[pages] += 1
    self._age += 1
    request.kept = Prefix(np.zeros(0), self._age, [], pages, count)
    self.kept[self._age] = request.kept
    self._kept_of_row[request.row] = self._age

  def remove(self, slot: int, num_pages: int) -> tuple[int, list[int]]:
    """Takes a response out of a slot; its row, and its first pages.

    The results of all segments have been applied.
    """
    request, pages = self.slots[slot], self._table[slot, :num_pages].tolist()
    assert request
    self._release_slot(slot)
    self._finish(request)
    return request.row, pages

  def insert(
    self,
    num_pages: int,
    *,
    response: int,
    num_cached: int,
    num_tokens: int,
    stop_at: int,
  ) -> tuple[int, int, list[int]]:
    """Gives a response of another shard a slot, a finished one's row, and pages
    for its tokens.

    It cannot start again on this shard, so it is never preempted.
    """
    slot, row = int(self._active_M.argmin()), self.free_row()
    pages = self._pop_pages(num_pages)
    request = Request(np.zeros(0), row, stop_at, response, num_tokens)
    self._set_slot(slot, request, pages, num_cached)
    return slot, row, pages

  def _make_room(self, request):
    """Evicts until a response's first segment fits; False if it cannot fit.

    It fits whenever no slot is active: then only this response's prefix stays.
    """
    prefix, page_size = request.prefix, self._sizes.page_size
    cached, before = prefix.num_cached, request.num_tokens
    pages = self._pages_after_segment(cached - before, before, request.stop_at)
    needed = pages - cached // page_size + -(-cached // page_size)
    needed -= len(prefix.pages)
    needed += int(self._missing_pages().sum())
    if needed > self.num_free_pages:
      readers = self._readers.copy()
      for other in self._evictable(prefix):
        readers[other.pages] -= 1
      if needed > np.count_nonzero(readers == 0):
        return False
    while needed > self.num_free_pages:
      self._evict(prefix)
    return True

  def _start(self, slot, request, admission):
    prefix, page_size = request.prefix, self._sizes.page_size
    cached, num_stored = prefix.num_cached, prefix.num_stored
    missing = -(-cached // page_size) - len(prefix.pages)
    prefix.pages = prefix.pages + self._pop_pages(missing)
    prefix.num_stored = cached
    self._started.add(prefix)
    self._prefill(slot, prefix, num_stored, admission)
    number = request.num_tokens
    count = self._pages_after_segment(cached - number, number, request.stop_at)
    pages = prefix.pages[: cached // page_size]
    self._readers[pages] += 1
    pages = pages + self._pop_pages(count - len(pages))
    if cached % page_size:
      admission.copy_source[slot] = prefix.pages[-1]
      admission.copy_target[slot] = pages[cached // page_size]
    admission.new[slot] = True
    admission.num_cached[slot] = cached
    self._set_slot(slot, request, pages, cached)

  def _set_slot(self, slot, request, pages, num_cached):
    self.slots[slot], self._active_M[slot] = request, True
    self._num_tokens_M[slot] = request.num_tokens
    self._stop_at_M[slot] = request.stop_at
    self._before_M[slot] = num_cached - request.num_tokens
    self._num_pages_M[slot] = len(pages)
    self._table[slot, : len(pages)] = pages

  def _prefill(self, slot, prefix, num_stored, admission):
    """Prefills the prefix of a slot unless all that it needs is stored."""
    prefill = admission.prefill
    if prefill and prefill[-1].prefix is prefix:
      prefill[-1].slots.append(slot)
      return
    has_state = not self._has_states or prefix is self._prefix_of_row
    if has_state and num_stored == prefix.num_cached:
      admission.prompt_row[slot] = self._row
      return
    pages = prefix.pages
    if self._has_states:
      # All tokens are computed, for the state; full pages are not written.
      full = num_stored // self._sizes.page_size
      pages = [self._sizes.num_pages] * full + pages[full:]
      num_stored = 0
    stage = self._stages.setdefault(prefix, 0)
    prefill.append(Prefill(prefix, pages, num_stored, [slot], stage=stage))

  def _pages_after_segment(self, before, num_tokens, stop_at):
    new = self._sizes.segment_tokens(self.num_active)
    new *= self._unknown_segments + 1
    tokens = before + np.minimum(num_tokens + new, stop_at)
    return -(-tokens // self._sizes.page_size)

  def _missing_pages(self):
    pages_M = self._pages_after_segment(
      self._before_M, self._num_tokens_M, self._stop_at_M
    )
    # After early ends of segments a slot may have more than it needs.
    missing_M = np.maximum(pages_M - self._num_pages_M, 0)
    return np.where(self._active_M, missing_M, 0)

  def _pop_pages(self, count):
    cut = len(self._free_pages) - count
    pages = self._free_pages[cut:]
    del self._free_pages[cut:]
    self._readers[pages] = 1
    return pages

  def _release_pages(self, pages):
    """Removes a reader from each page; frees pages without readers."""
    self._readers[pages] -= 1
    self._free_pages += [p for p in pages if not self._readers[p]]

  def _evictable(self, stays: Prefix | None) -> list[Prefix]:
    """Tokens that may be evicted, in this order.

    The oldest kept ones first; then the newest prefixes, of those that begin
    after the one that `stays`, or that no slot continues.
    """
    running = {request.prefix for request in self.slots if request}
    age = stays.age if stays else -1
    return [
      *self.kept.values(),
      *(
        prefix
        for prefix in reversed(self._prefixes.values())
        if prefix.pages
        and prefix is not stays
        and prefix not in self._started
        and (prefix.age > age or prefix not in running)
      ),
    ]

  def _evict(self, stays: Prefix | None) -> bool:
    """Evicts the first evictable tokens; False if there are none."""
    for evicted in self._evictable(stays)[:1]:
      self.kept.pop(evicted.age, None)
      self._release_pages(evicted.pages)
      evicted.pages, evicted.num_stored = [], 0
      return True
    return False

  def _release_slot(self, slot):
    self._release_pages(self._table[slot, : self._num_pages_M[slot]].tolist())
    self._table[slot] = 0
    self._num_pages_M[slot] = 0
    self.slots[slot], self._active_M[slot] = None, False


def _common(a: np.ndarray, b: np.ndarray) -> int:
  """How many first tokens are the same."""
  n = min(len(a), len(b))
  if not n or a[0] != b[0]:
    return 0
  different = np.flatnonzero(a[:n] != b[:n])
  return int(different[0]) if different.size else n
