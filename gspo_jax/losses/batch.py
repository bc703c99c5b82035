"""The checked arguments of a policy loss, and its sums and means."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.losses.metrics import Mean
from gspo_jax.losses.terms import NO_TERMS, Terms


class TokenBatch(NamedTuple):
  """The checked arguments of a policy loss; floats are 0 outside the mask."""

  # Sums over sequences are [B, N]: N is 1, or T with segment ids.
  logps: jax.Array  # [B, T] x, of the new policy; differentiated
  old_logps: jax.Array  # [B, T] o, of the old policy
  raw_log_ratio: jax.Array  # [B, T] x - o, clamped, no gradient; for metrics
  log_ratio: jax.Array  # [B, T] x - o + `Terms.log_ratio_shift`, clamped
  advantages: jax.Array  # [B, T], or [B, 1]: one for each sequence
  mask: jax.Array  # [B, T] bool, true at response tokens
  segment_ids: jax.Array | None  # [B, T] int; None: a row is one sequence
  terms: Terms  # masked

  def sums(self, values: jax.Array) -> jax.Array:
    """[B, T] -> [B, N]: the sum over the response tokens of each sequence."""
    return sequence_sums(values, self.mask, self.segment_ids)

  def lengths(self) -> jax.Array:
    """[B, N]: the number of response tokens of each sequence."""
    return self.sums(jnp.ones_like(self.log_ratio))

  def means(self, values: jax.Array) -> jax.Array:
    """[B, T] -> [B, N]; 0 for a sequence without response tokens."""
    return self.sums(values) / jnp.maximum(self.lengths(), 1.0)

  def running_sums(self, values: jax.Array) -> jax.Array:
    """[B, T]: the sum over the sequence's response tokens up to each token."""
    values = jnp.where(self.mask, values, 0.0)
    if self.segment_ids is None:
      return jnp.cumsum(values, axis=1)
    # One sequence after the other, less the sums of the sequences before.
    take = lambda x, i: jnp.take_along_axis(x, i, axis=1)
    order = jnp.argsort(self.segment_ids, axis=1, stable=True)
    running = jnp.cumsum(take(values, order), axis=1)
    sums = self.sums(values)
    before = jnp.cumsum(sums, axis=1) - sums
    return take(running, jnp.argsort(order, axis=1)) - self.to_tokens(before)

  def to_tokens(self, values: jax.Array) -> jax.Array:
    """[B, N] -> [B, T]: gives each token the value of its sequence."""
    if self.segment_ids is None:
      return jnp.broadcast_to(values, self.mask.shape)
    return jnp.take_along_axis(values, self.segment_ids, axis=1)


def sequence_sums(
  values: jax.Array, mask: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
  """The sum over the response tokens of each sequence: [B, T] -> [B, N]."""
  values = jnp.where(mask, values, 0.0)
  if segment_ids is None:
    return values.sum(axis=1, keepdims=True)
  # By rows: with flat ids a sharded batch would all-reduce all of [B * T].
  by_row = jax.vmap(jax.ops.segment_sum, in_axes=(0, 0, None))
  return by_row(values, segment_ids, values.shape[1])


def sequence_mean(batch: TokenBatch, values: jax.Array) -> Mean:
  """Mean over sequences of the mean over the tokens of each sequence."""
  count = jnp.sum(batch.lengths() > 0, dtype=jnp.float32)
  return Mean(batch.means(values).sum(), count)


def token_mean(batch: TokenBatch, values: jax.Array) -> Mean:
  """Mean over all tokens: a long sequence weighs more than a short one."""
  return Mean.of(values, batch.mask)


def sum_mean(batch: TokenBatch, values: jax.Array) -> Mean:
  """Mean over sequences of the sum over the tokens of each sequence."""
  count = sequence_mean(batch, values).count
  return Mean(token_mean(batch, values).total, count)


def fixed_length_mean(
  batch: TokenBatch, values: jax.Array, *, max_length: int | None = None
) -> Mean:
  """The sum over all tokens / (sequences * `max_length`, by default T)."""
  length = batch.mask.shape[1] if max_length is None else max_length
  sums = sum_mean(batch, values)
  return Mean(sums.total, sums.count * length)


def require_float32_BT(
  floats: Mapping[str, jax.Array],
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
) -> None:
  """Raises unless `floats`, arrays by name, are float32 and all [B, T]."""
  for name, x in floats.items():
    if x.dtype != jnp.float32:
      raise TypeError(f"{name} must be float32, got {x.dtype}")
  shapes = {name: x.shape for name, x in floats.items()} | {"mask": mask.shape}
  if segment_ids is not None:
    shapes["segment_ids"] = segment_ids.shape
  if mask.ndim != 2 or any(shape != mask.shape for shape in shapes.values()):
    raise ValueError(f"expected one shape [B, T], got {shapes}")
  _require_values(mask, segment_ids)


def _require_values(mask, segment_ids) -> None:
  """ValueError for a mask other than 0 and 1, or ids outside 0..T-1."""
  if any(isinstance(x, jax.core.Tracer) for x in (mask, segment_ids)):
    return  # inside jit there are no values to check
  # In NumPy: JAX would trace operations on constants of a jitted caller.
  mask = np.asarray(mask)
  is_wrong = (mask != 0) & (mask != 1)
  if is_wrong.any():
    raise ValueError(f"mask: expected bool or 0/1, got {mask[is_wrong][0]}")
  if segment_ids is None:
    return
  segment_ids, largest = np.asarray(segment_ids), mask.shape[1] - 1
  is_wrong = (mask != 0) & ((segment_ids < 0) | (segment_ids > largest))
  if is_wrong.any():
    raise ValueError(
      f"segment_ids: expected 0 to T - 1 = {largest} in each row, got"
      f" {segment_ids[is_wrong][0]}; ids that count over the whole batch start"
      " again in each row by segment_ids - segment_ids.min(1, keepdims=True)"
    )


def checked_batch(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
  terms: Terms = NO_TERMS,
) -> TokenBatch:
  """Checks the arguments of a policy loss and zeroes what is masked."""
  arrays = terms.arrays()
  floats = {"logps": logps, "old_logps": old_logps} | arrays
  require_float32_BT(floats, mask, segment_ids)
  if advantages.dtype != jnp.float32:
    raise TypeError(f"advantages must be float32, got {advantages.dtype}")
  packed = segment_ids is not None
  expected = [mask.shape] if packed else [mask.shape, mask.shape[:1]]
  if advantages.shape not in expected:
    raise ValueError(f"{expected=}, got {advantages.shape=}, {packed=}")
  if terms.dual_clip is not None and terms.dual_clip <= 1:
    raise ValueError(f"dual_clip must be above 1, got {terms.dual_clip}")
  mask = jnp.asarray(mask, bool)
  # Before exp, whose gradient under the mask may be inf (0 * inf is NaN), and
  # before the subtraction, as inf - inf would stop a run under jax_debug_nans.
  masked = lambda x: jnp.where(mask, x, 0.0)
  constant = lambda x: jax.lax.stop_gradient(masked(x))
  logps = masked(logps)
  old_logps = constant(old_logps)
  log_ratio = logps - old_logps
  if "penalty" in arrays:
    terms = terms._replace(penalty=masked(arrays.pop("penalty")))
  terms = terms._replace(**{name: constant(x) for name, x in arrays.items()})  # type: ignore[arg-type]  # no dual_clip
  shift = terms.log_ratio_shift
  if advantages.ndim == 1:
    advantages = advantages[:, None]
  if segment_ids is not None:
    segment_ids = jnp.where(mask, segment_ids, 0)
  return TokenBatch(
    logps=logps,
    old_logps=old_logps,
    raw_log_ratio=jax.lax.stop_gradient(clamp(log_ratio)),
    log_ratio=clamp(log_ratio if shift is None else log_ratio + shift),
    advantages=constant(advantages),
    mask=mask,
    segment_ids=segment_ids,
    terms=terms,
  )


def clamp(log_ratio: jax.Array) -> jax.Array:
  """Clips at ±20: exp(20) is 5e8, and float32 can hold its square."""
  return jnp.clip(log_ratio, -20.0, 20.0)
