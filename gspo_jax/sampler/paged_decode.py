"""Decode slots: the few answers of a batch that are being drawn at one time.

What a slot is to do the host says between segments (`schedule`); here are the
functions of a segment, over explicit state.

Dimension key: B slots, b of them, A answers, R most new tokens, W pages of a
row at most, P texts of one prefill, T their tokens, C = T / S their pages of S
tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.model import paged_cache as paged
from gspo_jax.model.moe import number_type
from gspo_jax.runtime import sharding
from gspo_jax.sampler import next_token
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  SamplerConfig,
  Samples,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """State of decoding; the tokens already fed are in `pages`.

  Attributes:
    pages: of B rows.
    answer: [B] int32, which of the A answers the slot draws.
    last: [B] int32, the newest token, not fed yet.
    drawn: [B] int32, tokens of the answer so far.
    until: [B] int32, the number of them at which it leaves the slot.
  """

  pages: paged.Pages
  answer: jax.Array
  last: jax.Array
  drawn: jax.Array
  until: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentPlan:
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


def empty(cfg: model.ModelConfig, **sizes: int) -> DecodeState:
  """No slot has an answer; `sizes` as in `pages.empty`."""
  pages = paged.empty(cfg, **sizes)
  zeros = jnp.zeros_like(pages.lengths)
  return DecodeState(pages, zeros, zeros, zeros, zeros)


def prefill(
  params: model.Params,
  cfg: model.ModelConfig,
  slots: DecodeState,
  tokens: jax.Array,
  lengths: jax.Array,
  numbers: jax.Array,
  *,
  chunk: int,
  record: bool = False,
) -> tuple[DecodeState, jax.Array | None]:
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
    record: whether to note the routing; static.

  Returns:
    The slots, and the experts [P, L, T, k] of the tokens, or None.
  """
  P, T = tokens.shape
  real_PT = jnp.arange(T) < lengths[:, None]
  experts = None
  if record:
    shape = cfg.num_layers, P, T, cfg.experts_per_token
    experts = jnp.zeros(shape, number_type(cfg.num_experts))
    experts = sharding.constrain(experts, None, sharding.BATCH_AXES)

  def forward(i, state):
    cache, experts = state
    start = i * chunk
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)
    positions = jnp.broadcast_to(start + jnp.arange(chunk), (P, chunk))
    out = model.hidden_states(
      params, cfg, cut(tokens), positions, cut(real_PT), cache
    )
    if record:
      experts = jax.lax.dynamic_update_slice_in_dim(
        experts, out.routing.experts, start, axis=2
      )
    return out.cache, experts

  chunks = -(-lengths.max() // chunk)
  begin = kv.empty(cfg, P, T), experts
  cache, experts = jax.lax.fori_loop(0, chunks, forward, begin)
  pages = paged.store(slots.pages, cache.k, cache.v, numbers)
  slots = dataclasses.replace(slots, pages=pages)
  return slots, experts.swapaxes(0, 1) if record else None


def note(
  samples: Samples,
  experts: jax.Array,
  lengths: jax.Array,
  first: jax.Array,
  *,
  group: int,
) -> Samples:
  """Writes down where the tokens of prompts went, for all answers to them.

  Args:
    samples: on the same device as the texts of their prompts.
    experts: [P, L, T, k], of `prefill`.
    lengths: [P] int32, tokens of each text: all of a prompt but its last.
    first: [P] int32, the first of the answers to it; less than 0: none.
    group: G, answers a prompt; static.
  """
  last = samples.experts.shape[2] - samples.tokens.shape[1] - 1

  def local(kept, experts, lengths, first_P):
    rows, T = len(kept), experts.shape[2]
    row_PG = first_P[:, None] % rows + jnp.arange(group)
    row_PG = jnp.where(first_P[:, None] < 0, rows, row_PG)
    token_T = jnp.arange(T)
    slot_PT = last - lengths[:, None] + token_T
    slot_PT = jnp.where(token_T < lengths[:, None], slot_PT, kept.shape[2])
    at = row_PG[:, :, None], slice(None), slot_PT[:, None, :]
    new_PTLk = experts.swapaxes(1, 2)
    return kept.at[at].set(new_PTLk[:, None], mode="drop")

  of_rows = jax.sharding.PartitionSpec(sharding.BATCH_AXES)
  write = sharding.shard_map(local, (of_rows,) * 4, of_rows)
  return dataclasses.replace(
    samples, experts=write(samples.experts, experts, lengths, first)
  )


def decode(
  params: model.Params,
  cfg: model.ModelConfig,
  slots: DecodeState,
  samples: Samples,
  orders: SegmentPlan,
  few: jax.Array | None,
  floor: jax.Array,
  key: jax.Array,
  *,
  sampler: SamplerConfig,
  steps: int,
) -> tuple[DecodeState, Samples]:
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
    few: [b] int32, the slots to compute, equally many of each shard, all that
      are active among them and none of them new; None for all.
    floor: [] int32.
    key: of all answers.
    sampler: how to draw; static.
    steps: static.
  """
  if few is None:  # else there is nothing to copy
    pages = paged.copy(slots.pages, orders.source, orders.target)
    slots = dataclasses.replace(slots, pages=pages)
  whole = _apply_plan(slots, orders)
  slots = whole if few is None else _select(whole, few)
  fold = functools.partial(jax.random.fold_in, key)

  def body(state):
    taken, slots, samples = state
    out = model.hidden_states(
      params,
      cfg,
      slots.last[:, None],
      slots.pages.lengths[:, None],
      slots.pages.active[:, None],
      slots.pages,
    )
    logits = next_token.logits(params, cfg, out.hidden[:, 0])
    row_keys = jax.vmap(fold)(slots.answer)
    token, logp = next_token.sample_token(
      logits, row_keys, slots.drawn, sampler
    )
    slots = dataclasses.replace(slots, pages=out.cache)
    noted = None
    if samples.experts is not None:
      noted = out.routing.experts[:, :, 0]
    return taken + 1, *_record(slots, samples, token, logp, noted, sampler)

  def going(state):
    taken, slots, _ = state
    return (taken < steps) & (slots.pages.active.sum() > floor)

  taken, slots, samples = jax.lax.while_loop(
    going, body, (jnp.int32(0), slots, samples)
  )
  B = slots.drawn.size
  total = samples.slot_steps + B * taken
  samples = dataclasses.replace(samples, slot_steps=total)
  return slots if few is None else _scatter_back(whole, slots, few), samples


def _apply_plan(slots: DecodeState, orders: SegmentPlan) -> DecodeState:
  pick = lambda a, b: jnp.where(orders.new, a, b)
  pages = dataclasses.replace(
    slots.pages,
    table=orders.table,
    lengths=pick(orders.length, slots.pages.lengths),
    active=orders.active,
  )
  return DecodeState(
    pages=pages,
    answer=pick(orders.answer, slots.answer),
    last=pick(orders.last, slots.last),
    drawn=pick(orders.drawn, slots.drawn),
    until=pick(orders.until, slots.until),
  )


_NO_KEYS = paged.Pages(None, None, None, None, None)


def _select(slots: DecodeState, few) -> DecodeState:
  """These slots alone, over the same pages."""

  def local(kept, row_b):
    return jax.tree.map(lambda x: x[row_b % len(x)], kept)

  of_rows = jax.sharding.PartitionSpec(sharding.BATCH_AXES)
  read = sharding.shard_map(local, (of_rows,) * 2, of_rows)
  return _over(slots.pages, read(_over(_NO_KEYS, slots), few))


def _scatter_back(slots: DecodeState, new: DecodeState, few) -> DecodeState:
  """All slots, after a segment of these few, `new`."""

  def local(kept, new, row_b):
    place = lambda old, new: old.at[row_b % len(old)].set(new)
    return jax.tree.map(place, kept, new)

  of_rows = jax.sharding.PartitionSpec(sharding.BATCH_AXES)
  write = sharding.shard_map(local, (of_rows,) * 3, of_rows)
  kept, changed = (_over(_NO_KEYS, x) for x in (slots, new))
  return _over(new.pages, write(kept, changed, few))


def _over(pages, slots: DecodeState) -> DecodeState:
  """The rows of `slots` over the keys and values of `pages`."""
  own = dataclasses.replace(slots.pages, k=pages.k, v=pages.v)
  return dataclasses.replace(slots, pages=own)


def _record(
  slots: DecodeState, samples: Samples, token, logp, experts, sampler
):
  """Writes a token of each active slot down, and notes whose was the last.

  `experts`, [L, B, k], are those of the token before it, which was fed.
  """
  active, t = slots.pages.active, slots.drawn
  stop = jnp.isin(token, jnp.array(sampler.stop_ids))
  cut = jnp.where(t + 1 == sampler.max_new_tokens, TRUNCATED, UNFINISHED)
  new = {
    "tokens": token,
    "logps": logp,
    "lengths": t + 1,
    "finish": jnp.where(stop, STOPPED, cut).astype(jnp.int8),
  }
  if experts is not None:
    new["experts"] = experts.swapaxes(0, 1)
  kept = {name: getattr(samples, name) for name in new}
  written = _write(kept, new, (slots.answer, t, active))
  samples = dataclasses.replace(samples, **written)
  done = stop | (t + 1 == slots.until)
  pages = dataclasses.replace(slots.pages, active=active & ~done)
  slots = dataclasses.replace(slots, pages=pages, last=token, drawn=t + active)
  return slots, samples


def _write(kept: dict, new: dict, where) -> dict:
  """Each slot's values into its answer's row, which is on the same device."""

  def local(kept, new, where):
    answer_B, t_B, active_B = where
    rows, R = kept["tokens"].shape
    row_B = jnp.where(active_B, answer_B % rows, rows)  # else none

    def write(old, value_B):
      at = (row_B, t_B)[: old.ndim]
      # Routing: where the token before it is, of a prompt and an answer.
      if old.ndim == 4:
        at = row_B, slice(None), old.shape[2] - R - 1 + t_B
      return old.at[at].set(value_B, mode="drop")

    return jax.tree.map(write, kept, new)

  of_rows = jax.sharding.PartitionSpec(sharding.BATCH_AXES)
  return sharding.shard_map(local, (of_rows,) * 3, of_rows)(kept, new, where)


def peek(slots: DecodeState, samples: Samples) -> jax.Array:
  """[B, R] int32, the tokens of the answers that are in the slots."""

  def local(tokens, answer_B):
    return tokens[answer_B % len(tokens)]

  of_rows = jax.sharding.PartitionSpec(sharding.BATCH_AXES)
  read = sharding.shard_map(local, (of_rows,) * 2, of_rows)
  return read(samples.tokens, slots.answer)
