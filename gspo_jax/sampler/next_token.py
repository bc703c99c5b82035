"""Samples the next token: logits, truncation, sampling, stops.

Dimension key: B responses, D model width, V vocabulary, K kept ids, H ids of a
head.
"""

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.runtime.sharding import constrain
from gspo_jax.sampler.samples import SamplerConfig
from gspo_jax.sampler.stop_strings import StopStrings

# Mesh axes of the rows and of the vocabulary of decode logits. Devices that
# share experts and heads read different parts of the head, for the same rows.
ROW_AXES, VOCAB_AXES = ("data", "fsdp"), ("expert", "tensor")


def logits(
  params: model.Params, cfg: model.ModelConfig, hidden_BD: jax.Array
) -> jax.Array:
  """Logits [B, V] float32, sharded over `ROW_AXES` and `VOCAB_AXES`."""
  if cfg.exact:  # an exact sum over the vocabulary is of one device
    return model.project_logits(hidden_BD, params["head"], cfg)
  hidden_BD = constrain(hidden_BD, ROW_AXES)
  logits_BV = model.project_logits(hidden_BD, params["head"], cfg)
  return constrain(logits_BV, ROW_AXES, VOCAB_AXES)


def sample_token(
  logits_BV: jax.Array,
  row_keys: jax.Array,
  step_B: jax.Array,
  sampler: SamplerConfig,
  params_B4: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """The next tokens [B] and what is known of them, by the fields of `Samples`.

  `tokens` and `logps` are [B], `kept_ids` [B, K], `head_ids` and `head_logps`
  [B, H], of which the samples may have none. `logits_BV` are float32; `step_B`
  counts the tokens of each response. Token t is sampled with
  `fold_in(row_key, t)`. With `params_B4`, each row a `SamplingParams`,
  `sampler` keeps no ids, and its own SamplingParams are ignored.
  """
  keys = jax.vmap(jax.random.fold_in)(row_keys, step_B)
  if params_B4 is not None:
    token, logp = _sample_by_row(logits_BV, keys, step_B, sampler, params_B4)
    return {"tokens": token, "logps": logp}
  greedy = sampler.temperature == 0
  logps = jax.nn.log_softmax(
    logits_BV / (1.0 if greedy else sampler.temperature)
  )
  at = lambda x, place: jnp.take_along_axis(x, place[:, None], axis=1)[:, 0]
  if K := sampler.num_kept(logps.shape[-1]):
    ids_BK, logps_BK = keep(logps, step_B, sampler, K)
    scores = logps_BK if greedy else logps_BK + jax.vmap(_noise)(keys, ids_BK)
    place = scores.argmax(-1)
    new = {"tokens": at(ids_BK, place), "logps": at(logps_BK, place)}
    new["kept_ids"] = ids_BK
  else:
    allowed = truncate(logps, step_B, sampler)
    token = (
      allowed.argmax(-1) if greedy else jax.vmap(categorical)(keys, allowed)
    )
    new = {"tokens": token.astype(jnp.int32), "logps": at(logps, token)}
  if H := sampler.num_head(logps.shape[-1]):
    best = (logps_BK[:, :H], ids_BK[:, :H]) if K else jax.lax.top_k(logps, H)
    new["head_logps"], new["head_ids"] = best
  return new


def _sample_by_row(logits_BV, keys, step_B, sampler, params_B4):
  temperature_B1, k_B1, p_B1, min_p_B1 = jnp.split(params_B4, 4, axis=1)
  greedy_B1 = temperature_B1 == 0
  temperature_B1 = jnp.where(greedy_B1, 1.0, temperature_B1)
  logps_BV = jax.nn.log_softmax(logits_BV / temperature_B1)
  allowed_BV = jax.lax.cond(
    ((k_B1 > 0) | (p_B1 < 1)).any(),
    lambda logps_BV: _best(logps_BV, k_B1, p_B1),
    lambda logps_BV: logps_BV,
    _likely(_no_early_stop(logps_BV, step_B, sampler), min_p_B1),
  )
  sampled_B = jax.vmap(categorical)(keys, allowed_BV)
  token_B = jnp.where(greedy_B1[:, 0], allowed_BV.argmax(-1), sampled_B)
  logp_B1 = jnp.take_along_axis(logps_BV, token_B[:, None], axis=1)
  return token_B.astype(jnp.int32), logp_B1[:, 0]


def keep(
  logps_BV: jax.Array, step_B: jax.Array, sampler: SamplerConfig, K: int
) -> tuple[jax.Array, jax.Array]:
  """The ids [B, K] of a truncated distribution, and their log-probs in it.

  As `truncate`, among the K likeliest tokens alone: so the set has a bounded
  size, and no vocabulary is sorted. Without top-k, top-p is still a part of the
  probability of all tokens. Where fewer than K are left, the likeliest fills
  up, with log-prob -inf.
  """
  logps_BV = _no_early_stop(logps_BV, step_B, sampler)
  if sampler.min_p:
    logps_BV = _likely(logps_BV, sampler.min_p)
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

  The vocabulary is split into C blocks of W tokens; the block is sampled first,
  then the token in it. C is the largest power of two that divides V and is at
  most its square root, so devices that share the vocabulary have whole blocks.
  """
  vocab = logps_V.shape[-1]
  blocks = min(vocab & -vocab, 1 << (vocab.bit_length() - 1) // 2)
  for_block, for_token = jax.random.uniform(key, (2,))
  logps_CW = logps_V.reshape(blocks, -1)
  logps_C = constrain(jax.nn.logsumexp(logps_CW, axis=-1), None)
  block = _inverse_cdf(for_block, logps_C)
  token = _inverse_cdf(for_token, logps_CW[block])
  return block * logps_CW.shape[1] + token


def _inverse_cdf(uniform, logps_K):
  """Which of K the uniform number falls on; none of log-prob -inf.

  Probabilities become whole numbers, in units of 2^-30: their sums are exact,
  so one of 0 has no room. A uniform number has steps of 2^-23: of what has
  1e-5 it is up to 1 % off, and what is rarer than a step has one or none.
  """
  sums_K = jnp.cumsum((jax.nn.softmax(logps_K) * 2**30).astype(jnp.int32))
  below = (uniform * sums_K[-1]).astype(jnp.int32)
  return (sums_K <= jnp.minimum(below, sums_K[-1] - 1)).sum()


def truncate(
  logps_BV: jax.Array, step_B: jax.Array, sampler: SamplerConfig
) -> jax.Array:
  """Sets tokens that are left out to -inf.

  In vLLM's order: length, min-p, top-k, top-p. Tokens as likely as the
  last one kept are kept, too.
  """
  logps_BV = _no_early_stop(logps_BV, step_B, sampler)
  logps_BV = _likely(logps_BV, sampler.min_p)
  if sampler.top_k or sampler.top_p < 1:
    return _best(logps_BV, sampler.top_k, sampler.top_p)
  return logps_BV


def _best(logps_BV, top_k, top_p):
  """What top-k and top-p leave; both are numbers or arrays [B, 1]."""
  B, V = logps_BV.shape
  best_BV = jnp.sort(logps_BV, axis=-1, descending=True)
  k = jnp.where(jnp.asarray(top_k) > 0, top_k, V)
  k_B1 = jnp.broadcast_to(jnp.minimum(k, V), (B, 1)).astype(jnp.int32)
  least_B1 = jnp.take_along_axis(best_BV, k_B1 - 1, axis=1)
  # A token stays if all likelier tokens together have less than top_p. So the
  # likeliest token always stays.
  probs_BV = jax.nn.softmax(jnp.where(best_BV < least_B1, -jnp.inf, best_BV))
  stays_BV = jnp.cumsum(probs_BV, -1) - probs_BV < top_p
  stays_BV = stays_BV.at[:, 0].set(True)  # also where top_p rounds to 0
  last_B1 = jnp.where(stays_BV, best_BV, jnp.inf).min(-1, keepdims=True)
  last_B1 = jnp.where(jnp.asarray(top_p) < 1, last_B1, -jnp.inf)
  least_B1 = jnp.maximum(least_B1, last_B1)
  return jnp.where(logps_BV < least_B1, -jnp.inf, logps_BV)


def _likely(logps_BV, min_p):
  """Without tokens below this share of the likeliest one's probability."""
  least_B1 = logps_BV.max(-1, keepdims=True) + jnp.log(min_p)
  return jnp.where(logps_BV < least_B1, -jnp.inf, logps_BV)


def _no_early_stop(logps_BV, step_B, sampler):
  if sampler.min_new_tokens <= 1:
    return logps_BV
  stops = jnp.isin(jnp.arange(logps_BV.shape[1]), jnp.array(sampler.stop_ids))
  early_B = step_B + 1 < sampler.min_new_tokens
  return jnp.where(early_B[:, None] & stops, -jnp.inf, logps_BV)


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
  if not isinstance(sampler.stop, StopStrings):
    return stop_state_B, stopped_B
  stop_state_B, ended_B = sampler.stop.advance(stop_state_B, token_B)
  ended_B &= length_B >= sampler.min_new_tokens
  return stop_state_B, stopped_B | ended_B
