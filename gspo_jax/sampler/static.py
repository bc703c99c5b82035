"""Group rollouts: each prompt is prefilled once, its G answers decode together.

Dimension key: P prompts, G answers a prompt, B = P * G rows, S prompt slots,
R most new tokens, V vocabulary, L layers, k experts a token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.runtime.sharding import BATCH_AXES, constrain
from gspo_jax.sampler import next_token
from gspo_jax.sampler.decode_params import decode_params
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  Prompts,
  SamplerConfig,
  Samples,
)

_FIRST_SLOTS = 64  # the answers' cache starts this long or longer, and doubles
_BLOCKS = 100  # decoder blocks to compile, over all lengths of the cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  """Decoding after `step` tokens; `last` is the newest of each row.

  `experts`, [L, B, R, k], are those of the tokens fed so far; or None.
  """

  step: jax.Array
  last: jax.Array
  done: jax.Array
  tokens: jax.Array
  logps: jax.Array
  lengths: jax.Array
  cache: kv.Cache
  experts: jax.Array | None


def generate(
  params: model.Params,
  cfg: model.ModelConfig,
  prompts: Prompts,
  key: jax.Array,
  *,
  sampler: SamplerConfig,
) -> Samples:
  """Draws `group_size` answers to each prompt.

  Decoding is a `while_loop` that ends with the longest answer; the cache it
  reads doubles as answers grow, so the cost follows the tokens really drawn and
  not `max_new_tokens`. Row b draws its token t with a key made of (key, b, t):
  the same key repeats exactly, two answers of a group differ.

  Args:
    params: as `model.init` makes them.
    cfg: the model; static.
    prompts: P prompts.
    key: a typed PRNG key.
    sampler: how to draw; static.
  """
  params = decode_params(params, cfg)
  logits, cache, prompt_experts = _prefill(params, cfg, prompts, sampler)
  params = model.unstack_layers(params, cfg)
  B, R = logits.shape[0], sampler.max_new_tokens
  row_keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(B))
  state = _State(
    step=jnp.int32(0),
    last=jnp.zeros(B, jnp.int32),
    done=jnp.zeros(B, bool),
    tokens=jnp.full((B, R), sampler.pad_id, jnp.int32),
    logps=jnp.zeros((B, R)),
    lengths=jnp.zeros(B, jnp.int32),
    cache=cache,
    experts=_room(prompt_experts, B, R),
  )
  state = _record(state, logits, row_keys, sampler)
  starts = jnp.repeat(prompts.lengths, sampler.group_size)
  state = _decode(state, params, cfg, starts, row_keys, sampler)
  finish = jnp.where(state.done, STOPPED, TRUNCATED).astype(jnp.int8)
  experts = _join(prompt_experts, state.experts)
  return Samples(
    state.tokens, state.logps, state.lengths, finish, B * state.step, experts
  )


def _prefill(params, cfg, prompts, sampler):
  """What the answers to each prompt share, and where its tokens went.

  Returns:
    The logits after it [B, V], the cache, and the experts [L, P, S, k] or None.
  """
  out = model.prefill(
    params, cfg, prompts.tokens, prompts.positions, prompts.mask
  )
  logits = next_token.logits(params, cfg, out.hidden[:, -1])
  cache = kv.share_prefix(
    out.cache, cfg, sampler.group_size, cache_slots(0, cfg, sampler)
  )
  logits = jnp.repeat(logits, sampler.group_size, axis=0)
  recorded = sampler.record_routing and cfg.num_experts
  experts = out.routing.experts if recorded else None
  return constrain(logits, next_token.GROUPS, next_token.VOCAB), cache, experts


def _room(prompts_LPSk, answers, slots):
  """For the experts of the answers, [L, B, R, k]; None where none are noted.

  What is never written are k experts, too, each once.
  """
  if prompts_LPSk is None:
    return None
  L, _, _, k = prompts_LPSk.shape
  first_k = jnp.arange(k, dtype=prompts_LPSk.dtype)
  return constrain(
    jnp.broadcast_to(first_k, (L, answers, slots, k)), None, BATCH_AXES
  )


def _join(prompts_LPSk, answers_LBRk):
  """The experts of the whole texts, [B, L, S + R, k]."""
  if answers_LBRk is None:
    return None
  group = answers_LBRk.shape[1] // prompts_LPSk.shape[1]
  shared_LBSk = jnp.repeat(prompts_LPSk, group, axis=1)
  joined_LBTk = jnp.concatenate([shared_LBSk, answers_LBRk], axis=2)
  return constrain(joined_LBTk.swapaxes(0, 1), BATCH_AXES)


def cache_slots(
  full: int, cfg: model.ModelConfig, sampler: SamplerConfig
) -> int:
  """Slots of the answers' cache that follows one of `full` slots, or the first.

  The last token drawn is never fed back. Every length has all blocks compiled
  once more (seconds each, on a TPU), so a deep model starts with a longer one.
  """
  most = max(sampler.max_new_tokens - 1, 1)
  lengths = max(_BLOCKS // cfg.num_layers, 1)
  first = max(_FIRST_SLOTS, -(-most // 2 ** (lengths - 1)))
  return min(max(first, 2 * full), most)


def _decode(state, params, cfg, starts, row_keys, sampler) -> _State:
  """Decodes until all are done; a full cache is doubled and decoding goes on.

  Each doubling stands in the taken branch of a `cond`, so that short answers
  never touch the longer cache; it also compiles the step once more. The
  result's cache is dropped: None.
  """
  slots = state.cache.valid.shape[1]
  limit = min(slots + 1, sampler.max_new_tokens)
  going = lambda s: (s.step < limit) & ~s.done.all()

  def body(s):
    positions = (starts + s.step - 1)[:, None]
    real = jnp.ones_like(positions)
    out = model.hidden_states(
      params, cfg, s.last[:, None], positions, real, s.cache
    )
    experts = _note(s.experts, out.routing, s.step - 1)
    s = dataclasses.replace(s, cache=out.cache, experts=experts)
    logits = next_token.logits(params, cfg, out.hidden[:, 0])
    return _record(s, logits, row_keys, sampler)

  state = jax.lax.while_loop(going, body, state)
  drop = lambda s: dataclasses.replace(s, cache=None)
  if limit == sampler.max_new_tokens:
    return drop(state)

  def longer(s):
    s = dataclasses.replace(
      s, cache=kv.grow(s.cache, cache_slots(slots, cfg, sampler))
    )
    return _decode(s, params, cfg, starts, row_keys, sampler)

  return jax.lax.cond(state.done.all(), drop, longer, state)


def _note(experts_LBRk, routing, slot):
  """Writes down where the tokens of one slot went, if that is asked for."""
  if experts_LBRk is None:
    return None
  at = (0, 0, slot, 0)
  return jax.lax.dynamic_update_slice(experts_LBRk, routing.experts, at)


def _record(s: _State, logits, row_keys, sampler) -> _State:
  """Draws one token a row and writes it down, except where a row is done."""
  steps_B = jnp.full(s.last.shape, s.step)
  token, logp = next_token.sample_token(logits, row_keys, steps_B, sampler)
  token = jnp.where(s.done, sampler.pad_id, token)
  logp = jnp.where(s.done, 0.0, logp)
  write = jax.lax.dynamic_update_slice
  stop = jnp.isin(token, jnp.array(sampler.stop_ids)) & ~s.done
  return dataclasses.replace(
    s,
    step=s.step + 1,
    last=token,
    done=s.done | stop,
    tokens=write(s.tokens, token[:, None], (0, s.step)),
    logps=write(s.logps, logp[:, None], (0, s.step)),
    lengths=s.lengths + ~s.done,
  )
