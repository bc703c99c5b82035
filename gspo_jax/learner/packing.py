"""Packing: several sequences, each a prompt with its response, share a row.

Padded to one width, every response would cost as much as the longest. Packed
sequences follow one another in a row, and attention stays within each. The
kernel of TPUs skips the blocks of scores that no sequence needs; devices wait
for each other in every layer, so the rows of a micro-batch need about equally
many. `pack` chooses the places on the host, from the lengths alone, so every
host chooses the same. `pack_responses` moves the tokens on the devices.

Dimension key: as in train_batch.
"""

import bisect
import dataclasses
import functools
import heapq
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gspo_jax import model
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.policy_loss import loss_per_token
from gspo_jax.learner.train_batch import PackedBatch, TrainBatch
from gspo_jax.model.moe import number_type
from gspo_jax.runtime import sharding
from gspo_jax.runtime.key import key
from gspo_jax.sampler.samples import TRUNCATED, Prompts, Samples

# Queries and keys of the blocks of scores by which `pack` sorts rows, which
# need not be those of a kernel.
_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class PackingConfig:
  """The rows of a packed batch; static under jit."""

  width: int = 0  # W, columns of a row: the longest sequence allowed
  # M, divides B, the number of sequences.
  minibatches: int = key(4, "optimizer steps an iteration (GSPO, sec. 5.1)")
  # It divides B / M.
  micro_batch_size: int = key(
    64, "packed rows of a forward and backward pass, over all devices"
  )
  shards: int = 1  # devices that split micro_batch_size rows; divides it
  multiple: int = 1  # of the columns at which sequences start; divides `width`


class Packing(NamedTuple):
  """The place of each of B sequences in the rows of M minibatches.

  A minibatch has the rows of A micro-batches, enough for one sequence a row.
  The first `num_micro_batches` of them hold all its sequences.
  """

  # [B] int32, from 0 to B - 1 over all minibatches; B for an empty sequence,
  # which has no place.
  row: np.ndarray
  offset: np.ndarray  # [B] int32, the column of the first token
  num_micro_batches: np.ndarray  # [M] int32, with sequences in them


class RowTokens(NamedTuple):
  """Tokens of all micro-batches that one or more passes run."""

  micro_batches: int
  real: int  # tokens of prompts and responses
  computed: int  # columns of all rows, padding included


def shuffled_groups(key: jax.Array, groups: int, group_size: int) -> np.ndarray:
  """Sequences in random order, groups whole: [groups * group_size]."""
  order = np.asarray(jax.random.permutation(key, groups))
  return (order[:, None] * group_size + np.arange(group_size)).reshape(-1)


def pack(lengths: np.ndarray, order: np.ndarray, cfg: PackingConfig) -> Packing:
  """Packs the sequences of each minibatch into few micro-batches.

  `lengths` [B] are tokens of each prompt with its response, 0 for an empty one,
  and at most `cfg.width`. `order` [B] is a permutation: minibatch m has the
  m-th part of it. Rows are filled evenly. Those that need the most blocks of
  scores come first, so the rows of a micro-batch need about equally many, and
  its shards have about as many tokens.
  """
  lengths, size = np.asarray(lengths), cfg.micro_batch_size
  lengths = -(-lengths // cfg.multiple) * cfg.multiple
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
    index = np.empty(len(members), np.int64)
    for r, (_, items) in enumerate(rows):
      sequences = longest_first[items]
      index[items] = r
      ends = np.cumsum(lengths[sequences])
      offset[sequences] = ends - lengths[sequences]
    tokens = np.array([tokens for tokens, _ in rows], int)
    unsorted = Packing(index, offset[longest_first], used)
    blocks = needed_blocks(lengths[longest_first], unsorted, cfg)[: len(rows)]
    place = np.empty(len(rows), np.int64)
    fullest_first = np.lexsort((-tokens, -blocks))
    place[fullest_first] = _places(len(rows), size, cfg.shards)
    row[longest_first] = m * (B // cfg.minibatches) + place[index]
  return Packing(row, offset, used)


def needed_blocks(
  lengths: np.ndarray,
  packing: Packing,
  cfg: PackingConfig,
  blocks: tuple[int, int] = (_BLOCK, _BLOCK),
) -> np.ndarray:
  """[B] int64, the blocks of scores that the attention of each row computes.

  `blocks` are the queries and the keys of a block. One is needed if a query and
  an earlier key, or the same token's, are of one sequence. Padding needs the
  blocks that hold the token itself, so an empty row has one of them for each
  block of queries.
  """
  query_block, key_block = blocks
  placed = packing.row < len(lengths)
  row, offset = packing.row[placed], packing.offset[placed]
  tokens = np.bincount(row, np.asarray(lengths)[placed], len(lengths))
  start = np.arange(0, cfg.width, query_block)  # the first query of each block
  # Its first key: keys that this query attends to reach back the furthest.
  first = np.zeros((len(lengths), len(start)), int)
  block = -(-offset // query_block)  # the first that starts in the sequence
  inside = block < len(start)
  np.maximum.at(first, (row[inside], block[inside]), offset[inside])
  first = np.maximum.accumulate(first, axis=1)
  first = np.where(start < tokens[:, None], first, start)
  last = np.minimum(start + query_block, cfg.width) - 1
  return (last // key_block - first // key_block + 1).sum(axis=1)


def row_tokens(
  lengths: np.ndarray,
  packing: Packing,
  cfg: PackingConfig,
  first: np.ndarray | int = 0,
) -> RowTokens:
  """Tokens of a pass that starts at micro-batch `first`, [M] or one for all."""
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
  """Rows, as their tokens and the indices of their sequences."""
  tight = _best_fit(lengths, width)
  count = min(len(lengths), -(-len(tight) // multiple) * multiple)
  return _emptiest_first(lengths, width, count) or tight


def _best_fit(lengths, width):
  """Each sequence goes into the fullest row that it fits; longest first."""
  rows: list[tuple[int, list[int]]] = []
  left: list[tuple[int, int]] = []  # (free columns, row), ascending
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
  """Each sequence goes into the emptiest row; None if one does not fit."""
  heap = [(0, row, list[int]()) for row in range(count)]
  for item, length in enumerate(lengths):
    tokens, row, items = heap[0]
    if tokens + length > width:
      return None
    heapq.heapreplace(heap, (tokens + length, row, [*items, item]))
  return [(tokens, items) for tokens, _, items in heap]


def _places(count, micro_batch_size, shards) -> np.ndarray:
  """Places for `count` rows in their order: micro-batch by micro-batch."""
  per_shard = micro_batch_size // shards
  order = np.arange(micro_batch_size).reshape(shards, per_shard).T
  order[1::2] = order[1::2, ::-1]
  micro_batch, row = np.divmod(np.arange(count), micro_batch_size)
  return micro_batch * micro_batch_size + order.reshape(-1)[row]


def pack_responses(
  prompts: Prompts,
  responses: jax.Array,
  lengths: jax.Array,
  packing: Packing,
  cfg: PackingConfig,
  *,
  logps: jax.Array | None = None,
  experts: jax.Array | None = None,
  of_ids: Mapping[str, jax.Array | None] | None = None,
  turns: jax.Array | None = None,
) -> PackedBatch:
  """Packs responses [B, R] behind their prompts [P, S]; B = P * G.

  Tokens go to their rows by two exchanges, see `_mover`. What a device holds
  meanwhile does not grow with the number of devices.
  Log-probs and advantages that are filled in later are zeros.

  Args:
    responses: [B, R] int32; responses to one prompt are neighbours.
    lengths: [B] int32.
    logps: [B, R] float32, for `sampler_logps`.
    experts: [B, L, S + R, k], with the columns of the left-padded prompt and
      its response.
    of_ids: the fields `kept_ids`, `head_ids` and `head_logps`, [B, K, R].
    turns: [B, R] int; tokens of turn 0 are not in `response_mask`. None: all
      are.
  """
  B, (P, S) = len(responses), prompts.tokens.shape
  batch_axes = PartitionSpec(sharding.BATCH_AXES)

  def local(prompts, responses, lengths, packing, logps, by_layer, turns):
    repeat = lambda x: jnp.repeat(x, B // P, axis=0)
    prompt_lengths = repeat(prompts.lengths)
    whole = lambda x: sharding.gather(x, *sharding.BATCH_AXES, dim=0)
    tokens_B = whole(prompt_lengths + lengths)
    b, place, segment_ids = _slots(packing, tokens_B, cfg)
    real = segment_ids > 0
    is_response = real & (place >= whole(prompt_lengths)[b])
    move = _mover(packing, S - prompt_lengths, cfg)
    at_response = lambda x: move(jnp.pad(x, ((0, 0), (S, 0))))[:, 1:]
    tokens = move(jnp.concatenate([repeat(prompts.tokens), responses], axis=1))
    mask = is_response[:, 1:]
    if turns is not None:
      turns = jnp.where(mask, at_response(turns), 0)
      mask &= turns > 0
    zeros = jnp.zeros(mask.shape)
    if logps is not None:
      logps = jnp.where(mask, at_response(logps), 0.0)
    # The largest fields: layer by layer, and one of the K after another.
    each = lambda f, x: jnp.moveaxis(
      jax.lax.map(f, jnp.moveaxis(x, 1, 0)), 0, 1
    )
    experts, of_ids = by_layer
    if experts is not None:
      experts = each(move, experts)
    at_ids = functools.partial(each, at_response)
    rows = TrainBatch(
      tokens=jnp.where(real, tokens, 0),
      positions=jnp.where(real, place, 0),
      segment_ids=segment_ids,
      response_mask=mask,
      old_logps=zeros,
      advantages=zeros,
      response_index=jnp.where(mask, b[:, 1:], 0),
      experts=experts,
      sampler_logps=logps,
      turns=turns,
      **jax.tree.map(at_ids, of_ids),
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
  by_layer = experts, dict(of_ids or {})
  rows = sharded(prompts, responses, lengths, packing, logps, by_layer, turns)
  return PackedBatch(rows, jnp.asarray(packing.num_micro_batches))


def _shards() -> int:
  return sharding.size(*sharding.ROW_AXES)


def _slots(packing, lengths, cfg):
  """This device's columns, [rows, W] int32: response, place, segment id."""
  B, size = len(lengths), cfg.micro_batch_size
  size_here = size // _shards()
  first = sharding.index(*sharding.ROW_AXES) * size_here
  micro_batch, row = packing.row // size, packing.row % size - first
  # Rows of other devices, and of empty sequences, are out of range.
  here = (row >= 0) & (row < size_here) & (packing.row < B)
  rows = B // _shards()
  row = jnp.where(here, micro_batch * size_here + row, rows)
  columns = jnp.arange(cfg.width, dtype=jnp.int32)
  response = _responses(packing.offset, row, rows, columns)
  place = columns - packing.offset[response]
  begun = response >= 0
  real = begun & (place < lengths[response])
  ids = jnp.cumsum(begun & (place == 0), axis=1, dtype=jnp.int32)
  # Places count from 0, ids from 1; at padding the id is 0 and the rest any.
  return jnp.maximum(response, 0), place, jnp.where(real, ids, 0)


def _responses(offset, row, rows, columns):
  """The last response to begin at or before each column; -1 for none.

  `columns` are neighbours. Response b begins at column `offset[b]` of `row[b]`;
  rows from `rows` on are left out.
  """
  count = len(columns)
  # In this order each row's responses come one after another.
  order = jnp.lexsort((offset, row)).astype(jnp.int32)
  at = jnp.maximum(offset - columns[0], 0)[order]
  rank = jnp.full((rows, count), -1, jnp.int32)
  rank = rank.at[row[order], at].max(
    jnp.arange(len(order), dtype=jnp.int32), mode="drop"
  )
  rank = jax.lax.cummax(rank, axis=1)
  return jnp.where(rank < 0, -1, order[rank])


def _mover(packing, begins, cfg):
  """Returns a function from this device's sequences [b, C, ...] to its rows.

  Sequences begin at the columns `begins` [b]. Each is shifted to the columns
  that it has in its row. A first exchange gives a device some columns of all
  sequences, which it joins to rows. A second exchange gives it all columns of
  its rows, [rows, W, ...]. Padding is any token.
  """
  B, size, shards = len(packing.row), cfg.micro_batch_size, _shards()
  axes = sharding.ROW_AXES
  count = -(-cfg.width // shards)  # columns of a part
  columns = sharding.index(*axes) * count + jnp.arange(count, dtype=jnp.int32)
  source = _responses(packing.offset, packing.row, B, columns)
  first = sharding.index(*sharding.BATCH_AXES) * len(begins)
  offset = jax.lax.dynamic_slice_in_dim(packing.offset, first, len(begins))
  context, expert = sharding.size("context"), sharding.size("expert")

  def move(x):
    padding = [(0, 0)] * x.ndim
    padding[1] = 0, max(count * shards - x.shape[1], 0)
    x = jax.vmap(lambda row, shift: jnp.roll(row, shift, axis=0))(
      jnp.pad(x, padding), offset - begins
    )
    x = x[:, : count * shards]
    x = sharding.gather(x, "context", dim=0)
    x = sharding.all_to_all(x, *axes, split=1, join=0)
    # Axes of devices: from ..., expert, context to the order of responses.
    x = x.reshape(-1, expert, context, len(begins), *x.shape[1:])
    x = x.swapaxes(1, 2).reshape(B, *x.shape[4:])
    x = x[source, jnp.arange(count)]
    x = x.reshape(-1, size, *x.shape[1:])
    x = sharding.all_to_all(x, *axes, split=1, join=2)
    return x.reshape(B // shards, *x.shape[2:])[:, : cfg.width]

  return move


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

  All fields that the objective reads exist from the start, so that one compiled
  program takes the batch for old log-probs and for an update. Overlong
  filtering takes truncated responses out of `response_mask` here, before any
  loss takes its count from it.
  """
  batch = pack_responses(
    prompts,
    samples.tokens,
    samples.lengths,
    packing,
    packing_config,
    logps=samples.logps,
    experts=samples.experts,
    of_ids={
      "kept_ids": samples.kept_ids,
      "head_ids": samples.head_ids,
      "head_logps": samples.head_logps,
    },
    turns=samples.turns,
  )
  rows = batch.rows
  assert rows.sampler_logps is not None
  lead, T = rows.tokens.shape[:-1], rows.tokens.shape[-1]
  zeros = jnp.zeros_like(rows.old_logps)
  L, k = cfg.num_moe_layers, cfg.experts_per_token
  experts, router_logps = rows.experts, None
  if experts is None and objective.reads_old_experts(cfg, instruments):
    experts = jnp.zeros((*lead, L, T, k), number_type(cfg.num_experts))
  if objective.reads_old_routers(cfg, instruments):
    router_logps = jnp.zeros((*lead, L, T - 1, k))
  has_critic, mask = objective.method.critic, rows.response_mask
  if objective.truncated == "mask":
    mask &= samples.finish[rows.response_index] != TRUNCATED
  teachers = len(objective.distillation.teachers)
  rows = dataclasses.replace(
    rows,
    response_mask=mask,
    old_logps=rows.sampler_logps if objective.has_sampler_logps else zeros,
    experts=experts,
    router_logps=router_logps,
    reference_logps=zeros if objective.has_reference else None,
    teacher_logps=zeros if teachers else None,
    teacher=jnp.zeros_like(rows.response_index) if teachers > 1 else None,
    values=zeros if has_critic else None,
    returns=zeros if has_critic else None,
    turns=rows.turns if objective.credit == "turn" else None,
  )
  if objective.has_router_losses:
    longest = samples.tokens.shape[1]
    rows = dataclasses.replace(
      rows, loss_per_token=loss_per_token(rows, objective, longest)
    )
  rows = sharding.constrain(rows, None, None, *sharding.ROWS)
  return batch._replace(rows=rows)
