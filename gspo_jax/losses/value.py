"""The clipped value loss of PPO, for the critic."""

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

  The mean is over all response tokens of the batch. The squared error is in
  Schulman et al. 2017, arXiv 1707.06347; the clip is in its authors' code, see
  Engstrom et al. 2020, arXiv 2005.12729, sec. 3.

  Args:
    values: v, [B, T] float32. The only differentiated argument.
    old_values: v_old, [B, T] float32, at the time of sampling.
    returns: R, [B, T] float32, of `generalized_advantages`.
    mask: as in `gspo_loss`.
    clip: e, in units of reward.
    normalizer: divides the sum, by default the number of response tokens.
    segment_ids: checked and not used: each token counts once.

  Returns:
    (loss, metrics): `loss/value`, whose count is the default normalizer,
    `clip_frac/value`, `value/error_std` and `value/return_std`. The explained
    variance is 1 - (error_std / return_std)^2.
  """
  floats = {"values": values, "old_values": old_values, "returns": returns}
  require_float32_BT(floats, mask, segment_ids)
  mask = jnp.asarray(mask, bool)
  v, old, target = (jnp.where(mask, x, 0.0) for x in floats.values())
  old, target = jax.lax.stop_gradient((old, target))
  error = (v - target) ** 2
  clipped_error = (jnp.clip(v, old - clip, old + clip) - target) ** 2
  total = jnp.maximum(error, clipped_error).sum() / 2
  count = jnp.sum(mask, dtype=jnp.float32)
  is_clipped = jnp.sum(clipped_error > error, dtype=jnp.float32)
  metrics: Metrics = {
    "loss/value": Mean(total, count),
    "clip_frac/value": Mean(is_clipped, count),
    "value/error_std": Std.of(target - v, mask),
    "value/return_std": Std.of(target, mask),
  }
  loss = total / (jnp.maximum(count, 1.0) if normalizer is None else normalizer)
  return loss, jax.lax.stop_gradient(metrics)
