"""The log-probs of given tokens, from logits.

Dimension key: C tokens, V vocabulary, v the part of it of one device, K kept
ids a token, H ids of a token's head.
"""

import jax
import jax.numpy as jnp

from gspo_jax.model import exact
from gspo_jax.model.config import ModelConfig
from gspo_jax.runtime import sharding


def target_logps(
  logits_Cv,
  targets_C,
  kept_ids_CK,
  column_v,
  *,
  cfg: ModelConfig,
  temperature: float,
  axes: tuple[str, ...] = (),
  head_ids_CH: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """Log-probs of the targets and entropies, [C] each, in nats.

  With `head_ids_CH` also the log-probs of these ids, [C, H], not with
  `cfg.exact`.

  They are of softmax(logits / temperature), over a token's kept ids alone if
  there are any. `column_v` are the ids of the columns, -1 for padding; the
  devices along `axes` share the vocabulary, with `cfg.exact` none do. So
  sampler and trainer call one function, whose bits are then the same.
  """

  def function(logits_Cv, targets_C, kept_ids_CK, column_v):
    logits_Cv = logits_Cv / temperature
    allowed = column_v >= 0
    if kept_ids_CK is not None:
      # Compared one by one, in one fused loop: a TPU would scatter them in
      # turn.
      allowed &= (kept_ids_CK[:, None, :] == column_v[:, None]).any(-1)
    logits_Cv = jnp.where(allowed, logits_Cv, -1e30)
    maximum = jax.lax.stop_gradient(logits_Cv.max(-1))
    logits_Cv -= sharding.pmax(maximum, *axes)[:, None]
    weights_Cv = jnp.exp(logits_Cv)
    target = jnp.where(column_v == targets_C[:, None], logits_Cv, 0).sum(-1)
    total = exact.sums(lambda x: jnp.exp(x).sum(-1, keepdims=True))
    sums = total(logits_Cv)[:, 0], target, (weights_Cv * logits_Cv).sum(-1)
    if head_ids_CH is not None:
      sums += (_of_ids(logits_Cv, head_ids_CH, column_v),)
    total, target, weighted, *head = sharding.psum(sums, *axes)
    log_total = jnp.log(total)
    logps = target - log_total, log_total - weighted / total
    return *logps, *(x - log_total[:, None] for x in head)

  if cfg.exact:
    if head_ids_CH is not None:
      raise ValueError("head_ids: expected None for a model that is exact")
    function = exact.by_tokens(function, whole=1, axes=1)
  return function(logits_Cv, targets_C, kept_ids_CK, column_v)


def _of_ids(logits_Cv, ids_CH, column_v):
  """The logits of these ids, [C, H]; 0 where another device has the column."""
  if sharding.platform() == "tpu":  # one fused loop: no scatter, as above
    is_id = column_v == ids_CH[:, :, None]
    return jnp.where(is_id, logits_Cv[:, None], 0).sum(-1)
  place = jnp.clip(ids_CH - column_v[0], 0, len(column_v) - 1)
  own = jnp.take_along_axis(logits_Cv, place, axis=1)
  return jnp.where(column_v[place] == ids_CH, own, 0)
