"""Which answer has which slot and which pages, settled between two segments.

Dimension key: N texts, A answers, B slots, n pages in the pool, S tokens of a
page, W pages of the longest row, m cached tokens of a text: all but its last,
which an answer's first step feeds.

A text is what answers continue: a prompt, for all answers to it, or a prompt
and the beginning of one answer, for the rest of that.

This is the host's half of paged decoding. A round goes `admit`, `grow`, a
segment on the device, `settle`. A text's m // S full pages are shared by the
rows of its answers; of the partial one each row gets a copy. A text stays in
the pool until all its answers have ended; when pages run out, the texts that
no row reads go first (they are prefilled again later), then the newest rows.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.paging import ShardSizes
from gspo_jax.sampler.samples import UNFINISHED, Samples


@dataclasses.dataclass(frozen=True)
class Admission:
  """Answers that got a slot: prefill, then copy pages, then grow.

  Attributes:
    prefill: (text, the pages of its m tokens) of texts to store first; one
      with m = 0 is never among them.
    new: [B] bool, slots that got an answer; the others hold 0 below.
    answer: [B] int32, its number.
    length: [B] int32, m, the tokens of its row that are cached.
    source: [B] int32, the page to copy; n where there is none.
    target: [B] int32, the page to copy it to; n where there is none.
  """

  prefill: list[tuple[int, list[int]]]
  new: np.ndarray
  answer: np.ndarray
  length: np.ndarray
  source: np.ndarray
  target: np.ndarray


@dataclasses.dataclass(frozen=True)
class SegmentPages:
  """What the next segment decodes.

  Attributes:
    table: [B, W] int32, the pages of each row, in order; 0 where it has none.
    active: [B] bool, slots to decode. Those that have been preempted are not
      among them: they get their answer again in a later admission.
  """

  table: np.ndarray
  active: np.ndarray


class Scheduler:
  """The slots and pages of one shard; all numbers are the shard's own."""

  def __init__(
    self,
    sizes: ShardSizes,
    lengths: Sequence[int],
    owner: Sequence[int],
    most: Sequence[int],
  ):
    """All answers wait, in order.

    Args:
      sizes: of the shard.
      lengths: [N], tokens of each text.
      owner: [A], the text that each answer continues; never falling.
      most: [A], tokens that each may draw; one of 0 is not to be drawn.

    Raises:
      UserError: a text is empty, or it and an answer are longer than a row.
    """
    self._sizes = sizes
    lengths = np.asarray(lengths, np.int64)
    self._owner_A = np.asarray(owner, np.int64)
    self._most_A = np.asarray(most, np.int64)
    self._require_rows(lengths)
    B = sizes.slots
    self._cached_N = lengths - 1
    drawn = np.flatnonzero(self._most_A)
    # Answers that have not ended.
    self._left_N = np.bincount(self._owner_A[drawn], minlength=len(lengths))
    # Every waiting answer has a greater number than every active one, so the
    # greatest active one is the newest.
    self._queue = collections.deque(drawn.tolist())
    self._free = list(range(sizes.pages))
    self._texts = {}  # text -> its pages, of those in the pool
    self._answer_B = np.full(B, -1)
    self._cached_B = np.zeros(B, np.int64)
    self._drawn_B = np.zeros(B, np.int64)
    self._held_B = np.zeros(B, np.int64)  # pages in the row, shared ones too
    self._table = np.zeros((B, sizes.width), np.int32)

  @property
  def waiting(self) -> int:
    """Answers without a slot that have not ended."""
    return len(self._queue)

  @property
  def active(self) -> int:
    """Slots with an answer."""
    return int((self._answer_B >= 0).sum())

  @property
  def free(self) -> int:
    """Pages that nobody holds."""
    return len(self._free)

  @property
  def done(self) -> bool:
    """Whether all answers have ended."""
    return not self.waiting and not self.active

  def admit(self) -> Admission:
    """Gives idle slots to waiting answers, as far as pages go.

    An answer is let in if its first segment fits beside the next one of all
    rows before it: so it is not preempted in the same round.
    """
    B, n = self._sizes.slots, self._sizes.pages
    fill = lambda value: np.full(B, value, np.int32)
    new = np.zeros(B, bool)
    found = Admission([], new, fill(0), fill(0), fill(n), fill(n))
    for slot in np.flatnonzero(self._answer_B < 0).tolist():
      if not self._queue or not self._fits(self._queue[0]):
        break
      self._place(slot, self._queue.popleft(), found)
    return found

  def grow(self) -> SegmentPages:
    """Gives each row the pages that the next segment can fill.

    That is min(steps, what the answer may still draw) tokens more. Where pages
    run out the newest rows give all theirs back and wait again, in front; the
    oldest always stays.
    """
    while (need_B := self._need()).sum() > self.free:
      self._give_way()
    column_W = np.arange(self._sizes.width)
    to_B = self._held_B + need_B
    fresh_BW = column_W >= self._held_B[:, None]
    fresh_BW &= column_W < to_B[:, None]
    self._table[fresh_BW] = self._take(int(need_B.sum()))
    self._held_B = to_B
    return SegmentPages(self._table.copy(), self._answer_B >= 0)

  def settle(self, drawn: np.ndarray, active: np.ndarray) -> list[int]:
    """Frees what the answers that ended in a segment held.

    Args:
      drawn: [B] tokens that each slot's answer has drawn here.
      active: [B] bool, false where the answer has ended.

    Returns:
      The answers that ended.
    """
    self._drawn_B[:] = drawn
    ended = np.flatnonzero((self._answer_B >= 0) & ~np.asarray(active))
    answers = self._answer_B[ended].tolist()
    for slot, answer in zip(ended.tolist(), answers, strict=True):
      self._clear(slot)
      text = self._owner_A[answer]
      self._left_N[text] -= 1
      if not self._left_N[text]:
        self._free += self._texts.pop(text)
    return answers

  def _require_rows(self, lengths_N):
    if empty := np.flatnonzero(lengths_N < 1).tolist():
      raise UserError(f"text {empty[0]}: it has no token, expected at least 1")
    room = self._sizes.prompt + self._sizes.most
    for answer in np.flatnonzero(self._most_A):
      row = lengths_N[self._owner_A[answer]] + self._most_A[answer]
      if row > room:
        raise UserError(
          f"answer {answer}: it and its text can have {row} tokens, expected "
          f"at most prompt={self._sizes.prompt} and most={self._sizes.most}"
        )

  def _fits(self, answer):
    """Whether it may start.

    Where none is active it does: at most one text is in the pool without a
    row, and that is the next answer's, since `_give_way` takes it first.
    """
    text, S = self._owner_A[answer], self._sizes.page
    m = self._cached_N[text]
    cost = self._pages(m, 0, self._most_A[answer]) - m // S
    if text not in self._texts:
      cost += -(-m // S)
    cost += int(self._need().sum())
    return cost <= self.free

  def _place(self, slot, answer, found):
    """Starts an answer, and notes it in `found`."""
    text, S = int(self._owner_A[answer]), self._sizes.page
    m = int(self._cached_N[text])
    if text not in self._texts:
      self._texts[text] = self._take(-(-m // S))
      if m:
        found.prefill.append((text, self._texts[text]))
    row = self._texts[text][: m // S]
    row = row + self._take(self._pages(m, 0, self._most_A[answer]) - len(row))
    if m % S:
      found.source[slot] = self._texts[text][-1]
      found.target[slot] = row[m // S]
    found.new[slot], found.answer[slot], found.length[slot] = True, answer, m
    self._answer_B[slot], self._cached_B[slot] = answer, m
    self._drawn_B[slot], self._held_B[slot] = 0, len(row)
    self._table[slot, : len(row)] = row

  def _pages(self, m, drawn, most):
    """Pages of a row when the next segment has ended."""
    tokens = m + np.minimum(drawn + self._sizes.steps, most)
    return -(-tokens // self._sizes.page)

  def _need(self):
    """[B] pages that rows lack for the next segment."""
    most_B = self._most_A[self._answer_B] if self._most_A.size else 0
    pages_B = self._pages(self._cached_B, self._drawn_B, most_B)
    return np.where(self._answer_B >= 0, pages_B - self._held_B, 0)

  def _take(self, count):
    cut = len(self._free) - count
    pages = self._free[cut:]
    del self._free[cut:]
    return pages

  def _give_way(self):
    """Frees the pages of a text that no row reads, or of the newest row."""
    newest, last = int(self._answer_B.argmax()), max(self._texts)
    answer = int(self._answer_B[newest])
    if last > self._owner_A[answer]:
      self._free += self._texts.pop(last)
    else:
      self._queue.appendleft(answer)
      self._clear(newest)

  def _clear(self, slot):
    """Frees the row's own pages and its slot."""
    shared, held = self._cached_B[slot] // self._sizes.page, self._held_B[slot]
    self._free += self._table[slot, shared:held].tolist()
    self._table[slot], self._held_B[slot], self._answer_B[slot] = 0, 0, -1


class Requests(NamedTuple):
  """Of N texts, each the start of one answer's row or of several.

  Attributes:
    tokens: N arrays of int32, no padding.
    owner: [A] int, the text that each answer continues; never falling.
    drawn: [A] int32, tokens of the answer that its text holds.
    until: [A] int32, those that it is to have in the end; of an answer that is
      not to be drawn, `drawn`.
  """

  tokens: Sequence[np.ndarray]
  owner: np.ndarray
  drawn: np.ndarray
  until: np.ndarray


def pending_requests(
  prompts: np.ndarray, lengths: np.ndarray, begun: Samples, until: np.ndarray
) -> Requests:
  """The answers that have not ended, and where each goes on.

  Neighbours to a prompt that have no token yet share one text, the prompt. The
  others have one each, prompt and all, for what they drew differs: their prompt
  is prefilled and stored for each.

  Args:
    prompts: [P, S] int32, padded on the left.
    lengths: [P] int, their tokens.
    begun: numpy arrays of A answers.
    until: [A] int, tokens at which an answer is to pause.
  """
  group = len(begun.lengths) // max(len(prompts), 1)
  waits = (begun.finish == UNFINISHED) & (begun.lengths < until)
  tokens, owner, shared = [], [], None
  for answer, drawn in enumerate(begun.lengths.tolist()):
    p = answer // group
    if waits[answer] and (drawn or shared != p):
      prompt = prompts[p, prompts.shape[1] - lengths[p] :]
      tokens.append(np.concatenate([prompt, begun.tokens[answer, :drawn]]))
      shared = None if drawn else p
    owner.append(max(len(tokens) - 1, 0))
  until = np.where(waits, until, begun.lengths)
  return Requests(
    tokens, np.array(owner, int), begun.lengths, until.astype(np.int32)
  )
