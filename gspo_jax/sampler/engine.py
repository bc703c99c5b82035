"""An engine: requests come at any time, from any thread, each for a response.

An engine has N rows, one for each slot of continuous batching. A step puts
waiting requests into free rows, and samples up to a chunk of tokens for each
row in use, in one call of a `ContinuousSampler`: for the call a row's prompt is
all that it has so far. So a request waits for one chunk at most. Keys and
values stay in the pages between steps: a row that goes on prefills nothing. A
request whose prompt begins as a row does, in use or free, prefills only the
rest: it shares the row's full pages, or takes a free row that has no more. Of
requests that come together and begin alike, as the prompts of a group, one goes
first, in a step of a single token.

Each of several processes has the rows of its own shards, and its own requests;
all take their steps together.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.model.cache import has_states
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous import (
  ContinuousSampler,
  PrefixCache,
  build_continuous_sampler,
)
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.continuous.scheduler import CachedTokens
from gspo_jax.sampler.samples import STOPPED, Prompts, SamplerConfig

# Tokens that a step samples for each row: two segments. A new request waits for
# half a chunk on average, and a row that has ended idles as long; a step costs
# a few transfers.
CHUNK = 64
# After which `run` looks again without being woken, also for other processes.
_SECONDS, _SECONDS_TOGETHER = 1.0, 0.02

# Values of `Generation.finish`, as in OpenAI's API.
STOP, LENGTH, ABORT = "stop", "length", "abort"


class Generation:
  """A request and what was sampled for it.

  Only the engine's thread changes it. `tokens` have the stop token; `logps` are
  their log-probs as in `Samples`. Another thread reads `progress` first, once:
  so many of both, and why the request ended, "" until then.
  """

  def __init__(
    self,
    prompt: Sequence[int],
    max_new_tokens: int,
    notify: Callable[[], None] = lambda: None,
  ):
    """`notify` is called in the engine's thread after each change."""
    self.prompt, self.max_new_tokens = list(prompt), max_new_tokens
    self.tokens: list[int] = []
    self.logps: list[float] = []
    self.progress = 0, ""
    self.cancelled = False  # set it to give up the rest
    self._notify = notify

  @property
  def finish(self) -> str:
    return self.progress[1]

  def add(self, tokens: list[int], logps: list[float], finish: str) -> None:
    self.logps += logps
    self.tokens += tokens
    self.progress = len(self.tokens), finish
    self._notify()


@dataclasses.dataclass
class _Row:
  tokens: np.ndarray  # all of its request: the prompt, and what was sampled
  generation: Generation | None = None  # None: it is free


@dataclasses.dataclass(frozen=True)
class EngineSampler:
  """Opens engines, which share what is compiled; see `Sampler`.

  `config` is the run's: one engine samples the responses of all groups.
  """

  config: SamplerConfig
  context: int  # most tokens of a prompt and its response
  chunk: ContinuousSampler

  def __getattr__(self, name: str) -> Any:
    """The rest of a `Sampler` is that of `chunk`."""
    return getattr(self.chunk, name)


def build_engine_sampler(
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
  *,
  batching: ContinuousBatchingConfig,
  context: int,
  **places,
) -> EngineSampler:
  """As `build_continuous_sampler`.

  UserError also if processes share rows, or for `min_new_tokens`, which a call
  of the sampler would apply to each chunk.
  """
  if sampler.min_new_tokens > 1:
    raise UserError(
      f"min_new_tokens={sampler.min_new_tokens}: an engine expects at most 1"
    )
  chunk = dataclasses.replace(
    sampler,
    group_size=1,
    max_new_tokens=min(CHUNK, sampler.max_new_tokens),
    kept_ids=0,
    record_routing=False,
    speculation=0,
  )
  built = build_continuous_sampler(
    cfg, chunk, batching=batching, max_prompt_length=context, **places
  )
  _require_own_rows(built)
  return EngineSampler(sampler, context, built)


def _require_own_rows(chunk: ContinuousSampler) -> None:
  places = chunk.batch_sharding.devices_indices_map((chunk.shards,))
  owners = {
    (part.start, device.process_index) for device, (part,) in places.items()
  }
  if len(owners) > len({start for start, _ in owners}):
    raise UserError(
      "sampler_mesh: several processes have the same rows; expected expert x "
      "tensor within one process, for an engine's requests are of one"
    )


class Engine:
  """Samples responses with one set of weights; a context manager.

  Any thread may `submit`; one thread calls `step` or `run`.
  """

  def __init__(
    self, sampler: EngineSampler, params: model.Params, key: jax.Array
  ):
    self._sampler, self._params = sampler, params
    self._key = sharding.key_beside(sampler.chunk.batch_sharding, key)
    self._cache = PrefixCache(keeps_idle=True)
    empty = np.zeros(0, np.int32)
    n = sampler.batching.slots // sampler.chunk.shards
    self._rows = [_Row(empty) for _ in range(n * len(sampler.chunk.own))]
    self._changed = threading.Condition()  # guards the next four
    self._waiting: collections.deque[Generation] = collections.deque()
    # Requests that go on with earlier ones, whose rows may be taken; first.
    self._going_on: collections.deque[Generation] = collections.deque()
    self._closed = self._woken = False
    self._steps = 0
    self._follow = False  # some requests followed in the step after the last
    self.slot_steps = 0  # as of Samples
    self.idle_seconds = 0.0  # that `run` waited for requests

  @property
  def _may_follow(self) -> bool:
    """Not in two steps running, for both would be of one token."""
    shares_pages = not has_states(self._sampler.chunk.cfg)
    return shares_pages and not self._follow

  @property
  def context(self) -> int:
    return self._sampler.context

  def most_new_tokens(self, prompt_length: int) -> int:
    """Room for a response; below 1 if the prompt is too long."""
    left = self.context - prompt_length
    return min(self._sampler.config.max_new_tokens, left)

  def submit(
    self, generation: Generation, *, goes_on: bool = False
  ) -> Generation:
    """Asks for a response; UserError unless prompt and response have room.

    One that `goes_on` with an earlier request comes before those that begin:
    their rows would else take what is kept of its prompt.
    """
    size = len(generation.prompt)
    vocabulary = self._sampler.chunk.cfg.vocab_size
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
      (self._going_on if goes_on else self._waiting).append(generation)
      self._changed.notify_all()
    return generation

  def wake(self) -> None:
    """Makes `run` look at its condition."""
    with self._changed:
      self._woken = True
      self._changed.notify_all()

  def run(self, until: Callable[[], bool]) -> None:
    """Takes steps, or waits for requests, until the condition holds everywhere.

    All processes call it together, and `step`, too.
    """
    alone = jax.process_count() == 1
    while multihost.any_process(not until()):
      if not self.step():
        start = time.monotonic()
        with self._changed:
          if not (self._going_on or self._waiting or self._woken):
            self._changed.wait(_SECONDS if alone else _SECONDS_TOGETHER)
          self._woken = False
        self.idle_seconds += time.monotonic() - start

  def step(self) -> bool:
    """Samples a chunk for each request; False if no process has one."""
    follow = self._start_waiting()
    chunk, pad = self._sampler.chunk, self._sampler.config.pad_id
    n = chunk.sizes.slots
    # By their number among the rows of all processes.
    rows = {
      chunk.own[i // n] * n + i % n: row
      for i, row in enumerate(self._rows)
      if row.generation
    }
    facts = np.array([bool(rows), follow], np.int32)
    any_rows, self._follow = (multihost.sum_of_all(facts) > 0).tolist()
    if not any_rows:
      return False
    width, count = chunk.sizes.max_prompt_length, self._sampler.batching.slots
    tokens = np.full((count, width), pad, np.int32)
    lengths, stop_at = np.zeros((2, count), np.int32)
    for i, row in rows.items():
      tokens[i, width - len(row.tokens) :] = row.tokens
      lengths[i] = len(row.tokens)
      made = row.generation
      stop_at[i] = 1 if self._follow else made.max_new_tokens - len(made.tokens)
    samples = chunk(
      self._params,
      Prompts(tokens, lengths),
      jax.random.fold_in(self._key, self._steps),
      stop_at=stop_at,
      prefix_cache=self._cache,
    )
    self._steps += 1
    *new, steps = multihost.to_host(
      (
        *(samples.tokens, samples.logps, samples.lengths, samples.finish),
        samples.slot_steps,
      )
    )
    self.slot_steps += int(steps)
    for i, row in rows.items():
      self._extend(row, *(x[i] for x in new))
    return True

  def close(self) -> None:
    """Ends all requests, and frees the pages."""
    with self._changed:
      self._closed = True
      waiting = [*self._going_on, *self._waiting]
      self._going_on.clear()
      self._waiting.clear()
    running = [row.generation for row in self._rows if row.generation]
    for generation in (*running, *waiting):
      generation.add([], [], ABORT)
    self._rows, self._cache = [], PrefixCache()

  def __enter__(self) -> "Engine":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _extend(self, row: _Row, tokens, logps, length, finish) -> None:
    generation, stop = row.generation, self._sampler.config.stop
    tokens, stopped = tokens[:length].tolist(), finish == STOPPED
    if stop:
      # The call has found strings within the chunk only.
      end = stop.first_end(generation.tokens, tokens)
      stopped, tokens = stopped or end is not None, tokens[:end]
    logps = logps[: len(tokens)].tolist()
    row.tokens = np.append(row.tokens, np.int32(tokens))
    left = generation.max_new_tokens - len(generation.tokens) - len(tokens)
    finish = STOP if stopped else LENGTH if left < 1 else ""
    if finish:
      row.generation = None
    generation.add(tokens, logps, finish)

  def _start_waiting(self) -> bool:
    """Frees the rows of cancelled requests; gives rows to waiting ones.

    Whether some wait for the next step, to share pages that this one fills.
    """
    for row in self._rows:
      if row.generation and row.generation.cancelled:
        row.generation.add([], [], ABORT)
        row.generation = None
    free = [i for i, row in enumerate(self._rows) if not row.generation]
    new, follow = [], []
    while len(follow) < len(free):
      with self._changed:
        queue = self._going_on or self._waiting
        if not queue:
          break
        generation = queue.popleft()
      if generation.cancelled:
        generation.add([], [], ABORT)
        continue
      prompt = np.array(generation.prompt, np.int32)
      i = self._place(prompt, free, new)
      if i is None:
        follow.append(generation)
        continue
      free.remove(i)
      new.append(i)
      self._rows[i] = _Row(prompt, generation)
    with self._changed:
      self._going_on.extendleft(reversed(follow))
    return bool(follow)

  def _place(
    self, prompt: np.ndarray, free: list[int], new: list[int]
  ) -> int | None:
    """A free row, the most of whose prompt need not be prefilled.

    What a row loses counts, too: the next request may begin with it. None if a
    `new` row, which this step prefills, will have most of the prompt.
    """
    sizes = self._sampler.sizes
    n, page = sizes.slots, sizes.page_size
    kept = self._cache.tokens or [{} for _ in self._sampler.chunk.own]
    held = [
      kept[i // n].get(i % n, CachedTokens([], 0))
      for i in range(len(self._rows))
    ]
    same = [
      min(_common(row.tokens[: tokens.num_tokens], prompt), len(prompt) - 1)
      for row, tokens in zip(self._rows, held, strict=True)
    ]
    # Of each shard, the row that others can share most full pages of.
    best = [
      max(range(first, first + n), key=lambda i: same[i] // page)
      for first in range(0, len(self._rows), n)
    ]
    shared = [same[i] // page * page for i in best]

    def worth(i):
      lost = held[i].num_tokens
      return max(2 * same[i], shared[i // n]) - lost, -lost

    i = max(free, key=worth)
    source, count = i, same[i]
    if 2 * count < shared[i // n]:
      source, count = best[i // n], shared[i // n]
    same_as_new = (
      _common(self._rows[j].tokens, prompt[:-1])
      for j in new
      if j // n == i // n
    )
    gain = max(same_as_new, default=0) // page * page - count
    if self._may_follow and gain > len(prompt) // 2:
      return None
    kept[i // n].pop(i % n, None)
    pages = held[source].pages[: -(-count // page)]
    if count % page and any(
      pages[-1] in tokens.pages for tokens in kept[i // n].values()
    ):
      count -= count % page  # other rows read what would be written
      pages.pop()
    if count:
      kept[i // n][i % n] = CachedTokens(pages, count)
    return i


def _common(a: np.ndarray, b: np.ndarray) -> int:
  """How many first tokens are the same."""
  n = min(len(a), len(b))
  different = np.flatnonzero(a[:n] != b[:n])
  return int(different[0]) if different.size else n
