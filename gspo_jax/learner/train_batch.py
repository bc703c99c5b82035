"""The batch that an update learns from: packed rows, cut into micro-batches.

Dimension key: P prompts, G responses a prompt, B = P * G responses, S prompt
columns, R most response tokens, M minibatches, A most micro-batches of one, L
layers, k experts a token, W columns of a row.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspo_jax import model
from gspo_jax.learner.packing import Packing, PackingConfig
from gspo_jax.logprobs import TokenLogprobs, token_logprobs
from gspo_jax.model.moe import number_type
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import Prompts, Samples

# The named scope of loops over the micro-batches that hold responses; `plan`
# counts their trips by it.
MICRO_BATCHES = "micro_batches"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
  """Rows of prompts with their responses, and what the objective reads of them.

  Several sequences, each a prompt and its response, may share a row. The fields
  of tokens have T columns; those of response tokens have the last R of them, in
  a packed row all but the first. `reference_logps`, `values`, `returns` and
  `turns` are None unless the objective reads them.

  Attributes:
    tokens: [B, T] int32.
    positions: [B, T] int32, from 0 in each sequence.
    segment_ids: [B, T] int32, the sequence of each token in its row, from 1; 0
      at padding.
    response_mask: [B, R] bool, the tokens of responses, their stop tokens
      included; those of an environment are not.
    old_logps: [B, R] float32, log-probs under the old policy.
    advantages: [B, R] float32, equal within a response without a critic.
    response_index: [B, R] int32, the response that a token belongs to, in the
      order of the samples. None where all advantages are given.
    experts: [B, L, T, k] unsigned, the experts that an update may replay: the
      sampler's where they were recorded, else the old policy's. None for a
      dense model.
    router_logps: [B, L, R, k] float32, the old routers' log-probs of these
      experts at the tokens that predict the response. None for a dense model.
    sampler_logps: [B, R] float32, the sampler's log-probs. None for
      demonstrations.
    reference_logps: [B, R] float32, log-probs under the reference policy.
    values: [B, R] float32, of the old critic.
    returns: [B, R] float32, the targets of the critic.
    turns: [B, R] int16, the turn of a conversation, from 1; 0 elsewhere.
  """

  tokens: jax.Array
  positions: jax.Array
  segment_ids: jax.Array
  response_mask: jax.Array
  old_logps: jax.Array
  advantages: jax.Array
  response_index: jax.Array | None = None
  experts: jax.Array | None = None
  router_logps: jax.Array | None = None
  sampler_logps: jax.Array | None = None
  reference_logps: jax.Array | None = None
  values: jax.Array | None = None
  returns: jax.Array | None = None
  turns: jax.Array | None = None

  @property
  def response_segments(self) -> jax.Array:
    """[B, R] int32, the `segment_ids` of the response columns."""
    return self.segment_ids[..., -self.response_mask.shape[-1] :]


class PackedBatch(NamedTuple):
  """A batch in minibatches of micro-batches.

  Attributes:
    rows: leaves [M, A, micro_batch_size, ...].
    num_micro_batches: [M] int32, the micro-batches of each minibatch that hold
      responses: its first ones. The others are empty, and are not computed.
  """

  rows: TrainBatch
  num_micro_batches: jax.Array

  def map(self, function, *fields: str) -> dict[str, jax.Array]:
    """`function` of each micro-batch that holds responses.

    Args:
      function: of a micro-batch; returns a dict of arrays [rows, ...] of the
        shapes that those fields have.
      *fields: of `TrainBatch`; they start from what the batch has.
    """
    rows = self.rows

    def minibatch(m, result):
      def micro_batch(a, result):
        one = function(jax.tree.map(lambda x: x[m, a], rows))
        return {k: x.at[m, a].set(one[k]) for k, x in result.items()}

      with jax.named_scope(MICRO_BATCHES):
        return jax.lax.fori_loop(
          0, self.num_micro_batches[m], micro_batch, result
        )

    start = {name: getattr(rows, name) for name in fields}
    return jax.lax.fori_loop(0, len(self.num_micro_batches), minibatch, start)


def unpacked(
  prompts: Prompts, responses: jax.Array, lengths: jax.Array
) -> TrainBatch:
  """Responses [B, R] behind their prompts [P, S], one a row; B = P * G.

  Its fields have the rows and columns of samples. An update takes packed rows;
  this is for what compares its results with the samples.

  Args:
    prompts: P prompts, with their padding on the left.
    responses: [B, R] int32; those of a prompt are neighbours.
    lengths: [B] int32, their tokens.

  Returns:
    T = S + R columns; zeros for log-probs and advantages.
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


class _Slots(NamedTuple):
  """What stands in each column of packed rows, [rows, W].

  Attributes:
    response: int32, the index of the response of the sequence; any number at
      padding.
    place: int32, the place in the sequence, from 0; any number at padding.
    prompt_length: int32, of that sequence.
    segment_ids: int32, from 1 in each row; 0 at padding.
  """

  response: jax.Array
  place: jax.Array
  prompt_length: jax.Array
  segment_ids: jax.Array

  @property
  def is_response(self):
    return (self.segment_ids > 0) & (self.place >= self.prompt_length)

  @property
  def response_column(self):
    return self.place - self.prompt_length


def pack_responses(
  prompts: Prompts,
  responses: jax.Array,
  lengths: jax.Array,
  packing: Packing,
  cfg: PackingConfig,
  *,
  logps: jax.Array | None = None,
  experts: jax.Array | None = None,
  turns: jax.Array | None = None,
) -> PackedBatch:
  """Packs responses [B, R] behind their prompts [P, S]; B = P * G.

  Args:
    prompts: P prompts.
    responses: [B, R] int32; those of a prompt are neighbours.
    lengths: [B] int32, their tokens.
    packing: where each response goes, from `packing.pack`.
    cfg: the rows; static.
    logps: [B, R] float32, for `sampler_logps`.
    experts: [B, L, S + R, k], for `experts`, with the columns of the left-
      padded prompt and its response.
    turns: [B, R] int, as in Samples: tokens of turn 0 are not of the response,
      and are only read. None: all tokens are.

  Each device gathers the tokens and log-probs of all responses, 8 B R bytes,
  and of the experts one layer at a time, to pick those of its rows.

  Returns:
    Leaves [M, A, micro_batch_size, ...], with zeros for log-probs and
    advantages that are filled in later.
  """
  B, R = responses.shape
  P, S = prompts.tokens.shape
  batch_axes = PartitionSpec(sharding.BATCH_AXES)

  def local(prompts, responses, lengths, packing, logps, experts, turns):
    whole = lambda x: sharding.gather(x, *sharding.BATCH_AXES, dim=0)
    prompt_lengths = jnp.repeat(whole(prompts.lengths), B // P)
    slots = _slots(packing, prompt_lengths, whole(lengths), cfg)
    b, i = slots.response, slots.response_column
    at_response = lambda x: x[b, jnp.clip(i, 0, R - 1)]
    prompt_column = jnp.clip(S + i, 0, S - 1)
    tokens = jnp.where(
      slots.is_response,
      at_response(whole(responses)),
      whole(prompts.tokens)[b // (B // P), prompt_column],
    )
    real = slots.segment_ids > 0
    mask = slots.is_response[:, 1:]
    if turns is not None:
      turns = jnp.where(mask, at_response(whole(turns))[:, 1:], 0)
      mask &= turns > 0
    zeros = jnp.zeros(mask.shape)
    if logps is not None:
      logps = jnp.where(mask, at_response(whole(logps))[:, 1:], 0.0)
    if experts is not None:
      column = jnp.clip(S + i, 0, S + R - 1)
      # Layer by layer: this is the largest field, and all devices gather it.
      layers = jax.lax.map(
        lambda x: whole(x)[b, column], jnp.moveaxis(experts, 1, 0)
      )
      experts = jnp.moveaxis(layers, 0, 1)
    rows = TrainBatch(
      tokens=jnp.where(real, tokens, 0),
      positions=jnp.where(real, slots.place, 0),
      segment_ids=slots.segment_ids,
      response_mask=mask,
      old_logps=zeros,
      advantages=zeros,
      response_index=jnp.where(mask, b[:, 1:], 0),
      experts=experts,
      sampler_logps=logps,
      turns=turns,
    )
    cut = lambda x: x.reshape(
      cfg.minibatches, -1, cfg.micro_batch_size // _shards(), *x.shape[1:]
    )
    return jax.tree.map(cut, rows)

  pack = sharding.shard_map(
    local,
    in_specs=(*[batch_axes] * 3, PartitionSpec(), *[batch_axes] * 3),
    out_specs=PartitionSpec(None, None, *sharding.ROWS),
  )
  rows = pack(prompts, responses, lengths, packing, logps, experts, turns)
  return PackedBatch(rows, jnp.asarray(packing.num_micro_batches))


def _shards() -> int:
  return sharding.size(*sharding.ROW_AXES)


def _slots(packing, prompt_lengths, lengths, cfg) -> _Slots:
  """What stands in the rows of this device."""
  B, size = len(lengths), cfg.micro_batch_size
  size_here = size // _shards()
  first = sharding.index(*sharding.ROW_AXES) * size_here
  micro_batch, row = packing.row // size, packing.row % size - first
  # Rows of other devices, and of empty sequences, are out of range.
  here = (row >= 0) & (row < size_here) & (packing.row < B)
  rows = B // _shards()
  row = jnp.where(here, micro_batch * size_here + row, rows)
  starts = jnp.full((rows, cfg.width), -1, jnp.int32)
  starts = starts.at[row, packing.offset].set(
    jnp.arange(B, dtype=jnp.int32), mode="drop"
  )
  columns = jnp.arange(cfg.width, dtype=jnp.int32)
  first_column = jax.lax.cummax(jnp.where(starts >= 0, columns, -1), axis=1)
  response = jnp.take_along_axis(starts, jnp.maximum(first_column, 0), axis=1)
  response = jnp.maximum(response, 0)
  place = columns - first_column
  prompt_length = prompt_lengths[response]
  real = (first_column >= 0) & (place < prompt_length + lengths[response])
  ids = jnp.cumsum(starts >= 0, axis=1, dtype=jnp.int32)
  return _Slots(response, place, prompt_length, jnp.where(real, ids, 0))


def logprobs(
  params: model.Params, cfg: model.ModelConfig, batch: TrainBatch, **options
) -> TokenLogprobs:
  """Log-probs of the responses; `options` are those of `token_logprobs`."""
  return token_logprobs(
    params,
    cfg,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    response_length=batch.response_mask.shape[1],
    wanted=batch.response_mask,
    **options,
  )


@dataclasses.dataclass(frozen=True)
class TrainBatchFields:
  """The optional fields of a `TrainBatch`; static under jit.

  Attributes:
    sampler_logps: whether `old_logps` are the sampler's, not recomputed.
    experts: whether there are experts even if the sampler recorded none.
    router_logps: whether there are the old routers' log-probs of them.
    reference: whether there are log-probs of a reference policy.
    critic: whether there are values and returns.
    turns: whether there are the turns of conversations.
  """

  sampler_logps: bool = False
  experts: bool = False
  router_logps: bool = False
  reference: bool = False
  critic: bool = False
  turns: bool = False


def train_batch_from_samples(
  prompts: Prompts,
  samples: Samples,
  packing: Packing,
  cfg: model.ModelConfig,
  fields: TrainBatchFields,
  packing_config: PackingConfig,
) -> PackedBatch:
  """The packed batch of samples, with zeros where values are filled in later.

  It has all its fields from the start, so that one compiled program takes it
  for old log-probs and for an update.

  Args:
    prompts: P prompts.
    samples: G responses to each.
    packing: where each response goes, from `packing.pack`.
    cfg: the model; static.
    fields: the optional fields; static.
    packing_config: the rows; static.
  """
  batch = pack_responses(
    prompts,
    samples.tokens,
    samples.lengths,
    packing,
    packing_config,
    logps=samples.logps,
    experts=samples.experts,
    turns=samples.turns,
  )
  rows = batch.rows
  lead, T = rows.tokens.shape[:-1], rows.tokens.shape[-1]
  zeros = lambda wanted: jnp.zeros_like(rows.old_logps) if wanted else None
  L, k = cfg.num_layers, cfg.experts_per_token
  experts = rows.experts
  if experts is None and fields.experts and cfg.num_experts:
    experts = jnp.zeros((*lead, L, T, k), number_type(cfg.num_experts))
  rows = dataclasses.replace(
    rows,
    old_logps=rows.sampler_logps if fields.sampler_logps else rows.old_logps,
    experts=experts,
    router_logps=jnp.zeros((*lead, L, T - 1, k))
    if fields.router_logps and cfg.num_experts
    else None,
    reference_logps=zeros(fields.reference),
    values=zeros(fields.critic),
    returns=zeros(fields.critic),
    turns=rows.turns if fields.turns else None,
  )
  rows = sharding.constrain(rows, None, None, *sharding.ROWS)
  return batch._replace(rows=rows)
