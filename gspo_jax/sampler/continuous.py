"""Continuous batching: a finished response's slot gets the next response.

The host assigns slots and pages (`scheduler`), the devices decode a segment of
a few dozen steps (`paged_decode`), and so on until all responses have finished
or reached the length at which they pause.

While no response waits for a slot, the next segment is planned and started
before the results of the last one are read; so the devices need not wait.

Dimension key: P prompts, G responses a prompt, A = P * G responses, B slots, D
shards, N prefixes of one prefill or responses that finished, T tokens of a
prefix, C its pages, R most new tokens.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler import continuous_jit
from gspo_jax.sampler.continuous_config import (
  ContinuousBatchingConfig,
  ShardSizes,
)
from gspo_jax.sampler.continuous_jit import JittedSampler
from gspo_jax.sampler.decode_params import decode_params_sharding
from gspo_jax.sampler.paged_decode import DecodeState, SegmentPlan
from gspo_jax.sampler.samples import (
  FinishedResponse,
  OnFinished,
  Prompts,
  SamplerConfig,
  Samples,
)
from gspo_jax.sampler.scheduler import (
  Admission,
  Requests,
  Scheduler,
  pending_requests,
)
from gspo_jax.sampler.stop_strings import StopStrings

_IDLE = 8  # a segment ends when 1 of 8 slots is idle and responses wait
_SUBSET = 4  # 1 of 4 slots is computed if no more are active
_MAX_PREFILL_BATCH = 8  # most prefixes of one prefill on each shard


class _PrefillBatch(NamedTuple):
  """One call of the jitted prefill, for all shards; N is a multiple of D.

  Attributes:
    tokens: [N, T] int32, padded on the right.
    lengths: [N] int32, their tokens; 0 for a row of padding.
    pages: [N, C] int32, where to store them; n for nowhere.
    num_cached: [N] int32, their first tokens that the pages hold already.
    first_response: [N] int32, the first response to the prompt, counted from
      the shard's first; -1 for a row of padding.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  pages: np.ndarray
  num_cached: np.ndarray
  first_response: np.ndarray


@dataclasses.dataclass
class PrefixCache:
  """Keys and values that calls of a sampler leave to the next one.

  A call with the cache of an earlier one prefills only the new tokens of the
  responses that it continues, and prepares no weights. All calls have the same
  weights, prompts and key. The devices hold the weights of `decode_params` and
  the pages of `ContinuousBatchingConfig.num_pages` as long as this object
  lives; what does not fit is prefilled again.
  """

  state: DecodeState | None = None
  tokens: list[dict] | None = None  # of each shard, by response
  params: model.Params | None = None  # of `decode_params`


@dataclasses.dataclass(frozen=True)
class ContinuousSampler:
  """Continuous batching, as a `Sampler`; it can also continue responses.

  Attributes:
    cfg: the model.
    config: the sampling parameters.
    batching: sizes of all devices together.
    sizes: sizes of each shard.
    shards: D, parts of the devices that have rows of their own.
    batch_sharding: the sharding of arrays of rows.
    jitted: the functions that run on the devices.
  """

  cfg: model.ModelConfig
  config: SamplerConfig
  batching: ContinuousBatchingConfig
  sizes: ShardSizes
  shards: int
  batch_sharding: jax.sharding.Sharding
  jitted: JittedSampler

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh that decodes."""
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

    Token t of response a is sampled with a key made of (key, a, t), whatever
    happened before: a response that is paused and resumed with the same key
    and weights is the one that would have been generated without a pause.

    Args:
      params: as `model.init` returns them.
      prompts: P of them, a multiple of D.
      key: a typed PRNG key.
      resume_from: samples whose UNFINISHED responses are continued; donated.
        Without them, all responses start from their first token.
      stop_at: [A] int, tokens at which a response pauses and stays UNFINISHED;
        without it no response pauses.
      turn_start: [A] int, where the newest turn of each response begins; stop
        strings are found from there on. Without it at its first token.
      prefix_cache: of the earlier calls for these responses, if any; it gets
        what this call leaves.
      on_finished: called with the responses that finished in an earlier
        segment while a later one decodes.
      progress: counts the responses that finish or pause.

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
    schedulers = self._schedulers(requests, cached)
    if turn_start is None:
      turn_start = np.zeros_like(so_far[0])
    fields = _fields_by_response(requests, turn_start, self.config.stop)
    params = cache.params or self.jitted.decode_params(params)

    def finished_in(results, samples) -> list[tuple]:
      before = sum(scheduler.num_sampled for scheduler in schedulers)
      left = self._apply_results(schedulers, requests, results)
      if progress:
        tokens = sum(scheduler.num_sampled for scheduler in schedulers)
        progress.advance(sum(map(len, left)), tokens=tokens - before)
      return list(self._finished(left, samples)) if on_finished else []

    results, finished = None, []  # of the last segment; not reported so far
    while True:
      if results and not _can_look_ahead(schedulers):
        finished += finished_in(results, samples)
        results = None
      if not results and all(scheduler.done for scheduler in schedulers):
        break
      admissions = [scheduler.admit() for scheduler in schedulers]
      for batch in self._prefill_batches(admissions, requests):
        state, samples = self._prefill(params, state, samples, batch)
      plan = self._segment_plan(schedulers, admissions, fields)
      min_active = self._min_active(schedulers, plan)
      plan_and_slots = multihost.to_global(
        (plan, self._active_subset(plan)), self.batch_sharding
      )
      unread = results
      state, samples, results = self.jitted.decode(
        params, state, samples, *plan_and_slots, min_active, key
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
    return self.jitted.finalize(samples)

  def append_tokens(
    self,
    samples: Samples,
    tokens: np.ndarray,
    counts: np.ndarray,
    finish: np.ndarray,
  ) -> Samples:
    """`samples.append_tokens` to the samples of an earlier call, donated."""
    arrays = multihost.to_global(
      (tokens, counts, finish), samples.tokens.sharding
    )
    return self.jitted.append_tokens(samples, *arrays)

  def buckets(self, *, continues: bool = True) -> tuple[int, ...]:
    """The padded lengths T that prefills can be compiled for."""
    longest = self.sizes.max_prompt_length
    if continues:
      longest += self.sizes.max_new_tokens
    return self.batching.buckets(longest)

  def prefill_batch(self, T: int) -> int:
    """Prefixes of T tokens in one prefill on each shard; 1 is also compiled.

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
    """See `Sampler`: a prefill of the longest prompts, and a segment.

    With `compute_slots`, int32 [b], a segment computes only those slots.
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
    T = self.buckets(continues=continues)[-1]
    N, C = self.prefill_batch(T) * self.shards, T // self.sizes.page_size
    return {
      "decode_params": decode_params,
      "prefill": jitted.prefill.lower(
        params, state, whole(N, T), whole(N), whole(N, C), None
      ),
      "generate": jitted.decode.lower(
        params,
        state,
        samples,
        SegmentPlan(**slots),
        compute_slots,
        shape((), np.int32),
        key,
      ),
    }

  def compilations(self) -> dict[str, tuple[MeshJit, int]]:
    """See `Sampler`."""
    once = "decode_params", "read_tokens", "finalize", "append_tokens"
    prefills = 4 * len(self.buckets())
    limits = dict.fromkeys(once, 1) | {
      "begin": 2,  # with an empty cache, and with that of the last turn
      "decode": len(self._compute_sizes),
      "prefill": prefills,
      "write_prompt_routing": prefills,
    }
    return {
      name: (getattr(self.jitted, name), limit)
      for name, limit in limits.items()
    }

  def describe(self, *, continues: bool) -> str:
    """See `Sampler`: the programs to compile and the cache's size."""
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
    """The responses that each shard has to generate.

    `prompts` [P, S], `prompt_lengths` [P] and `so_far`, the lengths [A] and the
    finish [A] of the samples, are on the host; the samples are on the decoding
    mesh.
    """
    A, R = samples.tokens.shape
    stop_at = np.full(A, R) if stop_at is None else np.minimum(stop_at, R)
    tokens = np.zeros((A, R), np.int32)
    if so_far[0].any():
      # A host needs only the tokens that its own devices prefill.
      for row, values in multihost.addressable_rows(samples.tokens).items():
        tokens[row] = values
    whole = prompts, prompt_lengths, tokens, *so_far, stop_at
    parts = zip(*(np.split(x, self.shards) for x in whole), strict=True)
    return [pending_requests(*part) for part in parts]

  def _schedulers(self, requests: list[Requests], cached) -> list[Scheduler]:
    """One of each shard; `cached` are their tokens of an earlier call."""
    return [
      Scheduler(
        self.sizes,
        [len(prefix) for prefix in shard.prefixes],
        shard.prefix_index,
        shard.stop_at - shard.num_tokens,
        tokens,
      )
      for shard, tokens in zip(requests, cached, strict=True)
    ]

  def _prefill_batches(
    self, admissions: list[Admission], requests: list[Requests]
  ) -> Iterator[_PrefillBatch]:
    """The prefills of all shards' admissions, in few different shapes."""
    queues = {T: [[] for _ in requests] for T in self.buckets()}
    for shard, (admission, request) in enumerate(
      zip(admissions, requests, strict=True)
    ):
      for prefix, pages, num_cached in admission.prefill:
        tokens = request.prefixes[prefix][:-1]
        T = next(T for T in queues if len(tokens) <= T)
        response = int(np.searchsorted(request.prefix_index, prefix))
        queues[T][shard].append((num_cached, tokens, pages, response))
    for T, by_shard in queues.items():
      for queue in by_shard:
        # A batch computes what its row with the fewest cached tokens needs.
        queue.sort(key=lambda row: row[0])
      while longest := max(map(len, by_shard)):
        # Padding costs as much as a prefix, so a few are prefilled one by one.
        count = self.prefill_batch(T)
        count = count if longest > count // 2 else 1
        N, C = self.shards * count, T // self.sizes.page_size
        batch = _PrefillBatch(
          tokens=np.zeros((N, T), np.int32),
          lengths=np.zeros(N, np.int32),
          pages=np.full((N, C), self.sizes.num_pages, np.int32),
          num_cached=np.zeros(N, np.int32),
          first_response=np.full(N, -1, np.int32),
        )
        for shard, queue in enumerate(by_shard):
          for row, prefill in enumerate(queue[:count], shard * count):
            num_cached, tokens, pages, response = prefill
            batch.tokens[row, : len(tokens)] = tokens
            batch.lengths[row] = len(tokens)
            batch.pages[row, : len(pages)] = pages
            batch.num_cached[row] = num_cached
            batch.first_response[row] = response
          del queue[:count]
        yield batch

  def _prefill(self, params, state, samples, batch: _PrefillBatch):
    """The state and the samples after a prefill."""
    *arrays, num_cached, first_response = batch
    tokens, lengths, pages = multihost.to_global(arrays, self.batch_sharding)
    if num_cached.any():
      num_cached = multihost.to_global(num_cached, self.batch_sharding)
    else:
      num_cached = None
    state, experts = self.jitted.prefill(
      params, state, tokens, lengths, pages, num_cached
    )
    if experts is not None:
      first_response = multihost.to_global(first_response, self.batch_sharding)
      samples = self.jitted.write_prompt_routing(
        samples, experts, lengths, first_response
      )
    return state, samples

  def _segment_plan(
    self, schedulers, admissions: list[Admission], fields
  ) -> SegmentPlan:
    """The plan of the next segment, for all shards; allocates its pages."""
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
      **{name: value_A[response] for name, value_A in fields.items()},
    )

  def _min_active(self, schedulers, plan: SegmentPlan) -> np.int32:
    """The number of active slots at which the segment ends early."""
    count = plan.active.sum()
    if any(scheduler.num_waiting for scheduler in schedulers):
      return np.int32(count - max(1, count // _IDLE))
    subset = self._compute_sizes[-1]
    return np.int32(subset if count > subset else 0)

  @property
  def _compute_sizes(self) -> tuple[int, ...]:
    """Numbers of slots that a segment can compute: all, or a subset."""
    subset = self.sizes.slots // _SUBSET * self.shards
    return (self.batching.slots, subset) if subset else (self.batching.slots,)

  def _active_subset(self, plan: SegmentPlan) -> np.ndarray | None:
    """The slots to compute, equally many of each shard; None for all.

    Most responses finish long before the longest one, so few slots may be
    active at the end. None also if a slot is new, because its prefix's partial
    page must be copied.
    """
    active = plan.active.reshape(self.shards, -1)
    slots = active.shape[1]
    if active.sum(1).max() > slots // _SUBSET or plan.new.any():
      return None
    active_first = np.argsort(~active, axis=1, kind="stable")
    subset = active_first[:, : slots // _SUBSET]
    subset = subset + slots * np.arange(self.shards)[:, None]
    return subset.ravel().astype(np.int32)

  def _apply_results(
    self, schedulers, requests, results
  ) -> list[list[tuple[int, int]]]:
    """Reads what a segment did, and applies it to the schedulers.

    Returns:
      For each shard, the responses that left their slots: number and tokens.
    """
    num_tokens, active = (
      np.split(x, self.shards) for x in jax.device_get(results)
    )
    left = []
    for shard, (scheduler, request) in enumerate(
      zip(schedulers, requests, strict=True)
    ):
      response, first = scheduler.response, shard * len(request.num_tokens)
      scheduler.apply_results(
        num_tokens[shard] - request.num_tokens[response], active[shard]
      )
      slots = np.flatnonzero((response >= 0) & ~active[shard])
      lengths = num_tokens[shard][slots].tolist()
      numbers = (first + response[slots]).tolist()
      left.append(list(zip(numbers, lengths, strict=True)))
    return left

  def _finished(self, left, samples) -> Iterator[tuple]:
    """The responses that left their slots, N at a time, with padding.

    Yields:
      Their numbers [N], -1 for padding; their lengths [N]; and their tokens
      [N, R] on the devices.
    """
    count = max(1, self.sizes.slots // _IDLE)  # rows of a shard
    while any(left):
      responses = np.full((self.shards, count), -1, np.int32)
      lengths = np.zeros_like(responses)
      for shard, pairs in enumerate(left):
        for i, pair in enumerate(pairs[:count]):
          responses[shard, i], lengths[shard, i] = pair
        del pairs[:count]
      responses, lengths = responses.ravel(), lengths.ravel()
      rows = multihost.to_global(responses, self.batch_sharding)
      yield responses, lengths, self.jitted.read_tokens(samples, rows)

  def _read_finished(
    self, finished: list[tuple]
  ) -> dict[int, FinishedResponse]:
    """The finished responses on this host; paused ones are left out."""
    responses = {}
    for numbers, lengths, tokens_on_devices in finished:
      for i, tokens in multihost.local_rows(tokens_on_devices).items():
        number, length = int(numbers[i]), int(lengths[i])
        if number < 0:
          continue
        stopped = self._stopped(tokens[:length])
        if stopped or length == self.config.max_new_tokens:
          responses[number] = FinishedResponse(tokens, length, stopped)
    return responses

  def _stopped(self, tokens) -> bool:
    """Whether the last token of a response ended it."""
    config = self.config
    if tokens[-1] in config.stop_ids:
      return True
    long_enough = len(tokens) >= config.min_new_tokens
    return bool(config.stop and long_enough and config.stop.ended(tokens))


def _can_look_ahead(schedulers: list[Scheduler]) -> bool:
  """Whether to start a segment before the results of the last one are read."""
  if not all(scheduler.can_look_ahead for scheduler in schedulers):
    return False
  return any(scheduler.may_go_on for scheduler in schedulers)


def _fields_by_response(
  requests: list[Requests], turn_start: np.ndarray, stop: StopStrings | None
) -> dict[str, np.ndarray]:
  """Fields of a SegmentPlan that depend on the response alone, [A] int32."""
  join = lambda name: np.concatenate([getattr(r, name) for r in requests])
  last_token = [
    r.prefixes[prefix][-1] if r.prefixes else 0
    for r in requests
    for prefix in r.prefix_index
  ]
  stop_state = [
    stop.state(r.prefixes[prefix][-count:])
    if stop and count and r.prefixes
    else 0
    for r, starts in zip(
      requests, np.split(turn_start, len(requests)), strict=True
    )
    for prefix, count in zip(r.prefix_index, r.num_tokens - starts, strict=True)
  ]
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
  """Builds a ContinuousSampler; compiles nothing yet.

  Args:
    cfg: the model.
    sampler: the sampling parameters.
    batching: sizes of all devices together.
    max_prompt_length: S, the width of the prompts.
    params_sharding: shardings of the weights, on `mesh`.
    mesh: of weights, keys and samples.
    sampler_mesh: the same devices, as they decode.

  Raises:
    UserError: the sizes do not fit.
  """
  shards = sharding.batch_shards(sampler_mesh)
  sizes = batching.shard_sizes(sampler, max_prompt_length, shards)
  return ContinuousSampler(
    cfg=cfg,
    config=sampler,
    batching=batching,
    sizes=sizes,
    shards=shards,
    batch_sharding=sharding.batch_sharding(sampler_mesh),
    jitted=continuous_jit.jit_sampler(
      cfg,
      sampler,
      prefill_chunk=batching.prefill_chunk,
      sizes=sizes,
      params_sharding=params_sharding,
      mesh=mesh,
      sampler_mesh=sampler_mesh,
    ),
  )
