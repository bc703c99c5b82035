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

  Args:
    logps: x, [B, T] float32. The only differentiated argument.
    reference_logps: f, [B, T] float32.
    mask: as in `gspo_loss`.
    estimator: "k3" or "k2".

  Returns:
    [B, T] float32 >= 0; 0 where the mask is 0. f - x is clamped at ±20, beyond
    which it has no gradient.
  """
  if estimator == "k1":
    raise ValueError(
      "k1 as a loss has zero expected gradient on-policy: subtract it from the"
      " reward instead, or use 'k2' or 'k3'"
    )
  if estimator not in ("k2", "k3"):
    raise ValueError(f"expected estimator 'k2' or 'k3', got {estimator!r}")
  require_float32_BT({"logps": logps, "reference_logps": reference_logps}, mask)
  mask = jnp.asarray(mask, bool)
  new, reference = (jnp.where(mask, x, 0) for x in (logps, reference_logps))
  log_ratio = clamp(jax.lax.stop_gradient(reference) - new)
  if estimator == "k2":
    return log_ratio**2 / 2
  return jnp.expm1(log_ratio) - log_ratio
