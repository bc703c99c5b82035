"""The host's half of continuous batching: which response has which slot, pages.

Dimension key: N prefixes, A responses, B slots, n pages in the pool, W pages
of the longest slot, P prompts, R most new tokens.

A prefix is the tokens that a response continues: a prompt, shared by all new
responses to it, or a prompt and the beginning of one response. All tokens of a
prefix but the last are prefilled; the first decode step feeds the last one.

Each round calls `admit`, `allocate_pages`, then decodes a segment on the
devices, then calls `apply_results`. While `can_look_ahead`, the next round may
begin before the results of the last one are applied. The full pages of a prefix
are shared by the slots of its responses; each slot gets a copy of its partial
last page. A prefix stays in the pool until all its responses have finished.
When pages run out, first what no slot reads is evicted (and prefilled again
later), then the newest responses are preempted.

The tokens of a response can stay in the pool until a later call continues it:
a scheduler that is given `cached` keeps them, and `cached` of the next one is
what it kept.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous_config import ShardSizes
from gspo_jax.sampler.samples import UNFINISHED


class CachedTokens(NamedTuple):
  """The first tokens of a sequence that are in the pool, and their pages."""

  pages: list[int]
  num_tokens: int


class PrefixPages(NamedTuple):
  """A prefix to prefill, the pages for all its tokens but the last.

  Attributes:
    prefix: its number.
    pages: in the order of its tokens.
    num_cached: its first tokens, which the pages hold already. Full pages of
      them may have other readers, and must not be written.
  """

  prefix: int
  pages: list[int]
  num_cached: int


@dataclasses.dataclass(frozen=True)
class Admission:
  """Responses that got a slot: prefill, then copy pages, then allocate pages.

  Attributes:
    prefill: the prefixes to store first; none has a single token.
    new: [B] bool, slots that got a response. The others hold 0 below.
    response: [B] int32, the number of the response.
    num_cached: [B] int32, tokens of its prefix that the pages hold.
    copy_source: [B] int32, the page to copy; n for none.
    copy_target: [B] int32, the page to copy it to; n for none.
  """

  prefill: list[PrefixPages]
  new: np.ndarray
  response: np.ndarray
  num_cached: np.ndarray
  copy_source: np.ndarray
  copy_target: np.ndarray


@dataclasses.dataclass(frozen=True)
class SegmentPages:
  """The pages and the slots of the next segment.

  Attributes:
    table: [B, W] int32, the pages of each slot, in order; 0 where it has none.
    active: [B] bool, slots to decode. A preempted slot is not active; a later
      admission starts its response again.
  """

  table: np.ndarray
  active: np.ndarray


class Scheduler:
  """Assigns the slots and pages of one shard; numbers count from its first.

  Attributes:
    num_sampled: tokens sampled so far, also of preempted responses.
    kept: by response that finished, its tokens in the pool; None if they are
      not kept.
  """

  def __init__(
    self,
    sizes: ShardSizes,
    prefix_lengths: Sequence[int],
    prefix_index: Sequence[int],
    max_tokens: Sequence[int],
    cached: Mapping[int, CachedTokens] | None = None,
  ):
    """All responses wait, in order.

    Args:
      sizes: those of the shard.
      prefix_lengths: [N], tokens of each prefix.
      prefix_index: [A], the prefix of each response; sorted.
      max_tokens: [A], most tokens to generate for each; 0 to leave it out.
      cached: by response with a prefix of its own, the first tokens of the
        prefix that are in the pool: `kept` of the last scheduler. All other
        pages are free. None: keep nothing.

    Raises:
      UserError: a prefix is empty, or it and a response do not fit a slot.
    """
    self._sizes, self.num_sampled = sizes, 0
    lengths_N = np.asarray(prefix_lengths, np.int64)
    self._prefix_A = np.asarray(prefix_index, np.int64)
    self._max_tokens_A = np.asarray(max_tokens, np.int64)
    self._check_lengths(lengths_N)
    B = sizes.slots
    self._num_cached_N = lengths_N - 1
    requested = np.flatnonzero(self._max_tokens_A)
    self._num_unfinished_N = np.bincount(
      self._prefix_A[requested], minlength=len(lengths_N)
    )
    # Every waiting response has a greater number than every active one, so the
    # greatest active one is the newest.
    self._queue = collections.deque(requested.tolist())
    self._unknown_segments = 0  # planned, without results so far
    self.kept = None if cached is None else {}
    self._prefix_pages = {  # prefix -> its CachedTokens in the pool
      int(self._prefix_A[response]): tokens
      for response, tokens in (cached or {}).items()
      if self._max_tokens_A[response]
    }
    self._readers_n = np.zeros(sizes.num_pages, np.int64)
    for tokens in self._prefix_pages.values():
      np.add.at(self._readers_n, tokens.pages, 1)
    self._free_pages = np.flatnonzero(self._readers_n == 0).tolist()
    self._response_B = np.full(B, -1)
    self._num_cached_B = np.zeros(B, np.int64)
    self._num_generated_B = np.zeros(B, np.int64)
    self._num_pages_B = np.zeros(B, np.int64)  # shared pages included
    self._table = np.zeros((B, sizes.pages_per_slot), np.int32)

  @property
  def num_waiting(self) -> int:
    """Unfinished responses without a slot."""
    return len(self._queue)

  @property
  def num_active(self) -> int:
    """Slots with a response."""
    return int((self._response_B >= 0).sum())

  @property
  def num_free_pages(self) -> int:
    """Pages that hold nothing."""
    return len(self._free_pages)

  @property
  def done(self) -> bool:
    """Whether all responses have finished."""
    return not self.num_waiting and not self.num_active

  @property
  def response(self) -> np.ndarray:
    """[B] the response in each slot; -1 for none."""
    return self._response_B.copy()

  @property
  def can_look_ahead(self) -> bool:
    """Whether to plan a segment before the results of the last one are known.

    Not while responses wait: the slots of responses that just finished would
    stay empty for a segment. And not if pages might run out, so that responses
    are preempted that need not be.
    """
    fits = self._missing_pages().sum() <= self.num_free_pages
    return not self._queue and bool(fits)

  @property
  def may_go_on(self) -> bool:
    """Whether some response can have tokens left after all planned segments."""
    active = self._response_B >= 0
    planned = self._unknown_segments * self._sizes.segment_steps
    most_B = self._most_tokens()
    return bool((active & (self._num_generated_B + planned < most_B)).any())

  def admit(self) -> Admission:
    """Gives idle slots to waiting responses, as far as pages go.

    A response is admitted if its first segment fits in the pool beside the
    next segment of all active ones; so it is not preempted in the same round.
    For that, tokens of finished and later responses are evicted.
    """
    B, n = self._sizes.slots, self._sizes.num_pages
    full = lambda value: np.full(B, value, np.int32)
    new = np.zeros(B, bool)
    admission = Admission([], new, full(0), full(0), full(n), full(n))
    for slot in np.flatnonzero(self._response_B < 0).tolist():
      if not self._queue or not self._make_room(self._queue[0]):
        break
      self._start(slot, self._queue.popleft(), admission)
    return admission

  def allocate_pages(self) -> SegmentPages:
    """Gives each slot the pages that the next segment can fill.

    A slot can fill min(segment_steps, the tokens it may still generate) more
    positions, of each segment whose results are unknown. If pages run out, the
    newest responses are preempted: they give all their pages back and wait at
    the front of the queue. The oldest one is never preempted.
    """
    while (missing_B := self._missing_pages()).sum() > self.num_free_pages:
      self._evict_or_preempt()
    column_W = np.arange(self._sizes.pages_per_slot)
    num_pages_B = self._num_pages_B + missing_B
    allocated_BW = column_W >= self._num_pages_B[:, None]
    allocated_BW &= column_W < num_pages_B[:, None]
    self._table[allocated_BW] = self._pop_pages(int(missing_B.sum()))
    self._num_pages_B = num_pages_B
    self._unknown_segments += 1
    return SegmentPages(self._table.copy(), self._response_B >= 0)

  def apply_results(
    self, num_generated: np.ndarray, active: np.ndarray
  ) -> list[int]:
    """Frees the slots and pages of the responses that finished in a segment.

    That is the oldest one without results.

    Args:
      num_generated: [B] tokens of each response that its prefix does not hold.
      active: [B] bool, false where the response has finished.

    Returns:
      The responses that finished.
    """
    self._unknown_segments -= 1
    new_B = np.asarray(num_generated) - self._num_generated_B
    self.num_sampled += int(new_B[self._response_B >= 0].sum())
    self._num_generated_B[:] = num_generated
    slots = np.flatnonzero((self._response_B >= 0) & ~np.asarray(active))
    responses = self._response_B[slots].tolist()
    for slot, response in zip(slots.tolist(), responses, strict=True):
      if self.kept is not None:
        self.kept[response] = self._keep(slot)
      self._release_slot(slot)
      prefix = self._prefix_A[response]
      self._num_unfinished_N[prefix] -= 1
      if not self._num_unfinished_N[prefix]:
        self._release_pages(self._prefix_pages.pop(prefix).pages)
    return responses

  def _check_lengths(self, lengths_N):
    if empty := np.flatnonzero(lengths_N < 1).tolist():
      raise UserError(
        f"prefix {empty[0]}: it has no tokens, expected at least 1"
      )
    prompt, new = self._sizes.max_prompt_length, self._sizes.max_new_tokens
    for response in np.flatnonzero(self._max_tokens_A):
      prefix = lengths_N[self._prefix_A[response]]
      total = prefix + self._max_tokens_A[response]
      if total > prompt + new:
        raise UserError(
          f"response {response}: its prefix and new tokens can be {total} "
          f"tokens, expected at most max_prompt_length={prompt} plus "
          f"max_new_tokens={new}"
        )

  def _make_room(self, response):
    """Whether the pool gets room for the first segment of a waiting response.

    It does whenever no slot is active: then all that stays in the pool is this
    response's own prefix.
    """
    prefix, page_size = self._prefix_A[response], self._sizes.page_size
    m = self._num_cached_N[prefix]
    pages = self._pages_after_segment(m, 0, self._max_tokens_A[response])
    needed = pages - m // page_size + -(-m // page_size)
    needed -= len(self._cached(prefix).pages)
    needed += int(self._missing_pages().sum())
    while needed > self.num_free_pages:
      if not self._evict(after=prefix):
        return False
    return True

  def _cached(self, prefix) -> CachedTokens:
    """What the pool holds of a prefix."""
    return self._prefix_pages.get(prefix, CachedTokens([], 0))

  def _keep(self, slot) -> CachedTokens:
    """The tokens of a finished response; its newest one was not fed."""
    count = int(self._num_cached_B[slot] + self._num_generated_B[slot])
    pages = self._table[slot, : -(-count // self._sizes.page_size)].tolist()
    self._readers_n[pages] += 1
    return CachedTokens(pages, count)

  def _start(self, slot, response, admission):
    """Puts a response into a slot, and records that in `admission`."""
    prefix, page_size = int(self._prefix_A[response]), self._sizes.page_size
    m = int(self._num_cached_N[prefix])
    stored, num_cached = self._cached(prefix)
    stored = stored + self._pop_pages(-(-m // page_size) - len(stored))
    self._prefix_pages[prefix] = CachedTokens(stored, m)
    if num_cached < m:
      admission.prefill.append(PrefixPages(prefix, stored, num_cached))
    count = self._pages_after_segment(m, 0, self._max_tokens_A[response])
    pages = stored[: m // page_size]
    self._readers_n[pages] += 1
    pages = pages + self._pop_pages(count - len(pages))
    if m % page_size:
      admission.copy_source[slot] = stored[-1]
      admission.copy_target[slot] = pages[m // page_size]
    admission.new[slot] = True
    admission.response[slot] = response
    admission.num_cached[slot] = m
    self._response_B[slot], self._num_cached_B[slot] = response, m
    self._num_generated_B[slot], self._num_pages_B[slot] = 0, len(pages)
    self._table[slot, : len(pages)] = pages

  def _pages_after_segment(self, num_cached, num_generated, max_tokens):
    """Pages that a slot needs until the end of the next segment."""
    steps = self._sizes.segment_steps * (self._unknown_segments + 1)
    tokens = num_cached + np.minimum(num_generated + steps, max_tokens)
    return -(-tokens // self._sizes.page_size)

  def _missing_pages(self):
    """[B] pages that the slots lack for the next segment."""
    pages_B = self._pages_after_segment(
      self._num_cached_B, self._num_generated_B, self._most_tokens()
    )
    # After early ends of segments a slot may have more than it needs.
    missing_B = np.maximum(pages_B - self._num_pages_B, 0)
    return np.where(self._response_B >= 0, missing_B, 0)

  def _most_tokens(self):
    """[B] most tokens to generate in each slot; any without a response."""
    if not self._max_tokens_A.size:
      return np.zeros_like(self._response_B)
    return self._max_tokens_A[self._response_B]

  def _pop_pages(self, count):
    cut = len(self._free_pages) - count
    pages = self._free_pages[cut:]
    del self._free_pages[cut:]
    self._readers_n[pages] = 1
    return pages

  def _release_pages(self, pages):
    """Takes one reader from each of these pages; frees those without any."""
    self._readers_n[pages] -= 1
    self._free_pages += [p for p in pages if not self._readers_n[p]]

  def _evict(self, *, after) -> bool:
    """Evicts tokens that no slot reads: a finished response's, or a prefix.

    Prefixes up to `after` stay. Returns whether there were any to evict.
    """
    if self.kept:
      _, tokens = self.kept.popitem()
    elif self._prefix_pages and (last := max(self._prefix_pages)) > after:
      tokens = self._prefix_pages.pop(last)
    else:
      return False
    self._release_pages(tokens.pages)
    return True

  def _evict_or_preempt(self):
    """Evicts what no slot reads, else preempts the newest response."""
    slot = int(self._response_B.argmax())
    response = int(self._response_B[slot])
    if not self._evict(after=self._prefix_A[response]):
      self._queue.appendleft(response)
      self._release_slot(slot)

  def _release_slot(self, slot):
    """Frees a slot; others may read its pages."""
    self._release_pages(self._table[slot, : self._num_pages_B[slot]].tolist())
    self._table[slot] = 0
    self._num_pages_B[slot], self._response_B[slot] = 0, -1


class Requests(NamedTuple):
  """The responses that one shard has to generate.

  Attributes:
    prefixes: N arrays of int32, the tokens of each prefix without padding.
    prefix_index: [A] int, the prefix that each response continues; sorted.
    num_tokens: [A] int32, tokens of the response that its prefix holds.
    stop_at: [A] int32, tokens at which the response stops or pauses;
      `num_tokens` for a response that is not to be generated.
  """

  prefixes: Sequence[np.ndarray]
  prefix_index: np.ndarray
  num_tokens: np.ndarray
  stop_at: np.ndarray


def pending_requests(
  prompts: np.ndarray,
  prompt_lengths: np.ndarray,
  tokens: np.ndarray,
  lengths: np.ndarray,
  finish: np.ndarray,
  stop_at: np.ndarray,
) -> Requests:
  """The unfinished responses of samples, with the prefix of each.

  Neighbours that have the same prompt and no token yet share one prefix, the
  prompt. Every other response has a prefix of its own, its prompt and its
  tokens; its prompt is prefilled and stored again.

  Args:
    prompts: [P, prompt width] int32, padded on the left.
    prompt_lengths: [P] int, their tokens.
    tokens: [A, R] int32, of the responses so far; where another host has the
      response, only the number of its tokens counts.
    lengths: [A] int32, their number.
    finish: [A] int8, as in Samples.
    stop_at: [A] int, tokens at which a response pauses.
  """
  group_size = len(lengths) // max(len(prompts), 1)
  pending = (finish == UNFINISHED) & (lengths < stop_at)
  prefixes, prefix_index, shared_prompt = [], [], None
  for response, length in enumerate(lengths.tolist()):
    p = response // group_size
    if pending[response] and (length or shared_prompt != p):
      prompt = prompts[p, prompts.shape[1] - prompt_lengths[p] :]
      prefixes.append(np.concatenate([prompt, tokens[response, :length]]))
      shared_prompt = None if length else p
    prefix_index.append(max(len(prefixes) - 1, 0))
  stop_at = np.where(pending, stop_at, lengths).astype(np.int32)
  return Requests(prefixes, np.array(prefix_index, int), lengths, stop_at)
