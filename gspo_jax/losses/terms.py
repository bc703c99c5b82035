"""What any policy loss takes besides log-probs and advantages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Terms(NamedTuple):
  """Extras of a policy loss; each array is [B, T] float32.

  What lies under the mask is never read. The loss's denominator stays what it
  is, so that a token of weight 0 still counts.
  """

  # Log of a factor of each token's ratio, added to x - o before any clipping.
  shift: jax.Array | None = None  # detached
  # Factor of each token's policy loss: `mismatch_weights`.
  weights: jax.Array | None = None  # detached
  # Added to each token's loss and averaged as the loss averages: KL, entropy.
  penalty: jax.Array | None = None  # differentiated
  # c > 1, static: where A < 0, a ratio above c counts as c and has no gradient.
  # Ye et al. 2020, arXiv 1912.09729.
  dual_clip: float | None = None

  def arrays(self) -> dict[str, jax.Array]:
    arrays = self._asdict()
    del arrays["dual_clip"]
    return {name: x for name, x in arrays.items() if x is not None}


NO_TERMS = Terms()


def refuse_dual_clip(terms: Terms, loss: str) -> None:
  """For the losses that do not clip a ratio against the sign of A."""
  if terms.dual_clip is not None:
    raise ValueError(f"{loss} has no dual clip, got {terms.dual_clip=}")


def router_log_weight(
  router_shift: jax.Array, mask: jax.Array, *, floor: float = 0.8
) -> jax.Array:
  """RSPO's log g = log max(exp(-d), floor), a `Terms.shift` for any loss.

  Zhang et al. 2025, arXiv 2510.23027v2; v1 multiplied after clipping instead.

  Args:
    router_shift: d, [B, T] float32 >= 0: the mean over layers, and over the
      experts that the old policy chose, of |log p_new(e) - log p_old(e)|, with
      p the router's probabilities.
    mask: [B, T], bool or 0/1. What lies under a 0 is never read.
    floor: the smallest weight, in (0, 1]; 1 switches it off.

  Returns:
    [B, T] float32, detached: in [log floor, 0], and 0 under the mask.

  Raises:
    ValueError: a floor outside (0, 1].
  """
  if not 0 < floor <= 1:
    raise ValueError(f"expected a floor in (0, 1], got {floor=}")
  shift = jnp.where(jnp.asarray(mask, bool), router_shift, 0.0)
  return jax.lax.stop_gradient(jnp.maximum(-shift, jnp.log(floor)))
