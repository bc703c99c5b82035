"""The schedule against a device that notes what each page really holds."""

import dataclasses
import functools

import numpy as np
import pytest

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.paging import ShardSizes
from gspo_jax.sampler.scheduler import Scheduler

EMPTY = -1
SMALL = ShardSizes(slots=2, pages=9, page=4, steps=3, most=8, prompt=5)


def tags(text, count):
  """What a text's first tokens leave in its pages."""
  return text * 1_000_000 + np.arange(count)


class Device:
  """Decodes answers of known lengths, and checks every round.

  Each place of a page holds a tag of the token last stored there: text p has
  number p, answer b has N + b. An answer that ends at 0 is not to be drawn.
  """

  def __init__(self, sizes, lengths, owner, ends, *, most=None, idle=1.0):
    self.ends, self.owner = np.asarray(ends), np.asarray(owner)
    most = np.full(len(ends), sizes.most) if most is None else most
    self.most = np.where(self.ends, most, 0)
    self.schedule = Scheduler(sizes, lengths, owner, self.most)
    self.sizes = sizes
    self.lengths = np.asarray(lengths)
    self.idle = idle  # a segment ends early when this share of slots has ended
    B = sizes.slots
    self.pool = np.full((sizes.pages, sizes.page), EMPTY)
    self.answer = np.full(B, EMPTY)
    self.cached = np.zeros(B, int)
    self.drawn = np.zeros(B, int)
    self.table = np.zeros((B, sizes.width), np.int32)
    self.owned = {}  # slot -> pages that no other row may hold
    self.prompts = {}  # those that were stored, and have answers to come
    self.ages = {}  # of the active answers: when each was admitted
    self.ended, self.starts, self.prefilled = [], [], []
    self.preempted, self.left_idle = [], 0
    self.useful = self.offered = 0  # slot-steps while answers wait

  def run(self):
    most = self.ends.sum() + 1  # the oldest draws at least one a segment
    for _ in range(most):
      if self.schedule.done:
        break
      self.round()
    assert self.schedule.done
    assert self.schedule.free == self.sizes.pages
    assert sorted(self.ended) == np.flatnonzero(self.ends).tolist()
    return self

  def round(self):
    queue = self.schedule.waiting
    idle = int((self.answer == EMPTY).sum())
    admission = self.schedule.admit()
    new = self.admitted(admission)
    if self.schedule.waiting:
      self.left_idle = max(self.left_idle, idle - len(new))
    assert self.schedule.waiting == queue - len(new)
    assert len(new) <= idle
    self.grown(self.schedule.grow(), new)
    self.decode()
    self.settle()

  def admitted(self, admission):
    n, S = self.sizes.pages, self.sizes.page
    for prompt, pages in admission.prefill:
      m = self.lengths[prompt] - 1
      assert len(pages) == -(-m // S) > 0
      self.prefilled.append(prompt)
      self.prompts[prompt] = pages
      self.pool[pages] = EMPTY
      self.pool[np.array(pages).repeat(S)[:m], np.arange(m) % S] = tags(
        prompt, m
      )
    new = admission.new
    assert (self.answer[new] == EMPTY).all()
    assert not admission.answer[~new].any()
    copies = admission.target < n
    np.testing.assert_array_equal(copies, new & (admission.length % S > 0))
    np.testing.assert_array_equal(admission.source < n, copies)
    self.pool[admission.target[copies]] = self.pool[admission.source[copies]]
    self.answer[new], self.drawn[new] = admission.answer[new], 0
    self.cached[new] = self.lengths[self.owner[self.answer[new]]] - 1
    np.testing.assert_array_equal(admission.length[new], self.cached[new])
    started = self.answer[new].tolist()
    for answer in started:
      self.ages[answer] = len(self.starts)
      self.starts.append(answer)
    return started

  def grown(self, segment, new):
    gone = (self.answer != EMPTY) & ~segment.active
    assert not (segment.active & (self.answer == EMPTY)).any()
    if gone.any():
      lost, kept = self.answer[gone].tolist(), self.answer[segment.active]
      assert not set(lost) & set(new)
      # The newest go, never all.
      oldest_lost = min(self.ages[answer] for answer in lost)
      assert max(self.ages[answer] for answer in kept.tolist()) < oldest_lost
      self.preempted += [self.ages.pop(answer) for answer in sorted(lost)]
      for slot in np.flatnonzero(gone):
        self.wipe(slot)
    self.table = segment.table
    self.check_pages()

  def own(self, slot):
    """The row's pages after those it shares."""
    shared = self.cached[slot] // self.sizes.page
    return self.table[slot, shared : self.held(slot)].tolist()

  def held(self, slot):
    """Pages of a row that the next segment can fill."""
    most = self.most[self.answer[slot]]
    more = min(self.drawn[slot] + self.sizes.steps, most)
    return -(-(self.cached[slot] + more) // self.sizes.page)

  def check_pages(self):
    """Each page has one holder, and each row the pages it needs."""
    assert self.table.dtype == np.int32
    active = np.flatnonzero(self.answer != EMPTY).tolist()
    self.owned = {slot: self.own(slot) for slot in active}
    owned = [page for pages in self.owned.values() for page in pages]
    needed = set(self.owner[self.answer[active]].tolist())
    pages = [page for p in needed for page in self.prompts.get(p, [])]
    used = owned + pages
    assert len(set(used)) == len(used)
    assert 0 <= self.table.min() <= self.table.max() < self.sizes.pages
    # Of the prompts without a row one may be there still, the next to be read.
    idle = [len(self.prompts[p]) for p in self.prompts.keys() - needed]
    taken = self.sizes.pages - self.schedule.free
    assert taken - len(used) in [0, *idle]
    for slot in range(self.sizes.slots):
      held = self.held(slot) if slot in active else 0
      assert not self.table[slot, held:].any()

  def decode(self):
    S, waiting = self.sizes.page, self.schedule.waiting
    decoding = self.answer != EMPTY
    # Of those that end now: slots may be idle for want of pages.
    left = 0
    if waiting:
      left = max(decoding.sum() - self.idle * len(decoding), 0)
    texts = len(self.lengths) + self.answer
    for _ in range(self.sizes.steps):
      rows = np.flatnonzero(decoding)
      at = self.cached[rows] + self.drawn[rows]
      tag = texts[rows] * 1_000_000 + self.drawn[rows]
      self.pool[self.table[rows, at // S], at % S] = tag
      self.drawn[rows] += 1
      if waiting:
        self.useful += len(rows)
        self.offered += len(decoding)
      decoding = decoding & (self.drawn < self.ends[self.answer])
      if decoding.sum() <= left:
        break
    self.decoding = decoding

  def settle(self):
    for slot in np.flatnonzero(self.answer != EMPTY):
      self.check_text(slot)
    stopped = (self.answer != EMPTY) & ~self.decoding
    expected = self.answer[stopped].tolist()
    table = self.table.copy()
    # It keeps no array of the caller's: this one is overwritten.
    drawn = self.drawn.copy()
    ended = self.schedule.settle(drawn, self.decoding)
    drawn[:] = 0
    assert sorted(ended) == sorted(expected)
    assert self.schedule.active == self.decoding.sum()
    np.testing.assert_array_equal(self.table, table)
    self.ended += ended
    for slot in np.flatnonzero(stopped):
      assert self.drawn[slot] == self.ends[self.answer[slot]]
      del self.ages[self.answer[slot]]
      self.wipe(slot)
    for text in set(self.owner[ended].tolist()):
      of_text = np.flatnonzero((self.owner == text) & (self.ends > 0))
      if set(of_text.tolist()) <= set(self.ended):
        self.pool[self.prompts.pop(text, [])] = EMPTY

  def wipe(self, slot):
    self.pool[self.owned[slot]] = EMPTY
    self.answer[slot] = EMPTY

  def check_text(self, slot):
    """The row reads its prompt, and then what it drew, and nothing else's."""
    answer, m, drawn = self.answer[slot], self.cached[slot], self.drawn[slot]
    text = np.concatenate(
      [
        tags(self.owner[answer], m),
        tags(len(self.lengths) + answer, drawn),
      ]
    )
    at = np.arange(m + drawn)
    S = self.sizes.page
    np.testing.assert_array_equal(
      self.pool[self.table[slot, at // S], at % S], text
    )


def drawn_at_random(rng, *, most, count):
  """Lengths with a median of a tenth of `most`, and 5 % at it."""
  spread = np.log(10) / 1.645
  ends = np.exp(rng.normal(np.log(most / 10), spread, count))
  return np.clip(ends.round().astype(int), 1, most)


def some(seed, *, ample):
  """A run of random sizes.

  The pool is ample, for the longest row and prompt of each slot, or little more
  than the least.
  """
  rng = np.random.default_rng(seed)
  size = lambda low, high: int(rng.integers(low, high + 1))
  prompts, group = size(1, 12), size(1, 6)
  rest = {"page": size(1, 9), "steps": size(1, 12), "most": size(1, 40)}
  sizes = ShardSizes(slots=size(1, 9), pages=10**6, prompt=size(1, 30), **rest)
  least = sizes.width + 1
  pages = sizes.slots * least if ample else least
  pages += 0 if ample else size(0, least * sizes.slots // 3)
  sizes = dataclasses.replace(sizes, pages=pages)
  lengths = rng.integers(1, sizes.prompt + 1, prompts)
  owner = np.repeat(np.arange(prompts), group)
  ends = rng.integers(1, sizes.most + 1, prompts * group)
  return Device(sizes, lengths, owner, ends, idle=rng.random())


def mixed(seed):
  """Whole groups, answers that go on from their own texts, and ended ones."""
  rng = np.random.default_rng(seed)
  sizes = ShardSizes(slots=4, pages=20, page=3, steps=4, most=12, prompt=9)
  counts = rng.integers(1, 4, 12)
  lengths = rng.integers(1, sizes.prompt + 1, 12)
  lengths += (counts == 1) * rng.integers(0, sizes.most, 12)
  owner = np.repeat(np.arange(12), counts)
  room = np.minimum(sizes.most, sizes.prompt + sizes.most - lengths)[owner]
  most = rng.integers(1, room + 1)
  ends = rng.integers(1, most + 1)
  ends[rng.integers(0, len(ends), 4)] = 0
  return Device(sizes, lengths, owner, ends, most=most, idle=rng.random())


@functools.cache
def tight(seed):
  return some(seed, ample=False).run()


@pytest.mark.parametrize("seed", range(40))
def test_every_answer_ends_once_and_in_whole(seed):
  """From any pool that the guard lets through; `Device` checks each round."""
  tight(seed)


@pytest.mark.parametrize("seed", range(20))
def test_answers_that_go_on_beside_new_ones(seed):
  device = mixed(seed).run()
  assert (device.ends == 0).any()
  assert (np.bincount(device.owner) > 1).any()


@pytest.mark.parametrize("seed", range(30))
def test_an_ample_pool_fills_every_slot_and_prefills_once(seed):
  device = some(seed, ample=True).run()
  assert device.left_idle == 0
  assert device.preempted == []
  assert device.starts == list(range(len(device.ends)))
  assert device.prefilled == np.flatnonzero(device.lengths > 1).tolist()


@pytest.mark.parametrize("prompt", [1, 8, 9, 12])
@pytest.mark.parametrize("most", [1, 4, 21])
def test_the_least_pool_decodes_the_longest_answers(prompt, most):
  """One at a time where it must be, and every prompt gets its turn."""
  sizes = ShardSizes(
    slots=4, pages=10**6, page=4, steps=3, most=most, prompt=prompt
  )
  sizes = dataclasses.replace(sizes, pages=sizes.width + 1)
  lengths, ends = [prompt] * 5, [most] * 15
  Device(sizes, lengths, np.repeat(range(5), 3), ends).run()


def test_a_group_pays_for_its_prompt_once():
  P, G, T = 8, 16, 512
  sizes = ShardSizes(
    slots=24, pages=2000, page=64, steps=32, most=256, prompt=T
  )
  ends = drawn_at_random(np.random.default_rng(0), most=256, count=P * G)
  device = Device(sizes, [T] * P, np.repeat(range(P), G), ends).run()
  tokens = sum(device.lengths[prompt] - 1 for prompt in device.prefilled)
  assert tokens * 16 == P * G * (T - 1)


def test_preemption_takes_the_newest_and_they_are_next():
  """Three rows outgrow a pool, one after the other."""
  sizes = ShardSizes(slots=3, pages=9, page=2, steps=2, most=16, prompt=1)
  schedule = Scheduler(sizes, [1], [0] * 4, [sizes.most] * 4)
  first = schedule.admit()
  assert first.answer.tolist() == [0, 1, 2]
  seen = []
  for drawn in range(2, 18, 2):
    active = schedule.grow().active
    seen.append(active.sum())
    # Answer 0 draws its 16 tokens; the others would, too.
    ended = schedule.settle(np.where(active, drawn, 0), active & (drawn < 16))
    assert ended == [0] * (drawn == 16) or active[1:].any()
  assert seen == [3, 3, 3, 2, 1, 1, 1, 1]
  assert schedule.waiting == 3
  again = schedule.admit()
  assert again.answer[again.new].tolist() == [1, 2, 3]


def test_preemption_and_a_second_prefill_do_happen():
  """What `Device` says of them is not said of nothing."""
  runs = [tight(seed) for seed in range(20)]
  assert sum(len(run.preempted) for run in runs) > 20
  again = [len(run.prefilled) - len(set(run.prefilled)) for run in runs]
  assert sum(again) > 5


def run_at_scale(share, B=64, P=32):
  """Answers of up to 1024 tokens, `share` of the most pages of B rows."""
  G, most = 16, 1024
  sizes = ShardSizes(B, 10**6, page=32, steps=64, most=most, prompt=128)
  sizes = dataclasses.replace(sizes, pages=int(share * B * sizes.width))
  rng = np.random.default_rng(0)
  ends = drawn_at_random(rng, most=most, count=P * G)
  lengths = rng.integers(16, 129, P)
  owner = np.repeat(range(P), G)
  return Device(sizes, lengths, owner, ends, idle=1 / 8).run()


def test_slots_are_busy_while_answers_wait():
  device = run_at_scale(share=0.5)
  assert device.useful >= 0.9 * device.offered
  assert device.preempted == []


@pytest.mark.parametrize("name", ["slots", "page", "steps", "most", "prompt"])
def test_sizes_are_checked(name):
  with pytest.raises(UserError, match=f"^{name}=0: expected at least 1"):
    dataclasses.replace(SMALL, **{name: 0})


def test_the_pool_holds_an_answer_and_its_prompt():
  # 4 + 8 cached tokens, and a copy of a partial page of a shorter prompt.
  assert dataclasses.replace(SMALL, pages=4).width == 3
  with pytest.raises(
    UserError, match=r"paging\.pages=3 a shard: expected at least 4"
  ):
    dataclasses.replace(SMALL, pages=3)


@pytest.mark.parametrize(
  ("lengths", "most", "message"),
  [
    ([5, 0], 8, "text 1: it has no token, expected at least 1"),
    ([5, 6], 8, "answer 1: it and its text can have 14 tokens, expected at"),
    ([6, 5], 9, "answer 0: .* 15 tokens, .* at most prompt=5 and most=8"),
  ],
)
def test_texts_are_checked(lengths, most, message):
  with pytest.raises(UserError, match=message):
    Scheduler(SMALL, lengths, [0, 1], [most] * 2)


def test_a_text_may_be_longer_than_a_prompt():
  Scheduler(SMALL, [7, 5], [0, 1], [6, 8])


def test_a_shard_without_work_goes_along():
  schedule = Scheduler(SMALL, [], [0] * 4, [0] * 4)
  assert schedule.done
  assert not schedule.admit().new.any()
  segment = schedule.grow()
  assert not segment.active.any()
  schedule.settle(np.zeros(2), segment.active)
