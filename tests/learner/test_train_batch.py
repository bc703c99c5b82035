"""Train batches: responses behind prompts, whole groups in minibatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.learner import train_batch
from gspo_jax.learner.train_batch import (
  MinibatchSplit,
  TrainBatch,
  TrainBatchFields,
)
from gspo_jax.sampler.samples import Prompts, Samples

P, G, S, R = 3, 4, 5, 6
B = P * G
PROMPT_LENGTHS = jnp.array([5, 1, 3])
RESPONSE_LENGTHS = np.arange(B) % (R + 1)


@pytest.fixture(scope="module")
def batch():
  """Numbered tokens: those of prompts from 100, of responses from 1000."""
  prompts = Prompts(100 + jnp.arange(P * S).reshape(P, S), PROMPT_LENGTHS)
  responses = 1000 + jnp.arange(B * R).reshape(B, R)
  return train_batch.make_train_batch(
    prompts, responses, jnp.asarray(RESPONSE_LENGTHS)
  )


def test_a_response_stands_behind_its_own_prompt(batch):
  tokens = np.asarray(batch.tokens)
  assert tokens.shape == (B, S + R)
  for row in range(B):
    first = 100 + row // G * S
    assert tokens[row, :S].tolist() == list(range(first, first + S))
    first = 1000 + row * R
    assert tokens[row, S:].tolist() == list(range(first, first + R))


def test_positions_count_the_tokens_of_prompt_and_response(batch):
  for row in range(B):
    n = int(PROMPT_LENGTHS[row // G])
    positions = batch.positions[row].tolist()
    assert positions[S - n :] == list(range(n + R))
    assert positions[: S - n] == [0] * (S - n)


def test_masks_agree_with_the_lengths(batch):
  for row in range(B):
    n, length = int(PROMPT_LENGTHS[row // G]), RESPONSE_LENGTHS[row]
    response = [True] * length + [False] * (R - length)
    assert batch.response_mask[row].tolist() == response
    mask = [False] * (S - n) + [True] * n + response
    assert batch.mask[row].tolist() == mask


def test_fields_that_are_filled_in_later_are_zeros(batch):
  assert batch.old_logps.shape == (B, R)
  assert batch.advantages.shape == (B,)
  assert batch.old_logps.dtype == batch.advantages.dtype == jnp.float32
  assert not batch.old_logps.any()
  assert not batch.advantages.any()
  assert batch.experts is None


def numbered(groups, group_size):
  """A batch in which every element of row i is i."""
  rows = groups * group_size
  fill = lambda *shape: np.broadcast_to(
    np.arange(rows).reshape(rows, *[1] * len(shape)), (rows, *shape)
  )
  return TrainBatch(
    tokens=fill(7),
    positions=fill(7),
    mask=fill(7),
    response_mask=fill(3),
    old_logps=fill(3),
    advantages=fill(),
    experts=fill(2, 7, 2),
    router_logps=fill(2, 3, 2),
    sampler_logps=fill(3),
    reference_logps=fill(3),
    values=fill(3),
    returns=fill(3),
  )


def split(batch, key, minibatches, group_size, micro_batch_size):
  groups = batch.tokens.shape[0] // group_size
  order = jax.random.permutation(key, groups)
  return MinibatchSplit(order, minibatches, micro_batch_size).split(batch)


@pytest.mark.parametrize(
  ("groups", "group_size", "minibatches", "micro"),
  [(6, 4, 3, 2), (6, 4, 6, 1), (5, 2, 1, 5)],
)
def test_minibatches_have_every_row_once_and_whole_groups(
  groups, group_size, minibatches, micro
):
  whole = numbered(groups, group_size)
  order = jax.random.permutation(jax.random.key(1), groups)
  cut = MinibatchSplit(order, minibatches, micro)
  batches = cut.split(whole)
  size = groups * group_size // minibatches
  rows = np.asarray(batches.advantages)
  assert rows.shape == (minibatches, size // micro, micro)
  assert sorted(rows.flat) == list(range(groups * group_size))
  for minibatch in rows.reshape(minibatches, size):
    group = minibatch.reshape(-1, group_size)
    assert (group // group_size == group[:, :1] // group_size).all()
    assert (group % group_size == np.arange(group_size)).all()
  for leaf in jax.tree.leaves(batches):  # all fields of a row move together
    index = rows.reshape(*rows.shape, *[1] * (leaf.ndim - 3))
    assert (leaf == index).all()
  # `join` is the inverse of `split`.
  joined = cut.join({k: x for k, x in vars(batches).items() if x is not None})
  assert {"experts", "old_logps"} <= set(joined)
  for name, x in joined.items():
    np.testing.assert_array_equal(x, getattr(whole, name))


def test_the_key_shuffles_the_groups():
  groups = jnp.arange(8)
  orders = [
    MinibatchSplit(jax.random.permutation(jax.random.key(seed), groups), 4, 4)
    for seed in (0, 0, 1, 2, 3)
  ]
  whole = numbered(8, 2)
  bare = dict.fromkeys(("experts", "router_logps"))
  whole = TrainBatch(**(vars(whole) | bare))
  cut = [tuple(np.asarray(x.split(whole).advantages).flat) for x in orders]
  assert cut[0] == cut[1]
  assert len(set(cut)) == 4
  assert tuple(range(16)) not in cut


def test_absent_fields_stay_absent(batch):
  cut = split(batch, jax.random.key(0), 3, G, 2)
  assert cut.experts is None
  assert cut.tokens.shape == (3, 2, 2, S + R)


def test_a_train_batch_has_the_fields_that_the_update_reads():
  cfg = model.variant("tiny")
  rng = np.random.default_rng(0)
  ids = lambda *shape: rng.integers(0, 256, shape).astype(np.int32)
  logps = -rng.random((B, R), np.float32)
  lengths = jnp.asarray(RESPONSE_LENGTHS)
  samples = Samples(ids(B, R), logps, lengths, None, None)
  make = functools.partial(
    train_batch.train_batch_from_samples,
    Prompts(ids(P, S), PROMPT_LENGTHS),
    samples,
    cfg,
  )
  plain = make(TrainBatchFields())
  np.testing.assert_array_equal(plain.sampler_logps, samples.logps)
  assert not plain.old_logps.any()
  assert plain.reference_logps is plain.values is plain.returns is None
  assert plain.experts is plain.router_logps is None
  trusting = make(TrainBatchFields(sampler_logps=True))
  np.testing.assert_array_equal(trusting.old_logps, samples.logps)
  whole = make(
    TrainBatchFields(
      experts=True, router_logps=True, reference=True, critic=True
    )
  )
  assert whole.experts.shape == (B, 2, S + R, 2)
  assert whole.experts.dtype == np.uint8
  assert whole.router_logps.shape == (B, 2, R, 2)
  for x in (whole.reference_logps, whole.values, whole.advantages):
    assert x.shape == (B, R)
