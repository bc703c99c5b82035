"""Packing: where each response stands, and how few tokens are padding."""

import jax
import numpy as np
import pytest

from benchmarks.lengths import long_tailed
from gspo_jax.learner import packing
from gspo_jax.learner.packing import PackingConfig, pack

SMALL = PackingConfig(width=16, minibatches=2, micro_batch_size=4, shards=2)


def random_lengths(count=64, longest=16, seed=0, empty=5):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, longest + 1, count)
  lengths[rng.permutation(count)[:empty]] = 0
  return lengths


def shuffled(count, seed=0, group_size=4):
  key = jax.random.key(seed)
  return packing.shuffled_groups(key, count // group_size, group_size)


def occupied(packed, lengths, cfg):
  """[B, W], how many sequences cover each column of each row."""
  covered = np.zeros((len(lengths), cfg.width + 1), int)
  nonempty = lengths > 0
  row, start = packed.row[nonempty], packed.offset[nonempty]
  np.add.at(covered, (row, start), 1)
  np.add.at(covered, (row, start + lengths[nonempty]), -1)
  return covered.cumsum(axis=1)[:, :-1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("longest", [4, 16])
def test_every_sequence_has_a_place_of_its_own(seed, longest):
  lengths = random_lengths(longest=longest, seed=seed)
  packed = pack(lengths, shuffled(64), SMALL)
  nonempty = lengths > 0
  assert (packed.row[~nonempty] == 64).all()  # out of range: no place
  assert (packed.row[nonempty] < 64).all()
  assert (packed.offset[nonempty] >= 0).all()
  assert (packed.offset + lengths)[nonempty].max() <= SMALL.width
  covered = occupied(packed, lengths, SMALL)
  assert covered.max() == 1  # no two overlap
  assert covered.sum() == lengths.sum()
  # Without a gap, so that each row is padded at its end alone.
  assert (np.diff(covered, axis=1) <= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_minibatch_has_its_part_of_the_order(seed):
  lengths, order = random_lengths(seed=seed), shuffled(64, seed)
  packed = pack(lengths, order, SMALL)
  for m, members in enumerate(np.split(order, SMALL.minibatches)):
    members = members[lengths[members] > 0]
    assert (packed.row[members] // 32 == m).all()


def test_only_micro_batches_that_are_used_have_sequences():
  lengths = random_lengths(longest=8)
  packed = pack(lengths, shuffled(64), SMALL)
  assert packed.num_micro_batches.shape == (SMALL.minibatches,)
  rows = occupied(packed, lengths, SMALL).sum(1).reshape(2, 8, 4)
  for minibatch, used in zip(rows, packed.num_micro_batches, strict=True):
    assert minibatch[:used].any(axis=1).all()
    assert not minibatch[used:].any()
    assert 0 < used < 8


def test_whole_groups_are_shuffled_by_the_key():
  one, again, other = (shuffled(64, seed) for seed in (0, 0, 1))
  np.testing.assert_array_equal(one, again)
  assert (one != other).any()
  assert sorted(one) == list(range(64))
  groups = one.reshape(16, 4)
  np.testing.assert_array_equal(groups, groups[:, :1] + np.arange(4))
  assert (groups[:, 0] % 4 == 0).all()
  assert (np.diff(groups[:, 0]) != 4).any()


def test_sequences_at_the_limit_have_a_row_each():
  packed = pack(np.full(64, SMALL.width), np.arange(64), SMALL)
  assert sorted(packed.row) == list(range(64))
  assert (packed.offset == 0).all()
  assert packed.num_micro_batches.tolist() == [8, 8]


def test_one_token_among_empty_sequences():
  packed = pack(np.eye(64, dtype=int)[40], np.arange(64), SMALL)
  assert packed.num_micro_batches.tolist() == [0, 1]
  assert packed.row[40] // 4 == 8  # the first micro-batch of the second half
  assert (np.delete(packed.row, 40) == 64).all()


def test_single_tokens_fill_one_micro_batch_evenly():
  """Rows of one micro-batch cost the same, full or not."""
  packed = pack(np.ones(64, int), np.arange(64), SMALL)
  assert packed.num_micro_batches.tolist() == [1, 1]
  counts = np.bincount(packed.row, minlength=64).reshape(2, 8, 4)
  assert (counts[:, 0] == 8).all()


def test_a_sequence_longer_than_a_row_is_an_error():
  lengths = np.ones(64, int)
  lengths[7] = 17
  with pytest.raises(ValueError, match=r"17 tokens, cfg\.width=16"):
    pack(lengths, np.arange(64), SMALL)


def test_few_tokens_are_padding_and_no_shard_waits():
  """For 8,192 responses on 64 shards, a row each in a micro-batch."""
  prompts = np.random.default_rng(1).integers(16, 129, 512)
  lengths = long_tailed(8192, 2048) + prompts.repeat(16)
  cfg = PackingConfig(2048 + 128, 4, micro_batch_size=64, shards=64)
  packed = pack(lengths, shuffled(8192, group_size=16), cfg)
  tokens = np.bincount(packed.row, lengths, minlength=8192).reshape(4, -1, 64)
  used = np.arange(tokens.shape[1]) < packed.num_micro_batches[:, None]
  computed = tokens[used]  # [micro-batches, shards]
  assert computed.sum() == lengths.sum()
  assert computed.mean() / cfg.width >= 0.85
  wait = computed.max(axis=1).sum() / computed.mean(axis=1).sum()
  assert wait <= 1.05


def test_rows_are_dealt_to_the_shards_there_and_back():
  """Rows too long to share, from half full to full; eight to each shard."""
  lengths = np.random.default_rng(0).permutation(np.arange(130, 258, 2))
  cfg = PackingConfig(256, 1, micro_batch_size=64, shards=8)
  packed = pack(lengths, np.arange(64), cfg)
  tokens = np.bincount(packed.row, lengths, minlength=64).reshape(8, 8)
  assert (tokens > 128).all()
  by_shard = tokens.sum(axis=1)
  assert by_shard.max() <= 1.01 * by_shard.mean()


def blocks_of_pairs(segments, query_block, key_block):
  """Blocks with a query and a key that it needs; the pairs one by one."""
  token = np.arange(len(segments))
  same = (segments[:, None] == segments) & (segments > 0)
  pairs = same & (token[:, None] >= token) | np.eye(len(token), dtype=bool)
  queries, keys = np.nonzero(pairs)
  return len(set(zip(queries // query_block, keys // key_block, strict=True)))


@pytest.mark.parametrize("blocks", [(4, 4), (4, 8), (8, 4), (3, 5), (1, 1)])
@pytest.mark.parametrize("longest", [1, 7, 40])
def test_needed_blocks_are_those_that_hold_a_pair(blocks, longest):
  """The last block of a row may be shorter, and rows may be empty."""
  cfg = PackingConfig(width=40, minibatches=2, micro_batch_size=4)
  lengths = random_lengths(longest=longest, seed=longest)
  packed = pack(lengths, shuffled(64), cfg)
  segments = np.zeros((64, cfg.width), int)
  for b in np.flatnonzero(lengths):
    start = packed.offset[b]
    segments[packed.row[b], start : start + lengths[b]] = b + 1
  expected = [blocks_of_pairs(row, *blocks) for row in segments]
  actual = packing.needed_blocks(lengths, packed, cfg, blocks)
  np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("size", [64, 128])
def test_rows_of_a_micro_batch_need_about_equally_many_blocks(size):
  """64 devices wait for the row of most; their tokens stay equal, too."""
  lengths = long_tailed(8192, 16384) + 512
  cfg = PackingConfig(16384 + 512, 4, micro_batch_size=size, shards=64)
  packed = pack(lengths, shuffled(8192, group_size=16), cfg)
  used = np.arange(2048 // size) < packed.num_micro_batches[:, None]
  by_row = packing.needed_blocks(lengths, packed, cfg)
  rows = by_row.reshape(4, -1, size)
  for minibatch, count in zip(rows, packed.num_micro_batches, strict=True):
    assert (minibatch[: count - 1].min(1) >= minibatch[1:count].max(1)).all()
  by_shard = rows.reshape(4, -1, 64, size // 64).sum(-1)[used]
  assert by_shard.max(1).sum() <= 1.12 * by_shard.mean(1).sum()
  tokens = np.bincount(packed.row, lengths, minlength=8192)
  by_shard = tokens.reshape(4, -1, 64, size // 64).sum(-1)[used]
  assert by_shard.max(1).sum() <= 1.05 * by_shard.mean(1).sum()


def test_row_tokens_are_those_of_the_micro_batches_that_run():
  lengths = random_lengths()
  packed = pack(lengths, shuffled(64), SMALL)
  rows = occupied(packed, lengths, SMALL).sum(1).reshape(2, 8, 4)
  used = packed.num_micro_batches
  whole = packing.row_tokens(lengths, packed, SMALL)
  assert whole == (used.sum(), lengths.sum(), used.sum() * 4 * 16)
  # The last micro-batch of the first minibatch, and all of the second.
  first = np.array([used[0] - 1, 0])
  some = packing.row_tokens(lengths, packed, SMALL, first)
  assert some.micro_batches == 1 + used[1]
  assert some.real == rows[0, used[0] - 1].sum() + rows[1].sum()
  assert some.computed == some.micro_batches * 4 * 16


def test_rows_of_empty_sequences_have_no_tokens():
  lengths = np.zeros(64, int)
  packed = pack(lengths, shuffled(64), SMALL)
  assert packing.row_tokens(lengths, packed, SMALL) == (0, 0, 0)
