"""Assigns slots and pages: the host's half of continuous batching.

A prefix is the tokens that a response continues: a prompt, shared by all new
responses to it, or a prompt and the beginning of one response. All tokens of a
prefix but the last are prefilled; the first decode step feeds the last one.
Dimension letters as in `continuous/__init__`.

A round is `admit`, `allocate_pages`, a segment on the devices, `apply_results`.
While `can_look_ahead`, a round may begin before the last one's results are
applied. The slots of a prefix share its full pages; each gets a copy of its
partial last page. A prefix stays in the pool until all its responses have
finished. When pages run out, tokens that no slot reads are evicted (and later
prefilled again), then the newest responses are preempted.

A scheduler with `cached` keeps the tokens of finished responses in the pool,
and cached tokens of responses that it does not generate; its `kept` is the
`cached` of the next scheduler. What was kept first is evicted first.

A model may also have states, which are no pages. A prefill gives its state to
the slots that start in the same round. If more responses wait, it also stores
the state in a row, from which they start later. The queue is in order, so one
prefix at a time has a row; of two rows it takes the one that no slot reads in
this round. Without a row, a prefix is prefilled again. A response that goes on
where the last call left it finds its state in its slot, if no other response
has had the slot.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.config import PROMPT_ROWS, ShardSizes
from gspo_jax.sampler.samples import UNFINISHED


class CachedTokens(NamedTuple):
  """The first tokens of a sequence, in the pool, and their pages."""

  pages: list[int]
  num_tokens: int
  slot: int = -1  # that has the state after these tokens; -1: none has


@dataclasses.dataclass
class Prefill:
  """A prefix to store first: all its tokens but the last."""

  prefix: int
  pages: list[int]  # of these tokens; `num_pages` for one not to be written
  # Tokens that the pages hold, and that need not be computed. Other slots may
  # read full pages of these: do not write them.
  num_cached: int
  slots: list[int]  # that start from it in this round
  row: int = PROMPT_ROWS  # for the state; PROMPT_ROWS: it is not stored


@dataclasses.dataclass(frozen=True)
class Admission:
  """Responses that got a slot: prefill, then copy pages, then allocate pages.

  The arrays after `new` are [M] int32.
  """

  prefill: list[Prefill]
  new: np.ndarray  # [M] bool, slots that got a response
  response: np.ndarray  # its number; 0 where no response is new
  num_cached: np.ndarray  # tokens of its prefix that the pages hold, or 0
  copy_source: np.ndarray  # the page to copy; `num_pages` for none
  copy_target: np.ndarray  # the page to copy it to; `num_pages` for none
  prompt_row: np.ndarray  # with the state to copy; PROMPT_ROWS for none


@dataclasses.dataclass(frozen=True)
class SegmentPages:
  table: np.ndarray  # [M, W] int32, pages in order; 0 where a slot has none
  # [M] bool, slots to decode. The slot of a preempted response is not active;
  # a later admission starts the response again.
  active: np.ndarray


class Scheduler:
  """Assigns one shard's slots and pages; its first response is number 0."""

  def __init__(
    self,
    sizes: ShardSizes,
    prefix_lengths: Sequence[int],
    prefix_index: Sequence[int],
    max_tokens: Sequence[int],
    cached: Mapping[int, CachedTokens] | None = None,
    *,
    has_states: bool = False,
  ):
    """Queues all responses in order; UserError if a prefix is empty.

    Args:
      sizes: of the shard.
      prefix_lengths: [Q], tokens of each prefix.
      prefix_index: [B], the prefix of each response; sorted.
      max_tokens: [B], most tokens to generate for each; 0 to leave it out. With
        its prefix they are at most `max_prompt_length + max_new_tokens`.
      cached: by response, the first tokens of its prefix that are in the pool:
        `kept` of the last scheduler. No other response has this prefix, and all
        other pages are free. Of a response that is left out, its tokens, which
        stay there. None: keep nothing.
      has_states: of the model.
    """
    self._sizes = sizes
    lengths_Q = np.asarray(prefix_lengths, np.int64)
    self._prefix_B = np.asarray(prefix_index, np.int64)
    self._max_tokens_B = np.asarray(max_tokens, np.int64)
    if empty := np.flatnonzero(lengths_Q < 1).tolist():
      raise UserError(
        f"prefix {empty[0]}: it has no tokens, expected at least 1"
      )
    M = sizes.slots
    self._num_cached_Q = lengths_Q - 1
    requested = np.flatnonzero(self._max_tokens_B)
    self._num_unfinished_Q = np.bincount(
      self._prefix_B[requested], minlength=len(lengths_Q)
    )
    # Every waiting response has a greater number than every active one, so the
    # greatest active one is the newest.
    self._queue = collections.deque(requested.tolist())
    self._has_states = has_states
    self._row, self._prefix_of_row = 0, None
    self._unknown_segments = 0  # planned, without results so far
    # The tokens in the pool of each response that has finished or is left out;
    # None if they are not kept.
    self.kept = None
    if cached is not None:
      left_out = self._max_tokens_B == 0
      self.kept = {b: x for b, x in cached.items() if left_out[b]}
    self._prefix_pages = {  # prefix -> its CachedTokens in the pool
      int(self._prefix_B[response]): tokens
      for response, tokens in (cached or {}).items()
      if self._max_tokens_B[response]
    }
    self._readers = np.zeros(sizes.num_pages, np.int64)
    for tokens in (*self._prefix_pages.values(), *(self.kept or {}).values()):
      np.add.at(self._readers, tokens.pages, 1)
    self._free_pages = np.flatnonzero(self._readers == 0).tolist()
    self._response_M = np.full(M, -1)
    # [B] bool, running responses of other shards, in the rows of finished ones.
    self._is_visitor = np.zeros(len(self._prefix_B), bool)
    self._num_cached_M = np.zeros(M, np.int64)
    self._num_generated_M = np.zeros(M, np.int64)
    self._num_pages_M = np.zeros(M, np.int64)  # shared pages included
    self._table = np.zeros((M, sizes.pages_per_slot), np.int32)

  @property
  def num_waiting(self) -> int:
    return len(self._queue)

  @property
  def num_active(self) -> int:
    return int((self._response_M >= 0).sum())

  @property
  def num_free_pages(self) -> int:
    return len(self._free_pages)

  @property
  def done(self) -> bool:
    return not self.num_waiting and not self.num_active

  @property
  def response(self) -> np.ndarray:
    """[M] the response in each slot; -1 for none."""
    return self._response_M.copy()

  @property
  def num_spare_pages(self) -> int:
    """Pages that are free after the next segment, if nothing is admitted."""
    return self.num_free_pages - int(self._missing_pages().sum())

  @property
  def num_visitors(self) -> int:
    """Running responses of other shards, which are never preempted."""
    return int(self._is_visitor.sum())

  @property
  def can_look_ahead(self) -> bool:
    """Whether to plan a segment before the results of the last one are known.

    Not while responses wait: slots that just became idle would stay empty for a
    segment. Not if pages might run out: responses would be preempted too early.
    """
    return not self._queue and self.num_spare_pages >= 0

  @property
  def may_go_on(self) -> bool:
    """Whether a response can have tokens left after all planned segments."""
    active = self._response_M >= 0
    planned = self._unknown_segments * self._sizes.segment_steps
    most_M = self._most_tokens()
    return bool((active & (self._num_generated_M + planned < most_M)).any())

  def admit(self) -> Admission:
    """Gives idle slots to waiting responses, as far as pages go.

    A response is admitted if the pool has room for its first segment and for
    the next segment of all active responses; so this round does not preempt it.
    Tokens of finished and later responses are evicted to make room.
    """
    M, n = self._sizes.slots, self._sizes.num_pages
    full = lambda value: np.full(M, value, np.int32)
    new = np.zeros(M, bool)
    admission = Admission(
      [], new, full(0), full(0), full(n), full(n), full(PROMPT_ROWS)
    )
    idle = np.flatnonzero(self._response_M < 0).tolist()
    while idle and self._queue and self._make_room(self._queue[0]):
      response = self._queue.popleft()
      slot = self._choose_slot(idle, self._prefix_B[response])
      idle.remove(slot)
      self._start(slot, response, admission)
    if self._has_states and self._queue and admission.prefill:
      last = admission.prefill[-1]
      if self._prefix_B[self._queue[0]] == last.prefix:
        self._row, self._prefix_of_row = 1 - self._row, last.prefix
        last.row = self._row
    return admission

  def _choose_slot(self, idle: list[int], prefix) -> int:
    """The slot that has the prefix's state, else one that has none."""
    if not self._has_states:
      return idle[0]
    if (own := self._cached(prefix).slot) in idle:
      return own
    kept = *self._prefix_pages.values(), *(self.kept or {}).values()
    taken = {tokens.slot for tokens in kept}
    return next((slot for slot in idle if slot not in taken), idle[0])

  def allocate_pages(self) -> SegmentPages:
    """Gives each slot the pages that the next segment can fill.

    A segment fills at most min(segment_tokens, remaining tokens) positions;
    earlier segments without results count, too. If pages run out, the newest
    responses are preempted: they return all pages and wait at the front of the
    queue. The oldest response is never preempted.
    """
    while (missing_M := self._missing_pages()).sum() > self.num_free_pages:
      is_visitor_M = self._is_visitor[self._response_M]
      newest_M = np.where(is_visitor_M, -1, self._response_M)
      slot, response = int(newest_M.argmax()), int(newest_M.max())
      prefix = self._prefix_B[response] if response >= 0 else -1
      if not self._evict(after=prefix):
        assert response >= 0  # `Placement` leaves room for all visitors
        self._queue.appendleft(response)
        self._release_slot(slot)
    column_W = np.arange(self._sizes.pages_per_slot)
    num_pages_M = self._num_pages_M + missing_M
    allocated_MW = column_W >= self._num_pages_M[:, None]
    allocated_MW &= column_W < num_pages_M[:, None]
    self._table[allocated_MW] = self._pop_pages(int(missing_M.sum()))
    self._num_pages_M = num_pages_M
    self._unknown_segments += 1
    return SegmentPages(self._table.copy(), self._response_M >= 0)

  def apply_results(
    self, num_generated: np.ndarray, active: np.ndarray
  ) -> list[int]:
    """Applies the oldest segment without results; returns finished responses.

    `num_generated` [M] counts a response's tokens after its prefix; `active`
    [M] is false where a response has finished.
    """
    self._unknown_segments -= 1
    self._num_generated_M[:] = num_generated
    slots = np.flatnonzero((self._response_M >= 0) & ~np.asarray(active))
    responses = self._response_M[slots].tolist()
    for slot, response in zip(slots.tolist(), responses, strict=True):
      if self.kept is not None:
        self.kept[response] = self._keep(slot)
      self._release_slot(slot)
      self._finish(response)
    return responses

  def _finish(self, response):
    """Releases the pages of its prefix with the last response to it."""
    if self._is_visitor[response]:
      self._is_visitor[response] = False
      return
    prefix = self._prefix_B[response]
    self._num_unfinished_Q[prefix] -= 1
    if not self._num_unfinished_Q[prefix]:
      self._release_pages(self._prefix_pages.pop(prefix).pages)

  def remove(self, slot: int, num_pages: int) -> tuple[int, list[int]]:
    """Takes a response out of a slot; its row, and its first pages.

    The results of all segments have been applied.
    """
    row, pages = int(self._response_M[slot]), self._table[slot, :num_pages]
    pages = pages.tolist()
    self._release_slot(slot)
    self._finish(row)
    return row, pages

  def insert(
    self, num_pages: int, num_cached: int, num_generated: int, max_tokens: int
  ) -> tuple[int, int, list[int]]:
    """Gives a response of another shard a slot, a finished one's row, and pages
    for its tokens.

    It cannot start again on this shard, so it is never preempted.
    """
    slot = int(self._response_M.argmin())
    is_idle_B = np.ones(len(self._prefix_B), bool)
    is_idle_B[self._response_M[self._response_M >= 0]] = False
    row = int(is_idle_B.argmax())
    pages = self._pop_pages(num_pages)
    self._is_visitor[row], self._max_tokens_B[row] = True, max_tokens
    self._response_M[slot], self._num_cached_M[slot] = row, num_cached
    self._num_generated_M[slot] = num_generated
    self._num_pages_M[slot] = num_pages
    self._table[slot, :num_pages] = pages
    return slot, row, pages

  def _make_room(self, response):
    """Evicts until a response's first segment fits; False if it cannot fit.

    It fits whenever no slot is active: then only this response's prefix stays.
    """
    prefix, page_size = self._prefix_B[response], self._sizes.page_size
    cached = self._num_cached_Q[prefix]
    pages = self._pages_after_segment(cached, 0, self._max_tokens_B[response])
    needed = pages - cached // page_size + -(-cached // page_size)
    needed -= len(self._cached(prefix).pages)
    needed += int(self._missing_pages().sum())
    while needed > self.num_free_pages:
      if not self._evict(after=prefix):
        return False
    return True

  def _cached(self, prefix) -> CachedTokens:
    return self._prefix_pages.get(prefix, CachedTokens([], 0))

  def _keep(self, slot) -> CachedTokens:
    """Keeps a finished response's tokens but the last, which was not fed."""
    count = int(self._num_cached_M[slot] + self._num_generated_M[slot])
    pages = self._table[slot, : -(-count // self._sizes.page_size)].tolist()
    self._readers[pages] += 1
    return CachedTokens(pages, count, slot if self._has_states else -1)

  def _start(self, slot, response, admission):
    prefix, page_size = int(self._prefix_B[response]), self._sizes.page_size
    cached = int(self._num_cached_Q[prefix])
    stored, num_stored, with_state = self._cached(prefix)
    has_state = with_state == slot and num_stored == cached
    if self._has_states:
      self._forget_state(slot)
    stored = stored + self._pop_pages(-(-cached // page_size) - len(stored))
    self._prefix_pages[prefix] = CachedTokens(stored, cached)
    if not has_state:
      self._prefill(slot, prefix, stored, num_stored, admission)
    count = self._pages_after_segment(cached, 0, self._max_tokens_B[response])
    pages = stored[: cached // page_size]
    self._readers[pages] += 1
    pages = pages + self._pop_pages(count - len(pages))
    if cached % page_size:
      admission.copy_source[slot] = stored[-1]
      admission.copy_target[slot] = pages[cached // page_size]
    admission.new[slot] = True
    admission.response[slot] = response
    admission.num_cached[slot] = cached
    self._response_M[slot], self._num_cached_M[slot] = response, cached
    self._num_generated_M[slot], self._num_pages_M[slot] = 0, len(pages)
    self._table[slot, : len(pages)] = pages

  def _forget_state(self, slot):
    for kept in (self._prefix_pages, self.kept or {}):
      for i, tokens in kept.items():
        if tokens.slot == slot:
          kept[i] = tokens._replace(slot=-1)

  def _prefill(self, slot, prefix, pages, num_stored, admission):
    """Prefills the prefix of a slot unless all that it needs is stored."""
    prefill = admission.prefill
    if prefill and prefill[-1].prefix == prefix:
      prefill[-1].slots.append(slot)
      return
    has_state = not self._has_states or prefix == self._prefix_of_row
    if has_state and num_stored == self._num_cached_Q[prefix]:
      admission.prompt_row[slot] = self._row
      return
    if self._has_states:
      # All tokens are computed, for the state; full pages are not written.
      full = num_stored // self._sizes.page_size
      pages = [self._sizes.num_pages] * full + pages[full:]
      num_stored = 0
    prefill.append(Prefill(prefix, pages, num_stored, [slot]))

  def _pages_after_segment(self, num_cached, num_generated, max_tokens):
    new = self._sizes.segment_tokens(self.num_active)
    new *= self._unknown_segments + 1
    tokens = num_cached + np.minimum(num_generated + new, max_tokens)
    return -(-tokens // self._sizes.page_size)

  def _missing_pages(self):
    pages_M = self._pages_after_segment(
      self._num_cached_M, self._num_generated_M, self._most_tokens()
    )
    # After early ends of segments a slot may have more than it needs.
    missing_M = np.maximum(pages_M - self._num_pages_M, 0)
    return np.where(self._response_M >= 0, missing_M, 0)

  def _most_tokens(self):
    """[M] most tokens to generate; any value without a response."""
    if not self._max_tokens_B.size:
      return np.zeros_like(self._response_M)
    return self._max_tokens_B[self._response_M]

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

  def _evict(self, *, after) -> bool:
    """Evicts tokens that no slot reads; False if there are none.

    Prefixes up to `after` stay.
    """
    if self.kept:
      tokens = self.kept.pop(next(iter(self.kept)))
    elif self._prefix_pages and (last := max(self._prefix_pages)) > after:
      tokens = self._prefix_pages.pop(last)
    else:
      return False
    self._release_pages(tokens.pages)
    return True

  def _release_slot(self, slot):
    self._release_pages(self._table[slot, : self._num_pages_M[slot]].tolist())
    self._table[slot] = 0
    self._num_pages_M[slot], self._response_M[slot] = 0, -1


class Requests(NamedTuple):
  prefixes: Sequence[np.ndarray]  # Q of int32, their tokens without padding
  prefix_index: np.ndarray  # [B] int, what each response continues; sorted
  num_tokens: np.ndarray  # [B] int32, of the response, in its prefix
  # [B] int32, tokens at which the response stops or pauses; `num_tokens` for
  # one that is not to be generated
  stop_at: np.ndarray
  # [B] int, the newest of `num_tokens`, appended since the call that sampled
  # the others
  num_appended: np.ndarray

  def unrecorded(self, prefix: int) -> tuple[np.ndarray, int]:
    """Which responses continue a prefix, and its first token without experts.

    An earlier call has fed, and so recorded, the prompt and all tokens that it
    left but the newest one. It has fed nothing of a response that it left
    without a token.
    """
    begin, end = np.searchsorted(self.prefix_index, [prefix, prefix + 1])
    responses = np.arange(begin, end)
    responses = responses[self.stop_at[begin:end] > self.num_tokens[begin:end]]
    num_tokens = self.num_tokens[responses[0]]
    num_left = num_tokens - self.num_appended[responses[0]]
    prompt_length = len(self.prefixes[prefix]) - num_tokens
    return responses, prompt_length + num_left - 1 if num_left else 0


def pending_requests(
  prompts: np.ndarray,
  prompt_lengths: np.ndarray,
  lengths: np.ndarray,
  finish: np.ndarray,
  stop_at: np.ndarray,
  num_appended: np.ndarray,
  tokens: Sequence[np.ndarray | None],
) -> Requests:
  """The unfinished responses of samples, with the prefix of each.

  Neighbours with the same prompt and no token share one prefix, the prompt. Any
  other response has a separate prefix: its prompt, stored again, and its
  tokens.

  `prompts` [P, S] are padded on the left; `tokens` are [R] for each of B
  responses, None if none has any; `finish` [B] is as in Samples; a response
  pauses at `stop_at` [B] tokens; `num_appended` [B] is as in Requests.
  """
  group_size = len(lengths) // max(len(prompts), 1)
  pending = (finish == UNFINISHED) & (lengths < stop_at)
  prefixes, prefix_index, shared_prompt = [], [], None
  for response, length in enumerate(lengths.tolist()):
    p = response // group_size
    if pending[response] and (length or shared_prompt != p):
      prompt = prompts[p, prompts.shape[1] - prompt_lengths[p] :]
      if length:
        prompt = np.concatenate([prompt, tokens[response][:length]])
      prefixes.append(prompt)
      shared_prompt = None if length else p
    prefix_index.append(max(len(prefixes) - 1, 0))
  stop_at = np.where(pending, stop_at, lengths).astype(np.int32)
  return Requests(
    prefixes, np.array(prefix_index, int), lengths, stop_at, num_appended
  )
