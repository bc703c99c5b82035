"""The KL divergence from a reference policy, estimated token by token."""

import jax
import jax.numpy as jnp

from gspo_jax.losses.batch import clamp, require_float32_BT


def kl_penalty(
  logps: jax.Array,
  reference_logps: jax.Array,
  mask: jax.Array,
  *,
  estimator: str = "k3",
  old_logps: jax.Array | None = None,
) -> jax.Array:
  """Estimates KL(new || reference) at each token, for `Terms.penalty`.

  x and f are the log-probs of the new and of the reference policy.
  k2 = (x - f)^2 / 2 and k3 = exp(f - x) - (f - x) - 1: Schulman 2020,
  joschu.net/blog/kl-approx.html. GRPO, arXiv 2402.03300, uses k3. The caller
  multiplies the result by the KL coefficient.

  As losses, on-policy, k2 has the expected gradient of KL(new || reference),
  but k3 has the expected gradient of KL(reference || new). k1 = x - f has an
  expected gradient of 0, so it belongs in the reward: subtract
  `jnp.where(mask, old_logps - reference_logps, 0)` from it.

  k3_unbiased = exp(x - o) k3 has the expected value and gradient of
  KL(new || reference), also off-policy: DeepSeek-AI 2025, arXiv 2512.02556,
  sec. 3.1. o are the log-probs of the old policy.

  Args:
    logps: x, [B, T] float32. The only differentiated argument.
    reference_logps: f, [B, T] float32.
    mask: as in `gspo_loss`.
    estimator: "k3", "k2" or "k3_unbiased".
    old_logps: o, [B, T] float32, for "k3_unbiased" alone.

  Returns:
    [B, T] float32 >= 0; 0 where the mask is 0. f - x and x - o are clamped at
    ±20, beyond which they have no gradient.
  """
  if estimator == "k1":
    raise ValueError(
      "k1 as a loss has zero expected gradient on-policy: subtract it from the"
      " reward instead, or use 'k2' or 'k3'"
    )
  if estimator not in ("k2", "k3", "k3_unbiased"):
    raise ValueError(
      f"expected estimator 'k2', 'k3' or 'k3_unbiased', got {estimator!r}"
    )
  floats = {"logps": logps, "reference_logps": reference_logps}
  if estimator == "k3_unbiased":
    if old_logps is None:
      raise ValueError("estimator 'k3_unbiased' needs old_logps")
    floats["old_logps"] = old_logps
  require_float32_BT(floats, mask)
  mask = jnp.asarray(mask, bool)
  new, reference, *old = (jnp.where(mask, x, 0) for x in floats.values())
  log_ratio = clamp(jax.lax.stop_gradient(reference) - new)
  if estimator == "k2":
    return log_ratio**2 / 2
  k3 = jnp.expm1(log_ratio) - log_ratio
  if not old:
    return k3
  return jnp.exp(clamp(new - jax.lax.stop_gradient(old[0]))) * k3
