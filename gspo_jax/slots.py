"""Decode slots: the few answers of a batch that are being drawn at one time.

What a slot is to do the host says between segments (`schedule`); here are the
functions of a segment, over explicit state.

Dimension key: B slots, A answers, R most new tokens, W pages of a row at most,
P texts of one prefill, T their tokens, C = T / S their pages of S tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspo_jax import draw, model, sharding
from gspo_jax.model import cache as kv
from gspo_jax.model import pages as paging
from gspo_jax.sampler import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  SamplerConfig,
  Samples,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """State of decoding; the tokens already fed are in `pages`.

  Attributes:
    pages: of B rows.
    answer: [B] int32, which of the A answers the slot draws.
    last: [B] int32, the newest token, not fed yet.
    drawn: [B] int32, tokens of the answer so far.
    until: [B] int32, the number of them at which it leaves the slot.
  """

  pages: paging.Pages
  answer: jax.Array
  last: jax.Array
  drawn: jax.Array
  until: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Orders:
  """What the host wants of a segment.

  Attributes:
    table: [B, W] int32, as in `Pages`.
    active: [B] bool, slots that decode; what another one had begun is void.
    new: [B] bool, those of them that get an answer.
    answer: [B] int32, for new slots which; and so on.
    drawn: [B] int32, tokens that it has.
    until: [B] int32, those at which it leaves the slot.
    length: [B] int32, tokens of its text that are in the pages.
    last: [B] int32, the token to feed first: the text's last.
    source: [B] int32, the page to copy ...
    target: [B] int32, ... to this one; none where there is no such page.
  """

  table: jax.Array
  active: jax.Array
  new: jax.Array
  answer: jax.Array
  drawn: jax.Array
  until: jax.Array
  length: jax.Array
  last: jax.Array
  source: jax.Array
  target: jax.Array


def empty(cfg: model.ModelConfig, **sizes: int) -> Slots:
  """No slot has an answer; `sizes` as in `pages.empty`."""
  pages = paging.empty(cfg, **sizes)
  zeros = jnp.zeros_like(pages.lengths)
  return Slots(pages, zeros, zeros, zeros, zeros)


def prefill(
  params: model.Params,
  cfg: model.ModelConfig,
  slots: Slots,
  tokens: jax.Array,
  lengths: jax.Array,
  numbers: jax.Array,
  *,
  chunk: int,
) -> Slots:
  """Stores keys and values of texts, computed `chunk` tokens at a time.

  The cost follows the longest of them, not T.

  Args:
    params: laid out and unstacked.
    cfg: the model; static.
    slots: whose pages are written.
    tokens: [P, T] int32, padded on the RIGHT; T is a multiple of `chunk`.
    lengths: [P] int32, real tokens; 0 where a row is padding.
    numbers: [P, C] int32, the pages of the tokens; none where there are none.
    chunk: tokens of one forward pass; static.
  """
  P, T = tokens.shape
  real_PT = jnp.arange(T) < lengths[:, None]

  def forward(i, cache):
    start = i * chunk
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)
    positions = jnp.broadcast_to(start + jnp.arange(chunk), (P, chunk))
    return model.encode(
      params, cfg, cut(tokens), positions, cut(real_PT), cache
    ).cache

  chunks = -(-lengths.max() // chunk)
  cache = jax.lax.fori_loop(0, chunks, forward, kv.empty(cfg, P, T))
  pages = paging.store(slots.pages, cache.k, cache.v, numbers)
  return dataclasses.replace(slots, pages=pages)


def decode(
  params: model.Params,
  cfg: model.ModelConfig,
  slots: Slots,
  samples: Samples,
  orders: Orders,
  floor: jax.Array,
  key: jax.Array,
  *,
  sampler: SamplerConfig,
  steps: int,
) -> tuple[Slots, Samples]:
  """A segment: a token for each active slot, `steps` times at most.

  It ends early when no more than `floor` slots are active. Answer a
  draws its token t with a key made of (key, a, t), whatever slot it is in and
  whoever is beside it.

  Args:
    params: laid out and unstacked.
    cfg: the model; static.
    slots: best donated, as is the next.
    samples: of A answers, what is drawn is written there.
    orders: carried out first.
    floor: [] int32.
    key: of all answers.
    sampler: how to draw; static.
    steps: static.
  """
  slots = _obey(slots, orders)
  fold = functools.partial(jax.random.fold_in, key)

  def body(state):
    taken, slots, samples = state
    out = model.encode(
      params,
      cfg,
      slots.last[:, None],
      slots.pages.lengths[:, None],
      slots.pages.active[:, None],
      slots.pages,
    )
    logits = draw.logits(params, cfg, out.hidden[:, 0])
    row_keys = jax.vmap(fold)(slots.answer)
    token, logp = draw.token(logits, row_keys, slots.drawn, sampler)
    slots = dataclasses.replace(slots, pages=out.cache)
    return taken + 1, *_record(slots, samples, token, logp, sampler)

  def going(state):
    taken, slots, _ = state
    return (taken < steps) & (slots.pages.active.sum() > floor)

  taken, slots, samples = jax.lax.while_loop(
    going, body, (jnp.int32(0), slots, samples)
  )
  B = slots.drawn.size
  total = samples.slot_steps + B * taken
  return slots, dataclasses.replace(samples, slot_steps=total)


def _obey(slots: Slots, orders: Orders) -> Slots:
  pages = paging.copy(slots.pages, orders.source, orders.target)
  pick = lambda a, b: jnp.where(orders.new, a, b)
  pages = dataclasses.replace(
    pages,
    table=orders.table,
    lengths=pick(orders.length, pages.lengths),
    active=orders.active,
  )
  return Slots(
    pages=pages,
    answer=pick(orders.answer, slots.answer),
    last=pick(orders.last, slots.last),
    drawn=pick(orders.drawn, slots.drawn),
    until=pick(orders.until, slots.until),
  )


def _record(slots: Slots, samples: Samples, token, logp, sampler):
  """Writes a token of each active slot down, and notes whose was the last."""
  active, t = slots.pages.active, slots.drawn
  stop = jnp.isin(token, jnp.array(sampler.stop_ids))
  cut = jnp.where(t + 1 == sampler.max_new_tokens, TRUNCATED, UNFINISHED)
  finish = jnp.where(stop, STOPPED, cut).astype(jnp.int8)
  written = _write(
    (samples.tokens, samples.logps, samples.lengths, samples.finish),
    (token, logp, t + 1, finish),
    (slots.answer, t, active),
  )
  names = "tokens", "logps", "lengths", "finish"
  samples = dataclasses.replace(
    samples, **dict(zip(names, written, strict=True))
  )
  done = stop | (t + 1 == slots.until)
  pages = dataclasses.replace(slots.pages, active=active & ~done)
  slots = dataclasses.replace(slots, pages=pages, last=token, drawn=t + active)
  return slots, samples


def _write(kept, new, where):
  """Each slot's values into its answer's row, which is on the same device."""

  def local(kept, new, where):
    answer_B, t_B, active_B = where
    rows = len(kept[-1])
    row_B = jnp.where(active_B, answer_B % rows, rows)  # else none

    def write(old, value_B):
      at = (row_B, t_B) if old.ndim == 2 else row_B
      return old.at[at].set(value_B, mode="drop")

    return tuple(map(write, kept, new))

  of_rows = jax.sharding.PartitionSpec(sharding.ROWS)
  return sharding.island(local, (of_rows,) * 3, of_rows)(kept, new, where)


def peek(slots: Slots, samples: Samples) -> jax.Array:
  """[B, R] int32, the tokens of the answers that are in the slots."""

  def local(tokens, answer_B):
    return tokens[answer_B % len(tokens)]

  of_rows = jax.sharding.PartitionSpec(sharding.ROWS)
  read = sharding.island(local, (of_rows,) * 2, of_rows)
  return read(samples.tokens, slots.answer)
