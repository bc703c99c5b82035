"""Rollouts by continuous refill: a slot whose answer ends gets the next one.

The host gives slots and pages (`schedule`), the devices decode a segment of a
few dozen steps (`slots`), and so on until all answers have ended.

Dimension key: P prompts, G answers a prompt, A = P * G answers, B slots, D
shards, T tokens of a prefill, C of their pages, S tokens of a page.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import draw as drawing
from gspo_jax import hosts, model, sampler, sharding, slots
from gspo_jax.errors import UserError
from gspo_jax.model.pages import Pages
from gspo_jax.on_mesh import OnMesh
from gspo_jax.sampler import Prompts, SamplerConfig, Samples
from gspo_jax.schedule import Schedule, Sizes, width
from gspo_jax.slots import Orders, Slots

_IDLE = 8  # a segment ends when 1 of so many slots is idle and answers wait
_ROWS = 8  # prompts of a prefill on each shard; or one


@dataclasses.dataclass(frozen=True)
class Paging:
  """Sizes of decoding, of all devices together.

  Attributes:
    slots: B, answers that decode together.
    page: S, tokens of a page.
    steps: most decode steps of a segment.
    chunk: tokens of one forward pass of a prefill; a multiple of `page`.
    pages: in all; 0 for as many as B of the longest answers take.
  """

  slots: int
  page: int
  steps: int
  chunk: int
  pages: int = 0

  def __post_init__(self):
    for name, least in (("slots", 1), ("page", 1), ("steps", 1), ("pages", 0)):
      if getattr(self, name) < least:
        raise UserError(
          f"paging.{name}={getattr(self, name)}: expected at least {least}"
        )
    if self.chunk < 1 or self.chunk % self.page:
      raise UserError(
        f"paging.chunk={self.chunk}: expected a multiple of "
        f"paging.page={self.page}"
      )

  def sizes(self, draw: SamplerConfig, prompt: int, shards: int) -> Sizes:
    """What each of `shards` has, for prompts of at most `prompt` tokens.

    Raises:
      UserError: slots or pages cannot be split, or are too few.
    """
    for name in ("slots", "pages"):
      if (value := getattr(self, name)) % shards:
        raise UserError(
          f"paging.{name}={value}: expected a multiple of the {shards} shards "
          "of sampler_mesh"
        )
    own = self.slots // shards
    most = draw.max_new_tokens
    # The prompts' own partial pages, besides: those of a slot's at most.
    longest = width(prompt, most, self.page) + 1
    pages = self.pages // shards or own * longest
    return Sizes(own, pages, self.page, self.steps, most, prompt)

  def buckets(self, prompt: int) -> tuple[int, ...]:
    """T, the lengths that prefills are compiled for, up to `prompt` tokens."""
    found = [self.chunk]
    while found[-1] < prompt - 1:
      found.append(2 * found[-1])
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class PagedSampler:
  """Draws answers to prompts: (params, prompts, key) -> Samples.

  Attributes:
    draw: how.
    paging: in what memory.
    sizes: of each shard.
    shards: D, parts of the devices that have rows of their own.
    rows: where arrays of rows lie.
    lay_out: params -> params as decoding wants them.
    begin: P -> (slots, samples), empty.
    prefill: `slots.prefill`, from params to numbers.
    decode: `slots.decode`, from params to key.
    finish: samples -> samples, as a rollout wants them.
  """

  draw: SamplerConfig
  paging: Paging
  sizes: Sizes
  shards: int
  rows: jax.sharding.Sharding
  lay_out: Callable
  begin: Callable
  prefill: Callable
  decode: Callable
  finish: Callable

  def __call__(self, params, prompts: Prompts, key: jax.Array) -> Samples:
    """All G answers to each of P prompts; P is a multiple of D."""
    texts, lengths = hosts.fetch((prompts.tokens, prompts.lengths))
    if texts.shape[1] != self.sizes.prompt or len(texts) % self.shards:
      raise UserError(
        f"prompts {texts.shape}: expected [P, {self.sizes.prompt}], with P a "
        f"multiple of the {self.shards} shards"
      )
    schedules = [
      Schedule(self.sizes, part, self.draw.group_size)
      for part in np.split(lengths, self.shards)
    ]
    params = self.lay_out(params)
    state, samples = self.begin(len(texts))
    while not all(schedule.done for schedule in schedules):
      admitted = [schedule.admit() for schedule in schedules]
      for batch in self._prefills(admitted, texts, lengths):
        state = self.prefill(params, state, *hosts.lay(batch, self.rows))
      orders, floor = self._orders(schedules, admitted, texts)
      state, samples = self.decode(params, state, samples, orders, floor, key)
      told = hosts.fetch((state.drawn, state.pages.active))
      told = zip(*(np.split(x, self.shards) for x in told), strict=True)
      for schedule, (drawn, active) in zip(schedules, told, strict=True):
        schedule.settle(drawn, active)
    return self.finish(samples)

  def _prefills(self, admitted, texts, lengths):
    """Tokens, lengths and pages of each call, in few shapes."""
    own, cached = len(texts) // self.shards, lengths - 1
    buckets = self.paging.buckets(self.sizes.prompt)
    left = {T: [[] for _ in admitted] for T in buckets}
    for shard, found in enumerate(admitted):
      for prompt, pages in found.prefill:
        prompt += shard * own
        T = next(T for T in buckets if cached[prompt] <= T)
        left[T][shard].append((prompt, pages))
    for T, queues in left.items():
      while most := max(map(len, queues)):
        count = _ROWS if most > 1 else 1
        tokens = np.zeros((self.shards, count, T), np.int32)
        fed = np.zeros((self.shards, count), np.int32)
        numbers = np.full(
          (*fed.shape, T // self.sizes.page), self.sizes.pages, np.int32
        )
        for shard, queue in enumerate(queues):
          for row, (prompt, pages) in enumerate(queue[:count]):
            m = fed[shard, row] = cached[prompt]
            tokens[shard, row, :m] = texts[prompt, -1 - m : -1]
            numbers[shard, row, : len(pages)] = pages
          del queue[:count]
        join = lambda x: x.reshape(-1, *x.shape[2:])
        yield join(tokens), join(fed), join(numbers)

  def _orders(self, schedules, admitted, texts) -> tuple[Orders, np.ndarray]:
    """What the next segment is to do, and when it is to end early."""
    segments = [schedule.grow() for schedule in schedules]
    join = lambda parts, name: np.concatenate([getattr(p, name) for p in parts])
    told = {name: join(segments, name) for name in ("table", "active")}
    for name in ("new", "answer", "length", "source", "target"):
      told[name] = join(admitted, name)
    # A shard counts answers from the first of its own.
    own = len(texts) // self.shards * self.draw.group_size
    shard_B = np.repeat(np.arange(self.shards), len(told["new"]) // self.shards)
    told["answer"] += np.int32(own) * shard_B.astype(np.int32)
    told["new"] &= told["active"]  # one may have been preempted at once
    told["last"] = texts[told["answer"] // self.draw.group_size, -1]
    count = told["active"].sum()
    waiting = any(schedule.waiting for schedule in schedules)
    floor = count - max(1, count // _IDLE) if waiting else 0
    return hosts.lay(Orders(**told), self.rows), np.int32(floor)


def build(
  cfg: model.ModelConfig,
  draw: SamplerConfig,
  *,
  paging: Paging,
  prompt: int,
  params,
  mesh: jax.sharding.Mesh,
  decoding: jax.sharding.Mesh,
) -> PagedSampler:
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
    UserError: the sizes do not fit, or routing is to be recorded.
  """
  if draw.record_routing:
    raise UserError(
      f"objective.replay='r3' with paging.slots={paging.slots}: expected "
      "paging.slots=0, for only there routing is recorded"
    )
  shards = decoding.size // decoding.shape["tensor"]
  sizes = paging.sizes(draw, prompt, shards)
  state = _layout(cfg, decoding)
  drawn = sampler.layout(draw, decoding)
  jit = lambda f, **how: OnMesh(jax.jit(f, **how), decoding)

  def begin(P):
    empty = slots.empty(
      cfg,
      rows=paging.slots,
      pages=sizes.pages * shards,
      page=paging.page,
      most=sizes.width,
    )
    A, R = P * draw.group_size, draw.max_new_tokens
    return empty, Samples(
      jnp.full((A, R), draw.pad_id, jnp.int32),
      jnp.zeros((A, R)),
      jnp.zeros(A, jnp.int32),
      jnp.zeros(A, jnp.int8),
      jnp.int32(0),
    )

  def prefill(params, state, *prompts):
    return slots.prefill(params, cfg, state, *prompts, chunk=paging.chunk)

  def decode(params, state, samples, orders, floor, key):
    rest = state, samples, orders, floor, sharding.constrain(key)
    how = {"sampler": draw, "steps": paging.steps}
    return slots.decode(params, cfg, *rest, **how)

  def finish(samples):
    # An answer that started again may have left more than it drew then.
    real = jnp.arange(draw.max_new_tokens) < samples.lengths[:, None]
    return dataclasses.replace(
      samples,
      tokens=jnp.where(real, samples.tokens, draw.pad_id),
      logps=jnp.where(real, samples.logps, 0),
    )

  return PagedSampler(
    draw,
    paging,
    sizes,
    shards,
    sharding.rows(decoding),
    lay_out=jit(
      lambda params: model.unstack(drawing.lay_out(params, cfg), cfg),
      in_shardings=(params,),
    ),
    begin=jit(begin, static_argnums=0, out_shardings=(state, drawn)),
    prefill=jit(prefill, donate_argnums=1, out_shardings=state),
    decode=jit(
      decode,
      in_shardings=(None,) * 5 + (sharding.everywhere(mesh),),
      out_shardings=(state, drawn),
      donate_argnums=(1, 2),
    ),
    finish=jit(finish, out_shardings=sampler.layout(draw, mesh)),
  )


def _layout(cfg, mesh) -> Slots:
  """Where the state of decoding lies."""
  rows, lay = sharding.rows(mesh), jax.sharding.PartitionSpec
  kept = jax.NamedSharding(mesh, lay("tensor", sharding.ROWS))
  of_layers = (kept,) * cfg.num_layers
  return Slots(Pages(of_layers, of_layers, rows, rows, rows), rows, rows, rows)
