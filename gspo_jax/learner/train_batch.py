"""The batch that an update learns from: packed rows, cut into micro-batches.

Dimension key: P prompts, G responses a prompt, B = P * G responses, S prompt
columns, R most response tokens, M minibatches, A most micro-batches of one, L
layers, k experts, K kept ids, H ids of the head of a token, W columns of a row.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.logprobs import TokenLogprobs, token_logprobs
from gspo_jax.sampler.samples import Prompts

# The named scope of loops over the micro-batches that hold responses; `plan`
# counts their trips by it.
MICRO_BATCHES = "micro_batches"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
  """Rows of prompts with their responses, and what the objective reads of them.

  Several sequences, each a prompt with its response, may share a row. Fields of
  tokens have T columns. Fields of response tokens have the last R columns; in a
  packed row R = T - 1. A field is None if the objective does not read it, or
  the model is dense and lacks it.
  """

  tokens: jax.Array  # [B, T] int32
  positions: jax.Array  # [B, T] int32, from 0 in each sequence
  # [B, T] int32, the sequence of a token in its row, from 1; 0 at padding.
  segment_ids: jax.Array
  # [B, R] bool: true at tokens of the policy, the stop token included; false at
  # tokens of an environment.
  response_mask: jax.Array
  old_logps: jax.Array  # [B, R] float32
  advantages: jax.Array  # [B, R] float32
  # [B, R] int32, the index of a token's response among the samples.
  response_index: jax.Array
  # [B, L, T, k] unsigned, the experts that an update may replay: the sampler's
  # if they were recorded, else the old policy's.
  experts: jax.Array | None = None
  # [B, L, R, k] float32, the old routers' log-probs of these experts at the
  # tokens that predict the response.
  router_logps: jax.Array | None = None
  # [B, K, R] int32, as in `Samples`. All log-probs of the batch are over these
  # ids: new, old, and the reference's.
  kept_ids: jax.Array | None = None
  # [B, H, R] int32 and float32, as in `Samples`.
  head_ids: jax.Array | None = None
  head_logps: jax.Array | None = None
  sampler_logps: jax.Array | None = None  # [B, R] float32
  reference_logps: jax.Array | None = None  # [B, R] float32
  teacher_logps: jax.Array | None = None  # [B, R] float32
  # [B, R] int32, which of several teachers scores a token, from 0
  teacher: jax.Array | None = None
  values: jax.Array | None = None  # [B, R] float32, of the old critic
  returns: jax.Array | None = None  # [B, R] float32, the critic's targets
  # [B, R] int16, the turn of a conversation, from 1; 0 elsewhere.
  turns: jax.Array | None = None
  # [B] float32: the count that divides the loss of the minibatch, by its tokens
  # of prompts and responses. See `policy_loss.loss_per_token`.
  loss_per_token: jax.Array | None = None

  @property
  def response_segments(self) -> jax.Array:
    """[B, R] int32, the `segment_ids` of the response columns."""
    return self.segment_ids[..., -self.response_mask.shape[-1] :]


class PackedBatch(NamedTuple):
  """A batch in minibatches of micro-batches."""

  rows: TrainBatch  # leaves [M, A, micro_batch_size, ...]
  # [M] int32: the first micro-batches of a minibatch, which hold responses. The
  # others are empty, and are not computed.
  num_micro_batches: jax.Array


def unpacked(
  prompts: Prompts, responses: jax.Array, lengths: jax.Array
) -> TrainBatch:
  """Responses [B, R] behind their prompts [P, S], one a row; B = P * G.

  An update takes packed rows; this one, with T = S + R, is for comparing its
  results with samples. Log-probs and advantages are zeros.
  """
  B, R = responses.shape
  group = B // prompts.tokens.shape[0]
  repeat = lambda x: jnp.repeat(x, group, axis=0)
  join = lambda a, b: jnp.concatenate([repeat(a), b], axis=1)
  response_mask = jnp.arange(R) < lengths[:, None]
  after = repeat(prompts.lengths)[:, None] + jnp.arange(R)
  return TrainBatch(
    tokens=join(prompts.tokens, responses),
    positions=join(prompts.positions, after),
    segment_ids=join(prompts.mask, response_mask).astype(jnp.int32),
    response_mask=response_mask,
    old_logps=jnp.zeros((B, R)),
    advantages=jnp.zeros((B, R)),
    response_index=jnp.broadcast_to(
      jnp.arange(B, dtype=jnp.int32)[:, None], (B, R)
    ),
  )


def response_logps(
  params: model.Params,
  cfg: model.ModelConfig,
  batch: TrainBatch,
  **options: Any,
) -> TokenLogprobs:
  """Log-probs of the responses; `options` are arguments of `token_logprobs`."""
  return token_logprobs(
    params,
    cfg,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    response_length=batch.response_mask.shape[1],
    wanted=batch.response_mask,
    kept_ids=batch.kept_ids,
    **options,
  )
