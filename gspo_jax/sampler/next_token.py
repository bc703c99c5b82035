"""One token of each row: laid-out weights, logits, truncation, the draw.

Dimension key: B rows, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.runtime.sharding import constrain

GROUPS, VOCAB = ("data", "fsdp"), ("expert", "tensor")


def logits(params, cfg, hidden_BD):
  """Float32 [B, V], the vocabulary split over the devices that share experts.

  So each reads its part of the head only, for the rows of all of them.
  """
  hidden_BD = constrain(hidden_BD, GROUPS)
  logits_BV = model.project_logits(hidden_BD, params["head"], cfg)
  return constrain(logits_BV, GROUPS, VOCAB)


def sample_token(logits_BV, row_keys, step_B, sampler):
  """One token [B] of each row, and its log-prob before truncation.

  Args:
    logits_BV: float32.
    row_keys: [B]; a row draws its token t with a key made of (key, t).
    step_B: t, the tokens drawn before.
    sampler: `sampler.SamplerConfig`.
  """
  greedy = sampler.temperature == 0
  logps = jax.nn.log_softmax(
    logits_BV / (1.0 if greedy else sampler.temperature)
  )
  allowed = truncate(logps, step_B, sampler)
  if greedy:
    drawn = allowed.argmax(-1)
  else:
    keys = jax.vmap(jax.random.fold_in)(row_keys, step_B)
    drawn = jax.vmap(jax.random.categorical)(keys, allowed)
  logp = jnp.take_along_axis(logps, drawn[:, None], axis=1)[:, 0]
  return drawn.astype(jnp.int32), logp


def truncate(logps, step_B, sampler):
  """Log-probs with -inf where min length, top-k or top-p forbids a token."""
  if sampler.min_new_tokens > 1:
    stops = jnp.isin(jnp.arange(logps.shape[-1]), jnp.array(sampler.stop_ids))
    early_B = step_B + 1 < sampler.min_new_tokens
    logps = jnp.where(early_B[:, None] & stops, -jnp.inf, logps)
  if 0 < sampler.top_k < logps.shape[-1]:
    worst = jax.lax.top_k(logps, sampler.top_k)[0][:, -1:]
    logps = jnp.where(logps < worst, -jnp.inf, logps)
  if sampler.top_p < 1:
    logps = jax.nn.log_softmax(logps)
    best = jnp.sort(logps, axis=-1, descending=True)
    # A token stays while those before it have not reached top_p: the first
    # always does.
    before = jnp.cumsum(jnp.exp(best), -1) - jnp.exp(best)
    worst = jnp.where(before < sampler.top_p, best, jnp.inf).min(-1)
    logps = jnp.where(logps < worst[:, None], -jnp.inf, logps)
  return logps
