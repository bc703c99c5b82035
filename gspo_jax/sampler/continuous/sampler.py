"""The host's loop of continuous batching.

The host assigns slots and pages (`scheduler`) and the devices decode a segment
of a few dozen steps (`paged_decode`), until all responses have finished or
paused. While no response waits for a slot, the host starts the next segment
before it reads the results of the last one, so the devices need not wait.

A host plans only the shards of its own devices. All hosts must run the same
programs, which follow from a few numbers of every shard (`_Facts`). Before each
segment the devices send these numbers to all hosts. A host reads them at once
if it waits for results anyway, else after the segment before.

Dimension letters as in `continuous/__init__`. A shard is a part of the devices;
no two shards share rows. "Own" shards are those of this host.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.model.cache import has_states
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler.continuous import jit, speculation
from gspo_jax.sampler.continuous.config import (
  PROMPT_ROWS,
  ContinuousBatchingConfig,
  ShardSizes,
)
from gspo_jax.sampler.continuous.jit import JittedSampler
from gspo_jax.sampler.continuous.paged_decode import (
  DecodeState,
  SegmentPlan,
  SegmentResults,
)
from gspo_jax.sampler.continuous.placement import Placement
from gspo_jax.sampler.continuous.scheduler import (
  Admission,
  Requests,
  Scheduler,
  pending_requests,
)
from gspo_jax.sampler.decode_params import decode_params_sharding
from gspo_jax.sampler.samples import (
  FinishedResponse,
  OnFinished,
  Prompts,
  SamplerConfig,
  Samples,
)
from gspo_jax.sampler.stop_strings import StopStrings

_IDLE = 8  # a segment ends when 1 of 8 slots is idle and responses wait
# A step computes at least so many rows of a shard: a TPU tile has 8.
_FEWEST_ROWS = 8
_MAX_PREFILL_BATCH = 8  # most prefixes of one prefill on each shard
_NOWHERE = 2**31 - 1  # a column behind the last one


@dataclasses.dataclass(frozen=True)
class _Facts:
  """What all hosts know of each shard after it has planned; [shards] ints."""

  waiting: np.ndarray  # responses
  active: np.ndarray  # slots
  new: np.ndarray  # of these, new ones
  looks_ahead: np.ndarray  # 1: `Scheduler.can_look_ahead`
  goes_on: np.ndarray  # 1: `Scheduler.may_go_on`
  room: np.ndarray  # `Scheduler.num_spare_pages`
  visitors: np.ndarray  # `Scheduler.num_visitors`
  # Prefixes to prefill in each bucket, and those without a cached token.
  prefixes: dict[int, np.ndarray]
  uncached: dict[int, np.ndarray]


@dataclasses.dataclass
class PrefixCache:
  """Keys, values and weights that a call leaves to the next one.

  The next call prefills only the new tokens of the responses that it continues,
  and does not prepare weights. All calls have the same weights, prompts and
  key. This object keeps the weights of `decode_params` and all pages in device
  memory; what does not fit is prefilled again. A model with states computes all
  tokens of a response again if it has new ones or has lost its slot.
  """

  state: DecodeState | None = None
  tokens: list[dict] | None = None  # of each own shard, by response
  keeps_idle: bool = False  # also of responses that a call does not continue
  params: model.Params | None = None  # of `decode_params`


@dataclasses.dataclass(frozen=True)
class ContinuousSampler:
  """A `Sampler` that can also continue responses."""

  cfg: model.ModelConfig
  config: SamplerConfig
  batching: ContinuousBatchingConfig
  sizes: ShardSizes
  shards: int
  batch_sharding: jax.sharding.Sharding
  jitted: JittedSampler

  @functools.cached_property
  def own(self) -> list[int]:
    """The shards on this host's devices; two hosts may have the same."""
    parts = self.batch_sharding.addressable_devices_indices_map((self.shards,))
    shards = range(self.shards)
    return sorted(
      {shard for (part,) in parts.values() for shard in shards[part]}
    )

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self.batch_sharding.mesh

  def __call__(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    resume_from: Samples | None = None,
    stop_at: np.ndarray | None = None,
    num_appended: np.ndarray | None = None,
    prefix_cache: PrefixCache | None = None,
    on_finished: OnFinished | None = None,
    progress: Progress | None = None,
  ) -> Samples:
    """Generates all G responses to each of P prompts.

    The key of token t of response b is made of (key, b, t). So a response that
    pauses and resumes with the same key and weights equals one without a pause.

    Args:
      params: as `model.init` returns them.
      prompts: P is a multiple of the shards.
      key: a typed PRNG key.
      resume_from: samples whose UNFINISHED responses are continued; donated.
      stop_at: [B] int, tokens at which a response pauses and stays UNFINISHED.
      num_appended: [B] int, tokens that `append_tokens` has added to each
        response since the last call that continued it. A turn begins behind
        them: stop strings are found from there on. None: it has one turn.
      prefix_cache: left by earlier calls for these responses; updated.
      on_finished: called with responses of an earlier segment while a later one
        decodes.
      progress: counts responses that finish or pause.

    Raises:
      UserError: the prompts have another shape.
    """
    tokens, lengths = multihost.to_host((prompts.tokens, prompts.lengths))
    width = self.sizes.max_prompt_length
    if tokens.shape[1] != width or len(tokens) % self.shards:
      raise UserError(
        f"prompts {tokens.shape}: expected [P, {width}], with P a multiple of "
        f"the {self.shards} shards"
      )
    samples = resume_from
    if samples is None:
      samples = self.jitted.empty_samples(len(tokens))
    so_far = multihost.to_host((samples.lengths, samples.finish))
    R = self.sizes.max_new_tokens
    if stop_at is None:
      stop_at = np.full(len(so_far[0]), R)
    stop_at = np.minimum(stop_at, R)
    cache, cached = prefix_cache or PrefixCache(), [None] * len(self.own)
    if prefix_cache:
      cached = cache.tokens or [{} for _ in self.own]
    state, samples = self.jitted.begin(samples, cache.state)
    cache.state = cache.tokens = None  # the state was donated
    appended = np.zeros_like(stop_at) if num_appended is None else num_appended
    requests = self._shard_requests(
      tokens, lengths, samples, so_far, stop_at, appended
    )
    if prefix_cache and not cache.keeps_idle:
      cached = [
        {
          b: x
          for b, x in kept.items()
          if shard.stop_at[b] > shard.num_tokens[b]
        }
        for kept, shard in zip(cached, requests, strict=True)
      ]
    schedulers = [
      Scheduler(
        self.sizes,
        [len(prefix) for prefix in shard.prefixes],
        shard.prefix_index,
        shard.stop_at - shard.num_tokens,
        kept,
        has_states=has_states(self.cfg),
      )
      for shard, kept in zip(requests, cached, strict=True)
    ]
    stop = self.config.stop
    fields = _fields_by_response(
      requests, stop if num_appended is None else None
    )
    params = cache.params or self.jitted.decode_params(params)
    placement = Placement(self.sizes, self.shards, self.own, so_far[0], stop_at)

    # Kept tokens stay with the rows of their responses. A prefill that is
    # repeated because pages ran out writes the routing of a group's rows.
    may_migrate = not prefix_cache and (
      samples.experts is None or self.sizes.holds_all_slots
    )

    def finished_in(results, samples) -> list[tuple]:
      nonlocal active, speculates
      results = jax.device_get(results)
      if results.drafts:
        speculates &= speculation.pays(*map(int, results.drafts))
      left = self._apply_results(schedulers, so_far[0], results)
      placement.update(results)
      before, active = active, results.active.reshape(self.shards, -1).sum(1)
      counts = before - active  # of responses that left, also on other hosts
      if progress:
        progress.advance(int(counts.sum()), tokens=int(results.num_sampled))
        shard, words = placement.slowest()
        device = self.mesh.devices.reshape(self.shards, -1)[shard, 0]
        host = f"shard {shard} of process {device.process_index}"
        progress.note = f"; fullest: {host}, {words}" if self.shards > 1 else ""
      most = counts.max(initial=0)
      return list(self._finished(left, most, samples)) if on_finished else []

    speculates = True  # where few slots are computed
    # Active slots of each shard, as far as results are known.
    active = np.zeros(self.shards, int)
    results, finished = None, []  # of the last segment; not reported so far
    shared = self._share(schedulers, [{}] * len(schedulers), None)
    while True:
      facts = self._facts(shared)
      look_ahead = facts.looks_ahead.all() and facts.goes_on.any()
      migrates = may_migrate and not facts.waiting.any()
      migrates = migrates and placement.is_uneven()
      if results and (migrates or not look_ahead):
        finished += finished_in(results, samples)
        results = None
      if not results and not facts.waiting.any() and not active.any():
        break
      if migrates:
        state, samples = self._migrate(state, samples, schedulers, placement)
      admissions = [scheduler.admit() for scheduler in schedulers]
      queues = self._prefill_queues(admissions, requests)
      plan = self._segment_plan(schedulers, admissions, fields)
      shared = self._share(schedulers, queues, plan)
      any_new = False
      if not results:  # else nothing waited, so nothing starts
        facts = self._facts(shared)
        active, any_new = facts.active, facts.new.any()
        for arrays in self._prefill_batches(queues, facts):
          state, samples = self._prefill(params, state, samples, *arrays)
      min_active = self._min_active(active.sum(), facts.waiting.any())
      slots = None
      most = active.max() * self.shards
      count = min(n for n in self.compute_sizes if n >= most)
      if not any_new and count < self.batching.slots:
        slots = self._active_subset(plan, count // self.shards)
      drafts = 0
      # Where preempted responses wait, pages may hold single tokens only.
      if speculates and slots is not None and not facts.waiting.any():
        drafts = self._drafts(count)
      plan_and_slots = self._to_devices((plan, slots))
      unread = results
      state, samples, results = self.jitted.decode(
        params, state, samples, *plan_and_slots, min_active, key, drafts
      )
      # The devices decode this segment while the host handles the last one's
      # responses.
      if finished:
        on_finished(self._read_finished(finished))
      finished = finished_in(unread, samples) if unread else []
    if finished:
      on_finished(self._read_finished(finished))
    if prefix_cache:
      cache.state, cache.params = state, params
      cache.tokens = [scheduler.kept for scheduler in schedulers]
    for rows in reversed(placement.swaps):
      samples = self.jitted.move_rows(samples, self._to_devices(rows))
    return self.jitted.finalize(samples)

  def append_tokens(
    self,
    samples: Samples,
    tokens: np.ndarray,
    counts: np.ndarray,
    finish: np.ndarray,
  ) -> Samples:
    """Appends tokens to the samples of an earlier call; donates them."""
    arrays = multihost.to_global(
      (tokens, counts, finish), samples.tokens.sharding
    )
    return self.jitted.append_tokens(samples, *arrays)

  def buckets(self, *, continues: bool = True) -> tuple[int, ...]:
    longest = self.sizes.max_prompt_length
    if continues:
      longest += self.sizes.max_new_tokens
    return self.batching.buckets(longest)

  def prefill_batch(self, T: int) -> int:
    """Prefixes of T tokens in a shard's prefill; a size of 1 also compiles.

    Their temporary cache takes at most an eighth of the memory of all pages.
    """
    tokens = self.sizes.num_pages * self.sizes.page_size
    return max(1, min(_MAX_PREFILL_BATCH, tokens // (8 * T)))

  def lower(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    continues: bool = False,
    subsets: bool = False,
  ) -> dict[str, jax.stages.Lowered]:
    """Lowers a prefill of the longest prompts, and a segment; see `Sampler`.

    With `subsets`, also the segments of fewer slots, as "generate SLOTS".
    """
    shape, jitted = jax.ShapeDtypeStruct, self.jitted
    whole = lambda *dims: shape(dims, np.int32, sharding=self.batch_sharding)
    decode_params = jitted.decode_params.lower(params)
    params = jax.tree.map(
      lambda x, place: shape(x.shape, x.dtype, sharding=place),
      decode_params.out_info,
      decode_params_sharding(self.cfg, self.mesh),
    )
    empty = jitted.empty_samples.lower(len(prompts.lengths)).out_info
    state, samples = jitted.begin.lower(empty, None).out_info
    slots = dict.fromkeys(SegmentPlan.__dataclass_fields__, state.num_tokens)
    slots |= {"table": state.pages.table}
    slots |= {"active": state.pages.active, "new": state.pages.active}
    sources = whole(self.batching.slots), whole(PROMPT_ROWS * self.shards)
    if not has_states(self.cfg):
      slots["prompt_row"], sources = (), None
    T = self.buckets(continues=continues)[-1]
    Q, C = self.prefill_batch(T) * self.shards, T // self.sizes.page_size
    decode = lambda compute_slots, drafts: jitted.decode.lower(
      params,
      state,
      samples,
      SegmentPlan(**slots),
      compute_slots,
      shape((), np.int32),
      key,
      drafts,
    )
    lowered = {
      "decode_params": decode_params,
      "prefill": jitted.prefill.lower(
        params, state, whole(Q, T), whole(Q), whole(Q, C), None, sources
      ),
      "generate": decode(None, 0),
    }
    for m in self.compute_sizes[1:] if subsets else ():
      lowered[f"generate {m}"] = decode(whole(m), self._drafts(m))
    return lowered

  def compilations(self) -> dict[str, tuple[MeshJit, int]]:
    once = (
      *("decode_params", "read_tokens", "finalize", "append_tokens"),
      *("move_pages", "move_slots", "move_rows"),
    )
    prefills, sizes = 4 * len(self.buckets()), self.compute_sizes
    limits = dict.fromkeys(once, 1) | {
      "begin": 2,  # with an empty cache, and with the last turn's cache
      # Few slots with drafts, and without if they do not pay.
      "decode": len(sizes) + sum(self._drafts(n) > 0 for n in sizes),
      "prefill": prefills,
      "write_prefix_routing": prefills,
    }
    return {
      name: (getattr(self.jitted, name), limit)
      for name, limit in limits.items()
    }

  def describe(self, *, continues: bool) -> str:
    slots = " or ".join(map(str, self.compute_sizes))
    buckets = ", ".join(map(str, self.buckets(continues=continues)))
    return (
      f"continuous batching: {slots} slots, "
      f"{self.sizes.num_pages * self.shards} pages of {self.sizes.page_size} "
      f"tokens; prefills of up to {buckets} tokens"
    )

  def _shard_requests(
    self, prompts, prompt_lengths, samples: Samples, so_far, *of_responses
  ) -> list[Requests]:
    """Each own shard's responses; `so_far` is (lengths, finish) on the host."""
    B = len(samples.tokens)
    tokens = {}
    if so_far[0].any():
      tokens = multihost.addressable_rows(samples.tokens)
    whole = prompts, prompt_lengths, *so_far, *of_responses
    parts = [np.split(x, self.shards) for x in whole]
    b = B // self.shards
    return [
      pending_requests(
        *(part[shard] for part in parts),
        [tokens.get(row) for row in range(shard * b, shard * b + b)],
      )
      for shard in self.own
    ]

  def _share(self, schedulers, queues, plan: SegmentPlan | None) -> jax.Array:
    """This host's part of the `_Facts`, sent to all: [shards, ...] int32."""
    new = np.zeros(len(schedulers), int)
    if plan is not None:
      new = plan.new.reshape(len(schedulers), -1).sum(1)
    rows = []
    for scheduler, queue, count in zip(schedulers, queues, new, strict=True):
      row = [scheduler.num_waiting, scheduler.num_active, count]
      row += [scheduler.can_look_ahead, scheduler.may_go_on]
      row += [scheduler.num_spare_pages, scheduler.num_visitors]
      for T in self.buckets():
        prefills = [prefill for prefill, *_ in queue.get(T, ())]
        row += [len(prefills), sum(not p.num_cached for p in prefills)]
      rows.append(row)
    return self.jitted.share(self._to_devices(np.array(rows, np.int32)))

  def _facts(self, shared: jax.Array) -> _Facts:
    """The facts of all shards; waits for them."""
    columns = np.asarray(shared.addressable_data(0)).T
    buckets = self.buckets()
    return _Facts(
      *columns[:7],
      prefixes=dict(zip(buckets, columns[7::2], strict=True)),
      uncached=dict(zip(buckets, columns[8::2], strict=True)),
    )

  def _to_devices(self, tree):
    """Global arrays from the rows of this host's own shards, joined."""

    def put(x):
      n = len(x) // len(self.own)

      def part(index):
        begin, end, _ = index[0].indices(n * self.shards)
        at = self.own.index(begin // n) * n
        return x[at : at + end - begin]

      return jax.make_array_from_callback(
        (n * self.shards, *x.shape[1:]), self.batch_sharding, part
      )

    return jax.tree.map(put, tree)

  def _prefill_queues(
    self, admissions: list[Admission], requests: list[Requests]
  ) -> list[dict[int, list]]:
    """Each shard's prefills by bucket: (prefill, tokens, rows, columns).

    The experts of the tokens are recorded in these rows of the shard's samples,
    and in these columns; beyond the last one they are not recorded.
    """
    queues, S = [], self.sizes.max_prompt_length
    for admission, request in zip(admissions, requests, strict=True):
      queue = {T: [] for T in self.buckets()}
      for prefill in admission.prefill:
        tokens = request.prefixes[prefill.prefix][:-1]
        T = next(T for T in queue if len(tokens) <= T)
        rows, first = request.unrecorded(prefill.prefix)
        number = np.arange(len(tokens))
        prompt_length = len(tokens) + 1 - request.num_tokens[rows[0]]
        columns = np.where(number < first, _NOWHERE, S - prompt_length + number)
        rows = rows if first < len(tokens) else rows[:0]
        queue[T].append((prefill, tokens, rows, columns))
      for rows in queue.values():
        # The row with the fewest cached tokens decides what a batch computes.
        rows.sort(key=lambda row: row[0].num_cached)
      queues.append(queue)
    return queues

  def _prefill_batches(
    self, queues: list[dict[int, list]], facts: _Facts
  ) -> Iterator[tuple]:
    """The prefills of all shards' admissions, in few different shapes.

    Each shard has equally many rows. Padding has the length 0. The arrays are
    of own shards; `num_cached` is None if no shard's row has a cached token.
    """
    for T, lengths in facts.prefixes.items():
      begin, end = 0, lengths.max()
      while begin < end:
        # Padding costs as much as a prefix, so a few are prefilled one by one.
        count = self.prefill_batch(T)
        count = count if end - begin > count // 2 else 1
        Q, C = len(queues) * count, T // self.sizes.page_size
        tokens_QT = np.zeros((Q, T), np.int32)
        pages_QC = np.full((Q, C), self.sizes.num_pages, np.int32)  # nowhere
        lengths_Q, num_cached_Q = np.zeros((2, Q), np.int32)
        rows_QG = np.full((Q, self.config.group_size), -1, np.int32)
        columns_QT = np.full((Q, T), _NOWHERE, np.int32)
        # Sources of `paged_decode.store_states`; a row more is for no row.
        slots, rows = (
          np.full((len(queues), n), count, np.int32)
          for n in (self.sizes.slots, PROMPT_ROWS + 1)
        )
        for shard, queue in enumerate(queues):
          batch = queue[T][begin : begin + count]
          for i, (prefill, tokens, of_samples, columns) in enumerate(batch):
            row = shard * count + i
            tokens_QT[row, : len(tokens)] = tokens
            lengths_Q[row] = len(tokens)
            pages_QC[row, : len(prefill.pages)] = prefill.pages
            num_cached_Q[row] = prefill.num_cached
            rows_QG[row, : len(of_samples)] = of_samples
            columns_QT[row, : len(columns)] = columns
            slots[shard, prefill.slots], rows[shard, prefill.row] = i, i
        last = np.minimum(begin + count, lengths)
        cached = last > np.maximum(begin, facts.uncached[T])
        sources = slots.ravel(), rows[:, :PROMPT_ROWS].ravel()
        prefixes = tokens_QT, lengths_Q, pages_QC
        num_cached = num_cached_Q if cached.any() else None
        yield prefixes, num_cached, sources, (rows_QG, columns_QT)
        begin += count

  def _prefill(
    self, params, state, samples, prefixes, num_cached, sources, routing
  ):
    sources = sources if has_states(self.cfg) else None
    (tokens, lengths, pages), num_cached, sources = self._to_devices(
      (prefixes, num_cached, sources)
    )
    state, experts = self.jitted.prefill(
      params, state, tokens, lengths, pages, num_cached, sources
    )
    if experts is not None:
      samples = self.jitted.write_prefix_routing(
        samples, experts, *self._to_devices(routing)
      )
    return state, samples

  def _segment_plan(
    self, schedulers, admissions: list[Admission], fields
  ) -> SegmentPlan:
    """Allocates the next segment's pages; returns its plan for own shards."""
    segments = [scheduler.allocate_pages() for scheduler in schedulers]
    join = lambda parts, name: np.concatenate([getattr(p, name) for p in parts])
    active = join(segments, "active")
    # A shard counts responses from its first one.
    b = len(fields["stop_at"]) // len(self.own)
    local = join(admissions, "response")
    first = lambda shards: np.repeat(shards, self.sizes.slots) * b
    row = local + first(np.arange(len(self.own)))
    return SegmentPlan(
      table=join(segments, "table"),
      active=active,
      # A new response may have been preempted at once.
      new=join(admissions, "new") & active,
      response=(local + first(self.own)).astype(np.int32),
      num_cached=join(admissions, "num_cached"),
      copy_source=join(admissions, "copy_source"),
      copy_target=join(admissions, "copy_target"),
      prompt_row=(
        join(admissions, "prompt_row") if has_states(self.cfg) else ()
      ),
      **{name: value_B[row] for name, value_B in fields.items()},
    )

  def _min_active(self, count, any_waiting) -> np.int32:
    if any_waiting:
      return np.int32(count - max(1, count // _IDLE))
    # A smaller program continues as soon as it has enough slots.
    smaller = (n for n in self.compute_sizes if n < count)
    return np.int32(max(smaller, default=0))

  @property
  def compute_sizes(self) -> tuple[int, ...]:
    """Numbers of slots that a segment can compute: all, a half, and so on."""
    slots, sizes = self.sizes.slots, [self.batching.slots]
    while (slots := slots // 2) * (1 + self.sizes.drafts) >= _FEWEST_ROWS:
      sizes.append(slots * self.shards)
    return tuple(sizes)

  def _drafts(self, count: int) -> int:
    """Tokens that each slot drafts in a step where `count` are computed."""
    return self.sizes.drafts_of(count // self.shards)

  def _active_subset(self, plan: SegmentPlan, count: int) -> np.ndarray:
    """`count` slots of each shard to compute; all active ones.

    Most responses finish long before the longest one, so few slots may be
    active at the end. A new slot needs all, to copy its prefix's partial page.
    """
    slots = self.sizes.slots
    active = plan.active.reshape(-1, slots)
    active_first = np.argsort(~active, axis=1, kind="stable")
    subset = active_first[:, :count] + slots * np.array(self.own)[:, None]
    return subset.ravel().astype(np.int32)

  def _migrate(self, state, samples, schedulers, placement):
    """Moves running responses from the fullest shards to the emptiest."""
    facts = self._facts(self._share(schedulers, [{}] * len(schedulers), None))
    migration = placement.migrate(schedulers, facts.room, facts.visitors)
    if not migration:
      return state, samples
    pages, *slots, rows = self._to_devices(migration)
    for moves in pages:
      state = self.jitted.move_pages(state, moves)
    state = self.jitted.move_slots(state, *slots)
    return state, self.jitted.move_rows(samples, rows)

  def _apply_results(
    self, schedulers, num_tokens_before, results: SegmentResults
  ) -> list[list[tuple[int, int, int]]]:
    """Applies a segment's results to the own shards.

    Returns the (row, number, tokens) of responses that left.
    """
    left = []
    by_shard = [np.split(x, self.shards) for x in results[:3]]
    for shard, scheduler in zip(self.own, schedulers, strict=True):
      num_tokens, active, response = (x[shard] for x in by_shard)
      row = scheduler.response
      scheduler.apply_results(num_tokens - num_tokens_before[response], active)
      slots = np.flatnonzero((row >= 0) & ~active)
      first = shard * (len(num_tokens_before) // self.shards)
      columns = first + row[slots], response[slots], num_tokens[slots]
      left.append(np.stack(columns, axis=1).tolist())
    return left

  def _finished(self, left, most: int, samples) -> Iterator[tuple]:
    """Yields numbers [Q] (-1: padding), lengths [Q] and tokens [Q, R].

    `most`: responses that left the shard which most left, on any host.
    """
    count = max(1, self.sizes.slots // _IDLE)  # of a shard
    for begin in range(0, most, count):
      columns = np.full((3, self.shards, count), -1, np.int32)
      for shard, finished in zip(self.own, left, strict=True):
        for i, values in enumerate(finished[begin : begin + count]):
          columns[:, shard, i] = values
      rows, numbers, lengths = columns.reshape(3, -1)
      rows = multihost.to_global(rows, self.batch_sharding)
      yield numbers, lengths, self.jitted.read_tokens(samples, rows)

  def _read_finished(
    self, finished: list[tuple]
  ) -> dict[int, FinishedResponse]:
    responses, config = {}, self.config
    for numbers, lengths, tokens_on_devices in finished:
      for i, tokens in multihost.local_rows(tokens_on_devices).items():
        number, length = int(numbers[i]), int(lengths[i])
        if number < 0:
          continue
        stopped = bool(tokens[length - 1] in config.stop_ids)
        if config.stop and length >= config.min_new_tokens:
          stopped |= config.stop.ended(tokens[:length])
        if stopped or length == config.max_new_tokens:
          responses[number] = FinishedResponse(tokens, length, stopped)
    return responses


def _fields_by_response(
  requests: list[Requests], stop: StopStrings | None
) -> dict[str, np.ndarray]:
  """Fields of a SegmentPlan that depend on the response alone, [B] int32.

  `stop` reads the tokens that a response has; None: a turn begins behind them.
  """
  join = lambda name: np.concatenate([getattr(r, name) for r in requests])
  last_token, stop_state = [], []
  for r in requests:
    for prefix, count in zip(r.prefix_index, r.num_tokens, strict=True):
      tokens = r.prefixes[prefix] if r.prefixes else [0]
      last_token.append(tokens[-1])
      reads = stop and count and r.prefixes
      stop_state.append(stop.state(tokens[-count:]) if reads else 0)
  return {
    "num_tokens": join("num_tokens"),
    "stop_at": join("stop_at"),
    "stop_state": np.array(stop_state, np.int32),
    "last_token": np.array(last_token, np.int32),
  }


def build_continuous_sampler(
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
  *,
  batching: ContinuousBatchingConfig,
  max_prompt_length: int,
  params_sharding,
  mesh: jax.sharding.Mesh,
  sampler_mesh: jax.sharding.Mesh,
) -> ContinuousSampler:
  """Builds a ContinuousSampler; UserError if the sizes do not fit.

  And if a model with states is to speculate: a state cannot go back.

  Weights, keys and samples are on `mesh`; `sampler_mesh` has the same devices,
  arranged for decoding. `max_prompt_length` is the width of the prompts.
  """
  shards = sharding.batch_shards(sampler_mesh)
  sampler.require_stops()
  if sampler.speculation and has_states(cfg):
    raise UserError(
      f"continuous_batching.speculation={sampler.speculation}: expected 0 for "
      "a model with gated DeltaNets, whose states cannot go back"
    )
  sizes = batching.shard_sizes(sampler, max_prompt_length, shards)
  return ContinuousSampler(
    cfg=cfg,
    config=sampler,
    batching=batching,
    sizes=sizes,
    shards=shards,
    batch_sharding=sharding.batch_sharding(sampler_mesh),
    jitted=jit.jit_sampler(
      cfg,
      sampler,
      prefill_chunk=batching.prefill_chunk,
      sizes=sizes,
      params_sharding=params_sharding,
      mesh=mesh,
      sampler_mesh=sampler_mesh,
    ),
  )
