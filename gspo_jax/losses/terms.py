"""Optional terms of a policy loss, and the router's term of RSPO."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Terms(NamedTuple):
  """Optional terms of a policy loss; each array is [B, T] float32.

  Values where the mask is 0 are never read. The terms do not change the loss's
  denominator: a token of weight 0 still counts.

  Attributes:
    log_ratio_shift: added to each token's x - o before clipping: its exp is a
      factor of the ratio. Not differentiated.
    weights: multiply each token's policy loss; see `mismatch_weights`. Not
      differentiated.
    penalty: added to each token's loss and averaged with it, for a KL or an
      entropy. Differentiated.
    dual_clip: c > 1, static: where A < 0, a ratio above c is replaced by c and
      has no gradient. Ye et al. 2020, arXiv 1912.09729.
  """

  log_ratio_shift: jax.Array | None = None
  weights: jax.Array | None = None
  penalty: jax.Array | None = None
  dual_clip: float | None = None

  def arrays(self) -> dict[str, jax.Array]:
    """The arrays that are not None, by name."""
    arrays = self._replace(dual_clip=None)._asdict()
    return {name: x for name, x in arrays.items() if x is not None}


NO_TERMS = Terms()


def router_log_weight(
  router_shift: jax.Array, mask: jax.Array, *, floor: float = 0.8
) -> jax.Array:
  """log max(exp(-d), floor): the weight of RSPO, as `Terms.log_ratio_shift`.

  Zhang et al. 2025, arXiv 2510.23027v2; v1 multiplied after clipping instead.

  Args:
    router_shift: d, [B, T] float32 >= 0: |log p_new(e) - log p_old(e)|,
      averaged over layers and over the experts e that the old policy chose; p
      are the router's probabilities.
    mask: as in `gspo_loss`.
    floor: the smallest weight, in (0, 1]; 1 makes all weights 1.

  Returns:
    [B, T] float32 without gradient, in [log floor, 0]; 0 where the mask is 0.
  """
  if not 0 < floor <= 1:
    raise ValueError(f"expected a floor in (0, 1], got {floor=}")
  shift = jnp.where(jnp.asarray(mask, bool), router_shift, 0.0)
  return jax.lax.stop_gradient(jnp.maximum(-shift, jnp.log(floor)))
