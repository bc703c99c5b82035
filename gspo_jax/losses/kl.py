"""Divergence from a reference policy, estimated token by token."""

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
  """An estimate of KL(new || reference) on each token, for `Terms.penalty`.

  With f the reference's log-prob, k2 = (x - f)^2 / 2 and
  k3 = exp(f - x) - (f - x) - 1: Schulman 2020,
  joschu.net/blog/kl-approx.html; k3 is the one of GRPO, arXiv 2402.03300.
  Multiply by the coefficient yourself.

  As losses they differ more than as estimates: on-policy, the expected gradient
  of k2 is that of KL(new || reference), and that of k3 is the gradient of
  KL(reference || new). k1 = x - f has none, so it belongs in the reward, where
  it is `jnp.where(mask, old_logps - reference_logps, 0)`.

  Args:
    logps, reference_logps: [B, T] float32, x and f. Only x is differentiated.
    mask: [B, T], bool or 0/1. What lies under a 0 is never read.
    estimator: "k3" or "k2".

  Returns:
    [B, T] float32 >= 0, and 0 under the mask. f - x is clamped at ±20, beyond
    which there is no gradient.

  Raises:
    ValueError: another estimator, k1 among them, or a wrong shape.
    TypeError: another dtype than float32.
  """
  if estimator == "k1":
    raise ValueError(
      "k1 as a loss has zero expected gradient on-policy: subtract it from the"
      " reward instead, or take 'k2' or 'k3'"
    )
  if estimator not in ("k2", "k3"):
    raise ValueError(f"expected estimator 'k2' or 'k3', got {estimator!r}")
  require_float32_BT({"logps": logps, "reference_logps": reference_logps}, mask)
  mask = jnp.asarray(mask, bool)
  new, reference = (jnp.where(mask, x, 0) for x in (logps, reference_logps))
  gap = clamp(jax.lax.stop_gradient(reference) - new)
  return gap**2 / 2 if estimator == "k2" else jnp.expm1(gap) - gap
