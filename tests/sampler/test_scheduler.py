"""The scheduler against simulated devices that record what each page holds."""

import dataclasses
import functools

import numpy as np
import pytest

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.config import PROMPT_ROWS, ShardSizes
from gspo_jax.sampler.continuous.scheduler import Scheduler, pending_requests
from gspo_jax.sampler.samples import STOPPED, UNFINISHED

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
  ):
    self.lengths, self.prefix = np.asarray(lengths), np.asarray(prefix_index)
    if max_tokens is None:
      max_tokens = np.full(len(lengths), sizes.max_new_tokens)
    self.max_tokens = np.where(self.lengths, max_tokens, 0)
    self.scheduler = Scheduler(
      sizes,
      prefix_lengths,
      prefix_index,
      self.max_tokens,
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
      if self.scheduler.done:
        break
      self.round()
    assert self.scheduler.done
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
    self.apply_pages(self.scheduler.allocate_pages(), new)
    self.decode()
    while self.look_ahead and self.plan_ahead():
      self.decode()
    self.apply_results()

  def plan_ahead(self):
    """Plans the next segment, then applies the last one's results."""
    if not self.scheduler.can_look_ahead or not self.scheduler.may_go_on:
      return False
    self.planned_ahead += 1
    planned, before = self.scheduler.allocate_pages(), self.response.copy()
    np.testing.assert_array_equal(planned.active, before != EMPTY)
    for slot in np.flatnonzero(planned.active):
      self.hold(slot, start=self.begun[slot], segments=2)
    self.apply_results()
    # A slot that has just finished decodes nothing, whatever its pages are.
    self.table = np.where((self.response == EMPTY)[:, None], 0, planned.table)
    self.check_pages()
    return True

  def apply_admission(self, admission):
    n, size = self.sizes.num_pages, self.sizes.page_size
    for prefill in admission.prefill:
      prefix, pages = prefill.prefix, np.array(prefill.pages, int)
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
    assert not admission.response[~new].any()
    copies = admission.copy_target < n
    np.testing.assert_array_equal(
      copies, new & (admission.num_cached % size > 0)
    )
    np.testing.assert_array_equal(admission.copy_source < n, copies)
    source, target = admission.copy_source, admission.copy_target
    self.pool[target[copies]] = self.pool[source[copies]]
    self.response[new], self.generated[new] = admission.response[new], 0
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

  def apply_pages(self, segment, new):
    preempted = (self.response != EMPTY) & ~segment.active
    assert not (segment.active & (self.response == EMPTY)).any()
    if preempted.any():
      lost = self.response[preempted].tolist()
      kept = self.response[segment.active].tolist()
      assert not set(lost) & set(new)
      # The newest are preempted, and never all.
      oldest_lost = min(self.ages[response] for response in lost)
      assert max(self.ages[response] for response in kept) < oldest_lost
      self.preempted += [self.ages.pop(response) for response in sorted(lost)]
      for slot in np.flatnonzero(preempted):
        self.clear(slot)
    self.table = segment.table
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
    generated = self.generated.copy()
    finished = self.scheduler.apply_results(generated, self.decoding)
    generated[:] = 0
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
  """A run of random sizes.

  An ample pool holds the longest response and prompt in each slot; else it has
  little more than the fewest pages allowed.
  """
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
  prefills = [(p.prefix, p.pages, p.slots, p.row) for p in admission.prefill]
  return prefills, admission.prompt_row.tolist()


def test_no_slot_reads_a_row_that_is_written_in_the_same_round():
  """Groups of three in two slots: the last of one starts beside the next."""
  sizes = sizes_of(page_size=8, num_pages=20)
  scheduler = Scheduler(
    sizes, [5, 1, 5], np.repeat(range(3), 3), [3] * 9, has_states=True
  )
  none, rounds = PROMPT_ROWS, []
  while not scheduler.done:
    prefills, rows = admitted(scheduler)
    rounds.append(([(p, *rest) for p, _, *rest in prefills], rows))
    active = scheduler.allocate_pages().active
    scheduler.apply_results([3, 3], ~active)
  first, second = 1, 0
  assert rounds == [
    ([(0, [0, 1], first)], [none, none]),
    ([(1, [1], second)], [first, none]),
    ([], [second, second]),
    ([(2, [0, 1], first)], [none, none]),
    ([], [first, none]),
  ]


def test_no_segment_is_planned_ahead_while_responses_wait():
  scheduler = Scheduler(SMALL, [1], [0] * 3, [8] * 3)
  for waiting in (1, 0):
    scheduler.admit()
    active = scheduler.allocate_pages().active
    assert scheduler.num_waiting == waiting
    assert scheduler.can_look_ahead == (not waiting)
    assert scheduler.may_go_on
    scheduler.apply_results([3, 3], active & [waiting == 0, True])


def test_no_segment_is_planned_ahead_where_pages_or_tokens_run_out():
  """8 tokens fill two pages, in three segments of 3."""
  for num_pages in (3, 4):
    sizes = sizes_of(max_prompt_length=1, num_pages=num_pages)
    scheduler = Scheduler(sizes, [1], [0] * 2, [8] * 2)
    scheduler.admit()
    scheduler.allocate_pages()
    assert scheduler.can_look_ahead == (num_pages == 4)
  sizes = sizes_of(max_prompt_length=1)
  scheduler = Scheduler(sizes, [1], [0] * 2, [8] * 2)
  scheduler.admit()
  may_go_on = []
  for _ in range(3):
    scheduler.allocate_pages()
    may_go_on.append(scheduler.may_go_on)
  assert may_go_on == [True, True, False]


def test_pages_of_a_segment_planned_ahead_are_kept_if_it_ends_early():
  """Two slots hold 6 pages each for two segments, and then need 5."""
  sizes = sizes_of(num_pages=12, page_size=1, max_prompt_length=1)
  scheduler = Scheduler(sizes, [1], [0] * 2, [8] * 2)
  scheduler.admit()
  active = scheduler.allocate_pages().active
  assert scheduler.can_look_ahead
  table = scheduler.allocate_pages().table[:, :6]
  assert len(np.unique(table)) == 12
  scheduler.apply_results([1, 1], active)
  assert not scheduler.can_look_ahead
  scheduler.apply_results([2, 2], active)
  np.testing.assert_array_equal(scheduler.allocate_pages().table[:, :6], table)
  assert scheduler.num_free_pages == 0
  scheduler.apply_results([3, 3], ~active)
  assert scheduler.num_free_pages == 12


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
  SimulatedDevices(
    sizes,
    prefix_lengths,
    prefix_index,
    lengths,
    max_tokens=max_tokens,
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
  with pytest.raises(UserError, match="prefix 1: it has no tokens, expected"):
    Scheduler(SMALL, [5, 0], [0, 1], [8] * 2)


def test_a_shard_without_requests_takes_part_in_each_round():
  scheduler = Scheduler(SMALL, [], [0] * 4, [0] * 4)
  assert scheduler.done
  assert not scheduler.admit().new.any()
  segment = scheduler.allocate_pages()
  assert not segment.active.any()
  scheduler.apply_results(np.zeros(2), segment.active)


# pending_requests, against plain Python.

P, S, G, R = 3, 4, 4, 6
PROMPTS = np.arange(P * S, dtype=np.int32).reshape(P, S)
PROMPT_LENGTHS = np.array([4, 1, 2])


TOKENS = 100 + np.arange(P * G * R, dtype=np.int32).reshape(-1, R)


def assert_requested(requests, lengths, finish, stop_at):
  """Each unfinished response below its `stop_at` has its prefix, no other."""
  requested = requests.stop_at > requests.num_tokens
  pending = (finish == UNFINISHED) & (lengths < stop_at)
  np.testing.assert_array_equal(requested, pending)
  np.testing.assert_array_equal(requests.num_tokens, lengths)
  np.testing.assert_array_equal(requests.stop_at[pending], stop_at[pending])
  for b in np.flatnonzero(pending).tolist():
    prompt = PROMPTS[b // G].tolist()[S - PROMPT_LENGTHS[b // G] :]
    prefix = requests.prefixes[requests.prefix_index[b]].tolist()
    assert prefix == prompt + TOKENS[b].tolist()[: lengths[b]]
  assert (np.diff(requests.prefix_index) >= 0).all()
  # Each prefix is that of a requested response.
  used = requests.prefix_index[pending]
  assert set(used.tolist()) == set(range(len(requests.prefixes)))


def pending(lengths, finish, stop_at, prompts=P, appended=None):
  appended = np.zeros_like(lengths) if appended is None else appended
  columns = lengths, finish, stop_at, appended, TOKENS
  so_far = [x[: prompts * G] for x in columns]
  return pending_requests(PROMPTS[:prompts], PROMPT_LENGTHS[:prompts], *so_far)


def test_new_responses_share_their_prompt():
  whole = np.zeros(P * G, np.int32), np.full(P * G, UNFINISHED, np.int8)
  requests = pending(*whole, stop_at := np.full(P * G, R))
  assert requests.prefix_index.tolist() == np.repeat(np.arange(P), G).tolist()
  assert_requested(requests, *whole, stop_at)
  assert pending(*whole, stop_at, prompts=0).prefixes == []


def test_any_mixture_of_new_resumed_and_finished_responses():
  rng = np.random.default_rng(0)
  for share in [0.5] * 50 + [1.0]:
    lengths = rng.integers(0, R + 1, P * G) * (rng.random(P * G) < 0.6)
    lengths = np.maximum(lengths, share == 1).astype(np.int32)
    finished = (lengths > 0) & (rng.random(P * G) < share)
    finish = np.where(finished, STOPPED, UNFINISHED).astype(np.int8)
    stop_at = rng.integers(0, R + 1, P * G)
    appended = rng.integers(0, lengths + 1)
    requests = pending(lengths, finish, stop_at, appended=appended)
    assert_requested(requests, lengths, finish, stop_at)
    recorded = []
    for prefix in range(len(requests.prefixes)):
      responses, first = requests.unrecorded(prefix)
      assert (requests.prefix_index[responses] == prefix).all()
      recorded += [(b, first) for b in responses.tolist()]
    # The last call fed all tokens but the newest of those that it left.
    assert recorded == [
      (b, PROMPT_LENGTHS[b // G] + left - 1 if left else 0)
      for b, left in enumerate((lengths - appended).tolist())
      if finish[b] == UNFINISHED and lengths[b] < stop_at[b]
    ]
  assert requests.prefixes == []  # all have finished


class Turns:
  """Conversations of several calls, whose tokens stay in the pool.

  Token t of conversation a is tagged; those of a prompt are its group's.
  """

  def __init__(self, rng, *, pages):
    size = lambda low, high: int(rng.integers(low, high + 1))
    self.rng, self.prompts, self.group = rng, size(1, 5), size(1, 4)
    sizes = ShardSizes(
      page_size=size(1, 6),
      segment_steps=size(1, 7),
      max_new_tokens=40,
      slots=size(1, 6),
      num_pages=10**6,
      max_prompt_length=12,
    )
    least = sizes.pages_per_slot + 1
    B = self.prompts * self.group
    num_pages = least * B if pages == "ample" else least + size(0, least)
    self.sizes = dataclasses.replace(sizes, num_pages=num_pages)
    self.prompt_lengths = rng.integers(1, 13, self.prompts)
    self.prompt = np.repeat(np.arange(self.prompts), self.group)
    self.lengths = self.prompt_lengths[self.prompt].copy()
    self.pool = np.full((num_pages, self.sizes.page_size), EMPTY)
    self.cached, self.prefilled = {}, 0

  def tokens(self, a, count):
    prompt = tags(self.prompt[a], count)[: self.prompt_lengths[self.prompt[a]]]
    return np.concatenate([prompt, tags(100 + a, count)[len(prompt) :]])

  def read(self, pages, count):
    at = np.arange(count)
    size = self.sizes.page_size
    return self.pool[np.asarray(pages, int)[at // size], at % size]

  def call(self, *, first, going):
    """One turn of the conversations `going`; returns the new ones."""
    B, size = len(self.lengths), self.sizes.page_size
    new = self.rng.integers(1, 7, B)
    prefix_index = self.prompt if first else np.arange(B)
    owner = np.arange(B) if not first else np.arange(self.prompts) * self.group
    scheduler = Scheduler(
      self.sizes,
      self.lengths[owner],
      prefix_index,
      np.where(going, 8, 0),
      self.cached,
    )
    at = {}
    while not scheduler.done:
      admission = scheduler.admit()
      for prefill in admission.prefill:
        pages, cached = prefill.pages, prefill.num_cached
        a = owner[prefill.prefix]
        m = self.lengths[a] - 1
        tokens = self.tokens(a, m)
        np.testing.assert_array_equal(self.read(pages, cached), tokens[:cached])
        for t in range(cached // size * size, m):
          self.pool[pages[t // size], t % size] = tokens[t]
        self.prefilled += m - cached
      copies = admission.copy_target < len(self.pool)
      source, target = admission.copy_source, admission.copy_target
      self.pool[target[copies]] = self.pool[source[copies]]
      for slot in np.flatnonzero(admission.new):
        at[slot] = 0
      plan, response = scheduler.allocate_pages(), scheduler.response
      active = plan.active.copy()
      for slot in np.flatnonzero(plan.active):
        a = response[slot]
        steps = min(self.sizes.segment_steps, new[a] - at[slot])
        t = self.lengths[a] - 1 + at[slot] + np.arange(steps)
        tokens = self.tokens(a, t[-1] + 1)[t]
        self.pool[plan.table[slot, t // size], t % size] = tokens
        at[slot] += steps
        active[slot] = at[slot] < new[a]
      for slot in np.flatnonzero(plan.active):
        a = response[slot]
        count = self.lengths[a] - 1 + at[slot]
        found = self.read(plan.table[slot], count)
        np.testing.assert_array_equal(found, self.tokens(a, count))
      generated = [at.get(slot, 0) for slot in range(self.sizes.slots)]
      scheduler.apply_results(np.array(generated), active)
    self.lengths = self.lengths + np.where(going, new, 0)
    self.cached = scheduler.kept
    for a, kept in self.cached.items():
      assert kept.num_tokens == self.lengths[a] - 1
      found = self.read(kept.pages, kept.num_tokens)
      np.testing.assert_array_equal(found, self.tokens(a, kept.num_tokens))
    held = {page for kept in self.cached.values() for page in kept.pages}
    assert self.sizes.num_pages - scheduler.num_free_pages == len(held)


@pytest.mark.parametrize("pages", ["ample", "few"])
def test_a_call_reads_the_tokens_that_the_last_one_left(pages):
  """Each slot's pages hold its conversation, and no page is lost.

  With ample pages only new tokens are prefilled: those behind the ones that
  the policy was fed. With few, conversations are evicted and prefilled again.
  """
  evicted = 0
  for seed in range(25):
    turns = Turns(np.random.default_rng(seed), pages=pages)
    going = np.ones(len(turns.lengths), bool)
    for turn in range(3):
      given = turns.rng.integers(1, 4, len(going)) * (turn > 0)
      turns.lengths = turns.lengths + np.where(going, given, 0)
      turns.prefilled = 0
      turns.call(first=not turn, going=going)
      if turn and pages == "ample":
        assert turns.prefilled == given[going].sum()
      evicted += going.sum() - len(turns.cached)
      going &= turns.rng.random(len(going)) < 0.7
  assert (evicted > 0) == (pages == "few")
