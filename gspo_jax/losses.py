"""Policy losses: arrays in, (loss, metrics) out; no model, no config.

x, o: log-probs of the taken tokens under the new and the old policy; m: mask of
the response tokens; A: advantages; l, h: `clip_low`, `clip_high`. A loss is a
ratio, a surrogate of it and a mean, and every loss here shares:

  logps, old_logps: [B, T] float32. Only `logps` is differentiated.
  advantages: float32, [B], or [B, T] where a loss says so or rows are packed.
  mask: [B, T], bool or 0/1. What lies under a 0 is never read, be it NaN.
  normalizer: denominator in place of the loss's own. With 1.0, gradients and
    metrics of micro-batches add; divide by the summed `loss/policy` count.
  segment_ids: [B, T] ints in 0..T-1 that name the sequences of a packed row.
  Returns (loss, metrics): a scalar, and a dict of additive `Mean` and `Std`.
  Raises TypeError for another dtype than float32, ValueError for a wrong shape.

Departures from the papers: (1) a token's x - o is clamped at ±20, beyond which
it has no gradient; (2) sequences without a response token are not counted.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Metrics = dict[str, "Mean | Std"]


class Mean(NamedTuple):
  """A mean that adds over micro-batches, field by field."""

  total: jax.Array
  count: jax.Array

  def value(self) -> float:
    return float(self.total) / float(self.count) if self.count else float("nan")


class Std(NamedTuple):
  """A standard deviation (ddof 0) that adds over micro-batches."""

  total: jax.Array
  squares: jax.Array
  count: jax.Array

  def value(self) -> float:
    mean = Mean(self.total, self.count).value()
    # In this order a NaN stays a NaN: max(0.0, nan) would be 0.0.
    return max(Mean(self.squares, self.count).value() - mean**2, 0.0) ** 0.5


class Batch(NamedTuple):
  """Checked tokens. S sequences a row: 1, or T slots where rows are packed."""

  log_ratio: jax.Array  # [B, T] x - o, clamped; 0 under the mask
  advantages: jax.Array  # [B, T] 0 under the mask
  mask: jax.Array  # [B, T] bool
  segment_ids: jax.Array | None  # [B, T] 0 under the mask

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


def check(logps, old_logps, advantages, mask, segment_ids) -> None:
  """Raises for what `Batch` cannot hold; see the head of this module."""
  floats = {"logps": logps, "old_logps": old_logps, "advantages": advantages}
  for name, x in floats.items():
    if x.dtype != jnp.float32:
      raise TypeError(f"{name} must be float32, got {x.dtype}")
  shapes = {"old_logps": old_logps.shape, "mask": mask.shape}
  if segment_ids is not None:
    shapes["segment_ids"] = segment_ids.shape
  if logps.ndim != 2 or any(s != logps.shape for s in shapes.values()):
    raise ValueError(f"expected [B, T], got {logps.shape=} and {shapes=}")
  expected = [logps.shape]
  if segment_ids is None:
    expected.append(logps.shape[:1])
  if advantages.shape not in expected:
    packed = segment_ids is not None
    raise ValueError(f"{expected=}, got {advantages.shape=}, {packed=}")


def as_batch(logps, old_logps, advantages, mask, segment_ids=None) -> Batch:
  """Checks the arguments and wipes what lies under the mask."""
  check(logps, old_logps, advantages, mask, segment_ids)
  mask = jnp.asarray(mask, bool)
  # Before exp, whose gradient under the mask may be inf (0 * inf is NaN), and
  # before the subtraction, as inf - inf would stop a run under jax_debug_nans.
  new, old = (jnp.where(mask, x, 0.0) for x in (logps, old_logps))
  log_ratio = jnp.clip(new - jax.lax.stop_gradient(old), -20.0, 20.0)
  if advantages.ndim == 1:
    advantages = advantages[:, None]
  advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
  if segment_ids is not None:
    segment_ids = jnp.where(mask, segment_ids, 0)
  return Batch(log_ratio, advantages, mask, segment_ids)


def sequence_mean(batch: Batch, values: jax.Array) -> Mean:
  """Mean over sequences of the mean over a sequence's tokens."""
  count = jnp.sum(batch.lengths() > 0, dtype=jnp.float32)
  return Mean(batch.means(values).sum(), count)


def token_mean(batch: Batch, values: jax.Array) -> Mean:
  """Mean over all tokens, so that a sequence weighs by its length."""
  count = jnp.sum(batch.mask, dtype=jnp.float32)
  return Mean(jnp.where(batch.mask, values, 0.0).sum(), count)


def clipped(
  batch: Batch,
  log_ratio: jax.Array,
  clip_low: float,
  clip_high: float,
  aggregate: Callable[[Batch, jax.Array], Mean],
  normalizer: jax.Array | float | None,
) -> tuple[jax.Array, Metrics]:
  """-min(r A, clip(r, 1 - l, 1 + h) A) for each token, aggregated."""
  ratio = jnp.exp(log_ratio)
  low = (batch.advantages < 0) & (ratio < 1 - clip_low)
  high = (batch.advantages > 0) & (ratio > 1 + clip_high)
  bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  surrogate = jnp.where(low | high, bounded, ratio) * batch.advantages
  policy = aggregate(batch, -surrogate)
  if normalizer is None:
    normalizer = jnp.maximum(policy.count, 1.0)
  return policy.total / normalizer, measure(batch, policy, low, high)


def measure(
  batch: Batch, policy: Mean, low: jax.Array, high: jax.Array
) -> Metrics:
  """The same keys for every loss; `low`, `high`: [B, T], where it clipped."""
  # The std accumulates r - 1: in float32 the squares of r would drown it.
  sequence = jnp.expm1(batch.means(batch.log_ratio))
  token = jnp.expm1(batch.log_ratio)
  metrics = {
    "loss/policy": policy,
    "ratio/moved": token_mean(batch, batch.log_ratio != 0),
    "kl/old_new": token_mean(batch, token - batch.log_ratio),
  }
  for unit, mean, offset in (
    ("sequence", sequence_mean, sequence),
    ("token", token_mean, token),
  ):
    count = mean(batch, low).count
    metrics |= {
      f"ratio/{unit}_std": Std(offset.sum(), (offset**2).sum(), count),
      f"clip_frac/{unit}": mean(batch, low | high),
      f"clip_frac/{unit}_low": mean(batch, low),
      f"clip_frac/{unit}_high": mean(batch, high),
    }
  return jax.lax.stop_gradient(metrics)


def gspo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """GSPO: mean_i -min(s_i A_i, clip(s_i, 1 - l, 1 + h) A_i).

  s_i = exp(sum_t m (x - o) / n_i), the geometric mean of the token ratios.
  Zheng et al. 2025, arXiv 2507.18071, sec. 4.1; l and h of sec. 5.1.

  Advantages are [B], or in packed rows [B, T] and constant in a sequence.
  Normalizer: the number of sequences. More at the head of this module.
  """
  if segment_ids is None and advantages.ndim != 1:
    raise ValueError(
      f"gspo_loss takes one advantage a sequence, [B], got {advantages.shape=};"
      " gspo_token_loss takes [B, T], packed rows need segment_ids"
    )
  batch = as_batch(logps, old_logps, advantages, mask, segment_ids)
  log_ratio = batch.spread(batch.means(batch.log_ratio))
  return clipped(
    batch, log_ratio, clip_low, clip_high, sequence_mean, normalizer
  )


def gspo_token_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """GSPO-token: `gspo_loss` in value, with an advantage for each token.

  s_it = sg[s_i] exp(x - sg[x]); mean_i mean_t -min(s_it A_it, clip(s_it) A_it).
  Zheng et al. 2025, arXiv 2507.18071, sec. 4.3.

  Advantages are [B] or [B, T]; where they are constant in a sequence, value and
  gradient are those of `gspo_loss`. Normalizer: the number of sequences.
  """
  batch = as_batch(logps, old_logps, advantages, mask, segment_ids)
  sequence = batch.spread(batch.means(batch.log_ratio))
  sg = jax.lax.stop_gradient
  # Exactly 0 in value only in these brackets.
  log_ratio = sg(sequence) + (batch.log_ratio - sg(batch.log_ratio))
  return clipped(
    batch, log_ratio, clip_low, clip_high, sequence_mean, normalizer
  )


def grpo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.27,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """GRPO: mean_i mean_t -min(r A, clip(r, 1 - l, 1 + h) A), r = exp(x - o).

  Shao et al. 2024, arXiv 2402.03300, sec. 4.1.1, without its KL term; l and h
  as tuned for the comparison in arXiv 2507.18071, sec. 5.1.

  Advantages are [B] or [B, T]. Normalizer: the number of sequences.
  """
  batch = as_batch(logps, old_logps, advantages, mask, segment_ids)
  return clipped(
    batch, batch.log_ratio, clip_low, clip_high, sequence_mean, normalizer
  )


def dr_grpo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  max_length: int | None = None,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """Dr. GRPO: the terms of `grpo_loss`, summed over (sequences * max_length).

  Liu et al. 2025, arXiv 2503.20783, sec. 3.2: no division by the length of the
  answer; the advantages too come undivided (`normalize_std=False`). l = h = 0.2
  is PPO's, arXiv 1707.06347.

  Advantages are [B] or [B, T]. `max_length`: the longest answer allowed, in
  tokens, T by default. Normalizer: number of sequences times `max_length`.
  """
  batch = as_batch(logps, old_logps, advantages, mask, segment_ids)
  length = logps.shape[1] if max_length is None else max_length

  def constant(batch: Batch, values: jax.Array) -> Mean:
    count = sequence_mean(batch, values).count * length
    return Mean(token_mean(batch, values).total, count)

  return clipped(
    batch, batch.log_ratio, clip_low, clip_high, constant, normalizer
  )


def dapo_loss(
  logps: jax.Array,
  old_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """DAPO: the terms of `grpo_loss`, averaged over all tokens of the batch.

  Yu et al. 2025, arXiv 2503.14476: clip-higher (sec. 3.1), token mean (3.3).

  Advantages are [B] or [B, T]. Normalizer: the number of response tokens.
  """
  batch = as_batch(logps, old_logps, advantages, mask, segment_ids)
  return clipped(
    batch, batch.log_ratio, clip_low, clip_high, token_mean, normalizer
  )
