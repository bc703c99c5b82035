"""The host's loop of continuous batching.

The host assigns slots and pages (`scheduler`) and the devices decode a segment
of a few dozen steps (`paged_decode`), until all responses have finished or
paused. While no response waits for a slot, the host starts the next segment
before it reads the results of the last one, so the devices need not wait.

Dimension letters as in `continuous/__init__`. A shard is a part of the devices;
no two shards share rows.
"""

import dataclasses
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
from gspo_jax.sampler.continuous.paged_decode import DecodeState, SegmentPlan
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
_FEWEST_ROWS = 8  # of a shard that a step computes: those of a TPU tile
_IDLE_SLOTS = 4  # responses draft tokens where 1 of 4 slots is computed
_MAX_PREFILL_BATCH = 8  # most prefixes of one prefill on each shard


@dataclasses.dataclass
class PrefixCache:
  """Keys, values and weights that a call leaves to the next one.

  The next call prefills only the new tokens of the responses that it continues,
  and does not prepare weights. All calls have the same weights, prompts and
  key. This object keeps the weights of `decode_params` and all pages in device
  memory; what does not fit is prefilled again. A model with states computes all
  tokens again.
  """

  state: DecodeState | None = None
  tokens: list[dict] | None = None  # of each shard, by response
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
    turn_start: np.ndarray | None = None,
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
      turn_start: [B] int, the first token of each response's newest turn, 0 by
        default; stop strings are found from there on.
      prefix_cache: left by earlier calls for these responses; updated.
      on_finished: called with responses of an earlier segment while a later one
        decodes.
      progress: counts responses that finish or pause.

    Raises:
      UserError: the prompts have another shape, or routing is recorded over
        several calls.
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
    several_calls = resume_from is not None or stop_at is not None
    if several_calls and samples.experts is not None:
      raise UserError(
        "resume_from, stop_at: expected neither with record_routing=True, "
        "because the routing of a response's earlier tokens is not kept"
      )
    so_far = multihost.to_host((samples.lengths, samples.finish))
    cache, cached = prefix_cache or PrefixCache(), [None] * self.shards
    if prefix_cache:
      cached = cache.tokens or [{} for _ in range(self.shards)]
    state, samples = self.jitted.begin(samples, cache.state)
    cache.state = cache.tokens = None  # the state was donated
    requests = self._shard_requests(tokens, lengths, samples, so_far, stop_at)
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
    if turn_start is None:
      turn_start = np.zeros_like(so_far[0])
    fields = _fields_by_response(requests, turn_start, self.config.stop)
    placement = Placement(so_far[0], self.sizes, self.shards)
    # Kept tokens stay with the row of their response.
    may_migrate = self.shards > 1 and not prefix_cache
    params = cache.params or self.jitted.decode_params(params)

    def finished_in(results, samples) -> list[tuple]:
      nonlocal speculates
      before = sum(scheduler.num_sampled for scheduler in schedulers)
      *results, drafts = jax.device_get(results)
      speculates &= drafts is None or speculation.pays(*map(int, drafts))
      left = self._apply_results(schedulers, placement, results)
      if progress:
        tokens = sum(scheduler.num_sampled for scheduler in schedulers)
        progress.advance(sum(map(len, left)), tokens=tokens - before)
      if not on_finished:
        return []
      return list(self._finished(left, placement, samples))

    speculates = True  # where few slots are computed
    results, finished = None, []  # of the last segment; not reported so far
    while True:
      look_ahead = all(scheduler.can_look_ahead for scheduler in schedulers)
      look_ahead &= any(scheduler.may_go_on for scheduler in schedulers)
      migrates = may_migrate and placement.should_migrate(schedulers)
      if results and (migrates or not look_ahead):
        finished += finished_in(results, samples)
        results = None
      if not results and all(scheduler.done for scheduler in schedulers):
        break
      if migrates:
        state, samples = self._migrate(state, samples, schedulers, placement)
      admissions = [scheduler.admit() for scheduler in schedulers]
      for arrays in self._prefill_batches(admissions, requests):
        state, samples = self._prefill(params, state, samples, *arrays)
      plan = self._segment_plan(schedulers, admissions, fields)
      min_active = self._min_active(schedulers, plan)
      slots = self._active_subset(plan)
      drafts = speculates * self._drafts(slots)
      plan_and_slots = multihost.to_global((plan, slots), self.batch_sharding)
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
      rows = multihost.to_global(rows, self.batch_sharding)
      samples = self.jitted.move_rows(samples, rows)
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
    compute_slots: jax.ShapeDtypeStruct | None = None,
  ) -> dict[str, jax.stages.Lowered]:
    """Lowers a prefill of the longest prompts, and a segment; see `Sampler`.

    With `compute_slots`, int32 [m], the segment computes only these slots.
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
    return {
      "decode_params": decode_params,
      "prefill": jitted.prefill.lower(
        params, state, whole(Q, T), whole(Q), whole(Q, C), None, sources
      ),
      "generate": jitted.decode.lower(
        params,
        state,
        samples,
        SegmentPlan(**slots),
        compute_slots,
        shape((), np.int32),
        key,
        self._drafts(compute_slots),
      ),
    }

  def compilations(self) -> dict[str, tuple[MeshJit, int]]:
    once = (
      *("decode_params", "read_tokens", "finalize", "append_tokens"),
      *("move_pages", "move_slots", "move_rows"),
    )
    prefills, sizes = 4 * len(self.buckets()), self._compute_sizes
    limits = dict.fromkeys(once, 1) | {
      "begin": 2,  # with an empty cache, and with the last turn's cache
      # Few slots with drafts, and without if they do not pay.
      "decode": len(sizes) + sum(map(self._speculates, sizes)),
      "prefill": prefills,
      "write_prompt_routing": prefills,
    }
    return {
      name: (getattr(self.jitted, name), limit)
      for name, limit in limits.items()
    }

  def describe(self, *, continues: bool) -> str:
    slots = " or ".join(map(str, self._compute_sizes))
    buckets = ", ".join(map(str, self.buckets(continues=continues)))
    return (
      f"continuous batching: {slots} slots, "
      f"{self.sizes.num_pages * self.shards} pages of {self.sizes.page_size} "
      f"tokens; prefills of up to {buckets} tokens"
    )

  def _shard_requests(
    self, prompts, prompt_lengths, samples: Samples, so_far, stop_at
  ) -> list[Requests]:
    """Each shard's responses; `so_far` is (lengths, finish) on the host."""
    B, R = samples.tokens.shape
    stop_at = np.full(B, R) if stop_at is None else np.minimum(stop_at, R)
    tokens = np.zeros((B, R), np.int32)
    if so_far[0].any():
      # A host needs only the tokens that its devices prefill.
      for row, values in multihost.addressable_rows(samples.tokens).items():
        tokens[row] = values
    whole = prompts, prompt_lengths, tokens, *so_far, stop_at
    parts = zip(*(np.split(x, self.shards) for x in whole), strict=True)
    return [pending_requests(*part) for part in parts]

  def _prefill_batches(
    self, admissions: list[Admission], requests: list[Requests]
  ) -> Iterator[tuple]:
    """The prefills of all shards' admissions, in few different shapes.

    Each shard has equally many rows, and counts responses from its first one.
    Padding has the length 0 and the first response -1.
    """
    queues = {T: [[] for _ in requests] for T in self.buckets()}
    for shard, (admission, request) in enumerate(
      zip(admissions, requests, strict=True)
    ):
      for prefill in admission.prefill:
        tokens = request.prefixes[prefill.prefix][:-1]
        T = next(T for T in queues if len(tokens) <= T)
        response = np.searchsorted(request.prefix_index, prefill.prefix)
        queues[T][shard].append((prefill, tokens, int(response)))
    for T, by_shard in queues.items():
      for queue in by_shard:
        # The row with the fewest cached tokens decides what a batch computes.
        queue.sort(key=lambda row: row[0].num_cached)
      while longest := max(map(len, by_shard)):
        # Padding costs as much as a prefix, so a few are prefilled one by one.
        count = self.prefill_batch(T)
        count = count if longest > count // 2 else 1
        Q, C = self.shards * count, T // self.sizes.page_size
        tokens_QT = np.zeros((Q, T), np.int32)
        pages_QC = np.full((Q, C), self.sizes.num_pages, np.int32)  # nowhere
        lengths_Q, num_cached_Q = np.zeros((2, Q), np.int32)
        first_response_Q = np.full(Q, -1, np.int32)
        # Sources of `paged_decode.store_states`; a row more is for no row.
        slots, rows = (
          np.full((self.shards, n), count, np.int32)
          for n in (self.sizes.slots, PROMPT_ROWS + 1)
        )
        for shard, queue in enumerate(by_shard):
          for i, (prefill, tokens, response) in enumerate(queue[:count]):
            row = shard * count + i
            tokens_QT[row, : len(tokens)] = tokens
            lengths_Q[row] = len(tokens)
            pages_QC[row, : len(prefill.pages)] = prefill.pages
            num_cached_Q[row] = prefill.num_cached
            first_response_Q[row] = response
            slots[shard, prefill.slots], rows[shard, prefill.row] = i, i
          del queue[:count]
        sources = slots.ravel(), rows[:, :PROMPT_ROWS].ravel()
        prefixes = tokens_QT, lengths_Q, pages_QC
        yield prefixes, num_cached_Q, sources, first_response_Q

  def _prefill(
    self, params, state, samples, prefixes, num_cached, sources, response
  ):
    num_cached = num_cached if num_cached.any() else None
    sources = sources if has_states(self.cfg) else None
    (tokens, lengths, pages), num_cached, sources = multihost.to_global(
      (prefixes, num_cached, sources), self.batch_sharding
    )
    state, experts = self.jitted.prefill(
      params, state, tokens, lengths, pages, num_cached, sources
    )
    if experts is not None:
      response = multihost.to_global(response, self.batch_sharding)
      samples = self.jitted.write_prompt_routing(
        samples, experts, lengths, response
      )
    return state, samples

  def _migrate(self, state, samples, schedulers, placement):
    """Moves running responses from full shards to empty ones."""
    migration = placement.migrate(schedulers)
    if not migration:
      return state, samples
    pages, *slots, rows = multihost.to_global(migration, self.batch_sharding)
    for moves in pages:
      state = self.jitted.move_pages(state, moves)
    state = self.jitted.move_slots(state, *slots)
    return state, self.jitted.move_rows(samples, rows)

  def _segment_plan(
    self, schedulers, admissions: list[Admission], fields
  ) -> SegmentPlan:
    """Allocates the next segment's pages; returns its plan for all shards."""
    segments = [scheduler.allocate_pages() for scheduler in schedulers]
    join = lambda parts, name: np.concatenate([getattr(p, name) for p in parts])
    active = join(segments, "active")
    # A shard counts responses from its first one.
    first = np.arange(self.shards) * (len(fields["stop_at"]) // self.shards)
    response = join(admissions, "response")
    response += np.repeat(first, self.sizes.slots).astype(np.int32)
    return SegmentPlan(
      table=join(segments, "table"),
      active=active,
      # A new response may have been preempted at once.
      new=join(admissions, "new") & active,
      response=response,
      num_cached=join(admissions, "num_cached"),
      copy_source=join(admissions, "copy_source"),
      copy_target=join(admissions, "copy_target"),
      prompt_row=(
        join(admissions, "prompt_row") if has_states(self.cfg) else ()
      ),
      **{name: value_B[response] for name, value_B in fields.items()},
    )

  def _min_active(self, schedulers, plan: SegmentPlan) -> np.int32:
    count = plan.active.sum()
    if any(scheduler.num_waiting for scheduler in schedulers):
      return np.int32(count - max(1, count // _IDLE))
    # A smaller program continues as soon as it has enough slots.
    smaller = (n for n in self._compute_sizes if n < count)
    return np.int32(max(smaller, default=0))

  @property
  def _compute_sizes(self) -> tuple[int, ...]:
    """Numbers of slots that a segment can compute: all, a half, and so on."""
    slots, sizes = self.sizes.slots, [self.batching.slots]
    while (slots := slots // 2) * (1 + self.sizes.drafts) >= _FEWEST_ROWS:
      sizes.append(slots * self.shards)
    return tuple(sizes)

  def _speculates(self, count: int) -> bool:
    """Whether responses draft tokens where `count` slots are computed."""
    few = self.batching.slots // _IDLE_SLOTS
    return self.sizes.drafts > 0 and count <= few

  def _drafts(self, compute_slots) -> int:
    """Tokens that each of these slots drafts in a step; None are all slots."""
    is_few = compute_slots is not None and self._speculates(compute_slots.size)
    return self.sizes.drafts if is_few else 0

  def _active_subset(self, plan: SegmentPlan) -> np.ndarray | None:
    """The slots to compute, equally many of each shard; None for all.

    Most responses finish long before the longest one, so few slots may be
    active at the end. A new slot needs all, to copy its prefix's partial page.
    """
    active = plan.active.reshape(self.shards, -1)
    slots, most = active.shape[1], active.sum(1).max()
    count = min(n for n in self._compute_sizes if n >= most * self.shards)
    if count == self.batching.slots or plan.new.any():
      return None
    active_first = np.argsort(~active, axis=1, kind="stable")
    subset = active_first[:, : count // self.shards]
    subset = subset + slots * np.arange(self.shards)[:, None]
    return subset.ravel().astype(np.int32)

  def _apply_results(
    self, schedulers, placement, results
  ) -> list[list[tuple[int, int]]]:
    """Applies a segment's results; (row, tokens) of responses that left."""
    num_tokens, active = (np.split(x, self.shards) for x in results)
    left = []
    before = np.split(placement.num_tokens, self.shards)
    for shard, scheduler in enumerate(schedulers):
      row, first = scheduler.response, shard * len(before[shard])
      scheduler.apply_results(
        num_tokens[shard] - before[shard][row], active[shard]
      )
      slots = np.flatnonzero((row >= 0) & ~active[shard])
      lengths = num_tokens[shard][slots].tolist()
      rows = (first + row[slots]).tolist()
      left.append(list(zip(rows, lengths, strict=True)))
    return left

  def _finished(self, left, placement, samples) -> Iterator[tuple]:
    """Yields responses [Q] (-1: padding), lengths [Q] and tokens [Q, R]."""
    count = max(1, self.sizes.slots // _IDLE)  # rows of a shard
    while any(left):
      rows = np.full((self.shards, count), -1, np.int32)
      lengths = np.zeros_like(rows)
      for shard, pairs in enumerate(left):
        for i, pair in enumerate(pairs[:count]):
          rows[shard, i], lengths[shard, i] = pair
        del pairs[:count]
      rows, lengths = rows.ravel(), lengths.ravel()
      responses = np.where(rows < 0, -1, placement.response[rows])
      on_devices = multihost.to_global(rows, self.batch_sharding)
      yield (
        responses,
        lengths,
        self.jitted.read_tokens(samples, on_devices),
      )

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
  requests: list[Requests], turn_start: np.ndarray, stop: StopStrings | None
) -> dict[str, np.ndarray]:
  """Fields of a SegmentPlan that depend on the response alone, [B] int32."""
  join = lambda name: np.concatenate([getattr(r, name) for r in requests])
  last_token, stop_state = [], []
  starts = np.split(turn_start, len(requests))
  for r, start in zip(requests, starts, strict=True):
    counts = r.num_tokens - start
    for prefix, count in zip(r.prefix_index, counts, strict=True):
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
