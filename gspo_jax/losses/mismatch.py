"""Token weights where sampler and trainer, or old and new policy, differ."""

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import checked_batch, require_float32_BT, token_mean
from gspo_jax.losses.metrics import Metrics


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
  """Bounded importance weights w = exp(o - q), for `Terms.weights`.

  For the same token and the same weights, q is the sampler's log-prob and o is
  the trainer's. "tis" truncates: min(w, cap). Yao et al. 2025, "Your Efficient
  RL Framework Secretly Brings You Off-Policy RL Training". "mis" masks: w where
  floor <= w <= cap, else 0. Liu, Li et al. 2025, "When Speed Kills Stability:
  Demystifying RL Collapse from the Training-Inference Mismatch". Other trainers
  also use a cap of 2; we chose its inverse as the floor. "mis" of tokens with
  cap 5 and floor 0.5 is IcePop, Ling Team 2025, arXiv 2510.18855, sec. 2.3.

  Departures from the second source: (1) with the unit "sequence" each token
  takes the geometric mean of w over its sequence. The source takes the product,
  which grows or vanishes with the length of the response. The mean is close to
  1, so it rarely reaches a cap chosen for tokens. (2) Tokens of weight 0 still
  count in the loss's denominator, so the other tokens do not get larger
  weights.

  Args:
    old_logps: o, [B, T] float32.
    sampler_logps: q, [B, T] float32.
    mask: as in `gspo_loss`.
    method: "tis" or "mis".
    unit: "token" or "sequence".
    cap: the largest weight, above `floor`.
    floor: the smallest weight that "mis" keeps; "tis" does not use it.
    segment_ids: as in `gspo_loss`.

  Returns:
    (weights, metrics): [B, T] float32 without gradient, 0 where the mask is 0;
    and over tokens the mean `mismatch/weight` and the fraction `mismatch/cut`
    that was truncated or masked. A token's o - q is clamped at ±20.
  """
  methods, units = ("tis", "mis"), ("token", "sequence")
  if method not in methods or unit not in units:
    raise ValueError(
      f"expected a method of {methods} and a unit of {units}, got {method=},"
      f" {unit=}"
    )
  if not 0 <= floor < cap:
    raise ValueError(f"expected 0 <= floor < cap, got {floor=}, {cap=}")
  floats = {"old_logps": old_logps, "sampler_logps": sampler_logps}
  require_float32_BT(floats, mask, segment_ids)
  zeros = jnp.zeros_like(old_logps)
  batch = checked_batch(old_logps, sampler_logps, zeros, mask, segment_ids)
  log_weight = batch.raw_log_ratio
  if unit == "sequence":
    log_weight = batch.to_tokens(batch.means(log_weight))
  weight = jnp.exp(log_weight)
  out_of_bounds = weight > cap
  if method == "mis":
    out_of_bounds |= weight < floor
  weight = jnp.where(out_of_bounds, cap if method == "tis" else 0.0, weight)
  metrics: Metrics = {
    "mismatch/weight": token_mean(batch, weight),
    "mismatch/cut": token_mean(batch, out_of_bounds),
  }
  return jnp.where(batch.mask, weight, 0.0), metrics


def off_policy_mask(
  logps: jax.Array,
  sampler_logps: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  threshold: float,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """Off-policy sequence masking: 0 or 1 for each token, for `Terms.weights`.

  0 where A < 0 and mean_t (q - x) > threshold, the mean over the sequence. q is
  the sampler's log-prob, so that the gap has the mismatch as well as the
  updates since. DeepSeek-AI 2025, arXiv 2512.02556, sec. 3.1, which gives no
  threshold; TRL's documentation begins at 0.5. Tokens of weight 0 still count
  in the loss's denominator.

  Args:
    logps: x, [B, T] float32.
    sampler_logps: q, [B, T] float32.
    advantages: A, as in `gspo_loss`: one for each sequence or token.
    mask: as in `gspo_loss`.
    threshold: in nats a token, above 0.
    segment_ids: as in `gspo_loss`.

  Returns:
    (weights, metrics): [B, T] float32 without gradient, 0 where the mask is 0;
    and the fraction of tokens that were masked, `mismatch/off_policy`. A
    token's q - x is clamped at ±20.
  """
  if not threshold > 0:
    raise ValueError(f"expected a threshold above 0, got {threshold=}")
  batch = checked_batch(logps, sampler_logps, advantages, mask, segment_ids)
  gap = batch.to_tokens(batch.means(-batch.raw_log_ratio))
  is_off = (batch.advantages < 0) & (gap > threshold)
  kept = jnp.where(batch.mask & ~is_off, 1.0, 0.0)
  return kept, {"mismatch/off_policy": token_mean(batch, is_off)}
