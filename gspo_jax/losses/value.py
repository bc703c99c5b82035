"""The loss of a value model."""

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import require_float32_BT
from gspo_jax.losses.metrics import Mean, Metrics, Std


def value_loss(
  values: jax.Array,
  old_values: jax.Array,
  returns: jax.Array,
  mask: jax.Array,
  *,
  clip: float = 0.2,
  normalizer: jax.Array | float | None = None,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """PPO's: mean of max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2) / 2.

  Over all tokens of the batch. Schulman et al. 2017, arXiv 1707.06347, has the
  squared error; the clip is of its authors' code, as told by Engstrom et al.
  2020, arXiv 2005.12729, sec. 3.

  Args:
    values, old_values, returns: [B, T] float32: v, v as it was when the answers
      were sampled, and R of `generalized_advantages`. Only v is differentiated.
    mask: [B, T], bool or 0/1. What lies under a 0 is never read.
    clip: e, in units of reward.
    normalizer: denominator in place of the number of tokens; with 1.0 gradients
      and metrics of micro-batches add.
    segment_ids: for the common shape of call; tokens are averaged one by one.

  Returns:
    (loss, metrics): `loss/value`, which carries the denominator as its count,
    `clip_frac/value`, and `value/error_std` and `value/return_std`, of which
    the explained variance is 1 - (error / return)^2.

  Raises:
    TypeError for another dtype than float32, ValueError for a wrong shape.
  """
  floats = {"values": values, "old_values": old_values, "returns": returns}
  require_float32_BT(floats, mask, segment_ids)
  mask = jnp.asarray(mask, bool)
  v, old, target = (jnp.where(mask, x, 0.0) for x in floats.values())
  old, target = jax.lax.stop_gradient((old, target))
  free = (v - target) ** 2
  bound = (jnp.clip(v, old - clip, old + clip) - target) ** 2
  total = jnp.maximum(free, bound).sum() / 2
  count = jnp.sum(mask, dtype=jnp.float32)
  metrics = {
    "loss/value": Mean(total, count),
    "clip_frac/value": Mean(jnp.sum(bound > free, dtype=jnp.float32), count),
    "value/error_std": Std.of(target - v, mask),
    "value/return_std": Std.of(target, mask),
  }
  loss = total / (jnp.maximum(count, 1.0) if normalizer is None else normalizer)
  return loss, jax.lax.stop_gradient(metrics)
