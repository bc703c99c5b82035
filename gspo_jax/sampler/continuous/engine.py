"""An engine: the host's loop of continuous batching.

Requests come at any time, from any thread. The host assigns slots and pages
(`scheduler`), and the devices decode a segment of a few dozen steps
(`paged_decode`). Each request owns a row of samples on the devices: log-probs,
kept ids and experts stay there. While no response waits for a slot, an engine
that keeps no tokens starts the next segment before it reads the results of the
last one, so the devices need not wait.

A host plans only the shards of its own devices. All hosts must run the same
programs, which follow from a few numbers of every shard (`_FACTS`). Before each
segment the devices send these numbers to all hosts. A host takes new requests
right before that, and never while the results of a segment are unread.

Dimension letters as in `continuous/__init__`.
"""

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.model.cache import has_states
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous import speculation
from gspo_jax.sampler.continuous.config import PROMPT_ROWS
from gspo_jax.sampler.continuous.paged_decode import (
  OF_SLOTS,
  SegmentPlan,
  SegmentResults,
)
from gspo_jax.sampler.continuous.placement import Placement
from gspo_jax.sampler.continuous.programs import Programs
from gspo_jax.sampler.continuous.scheduler import Admission, Request, Scheduler
from gspo_jax.sampler.samples import (
  FinishedResponse,
  OnFinished,
  Prompts,
  Samples,
  SamplingParams,
)
from gspo_jax.sampler.stop_strings import StopStrings

# A segment ends when 1 of 8 slots is idle and responses wait. Where requests
# come at any time, 1 of 3 must be idle, because a segment costs prefills, too.
_IDLE, _IDLE_OPEN = 8, 3
_NOWHERE = 2**31 - 1  # a column behind the last one
# Seconds until an idle `run` looks at its condition; the second if processes
# share the work.
_SECONDS, _SECONDS_TOGETHER = 1.0, 0.02

# What processes that share rows also tell each other of a Generation.
_SENT = (
  *("prompt", "max_new_tokens", "params", "streams", "row", "response"),
  *("num_tokens", "num_recorded", "goes_on", "by_token"),
)
# What all hosts know of each shard after it has planned: attributes of its
# Scheduler; `streams`, active slots whose responses are read as they grow;
# `by_token`, those that are read after each step; `open`, whether its host
# expects more requests.
_FACTS = (
  *("num_waiting", "num_queued", "num_active", "can_look_ahead", "may_go_on"),
  *("num_spare_pages", "num_visitors", "streams", "by_token", "open"),
)
# Values of `Generation.finish`, as in OpenAI's API.
STOP, LENGTH, ABORT = "stop", "length", "abort"


@dataclasses.dataclass(eq=False)
class Generation:
  """A request and what was sampled for it.

  Only the engine's thread changes what was sampled. Another thread reads
  `progress` first, once.
  """

  prompt: list[int]
  max_new_tokens: int
  # Called in the engine's thread when it ends, with `streams` as it grows, too.
  notify: Callable[[], None] = lambda: None
  _: dataclasses.KW_ONLY
  params: SamplingParams | None = None  # None: as the sampler's
  streams: bool = False
  logprobs: bool = False  # else they stay on the devices
  row: int | None = None  # of the samples; None: any free one
  # As of `Request`; the engine chooses them with the row.
  response: int = 0
  num_tokens: int = 0
  num_recorded: int = 0
  goes_on: bool = False
  # Its random keys are made of it; None: of a number that no other has.
  seed: int | None = None
  by_token: bool = False  # with `streams`: all segments have one step
  cancelled: bool = False  # set it to give up the rest
  tokens: list[int] = dataclasses.field(default_factory=list)  # and the stop
  logps: list[float] = dataclasses.field(default_factory=list)
  # The number of both, and why the request ended, "" until then.
  progress: tuple[int, str] = (0, "")

  @property
  def finish(self) -> str:
    return self.progress[1]

  def add(self, tokens: list[int], logps: list[float], finish: str) -> None:
    self.logps += logps
    self.tokens += tokens
    self.progress = len(self.tokens), finish
    self.notify()


class Engine(contextlib.AbstractContextManager["Engine"]):
  """Samples responses with one set of weights; a context manager.

  Any thread may `submit`; one thread calls `run`. All processes call `run`
  together.
  """

  def __init__(
    self,
    programs: Programs,
    params: model.Params,
    key: jax.Array,
    samples: Samples,
    *,
    keeps: bool = True,
  ):
    """`samples` get the responses, and are donated.

    Without `keeps` no request goes on with a finished response.
    """
    self._programs, self._key, self._keeps = programs, key, keeps
    rows = len(samples.lengths) // programs.shards
    self._state, self.samples = programs.jitted.begin(samples)
    self._params = programs.jitted.decode_params(params)
    states = has_states(programs.cfg)
    self._schedulers = {  # by own shard
      shard: Scheduler(
        programs.sizes,
        rows,
        has_states=states,
        keeps=keeps and not states,
        group_size=programs.config.group_size if programs.records else 0,
      )
      for shard in programs.own
    }
    self._rows = rows  # of a shard
    self._placement = Placement(
      programs.sizes, programs.shards, programs.own, rows
    )
    # Kept tokens stay with their shard. A prefill that is repeated because
    # pages ran out writes the routing of a group's rows.
    self._may_migrate = not keeps and (
      not programs.records or programs.sizes.holds_all_slots
    )
    self._speculates = True  # where few slots are computed
    # Active slots of each shard, as far as results are known, and those that
    # stream.
    self._active = self._streams = np.zeros(programs.shards, int)
    # Of the last segment; None: read.
    self._results: SegmentResults | None = None
    self._shared: jax.Array  # of the newest `_share`
    self._reads: list[tuple] = []  # of rows, not reported so far
    self._open: dict[Request, Scheduler] = {}  # the requests of generations
    self._on_finished: OnFinished | None = None
    self._progress: Progress | None = None
    self._changed = threading.Condition()  # guards the next three
    self._inbox: collections.deque[Generation] = collections.deque()
    self._closed = self._woken = False
    self._count = 0  # of requests without a row
    self.idle_seconds = 0.0  # that `run` waited for requests

  @property
  def params(self) -> SamplingParams:
    """Of a request without its own."""
    return self._programs.config.params

  @property
  def context(self) -> int:
    """Most tokens of a prompt and its response."""
    sizes = self._programs.sizes
    return sizes.max_prompt_length + sizes.max_new_tokens

  def most_new_tokens(self, prompt_length: int) -> int:
    """Room for a response; below 1 if the prompt is too long."""
    left = self.context - prompt_length
    return min(self._programs.sizes.max_new_tokens, left)

  def submit(self, generation: Generation) -> Generation:
    """Asks for a response; UserError unless prompt and response have room."""
    size = len(generation.prompt)
    vocabulary = self._programs.cfg.vocab_size
    if not size or not all(0 <= i < vocabulary for i in generation.prompt):
      raise UserError(
        f"a prompt of {size} tokens: expected at least one, and ids from 0 to "
        f"{vocabulary - 1}"
      )
    most = self.most_new_tokens(size)
    if not 1 <= generation.max_new_tokens <= most:
      raise UserError(
        f"{generation.max_new_tokens} new tokens after a prompt of {size}: "
        f"expected 1 to {most}"
      )
    with self._changed:
      if self._closed:
        raise UserError("the engine is closed")
      self._inbox.append(generation)
      self._changed.notify_all()
    return generation

  def wake(self) -> None:
    """Makes `run` look at its condition."""
    with self._changed:
      self._woken = True
      self._changed.notify_all()

  def run(
    self,
    until: Callable[[], bool] = lambda: True,
    *,
    on_finished: OnFinished | None = None,
    progress: Progress | None = None,
  ) -> None:
    """Samples until the condition holds everywhere.

    Then `close` ends the requests that are left. An engine that keeps no tokens
    first samples all of them.

    Args:
      until: may submit requests; called between segments.
      on_finished: gets responses that no Generation owns, those of an earlier
        segment while a later one decodes.
      progress: counts what finishes or pauses.
    """
    self._on_finished, self._progress = on_finished, progress
    while self._step(until):
      pass

  def warm_up(self) -> None:
    """Compiles before there are requests; call it on all processes.

    Prefills of each length, alone and together, of new and of known tokens;
    and segments of each number of slots.
    """
    programs, number = self._programs, itertools.count()
    V, shards = programs.cfg.vocab_size, len(programs.own)
    sets = [(2, size) for size in programs.compute_sizes]
    for T in programs.buckets():
      n = min(T, self.context - 1)
      sets += [(n, 1), (n, programs.prefill_batch(T) * shards)]
    for n, count in sets:
      new = [next(number) for _ in range(count)]
      prompts = [([i % V, i // V % V] + [0] * n)[:n] for i in new]
      for _ in range(2):
        for prompt in prompts:
          self.submit(Generation(prompt, 1))
        self.run(lambda: not (self._inbox or self._open))

  def close(self) -> None:
    """Ends all requests."""
    with self._changed:
      self._closed = True
      waiting = [*self._inbox]
      self._inbox.clear()
    for generation in (*(r.owner for r in self._open), *waiting):
      generation.add([], [], ABORT)
    self._open = {}
    self._state = self.samples = self._params = None  # frees their memory

  def __exit__(self, *_) -> None:
    self.close()

  def queue(
    self,
    queues: Sequence[Sequence[int]],
    request_of: Callable[[int], Request],
    *,
    lends: bool,
  ) -> None:
    """Queues responses on their shards.

    `queues` has the responses of each shard, and `request_of` makes the Request
    of one, for row 0. If it `lends`, both are the same on all hosts, and each
    response may start on any shard.
    """
    for shard, scheduler in self._schedulers.items():
      for response in queues[shard]:
        request = request_of(response)
        request.row = response - shard * self._rows
        scheduler.submit(request)
    if lends:
      self._placement.queue(queues, request_of)

  def finalize(self) -> Samples:
    """The samples, on the training mesh, each response in its first row."""
    programs, samples = self._programs, self.samples
    for rows in reversed(self._placement.swaps):
      samples = programs.jitted.move_rows(samples, programs.to_devices(rows))
    return programs.jitted.finalize(samples)

  def finish_episodes(
    self, numbers: Sequence[int], **rows: np.ndarray | Prompts
  ) -> Samples:
    """The samples, on the training mesh, with these fields.

    `rows` are of the rows `numbers`, all that this process answers for.
    """
    programs = self._programs
    if programs.shares_rows:
      size = self._rows * programs.shards
      own = np.arange(size).reshape(programs.shards, -1)[programs.own].ravel()

      def of_all(x):
        whole = np.zeros((size, *x.shape[1:]), x.dtype)
        whole[numbers] = x
        return multihost.sum_of_all(whole)[own]

      rows = jax.tree.map(of_all, rows)
    return programs.jitted.finish_episodes(
      self.samples, programs.to_devices(rows)
    )

  def _step(self, until) -> bool:
    """Decodes a segment, or waits; False when no host has or expects more."""
    programs, jitted = self._programs, self._programs.jitted
    moves = False
    if self._results:
      facts = self._facts()
      look_ahead = facts.can_look_ahead.all() and facts.may_go_on.any()
      moves = self._may_migrate and self._placement.is_uneven()
      moves |= self._placement.can_lend(facts)
      if moves or self._keeps or not look_ahead:
        self._read_results()
    is_open = True
    if not self._results:
      if self._keeps:
        self._report()
      is_open = self._take_requests(not until())
    if moves:
      self._move()
    admissions = [scheduler.admit() for scheduler in self._schedulers.values()]
    queues = [self._prefill_queue(admission) for admission in admissions]
    plan = self._segment_plan(admissions)
    self._share(queues, is_open)
    any_waiting = by_token = False
    if not self._results:  # else nothing waited, so nothing starts
      facts = self._facts()
      self._active, self._streams = facts.num_active, facts.streams
      is_open = bool(facts.open.any())
      if not self._active.any() or (self._keeps and not is_open):
        return self._pause(is_open)
      any_waiting = bool(facts.num_waiting.any())
      by_token = bool(facts.by_token.any())
      self._prefill(queues, facts)
    slots, drafts = None, 0
    most = self._active.max() * programs.shards
    count = min(n for n in programs.compute_sizes if n >= most)
    if count < programs.batching.slots:
      slots = self._active_subset(plan, count // programs.shards)
      # Where preempted responses wait, pages may hold single tokens only.
      if self._speculates and not any_waiting:
        drafts = programs.drafts(count)
    plan_and_slots = programs.to_devices((plan, slots))
    unread = self._results
    self._state, self.samples, results = jitted.decode(
      self._params,
      self._state,
      self.samples,
      *plan_and_slots,
      np.int32(-1) if by_token else self._min_active(any_waiting),
      self._key,
      drafts,
    )
    # The devices decode this segment while the host handles the last one's
    # responses.
    self._report()
    if unread:
      self._read_results()
    self._results = results
    return True

  def _pause(self, is_open: bool) -> bool:
    """Reports what is left, and waits for requests."""
    nothing = np.zeros(self._programs.sizes.slots, int)
    for scheduler in self._schedulers.values():
      if not scheduler.num_active:  # the planned segment is not decoded
        scheduler.apply_results(nothing, nothing)
    self._report()
    if not is_open:
      return False
    alone = jax.process_count() == 1
    with self.idle(), self._changed:
      if not (self._inbox or self._woken):
        self._changed.wait(_SECONDS if alone else _SECONDS_TOGETHER)
      self._woken = False
    return True

  @contextlib.contextmanager
  def idle(self) -> Iterator[None]:
    """Counts the seconds in which the devices have nothing to sample."""
    start = time.monotonic()
    yield
    self.idle_seconds += time.monotonic() - start

  def _take_requests(self, is_open: bool) -> bool:
    """Ends cancelled requests, and gives new ones to schedulers.

    Returns `is_open`, or if processes share rows, whether it is so on any.
    """
    with self._changed:
      inbox = [*self._inbox]
      self._inbox.clear()
    # A row that is free because its request was cancelled may have a new one.
    ended = [r.owner.row for r in self._open if r.owner.cancelled]
    new = []
    for generation in inbox:
      if generation.cancelled:
        generation.add([], [], ABORT)
      else:
        new.append(generation)
    if self._programs.shares_rows:
      new, ended, is_open = self._exchange(new, ended, is_open)
    for request, scheduler in [*self._open.items()]:
      if request.owner.row in ended:
        scheduler.cancel(request)
        self._end(request, [], [], ABORT)
    left: list[Generation] = []
    for generation in new:
      # Where one found no row, the next ones would find none.
      if generation.row is None and (left or not self._choose_row(generation)):
        left.append(generation)
      else:
        assert generation.row is not None
        shard, row = divmod(generation.row, self._rows)
        if shard not in self._schedulers:
          continue
        request = Request(
          np.array(generation.prompt, np.int32),
          row,
          generation.num_tokens + generation.max_new_tokens,
          generation.response,
          generation.num_tokens,
          generation.num_recorded,
          goes_on=generation.goes_on,
          params=generation.params,
          owner=generation,
        )
        self._schedulers[shard].submit(request)
        self._open[request] = self._schedulers[shard]
    with self._changed:
      self._inbox.extendleft(reversed(left))
    return is_open

  def _exchange(
    self, new: list[Generation], ended: list[int], is_open: bool
  ) -> tuple[list[Generation], list[int], bool]:
    """What all processes have, in one order: new requests, and ended rows.

    Processes that share rows must plan them alike. A request of another process
    has a Generation here, too, which nobody reads.
    """
    own = [{name: getattr(g, name) for name in _SENT} for g in new]
    said = multihost.allgather_json((own, ended, is_open))
    all_new, all_ended = [], []
    for process, (requests, rows, _) in enumerate(said):
      all_ended += rows
      if process == jax.process_index():
        all_new += new
        continue
      for fields in requests:
        if fields["params"]:
          fields["params"] = SamplingParams(*fields["params"])
        all_new.append(Generation(**fields))
    return all_new, all_ended, any(is_open for *_, is_open in said)

  def _choose_row(self, generation: Generation) -> bool:
    """A row that no request has, on the shard that knows most of the prompt."""
    prompt = np.array(generation.prompt, np.int32)
    taken = {request.owner.row for request in self._open}
    places = []
    for shard, scheduler in self._schedulers.items():
      first = shard * self._rows
      free = {*range(first, first + self._rows)} - taken
      if free:
        places.append((scheduler.num_known(prompt), len(free), min(free)))
    if not places:
      return False
    generation.row = max(places)[-1]
    longest = self._programs.sizes.max_prompt_length
    generation.num_tokens = max(len(prompt) - longest, 0)
    # A number that no other request has, on any host.
    self._count += 1
    generation.response = self._count * jax.process_count()
    generation.response += jax.process_index()
    if generation.seed is not None:
      generation.response = -1 - generation.seed % 2**31
    return True

  def _share(self, queues, is_open: bool) -> None:
    """Sends this host's part of the facts to all: [shards, ...] int32."""
    rows = []
    for scheduler, queue in zip(self._schedulers.values(), queues, strict=True):
      row = [getattr(scheduler, name) for name in _FACTS[:-3]]
      owners = [r.owner for r in scheduler.slots if r and r.owner]
      for name in ("streams", "by_token"):
        row.append(sum(getattr(owner, name) for owner in owners))
      row.append(is_open)
      for place in self._prefill_places():
        prefills = [prefill for prefill, *_ in queue.get(place, ())]
        row += [len(prefills), sum(not p.num_cached for p in prefills)]
      rows.append(row)
    facts = self._programs.to_devices(np.array(rows, np.int32))
    self._shared = self._programs.jitted.share(facts)

  def _facts(self) -> SimpleNamespace:
    """The `_FACTS` of all shards, [shards] ints each; waits for them.

    And by stage and bucket `prefixes` to prefill, and those that are
    `uncached`, without a cached token.
    """
    columns, n = np.asarray(self._shared).T, len(_FACTS)
    places = self._prefill_places()
    return SimpleNamespace(
      prefixes=dict(zip(places, columns[n::2], strict=True)),
      uncached=dict(zip(places, columns[n + 1 :: 2], strict=True)),
      **dict(zip(_FACTS, columns, strict=False)),
    )

  def _prefill_places(self) -> list[tuple[int, int]]:
    """(stage, bucket), in the order of the prefills."""
    stages = (0, 1) if self._keeps else (0,)
    return [(stage, T) for stage in stages for T in self._programs.buckets()]

  def _prefill_queue(self, admission: Admission) -> dict[tuple, list]:
    """A shard's prefills by place: (prefill, tokens, rows, columns).

    The experts of the tokens are recorded in these rows of the shard's samples,
    and in these columns; beyond the last one they are not recorded.
    """
    queue: dict[tuple, list] = {place: [] for place in self._prefill_places()}
    S, buckets = self._programs.sizes.max_prompt_length, self._programs.buckets
    for prefill in admission.prefill:
      tokens = prefill.prefix.tokens[:-1]
      T = next(T for T in buckets() if len(tokens) <= T)
      first = prefill.prefix.requests[0]
      rows = [request.row for request in prefill.prefix.requests]
      number = np.arange(len(tokens))
      prompt_length = len(tokens) + 1 - first.num_tokens
      columns = S - prompt_length + number
      columns = np.where(number < first.num_recorded, _NOWHERE, columns)
      rows = rows if first.num_recorded < len(tokens) else []
      queue[prefill.stage, T].append((prefill, tokens, rows, columns))
    for prefills in queue.values():
      # The row with the fewest cached tokens decides what a batch computes.
      prefills.sort(key=lambda row: row[0].num_cached)
    return queue

  def _prefill(
    self, queues: list[dict[tuple, list]], facts: SimpleNamespace
  ) -> None:
    """The prefills of all shards' admissions, in few different shapes.

    Each shard has equally many rows. Padding has the length 0. The arrays are
    of own shards; `num_cached` is None if no shard's row has a cached token.
    """
    programs, sizes = self._programs, self._programs.sizes
    states, jitted = has_states(programs.cfg), programs.jitted
    for (stage, T), lengths in facts.prefixes.items():
      begin, end = 0, lengths.max()
      while begin < end:
        # Padding costs as much as a prefix, so a few are prefilled one by one.
        count = programs.prefill_batch(T)
        count = count if end - begin > count // 2 else 1
        Q, C = len(queues) * count, T // sizes.page_size
        tokens_QT = np.zeros((Q, T), np.int32)
        pages_QC = np.full((Q, C), sizes.num_pages, np.int32)  # nowhere
        lengths_Q, num_cached_Q = np.zeros((2, Q), np.int32)
        rows_QG = np.full((Q, programs.config.group_size), -1, np.int32)
        columns_QT = np.full((Q, T), _NOWHERE, np.int32)
        # Sources of `paged_decode.store_states`; a row more is for no row.
        slots, rows = (
          np.full((len(queues), n), count, np.int32)
          for n in (sizes.slots, PROMPT_ROWS + 1)
        )
        for shard, queue in enumerate(queues):
          batch = queue[stage, T][begin : begin + count]
          for i, (prefill, tokens, of_samples, columns) in enumerate(batch):
            row = shard * count + i
            tokens_QT[row, : len(tokens)] = tokens
            lengths_Q[row] = len(tokens)
            pages_QC[row, : len(prefill.pages)] = prefill.pages
            num_cached_Q[row] = prefill.num_cached
            if programs.records:
              rows_QG[row, : len(of_samples)] = of_samples
            columns_QT[row, : len(columns)] = columns
            slots[shard, prefill.slots], rows[shard, prefill.row] = i, i
        last = np.minimum(begin + count, lengths)
        cached = last > np.maximum(begin, facts.uncached[stage, T])
        sources = slots.ravel(), rows[:, :PROMPT_ROWS].ravel()
        num_cached = num_cached_Q if cached.any() else None
        more = num_cached, sources if states else None
        arrays = programs.to_devices((tokens_QT, lengths_Q, pages_QC, *more))
        self._state, experts = jitted.prefill(
          self._params, self._state, *arrays
        )
        if experts is not None:
          self.samples = jitted.write_prefix_routing(
            self.samples, experts, *programs.to_devices((rows_QG, columns_QT))
          )
        begin += count

  def _segment_plan(self, admissions: list[Admission]) -> SegmentPlan:
    """Allocates the next segment's pages; returns its plan for own shards."""
    schedulers = self._schedulers.values()
    segments = [scheduler.allocate_pages() for scheduler in schedulers]
    table, active = map(np.concatenate, zip(*segments, strict=True))
    join = lambda name: np.concatenate([getattr(a, name) for a in admissions])
    new = join("new") & active  # some were preempted at once
    arrays: dict[str, Any] = {  # the devices get them later
      name: np.zeros(len(active), np.int32) for name in OF_SLOTS
    }
    arrays["params"] = np.zeros((len(active), 4), np.float32)
    slots: list[Any] = [slot for s in schedulers for slot in s.slots]
    for i in np.flatnonzero(new):
      request = slots[i]
      first = self._programs.own[i // self._programs.sizes.slots] * self._rows
      values = vars(request) | {
        "row": first + request.row,
        "last_token": request.tokens[-1],
        "params": request.params or self.params,
      }
      for name in OF_SLOTS:
        arrays[name][i] = values[name]
    names = ("num_cached", "copy_source", "copy_target", "prompt_row")
    arrays |= {name: join(name) for name in names}
    arrays |= {"table": table, "active": active, "new": new}
    if not self._programs.by_row:
      arrays["params"] = None
    if not has_states(self._programs.cfg):
      arrays["prompt_row"] = ()
    return SegmentPlan(**arrays)

  def _min_active(self, any_waiting) -> np.int32:
    count = self._active.sum()
    if any_waiting or self._keeps:
      idle = _IDLE_OPEN if self._keeps else _IDLE
      return np.int32(count - max(1, count // idle))
    # A smaller program continues as soon as it has enough slots.
    smaller = (n for n in self._programs.compute_sizes if n < count)
    return np.int32(max(smaller, default=0))

  def _active_subset(self, plan: SegmentPlan, count: int) -> np.ndarray:
    """`count` slots of each shard to compute; all active ones.

    Most responses finish long before the longest one, and an agent's come one
    by one: few slots may be active.
    """
    slots, own = self._programs.sizes.slots, np.array(self._programs.own)
    active = plan.active.reshape(-1, slots)
    active_first = np.argsort(~active, axis=1, kind="stable")
    subset = active_first[:, :count] + slots * own[:, None]
    return subset.ravel().astype(np.int32)

  def _move(self) -> None:
    """Moves responses from the fullest shards to the emptiest."""
    programs, placement = self._programs, self._placement
    jitted = programs.jitted
    self._share([{}] * len(self._schedulers), True)
    facts, migration = self._facts(), None
    if self._may_migrate and placement.is_uneven():
      migration = placement.migrate(self._schedulers, facts)
    elif placement.can_lend(facts):
      for rows in placement.lend(self._schedulers, facts):
        self.samples = jitted.move_rows(self.samples, programs.to_devices(rows))
    if not migration:
      return
    pages, *slots, rows = programs.to_devices(migration)
    for moves in pages:
      self._state = jitted.move_pages(self._state, moves)
    self._state = jitted.move_slots(self._state, *slots)
    self.samples = jitted.move_rows(self.samples, rows)

  def _read_results(self) -> None:
    """Reads the results of the last segment, and starts to read its rows."""
    results, self._results = jax.device_get(self._results), None
    if results.drafts:
      self._speculates &= speculation.pays(*map(int, results.drafts))
    programs = self._programs
    by_shard = [np.split(x, programs.shards) for x in results[:2]]
    read = []  # (request, its tokens, whether it has left) of each own shard
    for shard, scheduler in self._schedulers.items():
      num_tokens, active = (x[shard] for x in by_shard)
      ended = scheduler.apply_results(num_tokens, active)
      read.append([(*pair, True) for pair in ended])
      for request, count in zip(scheduler.slots, num_tokens, strict=True):
        if request and request.owner and request.owner.streams:
          read[-1].append((request, int(count), False))
    if not self._keeps:
      self._placement.update(results)
    before = self._active
    self._active = results.active.reshape(programs.shards, -1).sum(1)
    counts = before - self._active  # of responses that left, on all hosts
    self._advance(int(counts.sum()), int(results.num_sampled))
    if self._keeps or self._on_finished:
      self._read_rows(read, (counts + self._streams).max(initial=0))

  def _advance(self, count: int, tokens: int) -> None:
    if not self._progress:
      return
    self._progress.advance(count, tokens=tokens)
    if self._programs.shards > 1:
      shard, words = self._placement.slowest()
      devices = self._programs.mesh.devices.reshape(self._programs.shards, -1)
      host = f"shard {shard} of process {devices[shard, 0].process_index}"
      self._progress.note = f"; fullest: {host}, {words}"

  def _read_rows(self, read: list[list[tuple]], most: int) -> None:
    """Starts to read rows; `most` of a shard, on any host."""
    programs = self._programs
    count = max(1, programs.sizes.slots // _IDLE)  # of a shard
    for begin in range(0, most, count):
      rows = np.full((len(read), count), -1, np.int32)
      entries = {}  # by the place in the result
      for i, (shard, left) in enumerate(zip(programs.own, read, strict=True)):
        for j, entry in enumerate(left[begin : begin + count]):
          rows[i, j] = entry[0].row
          entries[shard * count + j] = entry
      arrays = programs.jitted.read_rows(
        self.samples, programs.to_devices(rows.ravel())
      )
      self._reads.append((entries, *arrays))

  def _stopped(self, row: np.ndarray, length: int, first: int = 0) -> bool:
    """Whether a row's last token stops it; its response begins at `first`."""
    config = self._programs.config
    ended = row[length - 1] in config.stop_ids
    if isinstance(config.stop, StopStrings) and length >= config.min_new_tokens:
      ended |= config.stop.ended(row[first:length])
    return ended

  def _report(self) -> None:
    """Hands out the rows that were read."""
    reads, self._reads = self._reads, []
    responses, most = {}, self._programs.config.max_new_tokens
    rows_of = (
      multihost.addressable_rows if self._keeps else multihost.local_rows
    )
    for entries, *arrays in reads:
      tokens = rows_of(arrays[0]) if entries else {}
      owners = [request.owner for request, *_ in entries.values()]
      logprobs = any(owner and owner.logprobs for owner in owners)
      logps = rows_of(arrays[1]) if logprobs else {}
      for i in tokens.keys() & entries.keys():
        request, length, left = entries[i]
        if request.owner:
          self._extend(request, tokens[i], logps.get(i, ()), length, left)
          continue
        stopped = self._stopped(tokens[i], length)
        if stopped or length == most:
          responses[request.response] = FinishedResponse(
            tokens[i], length, stopped
          )
    if responses and self._on_finished:
      self._on_finished(responses)

  def _extend(self, request: Request, tokens, logps, length, left) -> None:
    """Gives a Generation its new tokens."""
    generation = request.owner
    if generation.finish:  # it was cancelled
      return
    first = generation.num_tokens
    new = tokens[first:length].tolist()
    begin = len(generation.tokens)
    new_logps = []
    if generation.logprobs:
      new_logps = logps[first + begin : length].tolist()
    if not left:
      generation.add(new[begin:], new_logps, "")
      return
    if kept := request.kept:
      kept.tokens = np.append(request.tokens, np.int32(new))
    finish = STOP if self._stopped(tokens, length, first) else LENGTH
    self._end(request, new[begin:], new_logps, finish)

  def _end(self, request: Request, tokens, logps, finish: str) -> None:
    del self._open[request]
    request.owner.add(tokens, logps, finish)
