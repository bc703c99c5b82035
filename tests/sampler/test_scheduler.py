"""The scheduler against simulated devices that record what each page holds."""

import dataclasses
import functools

import numpy as np
import pytest

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.config import PROMPT_ROWS, ShardSizes
from gspo_jax.sampler.continuous.scheduler import Request, Scheduler

EMPTY = -1
SMALL = ShardSizes(
  slots=2,
  num_pages=9,
  page_size=4,
  segment_steps=3,
  max_new_tokens=8,
  max_prompt_length=5,
)
sizes_of = functools.partial(dataclasses.replace, SMALL)


def tags(sequence, count):
  """The tags of a sequence's first tokens, as the pages record them."""
  return sequence * 1_000_000 + np.arange(count)


def scheduled(
  sizes, prefix_lengths, prefix_index, max_tokens, first=None, **options
):
  """A request a response; `first`: of each, how many of the prefix's tokens."""
  scheduler = Scheduler(sizes, len(max_tokens), **options)
  first = np.zeros(len(max_tokens), int) if first is None else first
  for b, most in enumerate(max_tokens):
    if most:
      q = int(prefix_index[b])
      tokens, begin = tags(q, prefix_lengths[q]), int(first[b])
      scheduler.submit(Request(tokens, b, begin + int(most), b, begin))
  return scheduler


def responses(requests):
  """The numbers of requests; EMPTY without one."""
  return np.array([EMPTY if r is None else r.response for r in requests])


class SimulatedDevices:
  """Decodes responses of given lengths, and checks every round.

  Each position of a page records the tag of the token last stored there: prefix
  q is sequence q, response b is sequence Q + b. A response of length 0 is not
  requested. With states, a slot must start from that of its prefix.
  """

  def __init__(
    self,
    sizes,
    prefix_lengths,
    prefix_index,
    lengths,
    *,
    max_tokens=None,
    idle=1.0,
    look_ahead=False,
    has_states=False,
    first=None,
  ):
    self.first = np.zeros(len(lengths), int) if first is None else first
    self.lengths, self.prefix = np.asarray(lengths), np.asarray(prefix_index)
    if max_tokens is None:
      max_tokens = np.full(len(lengths), sizes.max_new_tokens)
    self.max_tokens = np.where(self.lengths, max_tokens, 0)
    self.scheduler = scheduled(
      sizes,
      prefix_lengths,
      prefix_index,
      self.max_tokens,
      self.first,
      has_states=has_states,
    )
    self.has_states = has_states
    # The prefix whose state is in each slot and in each row.
    self.states = np.full(sizes.slots, EMPTY)
    self.rows = np.full(PROMPT_ROWS, EMPTY)
    self.copied = self.kept_pages = 0
    self.sizes = sizes
    self.prefix_lengths = np.asarray(prefix_lengths)
    self.idle = idle  # a segment ends early when this share of slots is idle
    self.look_ahead = look_ahead  # plans before results, where it may
    self.planned_ahead = 0
    M = sizes.slots
    self.pool = np.full((sizes.num_pages, sizes.page_size), EMPTY)
    self.response = np.full(M, EMPTY)
    self.cached = np.zeros(M, int)
    self.generated = np.zeros(M, int)
    self.held = np.zeros(M, int)  # pages of each slot, shared ones included
    self.table = np.zeros((M, sizes.pages_per_slot), np.int32)
    self.unshared = {}  # slot -> pages that no other slot may hold
    self.stored = {}  # prefix -> its pages, while responses to it are to come
    self.ages = {}  # active response -> when it was admitted
    self.finished, self.starts, self.prefilled = [], [], []
    self.preempted, self.left_idle = [], 0
    self.useful = self.offered = 0  # slot-steps while responses wait

  def run(self):
    for _ in range(self.lengths.sum() + 1):  # a segment gives at least a token
      if not (self.scheduler.num_waiting or self.scheduler.num_active):
        break
      self.round()
    assert self.scheduler.num_waiting == self.scheduler.num_active == 0
    assert self.scheduler.num_free_pages == self.sizes.num_pages
    assert sorted(self.finished) == np.flatnonzero(self.lengths).tolist()
    return self

  def round(self):
    waiting = {*np.flatnonzero(self.lengths).tolist()}
    waiting -= {*self.finished, *self.ages}
    assert self.scheduler.num_waiting == len(waiting)
    idle = int((self.response == EMPTY).sum())
    new = self.apply_admission(self.scheduler.admit())
    assert new == sorted(waiting)[: len(new)]  # the preempted ones first
    if self.scheduler.num_waiting:
      self.left_idle = max(self.left_idle, idle - len(new))
    assert len(new) <= idle
    self.apply_pages(*self.scheduler.allocate_pages(), new)
    self.decode()
    while self.look_ahead and self.plan_ahead():
      self.decode()
    self.apply_results()

  def plan_ahead(self):
    """Plans the next segment, then applies the last one's results."""
    if not self.scheduler.can_look_ahead or not self.scheduler.may_go_on:
      return False
    self.planned_ahead += 1
    (table, active), before = (
      self.scheduler.allocate_pages(),
      self.response.copy(),
    )
    np.testing.assert_array_equal(active, before != EMPTY)
    for slot in np.flatnonzero(active):
      self.hold(slot, start=self.begun[slot], segments=2)
    self.apply_results()
    # A slot that has just finished decodes nothing, whatever its pages are.
    self.table = np.where((self.response == EMPTY)[:, None], 0, table)
    self.check_pages()
    return True

  def apply_admission(self, admission):
    n, size = self.sizes.num_pages, self.sizes.page_size
    for prefill in admission.prefill:
      prefix = int(prefill.prefix.tokens[0]) // 1_000_000
      pages = np.array(prefill.pages, int)
      m = self.prefix_lengths[prefix] - 1
      assert len(pages) == -(-m // size)
      assert len(pages) or self.has_states
      self.prefilled.append(prefix)
      if (written := pages < n).all():
        self.stored[prefix] = prefill.pages
      assert (
        self.stored[prefix]
        == np.where(written, pages, self.stored[prefix]).tolist()
      )
      self.kept_pages += (~written).sum()
      self.pool[pages[written]] = EMPTY
      at = np.flatnonzero(written.repeat(size)[:m])
      self.pool[pages[at // size], at % size] = tags(prefix, m)[at]
      self.states[prefill.slots] = prefix
      if prefill.row < PROMPT_ROWS:
        self.rows[prefill.row] = prefix
    new = admission.new
    assert (self.response[new] == EMPTY).all()
    copies = admission.copy_target < n
    np.testing.assert_array_equal(
      copies, new & (admission.num_cached % size > 0)
    )
    np.testing.assert_array_equal(admission.copy_source < n, copies)
    source, target = admission.copy_source, admission.copy_target
    self.pool[target[copies]] = self.pool[source[copies]]
    self.response[new] = responses(self.scheduler.slots)[new]
    self.generated[new] = 0
    prefix = self.prefix[self.response[new]]
    self.cached[new] = self.prefix_lengths[prefix] - 1
    np.testing.assert_array_equal(admission.num_cached[new], self.cached[new])
    if self.has_states:
      copied = admission.prompt_row < PROMPT_ROWS
      self.states[copied] = self.rows[admission.prompt_row[copied]]
      np.testing.assert_array_equal(self.states[new], prefix)
      assert not (copied & ~new).any()
      self.copied += copied.sum()
    started = self.response[new].tolist()
    for response in started:
      self.ages[response] = len(self.starts)
      self.starts.append(response)
    return started

  def apply_pages(self, table, active, new):
    preempted = (self.response != EMPTY) & ~active
    assert not (active & (self.response == EMPTY)).any()
    if preempted.any():
      lost = self.response[preempted].tolist()
      kept = self.response[active].tolist()
      assert not set(lost) & set(new)
      # The newest are preempted, and never all.
      oldest_lost = min(self.ages[response] for response in lost)
      assert max(self.ages[response] for response in kept) < oldest_lost
      self.preempted += [self.ages.pop(response) for response in sorted(lost)]
      for slot in np.flatnonzero(preempted):
        self.clear(slot)
    self.table = table
    for slot in np.flatnonzero(self.response != EMPTY):
      self.hold(slot, start=self.generated[slot], segments=1)
    self.check_pages()

  def hold(self, slot, *, start, segments):
    """A slot holds what `segments` segments from `start` tokens on can fill."""
    most = self.max_tokens[self.response[slot]]
    more = min(start + segments * self.sizes.segment_steps, most)
    pages = -(-(self.cached[slot] + more) // self.sizes.page_size)
    self.held[slot] = max(self.held[slot], pages)

  def unshared_pages(self, slot):
    shared = self.cached[slot] // self.sizes.page_size
    return self.table[slot, shared : self.held[slot]].tolist()

  def check_pages(self):
    """Each page has one holder, and each slot the pages it needs."""
    assert self.table.dtype == np.int32
    active = np.flatnonzero(self.response != EMPTY).tolist()
    self.unshared = {slot: self.unshared_pages(slot) for slot in active}
    used = [page for pages in self.unshared.values() for page in pages]
    read = set(self.prefix[self.response[active]].tolist())
    used += [page for p in read for page in self.stored.get(p, [])]
    assert len(set(used)) == len(used)
    assert 0 <= self.table.min() <= self.table.max() < self.sizes.num_pages
    # One prefix without a slot may still be stored, the next to be read.
    unread = [len(self.stored[p]) for p in self.stored.keys() - read]
    taken = self.sizes.num_pages - self.scheduler.num_free_pages
    assert taken - len(used) in [0, *unread]
    for slot in range(self.sizes.slots):
      assert not self.table[slot, self.held[slot] :].any()

  def decode(self):
    size, waiting = self.sizes.page_size, self.scheduler.num_waiting
    self.begun = self.generated.copy()
    decoding = self.response != EMPTY
    min_active = 0
    # Slots may also be idle because no page is free.
    if waiting or self.look_ahead:
      min_active = max(decoding.sum() - self.idle * len(decoding), 0)
    sequences = len(self.prefix_lengths) + self.response
    for _ in range(self.sizes.segment_steps):
      slots = np.flatnonzero(decoding)
      at = self.cached[slots] + self.generated[slots]
      tag = sequences[slots] * 1_000_000 + self.generated[slots]
      self.pool[self.table[slots, at // size], at % size] = tag
      self.generated[slots] += 1
      if waiting:
        self.useful += len(slots)
        self.offered += len(decoding)
      decoding = decoding & (self.generated < self.lengths[self.response])
      if decoding.sum() <= min_active:
        break
    self.decoding = decoding

  def apply_results(self):
    for slot in np.flatnonzero(self.response != EMPTY):
      self.check_sequence(slot)
    done = (self.response != EMPTY) & ~self.decoding
    expected = self.response[done].tolist()
    table = self.table.copy()
    # The scheduler keeps no array of the caller's: this one is overwritten.
    num_tokens = self.generated + self.first[self.response]
    ended = self.scheduler.apply_results(num_tokens, self.decoding)
    num_tokens[:] = 0
    finished = [request.response for request, _ in ended]
    for request, count in ended:
      b = request.response
      assert count == self.first[b] + self.lengths[b]
    assert sorted(finished) == sorted(expected)
    assert self.scheduler.num_active == self.decoding.sum()
    np.testing.assert_array_equal(self.table, table)
    self.finished += finished
    for slot in np.flatnonzero(done):
      assert self.generated[slot] == self.lengths[self.response[slot]]
      del self.ages[self.response[slot]]
      self.clear(slot)
    for prefix in set(self.prefix[finished].tolist()):
      responses = np.flatnonzero((self.prefix == prefix) & (self.lengths > 0))
      if set(responses.tolist()) <= set(self.finished):
        self.pool[self.stored.pop(prefix, [])] = EMPTY

  def clear(self, slot):
    self.pool[self.unshared[slot]] = EMPTY
    self.states[slot] = EMPTY
    self.response[slot], self.held[slot] = EMPTY, 0

  def check_sequence(self, slot):
    """The slot's pages hold its prefix and its response, and nothing else."""
    response, m = self.response[slot], self.cached[slot]
    sequence = np.concatenate(
      [
        tags(self.prefix[response], m),
        tags(len(self.prefix_lengths) + response, self.generated[slot]),
      ]
    )
    at = np.arange(len(sequence))
    size = self.sizes.page_size
    stored = self.pool[self.table[slot, at // size], at % size]
    np.testing.assert_array_equal(stored, sequence)


def random_run(seed, *, ample, look_ahead=False, has_states=False):
  """A run of random sizes; `ample`: the pool holds the longest of all slots."""
  rng = np.random.default_rng(seed)
  size = lambda low, high: int(rng.integers(low, high + 1))
  prompts, group_size = size(1, 12), size(1, 6)
  sizes = ShardSizes(
    page_size=size(1, 9),
    segment_steps=size(1, 12),
    max_new_tokens=size(1, 40),
    slots=size(1, 9),
    num_pages=10**6,
    max_prompt_length=size(1, 30),
  )
  least = sizes.pages_per_slot + 1
  pages = sizes.slots * least if ample else least
  pages += 0 if ample else size(0, least * sizes.slots // 3)
  sizes = dataclasses.replace(sizes, num_pages=pages)
  prefix_lengths = rng.integers(1, sizes.max_prompt_length + 1, prompts)
  prefix_index = np.repeat(np.arange(prompts), group_size)
  lengths = rng.integers(1, sizes.max_new_tokens + 1, prompts * group_size)
  return SimulatedDevices(
    sizes,
    prefix_lengths,
    prefix_index,
    lengths,
    idle=rng.random(),
    look_ahead=look_ahead,
    has_states=has_states,
  ).run()


def test_every_response_finishes_once_with_few_pages():
  """Each round is checked, with preemptions and second prefills."""
  runs = [random_run(seed, ample=False) for seed in range(40)]
  assert sum(len(run.preempted) for run in runs) > 40
  again = [len(run.prefilled) - len(set(run.prefilled)) for run in runs]
  assert sum(again) > 10


@pytest.mark.parametrize("ample", [True, False])
def test_segments_planned_before_the_last_results(ample):
  """Each has the pages that it can fill, and preempts no response."""
  runs = [random_run(n, ample=ample, look_ahead=True) for n in range(40)]
  assert sum(run.planned_ahead for run in runs) > 100


def test_every_response_starts_from_the_state_of_its_prefix():
  """With few pages, states are made again of prefixes that are still stored."""
  runs = [random_run(seed, ample=False, has_states=True) for seed in range(40)]
  again = [len(run.prefilled) - len(set(run.prefilled)) for run in runs]
  assert sum(again) > 10
  assert sum(run.kept_pages for run in runs) > 10
  assert sum(run.copied for run in runs) > 100
  for seed in range(20):
    run = random_run(seed, ample=True, has_states=True)
    assert run.prefilled == list(range(len(run.prefix_lengths)))
    assert run.kept_pages == 0


def admitted(scheduler):
  """(prefix, pages, slots, row) of each prefill, and `prompt_row`."""
  admission = scheduler.admit()
  prefills = [
    (int(p.prefix.tokens[0]) // 1_000_000, p.pages, p.slots, p.row)
    for p in admission.prefill
  ]
  return prefills, admission.prompt_row.tolist()


def test_no_slot_reads_a_row_that_is_written_in_the_same_round():
  """Groups of three in two slots: the last of one starts beside the next."""
  sizes = sizes_of(page_size=8, num_pages=20)
  scheduler = scheduled(
    sizes, [5, 1, 5], np.repeat(range(3), 3), [3] * 9, has_states=True
  )
  none, rounds = PROMPT_ROWS, []
  while scheduler.num_waiting or scheduler.num_active:
    prefills, rows = admitted(scheduler)
    rounds.append(([(p, *rest) for p, _, *rest in prefills], rows))
    _, active = scheduler.allocate_pages()
    scheduler.apply_results([3, 3], ~active)
  first, second = 1, 0
  assert rounds == [
    ([(0, [0, 1], first)], [none, none]),
    ([(1, [1], second)], [first, none]),
    ([], [second, second]),
    ([(2, [0, 1], first)], [none, none]),
    ([], [first, none]),
  ]


def test_no_segment_is_planned_ahead_where_pages_or_tokens_run_out():
  """8 tokens fill two pages, in three segments of 3."""
  for num_pages in (3, 4):
    sizes = sizes_of(max_prompt_length=1, num_pages=num_pages)
    scheduler = scheduled(sizes, [1], [0] * 2, [8] * 2)
    scheduler.admit()
    scheduler.allocate_pages()
    assert scheduler.can_look_ahead == (num_pages == 4)
  sizes = sizes_of(max_prompt_length=1)
  scheduler = scheduled(sizes, [1], [0] * 2, [8] * 2)
  scheduler.admit()
  may_go_on = []
  for _ in range(3):
    scheduler.allocate_pages()
    may_go_on.append(scheduler.may_go_on)
  assert may_go_on == [True, True, False]


@pytest.mark.parametrize("seed", range(20))
def test_resumed_responses_beside_new_ones(seed):
  """Groups that share a prefix, prefixes of one response, finished ones."""
  rng = np.random.default_rng(seed)
  sizes = sizes_of(
    slots=4, num_pages=20, page_size=3, max_new_tokens=12, max_prompt_length=9
  )
  prompt, new = sizes.max_prompt_length, sizes.max_new_tokens
  counts = rng.integers(1, 4, 12)
  prefix_lengths = rng.integers(1, prompt + 1, 12)
  prefix_lengths += (counts == 1) * rng.integers(0, new, 12)
  prefix_index = np.repeat(np.arange(12), counts)
  room = np.minimum(new, prompt + new - prefix_lengths)[prefix_index]
  max_tokens = rng.integers(1, room + 1)
  lengths = rng.integers(1, max_tokens + 1)
  lengths[rng.integers(0, len(lengths), 4)] = 0
  alone = (counts == 1)[prefix_index]
  first = alone * rng.integers(0, prefix_lengths[prefix_index])
  SimulatedDevices(
    sizes,
    prefix_lengths,
    prefix_index,
    lengths,
    max_tokens=max_tokens,
    first=first,
    idle=rng.random(),
  ).run()
  assert (lengths == 0).any()
  assert (counts > 1).any()


def test_an_ample_pool_fills_every_slot_and_prefills_once():
  for seed in range(30):
    run = random_run(seed, ample=True)
    assert run.left_idle == 0
    assert run.preempted == []
    assert run.starts == list(range(len(run.lengths)))
    assert run.prefilled == np.flatnonzero(run.prefix_lengths > 1).tolist()


@pytest.mark.parametrize("prompt", [1, 8, 9, 12])
@pytest.mark.parametrize("new", [1, 4, 21])
def test_the_smallest_pool_decodes_the_longest_responses(prompt, new):
  """One at a time where it must be; all finish."""
  pages = -(-(prompt - 1 + new) // SMALL.page_size) + 1
  sizes = sizes_of(
    slots=4, num_pages=pages, max_new_tokens=new, max_prompt_length=prompt
  )
  prefix_index = np.repeat(range(5), 3)
  SimulatedDevices(sizes, [prompt] * 5, prefix_index, [new] * 15).run()


def test_slots_are_busy_while_responses_wait():
  """With half the pages; the median length is a tenth of that of 5 %."""
  M, P, G, longest = 64, 32, 16, 1024
  sizes = ShardSizes(
    slots=M,
    num_pages=10**6,
    page_size=32,
    segment_steps=64,
    max_new_tokens=longest,
    max_prompt_length=128,
  )
  pages = M * sizes.pages_per_slot // 2
  sizes = dataclasses.replace(sizes, num_pages=pages)
  rng = np.random.default_rng(0)
  sigma = np.log(10) / 1.645
  lengths = np.exp(rng.normal(np.log(longest / 10), sigma, P * G))
  lengths = np.clip(lengths.round().astype(int), 1, longest)
  prefix_lengths = rng.integers(16, 129, P)
  prefix_index = np.repeat(range(P), G)
  run = SimulatedDevices(
    sizes, prefix_lengths, prefix_index, lengths, idle=1 / 8
  ).run()
  assert run.useful >= 0.9 * run.offered
  assert run.preempted == []


def test_a_prefix_without_tokens_is_an_error():
  with pytest.raises(UserError, match="a prefix has no tokens: expected"):
    scheduled(SMALL, [5, 0], [0, 1], [8] * 2)


def test_a_request_without_room_evicts_nothing():
  """And one of an episode that has begun starts before new ones."""
  sizes = sizes_of(num_pages=6, max_prompt_length=12)
  scheduler = Scheduler(sizes, 4, keeps=True)
  scheduler.submit(Request(np.arange(4), 0, 2, 0))
  scheduler.submit(Request(np.arange(8, 12), 1, 8, 1))
  scheduler.admit()
  scheduler.allocate_pages()
  ((ended, _),) = scheduler.apply_results([2, 2], [False, True])
  ended.kept.tokens = np.append(ended.tokens, [4, 5])
  scheduler.submit(Request(np.arange(20, 32), 2, 8, 2))
  assert not scheduler.admit().new.any()
  assert len(scheduler.kept) == 1
  again = np.append(ended.kept.tokens, 6)
  scheduler.submit(Request(again, 0, 5, 0, 3, goes_on=True))
  (prefill,) = scheduler.admit().prefill
  assert (prefill.prefix.tokens.tolist(), prefill.num_cached) == ([*again], 5)


class Turns:
  """Conversations of several turns, whose tokens stay in the pool.

  Requests come between any two segments. Token t of conversation a is tagged;
  those of a prompt are its group's, and prompts begin alike.
  """

  def __init__(self, rng, *, pages):
    size = lambda low, high: int(rng.integers(low, high + 1))
    self.rng, group, prompts = rng, size(1, 4), size(1, 5)
    B = prompts * group
    sizes = ShardSizes(
      page_size=size(1, 6),
      segment_steps=size(1, 7),
      max_new_tokens=40,
      slots=size(1, 6),
      num_pages=10**6,
      max_prompt_length=12,
    )
    least = sizes.pages_per_slot + 1
    num_pages = 2 * least * B if pages == "ample" else least + size(0, least)
    self.sizes = dataclasses.replace(sizes, num_pages=num_pages)
    lengths = rng.integers(1, 13, prompts)
    same = rng.integers(0, lengths + 1)  # tokens that all prompts begin with
    self.texts = []
    for p in range(prompts):
      alike, text = [*tags(7, same[p])], [*tags(p, lengths[p])]
      self.texts += [alike + text[same[p] :] for _ in range(group)]
    self.prompt_lengths = [*map(len, self.texts)]
    self.left = rng.integers(1, 4, B)  # turns
    self.pool = np.full((num_pages, self.sizes.page_size), EMPTY)
    self.scheduler = Scheduler(self.sizes, B, keeps=True)
    self.at = {}  # tokens of each slot's turn, and how many it will have
    self.given = self.prefilled = 0  # tokens of turns after the first
    self.shared = [0, 0]  # tokens of first turns, by the stage of the prefill

  def read(self, pages, count):
    at = np.arange(count)
    size = self.sizes.page_size
    return self.pool[np.asarray(pages, int)[at // size], at % size]

  def submit(self, a):
    """The next turn of a conversation, behind some tokens that it read."""
    text, turn = self.texts[a], self.left[a]
    if len(text) > self.prompt_lengths[a]:
      given = self.rng.integers(1, 4)
      text += [*tags(1000 + 10 * a + turn, given)]
      self.given += given
    number = len(text) - self.prompt_lengths[a]
    tokens = np.array(text, np.int32)
    stop_at, goes_on = number + 8, number > 0
    request = Request(tokens, a, stop_at, a, number, goes_on=goes_on, owner=a)
    self.scheduler.submit(request)
    self.left[a] -= 1

  def run(self):
    todo = self.rng.permutation(len(self.texts)).tolist()
    while todo or self.scheduler.num_waiting or self.scheduler.num_active:
      for _ in range(self.rng.integers(0, 4)):
        if todo:
          self.submit(todo.pop())
      for a in self.round():
        if self.left[a]:
          todo.append(a)
    held = {
      page for kept in self.scheduler.kept.values() for page in kept.pages
    }
    free = self.scheduler.num_free_pages
    assert self.sizes.num_pages - free == len(held)
    return self

  def round(self):
    size = self.sizes.page_size
    admission = self.scheduler.admit()
    for prefill in sorted(admission.prefill, key=lambda p: p.stage):
      pages, cached = prefill.pages, prefill.num_cached
      tokens = prefill.prefix.tokens[:-1]
      np.testing.assert_array_equal(self.read(pages, cached), tokens[:cached])
      for t in range(cached // size * size, len(tokens)):
        self.pool[pages[t // size], t % size] = tokens[t]
      if prefill.prefix.requests[0].goes_on:
        self.prefilled += len(tokens) - cached
      else:
        self.shared[prefill.stage] += cached
    copies = admission.copy_target < len(self.pool)
    source, target = admission.copy_source, admission.copy_target
    self.pool[target[copies]] = self.pool[source[copies]]
    slots = self.scheduler.slots
    for slot in np.flatnonzero(admission.new):
      self.at[slot] = 0, int(self.rng.integers(1, 8))
    table, planned = self.scheduler.allocate_pages()
    active, num_tokens = planned.copy(), np.zeros(len(slots), int)
    for slot in np.flatnonzero(planned):
      request, (done, most) = slots[slot], self.at[slot]
      steps = min(self.sizes.segment_steps, most - done)
      whole = [*request.tokens, *self.sampled(request.owner, done + steps)]
      t = len(request.tokens) - 1 + done + np.arange(steps)
      self.pool[table[slot, t // size], t % size] = np.array(whole)[t]
      found = self.read(table[slot], len(whole) - 1)
      np.testing.assert_array_equal(found, whole[:-1])
      self.at[slot] = done + steps, most
      num_tokens[slot] = request.num_tokens + done + steps
      active[slot] = done + steps < most
    ended = self.scheduler.apply_results(num_tokens, active)
    for request, count in ended:
      new = self.sampled(request.owner, count - request.num_tokens)
      self.texts[request.owner] += new
      request.kept.tokens = np.append(request.tokens, np.int32(new))
    for kept in self.scheduler.kept.values():
      found = self.read(kept.pages, kept.num_stored)
      np.testing.assert_array_equal(found, kept.tokens[: kept.num_stored])
    return [request.owner for request, _ in ended]

  def sampled(self, a, count):
    return [*tags(100 + 10 * a + self.left[a], count)]


@pytest.mark.parametrize("pages", ["ample", "few"])
def test_a_request_reads_the_tokens_that_earlier_ones_left(pages):
  """With ample pages a later turn prefills only what the policy was not fed."""
  shared, again = np.zeros(2, int), 0
  for seed in (*range(40), 130, 240, 629, 634, 861):
    turns = Turns(np.random.default_rng(seed), pages=pages).run()
    assert not turns.left.any()
    again += turns.prefilled - turns.given
    shared += turns.shared
  assert (again > 0) == (pages == "few")
  assert (shared >= 10).all()
