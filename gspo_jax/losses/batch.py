"""Checked tokens, the sequences they form, and means over both."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.losses.metrics import Mean
from gspo_jax.losses.terms import NO_TERMS, Terms


class TokenBatch(NamedTuple):
  """Checked tokens. S sequences a row: 1, or T slots where rows are packed."""

  logps: jax.Array  # [B, T] x; like all floats here 0 under the mask
  gap: jax.Array  # [B, T] x - o, clamped and detached, for metrics
  log_ratio: jax.Array  # [B, T] x - o + shift, clamped
  advantages: jax.Array  # [B, T]
  mask: jax.Array  # [B, T] bool
  segment_ids: jax.Array | None  # [B, T] 0 under the mask
  terms: Terms

  def sums(self, values: jax.Array) -> jax.Array:
    """[B, T] -> [B, S], over the response tokens of each sequence."""
    values = jnp.where(self.mask, values, 0.0)
    if self.segment_ids is None:
      return values.sum(axis=1, keepdims=True)
    # By rows: over flat ids a sharded batch would all-reduce all of [B * T].
    by_row = jax.vmap(jax.ops.segment_sum, in_axes=(0, 0, None))
    return by_row(values, self.segment_ids, values.shape[1])

  def lengths(self) -> jax.Array:
    return self.sums(jnp.ones_like(self.log_ratio))

  def means(self, values: jax.Array) -> jax.Array:
    """[B, T] -> [B, S], 0 for a sequence without response tokens."""
    return self.sums(values) / jnp.maximum(self.lengths(), 1.0)

  def spread(self, values: jax.Array) -> jax.Array:
    """[B, S] -> [B, T], to each token the value of its sequence."""
    if self.segment_ids is None:
      return jnp.broadcast_to(values, self.mask.shape)
    return jnp.take_along_axis(values, self.segment_ids, axis=1)


def sequence_mean(batch: TokenBatch, values: jax.Array) -> Mean:
  """Mean over sequences of the mean over a sequence's tokens."""
  count = jnp.sum(batch.lengths() > 0, dtype=jnp.float32)
  return Mean(batch.means(values).sum(), count)


def token_mean(batch: TokenBatch, values: jax.Array) -> Mean:
  """Mean over all tokens, so that a sequence weighs by its length."""
  count = jnp.sum(batch.mask, dtype=jnp.float32)
  return Mean(jnp.where(batch.mask, values, 0.0).sum(), count)


def require_float32_BT(floats, mask, segment_ids=None) -> None:
  """Raises unless `floats`, by name, are float32, and all of one [B, T]."""
  for name, x in floats.items():
    if x.dtype != jnp.float32:
      raise TypeError(f"{name} must be float32, got {x.dtype}")
  shapes = {name: x.shape for name, x in floats.items()} | {"mask": mask.shape}
  if segment_ids is not None:
    shapes["segment_ids"] = segment_ids.shape
  if mask.ndim != 2 or any(shape != mask.shape for shape in shapes.values()):
    raise ValueError(f"expected one shape [B, T], got {shapes}")


def check_advantages(advantages, mask, segment_ids) -> None:
  """Raises unless float32 and [B] or [B, T]; only [B, T] in packed rows."""
  if advantages.dtype != jnp.float32:
    raise TypeError(f"advantages must be float32, got {advantages.dtype}")
  expected = [mask.shape]
  if segment_ids is None:
    expected.append(mask.shape[:1])
  if advantages.shape not in expected:
    packed = segment_ids is not None
    raise ValueError(f"{expected=}, got {advantages.shape=}, {packed=}")


def checked_batch(
  logps, old_logps, advantages, mask, segment_ids=None, terms=NO_TERMS
) -> TokenBatch:
  """Checks the arguments and wipes what lies under the mask."""
  arrays = terms.arrays()
  floats = {"logps": logps, "old_logps": old_logps} | arrays
  require_float32_BT(floats, mask, segment_ids)
  check_advantages(advantages, mask, segment_ids)
  if terms.dual_clip is not None and terms.dual_clip <= 1:
    raise ValueError(f"dual_clip must be above 1, got {terms.dual_clip}")
  mask = jnp.asarray(mask, bool)
  # Before exp, whose gradient under the mask may be inf (0 * inf is NaN), and
  # before the subtraction, as inf - inf would stop a run under jax_debug_nans.
  wiped = lambda x: jnp.where(mask, x, 0.0)
  detached = lambda x: jax.lax.stop_gradient(wiped(x))
  logps = wiped(logps)
  gap = logps - detached(old_logps)
  if "penalty" in arrays:
    terms = terms._replace(penalty=wiped(arrays.pop("penalty")))
  terms = terms._replace(**{name: detached(x) for name, x in arrays.items()})
  if advantages.ndim == 1:
    advantages = advantages[:, None]
  return TokenBatch(
    logps,
    gap=jax.lax.stop_gradient(clamp(gap)),
    log_ratio=clamp(gap if terms.shift is None else gap + terms.shift),
    advantages=detached(advantages),
    mask=mask,
    segment_ids=None
    if segment_ids is None
    else jnp.where(mask, segment_ids, 0),
    terms=terms,
  )


def clamp(log_ratio: jax.Array) -> jax.Array:
  """At ±20: exp(20) is 5e8, whose square float32 still holds."""
  return jnp.clip(log_ratio, -20.0, 20.0)
