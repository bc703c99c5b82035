"""Weights between the policy that sampled and the old policy as recomputed."""

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import checked_batch, require_float32_BT, token_mean
from gspo_jax.losses.metrics import Metrics

METHODS = ("tis", "mis")
UNITS = ("token", "sequence")


def mismatch_weights(
  old_logps: jax.Array,
  sampler_logps: jax.Array,
  mask: jax.Array,
  *,
  method: str = "tis",
  unit: str = "token",
  cap: float = 2.0,
  floor: float = 0.5,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """Importance weights w = exp(o - q), tamed, for `Terms.weights`.

  q is what the sampler reported for its own tokens, o the same policy as the
  trainer computes it. "tis" truncates, min(w, cap): Yao et al. 2025, "Your
  Efficient RL Framework Secretly Brings You Off-Policy RL Training". "mis"
  masks, w where floor <= w <= cap and else 0: Liu, Li et al. 2025, "When Speed
  Kills Stability: Demystifying RL Collapse from the Training-Inference
  Mismatch". The cap of 2 is what trainers ship as their default; the floor is
  its inverse, our choice.

  With "sequence" each token takes the geometric mean of w in its sequence:
  their product, as in the second source, grows or dies with the length of the
  answer. The mean lies near 1, so that a cap made for tokens hardly ever binds.

  Masked tokens still count in the loss's denominator: the mask shrinks a batch,
  it does not reweigh what is left of it.

  Args:
    old_logps, sampler_logps: [B, T] float32, o and q.
    mask: [B, T], bool or 0/1. What lies under a 0 is never read.
    method: "tis" or "mis". unit: "token" or "sequence".
    cap, floor: bounds of w, floor < cap; "tis" reads no floor.
    segment_ids: as in the policy losses.

  Returns:
    ([B, T] float32, detached, 0 under the mask, and metrics: the tokens' mean
    `mismatch/weight`, and the fraction `mismatch/cut` of them that the cap or
    the mask changed). A token's o - q is clamped at ±20.

  Raises:
    ValueError: another method or unit, bounds out of order, a wrong shape.
    TypeError: another dtype than float32.
  """
  if method not in METHODS or unit not in UNITS:
    raise ValueError(
      f"expected a method of {METHODS} and a unit of {UNITS}, got {method=},"
      f" {unit=}"
    )
  if not 0 <= floor < cap:
    raise ValueError(f"expected 0 <= floor < cap, got {floor=}, {cap=}")
  floats = {"old_logps": old_logps, "sampler_logps": sampler_logps}
  require_float32_BT(floats, mask, segment_ids)
  nothing = jnp.zeros_like(old_logps)
  batch = checked_batch(old_logps, sampler_logps, nothing, mask, segment_ids)
  log_weight = batch.gap
  if unit == "sequence":
    log_weight = batch.spread(batch.means(log_weight))
  weight = jnp.exp(log_weight)
  cut = weight > cap
  if method == "mis":
    cut |= weight < floor
  weight = jnp.where(cut, cap if method == "tis" else 0.0, weight)
  metrics = {
    "mismatch/weight": token_mean(batch, weight),
    "mismatch/cut": token_mean(batch, cut),
  }
  return jnp.where(batch.mask, weight, 0.0), metrics
