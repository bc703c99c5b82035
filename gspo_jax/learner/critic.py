"""The critic of PPO: the policy's architecture with a scalar head.

Dimension key: B rows, T tokens, R response slots, D model width.
"""

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.learner.train_step import LossOutput
from gspo_jax.losses import Mean, value_loss


def init(policy: model.Params) -> model.Params:
  """A critic with the policy's blocks and a head of zeros: it expects nothing.

  Schulman et al. 2017, arXiv 1707.06347, leave the start open; that of the
  policy's weights is usual where the policy has been pretrained.
  """
  blocks = {name: x for name, x in policy.items() if name != "head"}
  width = policy["final_norm"]["scale"].shape
  return blocks | {"value_head": jnp.zeros(width)}


def values(params: model.Params, cfg: model.ModelConfig, rows: TrainBatch):
  """[B, R] float32: what is still to come before each response token."""
  out = model.hidden_states(params, cfg, rows.tokens, rows.positions, rows.mask)
  R = rows.response_mask.shape[1]
  before = out.hidden[:, -R - 1 : -1].astype(jnp.float32)
  return jnp.einsum("brd,d->br", before, params["value_head"])


def loss(
  params: model.Params,
  rows: TrainBatch,
  is_old_policy: jax.Array | None = None,
  *,
  cfg: model.ModelConfig,
  clip: float,
) -> LossOutput:
  """`losses.value_loss` of some rows, as `train_step.update` takes it.

  `is_old_policy` is not used: there is no ratio.
  """
  total, metrics = value_loss(
    values(params, cfg, rows),
    rows.values,
    rows.returns,
    rows.response_mask,
    clip=clip,
    normalizer=1.0,
  )
  return LossOutput(Mean(total, metrics["loss/value"].count), metrics)
