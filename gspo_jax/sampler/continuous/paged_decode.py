"""The devices' half of continuous batching: prefill and a segment of decoding.

Functions over explicit state; `jit` compiles them. Between segments the host
decides what each slot does (`scheduler`, SegmentPlan). Dimension letters as in
`continuous/__init__`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.model import paged_cache
from gspo_jax.model.moe import number_type
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import Moves
from gspo_jax.sampler import next_token
from gspo_jax.sampler.continuous import speculation
from gspo_jax.sampler.continuous.config import PROMPT_ROWS
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  SamplerConfig,
  Samples,
)

# Any: they stand where a dataclass has arrays.
_BATCH: Any = jax.sharding.PartitionSpec(sharding.BATCH_AXES)
_STATES: Any = jax.sharding.PartitionSpec(sharding.BATCH_AXES, "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slots:
  """The responses in the slots: [M] int32 each, but for `params`."""

  response: jax.Array  # its number: random keys are made from it
  row: jax.Array  # of the samples, where its tokens are written
  last_token: jax.Array  # the newest one, not fed yet
  num_tokens: jax.Array  # that the row has
  stop_at: jax.Array  # tokens at which the response leaves the slot
  stop_state: jax.Array  # of `StopStrings` after the newest token
  # [M, 4] float32, each row a `SamplingParams`; None: all as the sampler's.
  params: jax.Array | None = None


OF_SLOTS = tuple(field.name for field in dataclasses.fields(_Slots))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState(_Slots):
  pages: paged_cache.Pages  # of the tokens already fed
  # The layers' states after prefixes from which slots are to start later,
  # PROMPT_ROWS rows a shard.
  prompt_states: kv.Arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentPlan(_Slots):
  """The host's plan for each slot in the next segment.

  What is not `table`, `active` or `new` is valid only for new slots.
  """

  table: jax.Array  # [M, W] int32, as in `Pages`
  # [M] bool, slots that decode unless their response has finished. The content
  # of an inactive slot is dropped.
  active: jax.Array
  new: jax.Array  # [M] bool, active slots that start a response
  num_cached: jax.Array  # [M] int32, tokens of its prefix that are in the pages
  # [M] int32, the page to copy, and where to; beyond the pool: nothing is
  # copied.
  copy_source: jax.Array
  copy_target: jax.Array
  # [M] int32, the shard's row of `prompt_states` to start from; beyond them:
  # the slot has its state. () for a model without states.
  prompt_row: jax.Array | tuple[()]


class SegmentResults(NamedTuple):
  """What every host learns of a segment."""

  num_tokens: jax.Array  # [M], of the response in each slot
  active: jax.Array  # [M] bool, whether it goes on
  response: jax.Array  # [M], its number
  stop_at: jax.Array  # [M], tokens at which it leaves the slot
  num_cached: jax.Array  # [M], tokens in the pages of each slot
  num_sampled: jax.Array  # [] tokens, in all slots together
  drafts: tuple[jax.Array, jax.Array] | None  # `Samples.drafts` so far


def empty(
  cfg: model.ModelConfig, *, shards: int, by_row: bool = False, **sizes: int
) -> DecodeState:
  """A state without responses; sizes as of `paged_cache.empty`.

  `by_row`: with `DecodeState.params`.
  """
  pages = paged_cache.empty(cfg, **sizes)
  zeros = jnp.zeros_like(pages.lengths)
  prompt_states = kv.empty_states(cfg, PROMPT_ROWS * shards)
  slots: dict[str, Any] = dict.fromkeys(OF_SLOTS, zeros)
  slots["params"] = jnp.zeros((len(zeros), 4)) if by_row else None
  return DecodeState(pages=pages, prompt_states=prompt_states, **slots)


def prefill(
  params: model.Params,
  cfg: model.ModelConfig,
  tokens: jax.Array,
  lengths: jax.Array,
  *,
  chunk: int,
  record_routing: bool = False,
  cached: tuple[kv.Arrays, jax.Array] | None = None,
) -> tuple[kv.Cache, jax.Array | None]:
  """Computes keys and values of prefixes, `chunk` tokens at a time.

  The cost follows the longest prefix, not T, and the shortest cached part.

  Args:
    params: of `decode_params`, unstacked.
    tokens: [Q, T] int32, padded on the RIGHT; T is a multiple of `chunk`.
    lengths: [Q] int32, real tokens; 0 for a row of padding.
    cached: keys and values [Q, K, T, H] per layer of the first tokens, and the
      number of these tokens, [Q] int32. Chunks that all rows have cached are
      not computed; their experts are 0.
    cfg, chunk, record_routing: static.

  Returns:
    The cache of T slots, and the experts [Q, L, T, k] of the tokens, or None.
  """
  Q, T = tokens.shape
  real_QT = jnp.arange(T) < lengths[:, None]
  experts = None
  if record_routing:
    shape = cfg.num_moe_layers, Q, T, cfg.experts_per_token
    experts = jnp.zeros(shape, number_type(cfg.num_experts))
    experts = sharding.constrain(experts, None, sharding.BATCH_AXES)

  def forward(i, carry):
    cache, experts = carry
    start = i * chunk
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)
    positions = jnp.broadcast_to(start + jnp.arange(chunk), (Q, chunk))
    out = model.hidden_states(
      params, cfg, cut(tokens), positions, cut(real_QT), cache
    )
    if record_routing and out.routing:
      experts = jax.lax.dynamic_update_slice_in_dim(
        experts, out.routing.experts, start, axis=2
      )
    return out.cache, experts

  num_chunks = -(-lengths.max() // chunk)
  first, cache = jnp.int32(0), kv.empty(cfg, Q, T)
  if cached is not None:
    arrays, counts_Q = cached
    valid_QT = jnp.arange(T) < counts_Q[:, None]
    first = jnp.where(lengths > 0, counts_Q, T).min() // chunk
    cache = dataclasses.replace(
      cache, kv=arrays, valid=valid_QT, length=first * chunk
    )
  init = cache, experts
  cache, experts = jax.lax.fori_loop(first, num_chunks, forward, init)
  return cache, experts.swapaxes(0, 1) if record_routing else None


def write_prefix_routing(
  samples: Samples, experts: jax.Array, rows: jax.Array, columns: jax.Array
) -> Samples:
  """Writes the experts of prefixes, [Q, L, T, k], into their responses.

  Each row of `samples` is on the device that prefilled its prefix. `rows` are
  [Q, G], counted from the first one of the shard, and -1 after the last one.
  `columns` [Q, T] are those of `Samples.experts`; beyond them nothing is
  written.
  """

  def local(old, experts, row_QG, column_QT):
    new_QTLk = experts.swapaxes(1, 2)

    def write(g, old):
      row_Q = row_QG[:, g]
      row_Q = jnp.where(row_Q < 0, len(old), row_Q)  # nowhere
      index = row_Q[:, None], slice(None), column_QT
      return old.at[index].set(new_QTLk, mode="drop")

    most = (row_QG >= 0).sum(1).max()  # often 0 when responses are resumed
    return jax.lax.fori_loop(0, most, write, old)

  write = sharding.shard_map(local, (_BATCH,) * 4, _BATCH)
  return dataclasses.replace(
    samples, experts=write(samples.experts, experts, rows, columns)
  )


def store_states(
  state: DecodeState,
  states: kv.Arrays,
  slot_source: jax.Array,
  row_source: jax.Array,
) -> DecodeState:
  """Copies states [Q, ...] after prefixes into slots and `prompt_states`.

  The sources, [M] and [PROMPT_ROWS * shards] int32, count the rows of a shard;
  beyond them nothing is copied.
  """
  copy = paged_cache.copy_states
  pages = dataclasses.replace(
    state.pages, states=copy(state.pages.states, states, slot_source)
  )
  return dataclasses.replace(
    state,
    pages=pages,
    prompt_states=copy(state.prompt_states, states, row_source),
  )


def apply_plan(
  state: DecodeState, plan: SegmentPlan, slots: jax.Array | None = None
) -> DecodeState:
  """Applies the plan; all new slots are among `slots` [m], if given."""
  copies = plan.copy_source, plan.copy_target
  if slots is not None:
    copies = _select(copies, slots, (_BATCH, _BATCH))
  pages = paged_cache.copy(state.pages, *copies)
  if not isinstance(plan.prompt_row, tuple):
    states = paged_cache.copy_states(
      pages.states, state.prompt_states, plan.prompt_row
    )
    pages = dataclasses.replace(pages, states=states)

  def select(new, old):
    is_new = plan.new[:, None] if old.ndim > 1 else plan.new
    return jnp.where(is_new, new, old)

  pages = dataclasses.replace(
    pages,
    table=plan.table,
    lengths=select(plan.num_cached, pages.lengths),
    # The host may have planned before it knew which responses had finished.
    active=plan.active & (plan.new | pages.active),
  )
  of_slots = lambda x: {name: getattr(x, name) for name in OF_SLOTS}
  selected = jax.tree.map(select, of_slots(plan), of_slots(state))
  return dataclasses.replace(state, pages=pages, **selected)


def decode(
  params: model.Params,
  cfg: model.ModelConfig,
  state: DecodeState,
  samples: Samples,
  key: jax.Array,
  *,
  sampler: SamplerConfig,
  steps: int,
  min_active: jax.Array,
  drafts: int = 0,
) -> tuple[DecodeState, Samples]:
  """Decodes a segment: up to `steps` steps of each active slot.

  A step gives a response a token, and one more for each accepted draft. The key
  of token t of response b is made of (key, b, t), whatever the slot.

  Args:
    params: of `decode_params`, unstacked.
    state: all slots or a subset.
    samples: B responses; the tokens are written there.
    min_active: [] int32; the segment also ends when at most that many slots
      decode. -1: after one step.
    drafts: J - 1, of each slot in a step; see `speculation`.
    cfg, sampler, steps, drafts: static.
  """
  place_J = jnp.arange(1 + drafts)

  def body(carry):
    step, state, samples = carry
    pages = state.pages
    fed_mJ = state.last_token[:, None]
    if drafts:
      guesses = speculation.draft(
        samples,
        state.row,
        state.num_tokens,
        count=drafts,
        group_size=sampler.group_size,
      )
      fed_mJ = jnp.concatenate([fed_mJ, guesses], axis=1)
    number_mJ = state.num_tokens[:, None] + place_J  # of the sampled tokens
    # Pages have room up to `stop_at` only.
    real_mJ = pages.active[:, None] & (number_mJ < state.stop_at[:, None])
    out, new = _feed(params, cfg, state, key, fed_mJ, real_mJ, sampler)
    token_mJ = new["tokens"]
    taken_mJ, stop_state_mJ, stopped_mJ, done_mJ = speculation.accept(
      fed_mJ,
      token_mJ,
      state.num_tokens,
      state.stop_at,
      state.stop_state,
      sampler,
    )
    taken_mJ &= real_mJ
    count = taken_mJ.sum(1, dtype=jnp.int32)
    # Of the last token that a response gets; any without one.
    last = lambda x_mJ: jnp.take_along_axis(
      x_mJ, jnp.maximum(count - 1, 0)[:, None], axis=1
    )[:, 0]
    num_tokens = state.num_tokens + count
    finish = jnp.where(
      num_tokens == sampler.max_new_tokens, TRUNCATED, UNFINISHED
    )
    finish = jnp.where(last(stopped_mJ), STOPPED, finish)
    if samples.experts is not None:
      new["experts"] = out.routing.experts.transpose(1, 2, 0, 3)  # [m, J, L, k]
    samples = _write_tokens(state, samples, taken_mJ, new, num_tokens, finish)
    if drafts:
      counts = pages.active.sum(), (count - pages.active).sum()
      samples = dataclasses.replace(
        samples, drafts=jax.tree.map(jnp.add, samples.drafts, counts)
      )
    state = dataclasses.replace(
      state,
      pages=dataclasses.replace(
        out.cache,
        lengths=pages.lengths + count,
        active=pages.active & ~last(done_mJ),
      ),
      last_token=last(token_mJ),
      num_tokens=num_tokens,
      stop_state=last(stop_state_mJ),
    )
    return step + 1, state, samples

  def proceed(carry):
    step, state, _ = carry
    most = jnp.where(min_active < 0, 1, steps)
    return (step < most) & (state.pages.active.sum() > min_active)

  taken, state, samples = jax.lax.while_loop(
    proceed, body, (jnp.int32(0), state, samples)
  )
  slot_steps = samples.slot_steps + taken * state.num_tokens.size * len(place_J)
  return state, dataclasses.replace(samples, slot_steps=slot_steps)


def _feed(params, cfg, state, key, fed_mJ, real_mJ, sampler):
  """Reads the tokens [m, J]; the model's output, and what is sampled behind."""
  m, J = fed_mJ.shape
  place_J = jnp.arange(J)
  out = model.hidden_states(
    params,
    cfg,
    fed_mJ,
    state.pages.lengths[:, None] + place_J,
    real_mJ,
    state.pages,
  )
  logits = next_token.logits(params, cfg, out.hidden.reshape(m * J, -1))
  response_key = functools.partial(jax.random.fold_in, key)
  row_keys = jax.vmap(response_key)(jnp.repeat(state.response, J))
  numbers = (state.num_tokens[:, None] + place_J).reshape(-1)
  params = state.params
  if params is not None:
    params = jnp.repeat(params, J, axis=0)
  new = next_token.sample_token(logits, row_keys, numbers, sampler, params)
  if cfg.exact and params is None:
    vocab = jnp.arange(logits.shape[1])
    temperature = sampler.temperature or 1.0
    ids = new["tokens"], new.get("kept_ids"), vocab
    new["logps"], _ = model.target_logps(  # as the trainer computes them
      logits, *ids, cfg=cfg, temperature=temperature
    )
  return out, {name: x.reshape(m, J, *x.shape[1:]) for name, x in new.items()}


def select_slots(state: DecodeState, slots: jax.Array) -> DecodeState:
  """The state of `slots` [m], equally many of each shard."""
  selected = _select(_without_shared(state), slots, _OF_SLOTS)
  return _with_shared(selected, state)


def _select(arrays, rows, specs):
  """The rows [m] of each array; each row on its device."""

  def local(arrays, row_m):
    return jax.tree.map(lambda x: x[row_m % len(x)], arrays)

  return sharding.shard_map(local, (specs, _BATCH), specs)(arrays, rows)


def scatter_slots(
  state: DecodeState, subset: DecodeState, slots: jax.Array
) -> DecodeState:
  """Writes the state of a subset of slots back; see `select_slots`."""

  def local(arrays, new, slot_m):
    write = lambda old, new: old.at[slot_m % len(old)].set(new)
    return jax.tree.map(write, arrays, new)

  specs = _OF_SLOTS, _OF_SLOTS, _BATCH
  write = sharding.shard_map(local, specs, _OF_SLOTS)
  arrays = map(_without_shared, (state, subset))
  return _with_shared(write(*arrays, slots), subset)


def read_rows(samples: Samples, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Tokens, log-probs [Q, R] of the rows [Q], on their devices; -1: any row."""
  return _select((samples.tokens, samples.logps), rows, _BATCH)


def move_pages(state: DecodeState, moves: Moves) -> DecodeState:
  """Copies pages to other devices; sharded as `Pages.kv`."""
  moved = paged_cache.exchange(state.pages.kv, moves)
  return dataclasses.replace(
    state, pages=dataclasses.replace(state.pages, kv=moved)
  )


def move_slots(
  state: DecodeState, moves: Moves, rows: jax.Array
) -> DecodeState:
  """Copies slots, without their pages, to slots of other devices.

  A slot's new tokens are then written to the row in `rows` [n], beside
  `moves.target`.
  """

  def local(arrays, moves, row_n):
    moved = sharding.exchange(arrays, moves, *sharding.BATCH_AXES, dim=0)
    row_M = moved.row.at[moves.target].set(row_n, mode="drop")
    return dataclasses.replace(moved, row=row_M)

  move = sharding.shard_map(local, (_OF_SLOTS, _BATCH, _BATCH), _OF_SLOTS)
  return _with_shared(move(_without_shared(state), moves, rows), state)


def move_rows(samples: Samples, moves: Moves) -> Samples:
  """Exchanges rows of samples between devices."""

  def local(arrays, moves):
    return sharding.exchange(arrays, moves, *sharding.BATCH_AXES, dim=0)

  move = sharding.shard_map(local, (_BATCH, _BATCH), _BATCH)
  scalars: dict[str, Any] = {"slot_steps": None, "drafts": None}
  moved = move(dataclasses.replace(samples, **scalars), moves)
  return dataclasses.replace(
    moved, slot_steps=samples.slot_steps, drafts=samples.drafts
  )


# Specs of the arrays of slots, without what slots share.
_OF_SLOTS = DecodeState(
  pages=paged_cache.Pages((), _STATES, _BATCH, _BATCH, _BATCH),
  prompt_states=(),
  **dict.fromkeys(OF_SLOTS, _BATCH),
)


def _with_shared(state: DecodeState, source: DecodeState) -> DecodeState:
  """With the pages and `prompt_states` of `source`, which slots share."""
  pages = dataclasses.replace(state.pages, kv=source.pages.kv)
  return dataclasses.replace(
    state, pages=pages, prompt_states=source.prompt_states
  )


def _without_shared(state: DecodeState) -> DecodeState:
  pages = dataclasses.replace(state.pages, kv=())
  return dataclasses.replace(state, pages=pages, prompt_states=())


def _write_tokens(
  state: DecodeState, samples: Samples, taken_mJ, new, lengths, finish
) -> Samples:
  """Writes what each response gets in a step.

  `new` is of `sample_token`, [m, J, ...]; `experts` [m, J, L, k] are those of
  the fed tokens, each one earlier. `lengths` and `finish` are [m].
  """

  def local(old, new, of_rows, row_m, num_tokens_m, taken_mJ):
    rows, R = old["tokens"].shape
    # `rows`: nowhere
    row_mJ = jnp.where(taken_mJ, row_m[:, None] % rows, rows)
    column_mJ = num_tokens_m[:, None] + jnp.arange(taken_mJ.shape[1])

    def write(old, value):
      if old.ndim == 2:
        return old.at[row_mJ, column_mJ].set(value, mode="drop")
      # Routing begins with the prompt's columns, and is of the fed tokens.
      first = old.shape[2] - R - (old.ndim == 4)
      return old.at[row_mJ, :, first + column_mJ].set(value, mode="drop")

    written = {name: write(old[name], value) for name, value in new.items()}
    return written | {
      name: old[name].at[row_mJ[:, 0]].set(value, mode="drop")
      for name, value in of_rows.items()
    }

  of_rows = {"lengths": lengths, "finish": finish.astype(jnp.int8)}
  old = {name: getattr(samples, name) for name in new | of_rows}
  write = sharding.shard_map(local, (_BATCH,) * 6, _BATCH)
  slots = state.row, state.num_tokens, taken_mJ
  return dataclasses.replace(samples, **write(old, new, of_rows, *slots))
