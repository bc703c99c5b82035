"""Rollouts by continuous refill: a slot whose answer ends gets the next one.

The host gives slots and pages (`schedule`), the devices decode a segment of a
few dozen steps (`slots`), and so on until all answers have ended, or have as
many tokens as they may have for now.

Dimension key: P prompts, G answers a prompt, A = P * G answers, B slots, D
shards, N texts of a shard, T tokens of a prefill, R most new tokens.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler import continuous_jit
from gspo_jax.sampler.continuous_jit import JittedSampler
from gspo_jax.sampler.paged_decode import SegmentPlan
from gspo_jax.sampler.paging import ContinuousBatchingConfig, ShardSizes
from gspo_jax.sampler.samples import (
  FinishedResponse,
  Prompts,
  SamplerConfig,
  Samples,
)
from gspo_jax.sampler.scheduler import Requests, Scheduler, pending_requests

_IDLE = 8  # a segment ends when 1 of so many slots is idle and answers wait
_FEW = 4  # where 1 of so many slots will do, no more are computed
ROWS = 8  # most texts of a prefill on each shard


# Told of this host's answers, by number, while others are still being drawn.
Told = Callable[[dict[int, FinishedResponse]], None]


@dataclasses.dataclass(frozen=True)
class ContinuousSampler:
  """Draws answers to prompts: (params, prompts, key) -> Samples.

  Attributes:
    draw: how.
    paging: in what memory.
    sizes: of each shard.
    shards: D, parts of the devices that have rows of their own.
    rows: where arrays of rows lie.
    devices: what they do.
  """

  draw: SamplerConfig
  paging: ContinuousBatchingConfig
  sizes: ShardSizes
  shards: int
  rows: jax.sharding.Sharding
  devices: JittedSampler

  def __call__(
    self,
    params,
    prompts: Prompts,
    key: jax.Array,
    *,
    begun: Samples | None = None,
    until: np.ndarray | None = None,
    tell: Told | None = None,
  ) -> Samples:
    """All G answers to each of P prompts; P is a multiple of D.

    Answer a draws its token t with a key made of (key, a, t), whatever came
    before: one that is continued with the same key and weights is the one that
    would have been drawn at once.

    Args:
      params: as `model.init` makes them.
      prompts: P of them.
      key: a typed PRNG key.
      begun: answers to continue, those that are UNFINISHED; donated. Without
        it, all are drawn from their first token on.
      until: [P * G] int, tokens at which an answer pauses, UNFINISHED; without
        it none does.
      tell: called between segments with what ended in the last one.
    """
    asked, lengths = multihost.to_host((prompts.tokens, prompts.lengths))
    if asked.shape[1] != self.sizes.prompt or len(asked) % self.shards:
      raise UserError(
        f"prompts {asked.shape}: expected [P, {self.sizes.prompt}], with P a "
        f"multiple of the {self.shards} shards"
      )
    goes_on = begun is not None or until is not None
    begun = self.devices.fresh(len(asked)) if begun is None else begun
    if goes_on and begun.experts is not None:
      raise UserError(
        "begun or until: expected neither where routing is recorded, for that "
        "of the tokens before is not kept"
      )
    work = self._divide(asked, lengths, begun, until)
    known = _columns(work)
    schedules = [
      Scheduler(self.sizes, [*map(len, w.tokens)], w.owner, w.until - w.drawn)
      for w in work
    ]
    devices = self.devices
    params = devices.lay_out(params)
    state, samples = devices.begin(begun)
    ended = None
    while not all(scheduler.done for scheduler in schedules):
      admitted = [scheduler.admit() for scheduler in schedules]
      for *batch, first in self._prefills(admitted, work):
        tokens, fed, numbers = multihost.to_global(batch, self.rows)
        state, noted = devices.prefill(params, state, tokens, fed, numbers)
        if noted is not None:
          first = multihost.to_global(first, self.rows)
          samples = devices.note(samples, noted, fed, first)
      orders, floor = self._orders(schedules, admitted, known)
      laid = multihost.to_global((orders, self._few(orders)), self.rows)
      state, samples = devices.decode(params, state, samples, *laid, floor, key)
      if ended:  # in the segment before; the devices decode this one meanwhile
        tell(self._read(*ended))
      told = self._settle(schedules, work, state)
      if tell:
        ended = self._look(state, samples, orders.active, *told)
    if ended:
      tell(self._read(*ended))
    return devices.finish(samples)

  def buckets(self, *, continues: bool = True) -> tuple[int, ...]:
    """T, tokens of the prefills that can be compiled.

    Args:
      continues: whether answers that have begun go on.
    """
    longest = self.sizes.prompt + continues * self.sizes.most
    return self.paging.buckets(longest)

  def at_once(self, T: int) -> int:
    """Prompts of a prefill of that length on each shard; or one.

    They have a cache of their own meanwhile, of an eighth of all pages at most.
    """
    return max(1, min(ROWS, self.sizes.pages * self.sizes.page // (8 * T)))

  def compilations(self) -> dict[str, int]:
    """How often each function is compiled at most, over all calls."""
    most = dict.fromkeys(("lay_out", "begin", "peek", "finish"), 1)
    most["decode"] = len(self._widths)
    return most | dict.fromkeys(("prefill", "note"), 2 * len(self.buckets()))

  def describe(self, *, continues: bool) -> str:
    """What is compiled, in what memory: a line for a person."""
    buckets = ", ".join(map(str, self.buckets(continues=continues)))
    return (
      f"refill: {' or '.join(map(str, self._widths))} slots, "
      f"{self.sizes.pages * self.shards} pages of {self.paging.page_size} tokens; "
      f"prefills of up to {buckets} tokens"
    )

  def _divide(self, asked, lengths, begun, until) -> list[Requests]:
    """What each shard has to draw."""
    A, R = begun.tokens.shape
    until = np.full(A, R) if until is None else np.minimum(until, R)
    known = dataclasses.replace(
      begun, logps=None, slot_steps=None, experts=None
    )
    whole = asked, lengths, multihost.to_host(known), until
    leaves, tree = jax.tree.flatten(whole)
    parts = zip(*(np.split(x, self.shards) for x in leaves), strict=True)
    return [pending_requests(*tree.unflatten(part)) for part in parts]

  def _prefills(self, admitted, work):
    """Tokens, lengths, pages, first answers of each call, in few shapes."""
    left = {T: [[] for _ in work] for T in self.buckets()}
    for shard, found in enumerate(admitted):
      for text, pages in found.prefill:
        tokens = work[shard].tokens[text][:-1]
        T = next(T for T in left if len(tokens) <= T)
        answer = int(np.searchsorted(work[shard].owner, text))
        left[T][shard].append((tokens, pages, answer))
    for T, queues in left.items():
      while most := max(map(len, queues)):
        # A few one by one: rows of padding cost as much as others.
        count = self.at_once(T)
        count = count if most > count // 2 else 1
        tokens = np.zeros((self.shards, count, T), np.int32)
        fed = np.zeros((self.shards, count), np.int32)
        first = np.full_like(fed, -1)
        numbers = np.full(
          (*fed.shape, T // self.sizes.page), self.sizes.pages, np.int32
        )
        for shard, queue in enumerate(queues):
          for row, (text, pages, answer) in enumerate(queue[:count]):
            fed[shard, row], first[shard, row] = len(text), answer
            tokens[shard, row, : len(text)] = text
            numbers[shard, row, : len(pages)] = pages
          del queue[:count]
        join = lambda x: x.reshape(-1, *x.shape[2:])
        yield join(tokens), join(fed), join(numbers), join(first)

  def _orders(
    self, schedules, admitted, known
  ) -> tuple[SegmentPlan, np.ndarray]:
    """What the next segment is to do, and when it is to end early."""
    segments = [scheduler.grow() for scheduler in schedules]
    join = lambda parts, name: np.concatenate([getattr(p, name) for p in parts])
    told = {name: join(segments, name) for name in ("table", "active")}
    for name in ("new", "answer", "length", "source", "target"):
      told[name] = join(admitted, name)
    # A shard counts answers from the first of its own.
    own = len(known["drawn"]) // self.shards
    shard_B = np.repeat(np.arange(self.shards), self.sizes.slots)
    told["answer"] += shard_B.astype(np.int32) * np.int32(own)
    told["new"] &= told["active"]  # one may have been preempted at once
    for name, value_A in known.items():
      told[name] = value_A[told["answer"]]
    count = told["active"].sum()
    if any(scheduler.waiting for scheduler in schedules):
      floor = count - max(1, count // _IDLE)
    else:
      few = self._widths[-1]
      floor = few if count > few else 0
    return SegmentPlan(**told), np.int32(floor)

  @property
  def _widths(self) -> tuple[int, ...]:
    """Slots that a segment can compute: all, or where few will do, those."""
    few = self.sizes.slots // _FEW * self.shards
    return (self.paging.slots, few) if few else (self.paging.slots,)

  def _few(self, orders) -> np.ndarray | None:
    """Numbers of the slots to compute; None for all.

    A part of each shard's, those that are active first: most of a batch's
    answers may have ended long before its longest. Not where one is new, whose
    prompt's partial page is still to be copied.
    """
    active = orders.active.reshape(self.shards, -1)
    own = active.shape[1]
    if active.sum(1).max() > own // _FEW or orders.new.any():
      return None
    first = np.argsort(~active, axis=1, kind="stable")[:, : own // _FEW]
    numbers = first + own * np.arange(self.shards)[:, None]
    return numbers.ravel().astype(np.int32)

  def _settle(self, schedules, work, state):
    """Tells the schedules what a segment has done.

    Returns:
      Of each slot, tokens drawn, whether it is still active, and the answer.
    """
    told = multihost.to_host((state.drawn, state.pages.active, state.answer))
    parts = zip(*(np.split(x, self.shards) for x in told), strict=True)
    for scheduler, part, (drawn, active, answer) in zip(
      schedules, work, parts, strict=True
    ):
      before = part.drawn[answer % len(part.drawn)]
      scheduler.settle(drawn - before, active)
    return told

  def _look(self, state, samples, were_active, drawn, active, answer):
    """What `_read` takes: slots in which an answer ended, and their tokens."""
    slots_ = np.flatnonzero(were_active & ~active)
    if not slots_.size:
      return None
    which = [(int(b), int(answer[b]), int(drawn[b])) for b in slots_]
    return which, self.devices.peek(state, samples)

  def _read(self, which, tokens) -> dict[int, FinishedResponse]:
    """The answers in this host's slots, but for those that only pause."""
    tokens, found = multihost.local_rows(tokens), {}
    for slot, answer, length in which:
      if slot in tokens:
        stopped = tokens[slot][length - 1] in self.draw.stop_ids
        if stopped or length == self.draw.max_new_tokens:
          found[answer] = FinishedResponse(tokens[slot], length, bool(stopped))
    return found


def _columns(work: list[Requests]) -> dict[str, np.ndarray]:
  """Of all answers, [A] int32: what a slot that gets one has to know."""
  last = [
    w.tokens[text][-1] if w.tokens else 0 for w in work for text in w.owner
  ]
  join = lambda name: np.concatenate([getattr(w, name) for w in work])
  columns = {"drawn": join("drawn"), "until": join("until")}
  return columns | {"last": np.array(last, np.int32)}


def build(
  cfg: model.ModelConfig,
  draw: SamplerConfig,
  *,
  paging: ContinuousBatchingConfig,
  prompt: int,
  params,
  mesh: jax.sharding.Mesh,
  decoding: jax.sharding.Mesh,
) -> ContinuousSampler:
  """A sampler of jitted functions; compiles nothing yet.

  Args:
    cfg: the model.
    draw: how answers are drawn.
    paging: in what memory.
    prompt: tokens of the longest prompt.
    params: shardings of the parameters, on `mesh`.
    mesh: where parameters, keys and samples lie.
    decoding: the same devices as they decode.

  Raises:
    UserError: the sizes do not fit.
  """
  shards = sharding.batch_shards(decoding)
  sizes = paging.sizes(draw, prompt, shards)
  jitted = continuous_jit.functions(
    cfg,
    draw,
    chunk=paging.prefill_chunk,
    sizes=sizes,
    params=params,
    mesh=mesh,
    decoding=decoding,
  )
  rows = sharding.batch_sharding(decoding)
  return ContinuousSampler(draw, paging, sizes, shards, rows, jitted)
