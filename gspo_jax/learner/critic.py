"""The critic of PPO: the policy's architecture with a scalar head.

Dimension key: B rows, T tokens, R response tokens, D model width.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.learner.train_step import LossOutput
from gspo_jax.losses import Mean, value_loss
from gspo_jax.runtime.key import SHARE, ZERO_OR_MORE, Range, key


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  """The numbers `critic_*` of a method; `optim` has the rest of its AdamW."""

  learning_rate: float = key(1e-5, "its peak", ZERO_OR_MORE)
  warmup_steps: int = key(
    0,
    "optimizer steps",
    Range(
      "a whole number, 0 or more", lambda x: 0 <= x < math.inf and x == int(x)
    ),
  )
  clip: float = key(
    0.2, "largest change of a value in an iteration", ZERO_OR_MORE
  )
  discount: float = key(1.0, "of the reward, per token", SHARE)
  trace_decay: float = key(0.95, "lambda of GAE", SHARE)


def init(policy: model.Params) -> model.Params:
  """A critic: the policy's blocks, and a head of zeros, so all values are 0."""
  # Schulman et al. 2017, arXiv 1707.06347, do not say where a critic starts.
  # Starting from a pretrained policy's weights is usual.
  blocks = {name: x for name, x in policy.items() if name != "head"}
  width = policy["final_norm"]["scale"].shape
  return blocks | {"value_head": jnp.zeros(width)}


def values(
  params: model.Params, cfg: model.ModelConfig, batch: TrainBatch
) -> jax.Array:
  """[B, R] float32, the expected return before each response token."""
  out = model.hidden_states(
    params, cfg, batch.tokens, batch.positions, batch.segment_ids
  )
  R = batch.response_mask.shape[1]
  before = out.hidden[:, -R - 1 : -1].astype(jnp.float32)
  return jnp.einsum("brd,d->br", before, params["value_head"])


def loss(
  params: model.Params,
  batch: TrainBatch,
  is_old_policy: jax.Array | None = None,
  *,
  cfg: model.ModelConfig,
  clip: float,
) -> LossOutput:
  """A `train_step.Loss`: `losses.value_loss` of a micro-batch, no ratio."""
  assert batch.values is not None and batch.returns is not None
  total, metrics = value_loss(
    values(params, cfg, batch),
    batch.values,
    batch.returns,
    batch.response_mask,
    clip=clip,
    normalizer=1.0,
  )
  return LossOutput(Mean(total, metrics["loss/value"].count), metrics)  # type: ignore[attr-defined]  # a Mean
