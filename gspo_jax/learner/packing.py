"""Packing: responses with their prompts share rows of one width.

Padded to one width each, responses of several lengths cost what the longest
costs. Here several share a row, one after the other, and attention stays within
each. The kernels still compute the scores between sequences of a row, and mask
them: a token costs the attention of a whole row. `pack` computes on the host,
from the lengths, where each sequence goes, the same on every host;
`pack_responses` moves the tokens on the devices.

Dimension key: P prompts, G responses a prompt, B = P * G responses, S prompt
columns, R most response tokens, M minibatches, A most micro-batches of one, L
layers, k experts a token, W columns of a row.
"""

import bisect
import dataclasses
import heapq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gspo_jax import model
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.train_batch import PackedBatch, TrainBatch
from gspo_jax.model.moe import number_type
from gspo_jax.runtime import sharding
from gspo_jax.runtime.key import key
from gspo_jax.sampler.samples import Prompts, Samples


@dataclasses.dataclass(frozen=True)
class PackingConfig:
  """The rows of a packed batch; static under jit.

  Attributes:
    width: W, columns of a row; no sequence is longer.
    minibatches: M, divides B, the number of sequences.
    micro_batch_size: divides B / M.
    shards: devices among which the rows of a micro-batch are split; divides
      `micro_batch_size`.
  """

  width: int = 0
  minibatches: int = key(4, "optimizer steps an iteration (GSPO, sec. 5.1)")
  micro_batch_size: int = key(
    64, "packed rows of a forward and backward pass, over all devices"
  )
  shards: int = 1


class Packing(NamedTuple):
  """Where each of B sequences stands in the rows of M minibatches.

  A minibatch has the rows of A micro-batches, enough for one sequence a row;
  the first `num_micro_batches` of them hold all its sequences.

  Attributes:
    row: [B] int32, counted through all minibatches, 0 to B - 1; B for an empty
      sequence, which has no place.
    offset: [B] int32, the column of its first token.
    num_micro_batches: [M] int32, micro-batches that hold sequences.
  """

  row: np.ndarray
  offset: np.ndarray
  num_micro_batches: np.ndarray


class RowTokens(NamedTuple):
  """Tokens of the micro-batches that passes over a batch run."""

  micro_batches: int
  real: int  # tokens of prompts and responses
  computed: int  # columns of all rows, padding included


def shuffled_groups(key: jax.Array, groups: int, group_size: int) -> np.ndarray:
  """The sequences of whole groups in random order, [groups * group_size].

  Whole groups, so that the advantages of a group cancel inside a minibatch.
  """
  order = np.asarray(jax.random.permutation(key, groups))
  return (order[:, None] * group_size + np.arange(group_size)).reshape(-1)


def pack(lengths: np.ndarray, order: np.ndarray, cfg: PackingConfig) -> Packing:
  """Packs the sequences of each minibatch into as few micro-batches as it can.

  The rows of a minibatch are as evenly filled as the longest-first rule makes
  them, and those of a micro-batch are dealt to the shards by their tokens.

  Args:
    lengths: [B], tokens of each sequence, its prompt included; 0 for an empty
      one.
    order: [B], a permutation: minibatch m has the m-th part of it.
    cfg: the rows.

  Raises:
    ValueError: a sequence is longer than a row.
  """
  lengths, size = np.asarray(lengths), cfg.micro_batch_size
  if lengths.max(initial=0) > cfg.width:
    raise ValueError(f"a sequence of {lengths.max()} tokens, {cfg.width=}")
  B = len(lengths)
  row, offset = np.full(B, B, np.int32), np.zeros(B, np.int32)
  used = np.zeros(cfg.minibatches, np.int32)
  for m, members in enumerate(np.reshape(order, (cfg.minibatches, -1))):
    members = members[lengths[members] > 0]
    longest_first = members[np.argsort(-lengths[members], kind="stable")]
    rows = _rows(lengths[longest_first].tolist(), cfg.width, size)
    used[m] = -(-len(rows) // size)
    for place, (_, items) in zip(
      _places(len(rows), size, cfg.shards),
      sorted(rows, key=lambda row: -row[0]),
      strict=True,
    ):
      sequences = longest_first[items]
      row[sequences] = m * (B // cfg.minibatches) + place
      ends = np.cumsum(lengths[sequences])
      offset[sequences] = ends - lengths[sequences]
  return Packing(row, offset, used)


def one_a_row(order: np.ndarray, cfg: PackingConfig) -> Packing:
  """One sequence a row, as without packing; `order` as in `pack`."""
  B = len(order)
  micro_batches = B // cfg.minibatches // cfg.micro_batch_size
  return Packing(
    row=np.argsort(order).astype(np.int32),
    offset=np.zeros(B, np.int32),
    num_micro_batches=np.full(cfg.minibatches, micro_batches, np.int32),
  )


def row_tokens(
  lengths: np.ndarray,
  packing: Packing,
  cfg: PackingConfig,
  first: np.ndarray | int = 0,
) -> RowTokens:
  """The tokens of a pass over a packed batch.

  Args:
    lengths: [B], those that `pack` was given.
    packing: its result.
    cfg: the rows.
    first: [M] or one for all, the first micro-batch of each minibatch that
      runs; all further ones that hold sequences run, too.
  """
  size, (M,) = cfg.micro_batch_size, packing.num_micro_batches.shape
  placed = packing.row < len(lengths)
  tokens = np.bincount(
    packing.row[placed] // size,
    np.asarray(lengths)[placed],
    len(lengths) // size,
  ).reshape(M, -1)
  first = np.broadcast_to(first, M)
  runs = np.arange(tokens.shape[1]) >= first[:, None]
  count = int(np.maximum(packing.num_micro_batches - first, 0).sum())
  return RowTokens(count, int(tokens[runs].sum()), count * size * cfg.width)


def _rows(lengths, width, multiple) -> list[tuple[int, list[int]]]:
  """Rows, as their tokens and the indices of their sequences.

  Best-fit decreasing gives the number of rows. It is rounded up to whole
  micro-batches, and the sequences are spread over them evenly if they still
  fit.
  """
  tight = _best_fit(lengths, width)
  count = min(len(lengths), -(-len(tight) // multiple) * multiple)
  return _emptiest_first(lengths, width, count) or tight


def _best_fit(lengths, width):
  """Each sequence goes into the fullest row that it fits; longest first."""
  rows, left = [], []  # left: (free columns, row), ascending
  for item, length in enumerate(lengths):
    at = bisect.bisect_left(left, (length, -1))
    if at == len(left):
      free, row = width, len(rows)
      rows.append((0, []))
    else:
      free, row = left.pop(at)
    rows[row] = rows[row][0] + length, [*rows[row][1], item]
    bisect.insort(left, (free - length, row))
  return rows


def _emptiest_first(lengths, width, count):
  """Each sequence goes into the emptiest of `count` rows; None if one fails."""
  heap = [(0, row, []) for row in range(count)]
  for item, length in enumerate(lengths):
    tokens, row, items = heap[0]
    if tokens + length > width:
      return None
    heapq.heapreplace(heap, (tokens + length, row, [*items, item]))
  return [(tokens, items) for tokens, _, items in heap]


def _places(count, micro_batch_size, shards) -> list[int]:
  """Places for `count` rows, fullest first: micro-batch by micro-batch.

  Within one, the rows are dealt to the shards, there and back, so that each
  shard has about as many tokens.
  """
  per_shard = micro_batch_size // shards
  there = np.arange(micro_batch_size).reshape(shards, per_shard).T
  there[1::2] = there[1::2, ::-1]
  dealt = there.reshape(-1)
  return [
    i // micro_batch_size * micro_batch_size + int(dealt[i % micro_batch_size])
    for i in range(count)
  ]


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
    prompts: P of them.
    responses: [B, R] int32; those of a prompt are neighbours.
    lengths: [B] int32, in tokens.
    packing: where each response goes, from `pack`.
    cfg: static.
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

  sharded = sharding.shard_map(
    local,
    in_specs=(*[batch_axes] * 3, PartitionSpec(), *[batch_axes] * 3),
    out_specs=PartitionSpec(None, None, *sharding.ROWS),
  )
  rows = sharded(prompts, responses, lengths, packing, logps, experts, turns)
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


def train_batch_from_samples(
  prompts: Prompts,
  samples: Samples,
  packing: Packing,
  *,
  cfg: model.ModelConfig,
  objective: ObjectiveConfig,
  instruments: bool,
  packing_config: PackingConfig,
) -> PackedBatch:
  """The packed batch of samples, with zeros where values are filled in later.

  It has all its fields from the start, so that one compiled program takes it
  for old log-probs and for an update. The optional ones are those that the
  objective reads. Static: `cfg`, `objective`, `instruments`, `packing_config`.
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
  zeros = jnp.zeros_like(rows.old_logps)
  L, k = cfg.num_layers, cfg.experts_per_token
  experts, router_logps = rows.experts, None
  if experts is None and objective.reads_old_experts(cfg, instruments):
    experts = jnp.zeros((*lead, L, T, k), number_type(cfg.num_experts))
  if objective.reads_old_routers(cfg, instruments):
    router_logps = jnp.zeros((*lead, L, T - 1, k))
  has_critic = objective.method.critic
  rows = dataclasses.replace(
    rows,
    old_logps=rows.sampler_logps if objective.has_sampler_logps else zeros,
    experts=experts,
    router_logps=router_logps,
    reference_logps=zeros if objective.has_reference else None,
    values=zeros if has_critic else None,
    returns=zeros if has_critic else None,
    turns=rows.turns if objective.credit == "turn" else None,
  )
  rows = sharding.constrain(rows, None, None, *sharding.ROWS)
  return batch._replace(rows=rows)
