"""Samples the next token: logits, truncation, sampling, stops.

Dimension key: B responses, D model width, V vocabulary, K kept ids.
"""

import math

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.runtime.sharding import constrain
from gspo_jax.sampler.samples import SamplerConfig

# Mesh axes of the rows and of the vocabulary of decode logits. Devices that
# share experts and heads read different parts of the head, for the same rows.
ROW_AXES, VOCAB_AXES = ("data", "fsdp"), ("expert", "tensor")
# From this many tokens on, `categorical` samples in two steps.
LARGE_VOCAB = 4096


def logits(params, cfg: model.ModelConfig, hidden_BD: jax.Array) -> jax.Array:
  """Logits [B, V] float32, sharded over `ROW_AXES` and `VOCAB_AXES`."""
  hidden_BD = constrain(hidden_BD, ROW_AXES)
  logits_BV = model.project_logits(hidden_BD, params["head"], cfg)
  return constrain(logits_BV, ROW_AXES, VOCAB_AXES)


def sample_token(
  logits_BV: jax.Array,
  row_keys: jax.Array,
  step_B: jax.Array,
  sampler: SamplerConfig,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """The next tokens [B] int32, their log-probs [B], and the kept ids [B, K].

  The results are as in `Samples`. `logits_BV` are float32; `step_B` counts the
  tokens of each response. Token t is sampled with `fold_in(row_key, t)`.
  """
  greedy = sampler.temperature == 0
  logps = jax.nn.log_softmax(
    logits_BV / (1.0 if greedy else sampler.temperature)
  )
  keys = jax.vmap(jax.random.fold_in)(row_keys, step_B)
  at = lambda x, place: jnp.take_along_axis(x, place[:, None], axis=1)[:, 0]
  if K := sampler.num_kept(logps.shape[-1]):
    ids_BK, logps_BK = keep(logps, step_B, sampler, K)
    scores = logps_BK if greedy else logps_BK + jax.vmap(_noise)(keys, ids_BK)
    place = scores.argmax(-1)
    return at(ids_BK, place), at(logps_BK, place), ids_BK
  allowed = truncate(logps, step_B, sampler)
  token = allowed.argmax(-1) if greedy else jax.vmap(categorical)(keys, allowed)
  return token.astype(jnp.int32), at(logps, token), None


def keep(
  logps_BV: jax.Array, step_B: jax.Array, sampler: SamplerConfig, K: int
) -> tuple[jax.Array, jax.Array]:
  """The ids [B, K] of a truncated distribution, and their log-probs in it.

  As `truncate`, among the K likeliest tokens alone: so the set has a bounded
  size, and no vocabulary is sorted. Without top-k, top-p is still a part of the
  probability of all tokens. Where fewer than K are left, the likeliest fills
  up, with log-prob -inf.
  """
  logps_BV = _allow(logps_BV, step_B, sampler)
  best_BK, ids_BK = jax.lax.top_k(logps_BV, K)
  kept = best_BK > -jnp.inf
  if sampler.top_p < 1:
    of = best_BK if sampler.top_k else logps_BV
    probs = jnp.exp(best_BK - jax.nn.logsumexp(of, axis=-1, keepdims=True))
    kept &= jnp.cumsum(probs, -1) - probs < sampler.top_p
  ids_BK = jnp.where(kept, ids_BK, ids_BK[:, :1])
  return ids_BK, jax.nn.log_softmax(jnp.where(kept, best_BK, -jnp.inf))


def _noise(key, ids_K):
  """Gumbel noise. An id's does not depend on which others are kept.

  So a token is the same where two samplers round to another order or set.
  """
  return jax.vmap(lambda i: jax.random.gumbel(jax.random.fold_in(key, i)))(
    ids_K
  )


def categorical(key: jax.Array, logps_V: jax.Array) -> jax.Array:
  """Samples a token with probabilities proportional to exp(logps).

  A large vocabulary is split into C blocks of W tokens; the block is sampled
  first, then the token in it. The distribution is the same, with C + W random
  numbers instead of V. C is the largest power of two that divides V and is at
  most its square root, so devices that share the vocabulary have whole blocks.
  """
  vocab = logps_V.shape[-1]
  if vocab < LARGE_VOCAB:
    return jax.random.categorical(key, logps_V)
  blocks = vocab & -vocab
  while blocks * blocks > vocab:
    blocks //= 2
  block_key, token_key = jax.random.split(key)
  logps_CW = logps_V.reshape(blocks, -1)
  block_logps = jax.nn.logsumexp(logps_CW, axis=-1)
  block = jax.random.categorical(block_key, block_logps)
  token = jax.random.categorical(token_key, logps_CW[block])
  return block * logps_CW.shape[1] + token


def truncate(
  logps_BV: jax.Array, step_B: jax.Array, sampler: SamplerConfig
) -> jax.Array:
  """Sets tokens that are left out to -inf.

  In vLLM's order: length, min-p, top-k, top-p. Tokens that tie with the k-th
  stay.
  """
  logps = _allow(logps_BV, step_B, sampler)
  if 0 < sampler.top_k < logps.shape[-1]:
    worst = jax.lax.top_k(logps, sampler.top_k)[0][:, -1:]
    logps = jnp.where(logps < worst, -jnp.inf, logps)
  if sampler.top_p < 1:
    logps = jax.nn.log_softmax(logps)
    best = jnp.sort(logps, axis=-1, descending=True)
    # A token stays if all likelier tokens together have less than top_p. So the
    # likeliest token always stays.
    before = jnp.cumsum(jnp.exp(best), -1) - jnp.exp(best)
    worst = jnp.where(before < sampler.top_p, best, jnp.inf).min(-1)
    logps = jnp.where(logps < worst[:, None], -jnp.inf, logps)
  return logps


def _allow(logps, step_B, sampler):
  if sampler.min_new_tokens > 1:
    stops = jnp.isin(jnp.arange(logps.shape[-1]), jnp.array(sampler.stop_ids))
    early_B = step_B + 1 < sampler.min_new_tokens
    logps = jnp.where(early_B[:, None] & stops, -jnp.inf, logps)
  if sampler.min_p > 0:
    least = logps.max(-1, keepdims=True) + math.log(sampler.min_p)
    logps = jnp.where(logps < least, -jnp.inf, logps)
  return logps


def stop(
  token_B: jax.Array,
  length_B: jax.Array,
  stop_state_B: jax.Array,
  sampler: SamplerConfig,
) -> tuple[jax.Array, jax.Array]:
  """Whether the newest token ends its response, alone or with a stop string.

  `length_B` includes this token. `stop_state_B` is the state of `StopStrings`
  before the token; the first result is the state after it.
  """
  stopped_B = jnp.isin(token_B, jnp.array(sampler.stop_ids))
  if not sampler.stop:
    return stop_state_B, stopped_B
  stop_state_B, ended_B = sampler.stop.advance(stop_state_B, token_B)
  ended_B &= length_B >= sampler.min_new_tokens
  return stop_state_B, stopped_B | ended_B
