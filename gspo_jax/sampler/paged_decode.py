"""The devices' half of continuous batching: prefill and a segment of decoding.

Functions over explicit state; `continuous_jit` compiles them. The host decides
between segments what each slot does (`scheduler`, SegmentPlan).

Dimension key: B slots, b of them, A responses, R most new tokens, W pages of a
slot, N prefixes of one prefill, T their tokens, L layers, k experts a token, P
prompts, G responses a prompt.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.model import paged_cache
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

_BATCH = jax.sharding.PartitionSpec(sharding.BATCH_AXES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """State of the decode slots; `pages` holds the tokens already fed.

  Attributes:
    pages: the paged cache of B slots.
    response: [B] int32, which of the A responses the slot decodes.
    last_token: [B] int32, the newest token, not fed yet.
    num_tokens: [B] int32, tokens of the response so far.
    stop_at: [B] int32, tokens at which the response leaves the slot.
    stop_state: [B] int32, of `StopStrings` after the newest token.
  """

  pages: paged_cache.Pages
  response: jax.Array
  last_token: jax.Array
  num_tokens: jax.Array
  stop_at: jax.Array
  stop_state: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentPlan:
  """What each slot does in the next segment; made by the host.

  Attributes:
    table: [B, W] int32, the pages of each slot, as in `Pages`.
    active: [B] bool, slots that decode, unless their response has finished.
      What an inactive slot held is dropped.
    new: [B] bool, active slots that start a response. The fields below hold
      only for these.
    response: [B] int32, which of the A responses.
    num_tokens: [B] int32, tokens that the response already has.
    stop_at: [B] int32, tokens at which it leaves the slot.
    stop_state: [B] int32, of `StopStrings` after the tokens that it has.
    num_cached: [B] int32, tokens of its prefix that are in the pages.
    last_token: [B] int32, the last token of its prefix, to be fed first.
    copy_source: [B] int32, the page to copy ...
    copy_target: [B] int32, ... to this page; n or more: none is copied.
  """

  table: jax.Array
  active: jax.Array
  new: jax.Array
  response: jax.Array
  num_tokens: jax.Array
  stop_at: jax.Array
  stop_state: jax.Array
  num_cached: jax.Array
  last_token: jax.Array
  copy_source: jax.Array
  copy_target: jax.Array


def empty(cfg: model.ModelConfig, **sizes: int) -> DecodeState:
  """A state without responses; the sizes are those of `paged_cache.empty`."""
  pages = paged_cache.empty(cfg, **sizes)
  zeros = jnp.zeros_like(pages.lengths)
  return DecodeState(pages, zeros, zeros, zeros, zeros, zeros)


def prefill(
  params: model.Params,
  cfg: model.ModelConfig,
  tokens: jax.Array,
  lengths: jax.Array,
  *,
  chunk: int,
  record_routing: bool = False,
  cached: tuple[tuple, tuple, jax.Array] | None = None,
) -> tuple[kv.Cache, jax.Array | None]:
  """Keys and values of prefixes, computed `chunk` tokens at a time.

  The cost follows the longest prefix, not T, and the shortest cached part.

  Args:
    params: those of `decode_params`, unstacked.
    cfg: the model; static.
    tokens: [N, T] int32, padded on the RIGHT; T is a multiple of `chunk`.
    lengths: [N] int32, real tokens; 0 for a row of padding.
    chunk: tokens of one forward pass; static.
    record_routing: whether to return the experts; static.
    cached: keys and values of the first tokens, per layer [N, K, T, H] for K
      heads of width H, and the number of these tokens, [N] int32. Chunks that
      lie in them for all rows are not computed; their experts are 0.

  Returns:
    The cache of T slots, and the experts [N, L, T, k] of the tokens, or None.
  """
  N, T = tokens.shape
  real_NT = jnp.arange(T) < lengths[:, None]
  experts = None
  if record_routing:
    shape = cfg.num_layers, N, T, cfg.experts_per_token
    experts = jnp.zeros(shape, number_type(cfg.num_experts))
    experts = sharding.constrain(experts, None, sharding.BATCH_AXES)

  def forward(i, carry):
    cache, experts = carry
    start = i * chunk
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)
    positions = jnp.broadcast_to(start + jnp.arange(chunk), (N, chunk))
    out = model.hidden_states(
      params, cfg, cut(tokens), positions, cut(real_NT), cache
    )
    if record_routing:
      experts = jax.lax.dynamic_update_slice_in_dim(
        experts, out.routing.experts, start, axis=2
      )
    return out.cache, experts

  num_chunks = -(-lengths.max() // chunk)
  first, cache = jnp.int32(0), kv.empty(cfg, N, T)
  if cached is not None:
    k, v, counts_N = cached
    valid_NT = jnp.arange(T) < counts_N[:, None]
    first = jnp.where(lengths > 0, counts_N, T).min() // chunk
    cache = kv.Cache(k, v, valid_NT, first * chunk)
  init = cache, experts
  cache, experts = jax.lax.fori_loop(first, num_chunks, forward, init)
  return cache, experts.swapaxes(0, 1) if record_routing else None


def write_prompt_routing(
  samples: Samples,
  experts: jax.Array,
  lengths: jax.Array,
  first_response: jax.Array,
  *,
  group_size: int,
) -> Samples:
  """Writes the experts of prompts' tokens into all G responses to each.

  Args:
    samples: each row on the device of its prompt's prefill.
    experts: [N, L, T, k], of `prefill`.
    lengths: [N] int32, tokens of each prefix: all of a prompt but its last.
    first_response: [N] int32, the first response to the prompt; -1 for none.
    group_size: G; static.
  """
  # The column of a prompt's last token; it is fed by the first decode step.
  last = samples.experts.shape[2] - samples.tokens.shape[1] - 1

  def local(old, experts, lengths, first_N):
    rows, T = len(old), experts.shape[2]
    row_NG = first_N[:, None] % rows + jnp.arange(group_size)
    row_NG = jnp.where(first_N[:, None] < 0, rows, row_NG)
    token_T = jnp.arange(T)
    column_NT = last - lengths[:, None] + token_T
    column_NT = jnp.where(token_T < lengths[:, None], column_NT, old.shape[2])
    index = row_NG[:, :, None], slice(None), column_NT[:, None, :]
    new_NTLk = experts.swapaxes(1, 2)
    return old.at[index].set(new_NTLk[:, None], mode="drop")

  write = sharding.shard_map(local, (_BATCH,) * 4, _BATCH)
  return dataclasses.replace(
    samples, experts=write(samples.experts, experts, lengths, first_response)
  )


def apply_plan(
  state: DecodeState, plan: SegmentPlan, *, copy_pages: bool
) -> DecodeState:
  """The state at the start of a segment.

  Args:
    state: that at the end of the last segment; best donated.
    plan: the host's plan of the segment.
    copy_pages: whether to copy the prefixes' partial pages; static. False
      spares the work if no slot is new.
  """
  pages = state.pages
  if copy_pages:
    pages = paged_cache.copy(pages, plan.copy_source, plan.copy_target)
  select = lambda new, old: jnp.where(plan.new, new, old)
  pages = dataclasses.replace(
    pages,
    table=plan.table,
    lengths=select(plan.num_cached, pages.lengths),
    # The host may have planned before it knew which responses had finished.
    active=plan.active & (plan.new | pages.active),
  )
  return DecodeState(
    pages=pages,
    response=select(plan.response, state.response),
    last_token=select(plan.last_token, state.last_token),
    num_tokens=select(plan.num_tokens, state.num_tokens),
    stop_at=select(plan.stop_at, state.stop_at),
    stop_state=select(plan.stop_state, state.stop_state),
  )


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
) -> tuple[DecodeState, Samples]:
  """A segment: one token for each active slot, up to `steps` times.

  Token t of response a is sampled with a key made of (key, a, t), whatever its
  slot and its neighbours are.

  Args:
    params: those of `decode_params`, unstacked.
    cfg: the model; static.
    state: of `apply_plan`, of all slots or of a subset.
    samples: A responses; the tokens are written there.
    key: the same for all responses.
    sampler: the sampling parameters; static.
    steps: most decode steps; static.
    min_active: [] int32; the segment also ends when no more slots than these
      decode.
  """
  response_key = functools.partial(jax.random.fold_in, key)

  def body(carry):
    step, state, samples = carry
    out = model.hidden_states(
      params,
      cfg,
      state.last_token[:, None],
      state.pages.lengths[:, None],
      state.pages.active[:, None],
      state.pages,
    )
    logits = next_token.logits(params, cfg, out.hidden[:, 0])
    row_keys = jax.vmap(response_key)(state.response)
    token, logp = next_token.sample_token(
      logits, row_keys, state.num_tokens, sampler
    )
    state = dataclasses.replace(state, pages=out.cache)
    experts = None
    if samples.experts is not None:
      experts = out.routing.experts[:, :, 0]
    stop_state, stopped = next_token.stop(
      token, state.num_tokens + 1, state.stop_state, sampler
    )
    finish = jnp.where(
      state.num_tokens + 1 == sampler.max_new_tokens, TRUNCATED, UNFINISHED
    )
    finish = jnp.where(stopped, STOPPED, finish)
    samples = _write_token(state, samples, token, logp, finish, experts)
    state = dataclasses.replace(state, stop_state=stop_state)
    return step + 1, _advance(state, token, stopped), samples

  def proceed(carry):
    step, state, _ = carry
    return (step < steps) & (state.pages.active.sum() > min_active)

  taken, state, samples = jax.lax.while_loop(
    proceed, body, (jnp.int32(0), state, samples)
  )
  slot_steps = samples.slot_steps + taken * state.num_tokens.size
  return state, dataclasses.replace(samples, slot_steps=slot_steps)


def select_slots(state: DecodeState, slots: jax.Array) -> DecodeState:
  """The state of the slots [b], equally many of each shard."""

  def local(arrays, slot_b):
    return jax.tree.map(lambda x: x[slot_b % len(x)], arrays)

  read = sharding.shard_map(local, (_BATCH,) * 2, _BATCH)
  return _with_pages_of(state.pages, read(_without_pages(state), slots))


def scatter_slots(
  state: DecodeState, subset: DecodeState, slots: jax.Array
) -> DecodeState:
  """The state of all slots after a segment of a subset; see `select_slots`."""

  def local(arrays, new, slot_b):
    write = lambda old, new: old.at[slot_b % len(old)].set(new)
    return jax.tree.map(write, arrays, new)

  write = sharding.shard_map(local, (_BATCH,) * 3, _BATCH)
  arrays = write(_without_pages(state), _without_pages(subset), slots)
  return _with_pages_of(subset.pages, arrays)


def read_tokens(samples: Samples, responses: jax.Array) -> jax.Array:
  """The tokens [N, R] of `responses` [N], each on the device of its response.

  A number of -1 stands for any response.
  """

  def local(tokens, response_N):
    return tokens[response_N % len(tokens)]

  read = sharding.shard_map(local, (_BATCH,) * 2, _BATCH)
  return read(samples.tokens, responses)


def _without_pages(state: DecodeState) -> DecodeState:
  """The arrays of slots alone, without keys and values."""
  pages = dataclasses.replace(state.pages, k=None, v=None)
  return dataclasses.replace(state, pages=pages)


def _with_pages_of(pages, state: DecodeState) -> DecodeState:
  """The state with the keys and values of `pages`."""
  pages = dataclasses.replace(state.pages, k=pages.k, v=pages.v)
  return dataclasses.replace(state, pages=pages)


def _advance(state: DecodeState, token, stopped) -> DecodeState:
  """The state after each active slot sampled a token."""
  active = state.pages.active
  num_tokens = state.num_tokens + active
  done = stopped | (state.num_tokens + 1 == state.stop_at)
  pages = dataclasses.replace(state.pages, active=active & ~done)
  return dataclasses.replace(
    state, pages=pages, last_token=token, num_tokens=num_tokens
  )


def _write_token(
  state: DecodeState, samples: Samples, token, logp, finish, experts
) -> Samples:
  """Writes the token of each active slot into its response.

  Args:
    state: before `_advance`.
    samples: A responses, each on the device of its slot.
    token: [B] int32.
    logp: [B] float32.
    finish: [B], as in Samples, with this token.
    experts: [L, B, k], those of the token before, which was fed; or None.
  """
  new = {
    "tokens": token,
    "logps": logp,
    "lengths": state.num_tokens + 1,
    "finish": finish.astype(jnp.int8),
  }
  if experts is not None:
    new["experts"] = experts.swapaxes(0, 1)

  def local(old, new, slots):
    response_B, column_B, active_B = slots
    rows, R = old["tokens"].shape
    row_B = jnp.where(active_B, response_B % rows, rows)  # `rows`: nowhere

    def write(old, value_B):
      index = (row_B, column_B)[: old.ndim]
      # Routing has the prompt's columns first, and the token before is meant.
      if old.ndim == 4:
        index = row_B, slice(None), old.shape[2] - R - 1 + column_B
      return old.at[index].set(value_B, mode="drop")

    return jax.tree.map(write, old, new)

  old = {name: getattr(samples, name) for name in new}
  slots = state.response, state.num_tokens, state.pages.active
  write = sharding.shard_map(local, (_BATCH,) * 3, _BATCH)
  return dataclasses.replace(samples, **write(old, new, slots))
