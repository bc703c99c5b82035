"""Rollouts: answers in line with their prompts, groups whole in minibatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model, rollout
from gspo_jax.sampler import Prompts, Samples

P, G, S, R = 3, 4, 5, 6
B = P * G
LENGTHS = jnp.array([5, 1, 3])
ANSWER_LENGTHS = np.arange(B) % (R + 1)


def assembled():
  prompts = Prompts(100 + jnp.arange(P * S).reshape(P, S), LENGTHS)
  responses = 1000 + jnp.arange(B * R).reshape(B, R)
  return rollout.assemble(prompts, responses, jnp.asarray(ANSWER_LENGTHS))


def test_an_answer_stands_after_its_own_prompt():
  tokens = np.asarray(assembled().tokens)
  assert tokens.shape == (B, S + R)
  for row in range(B):
    first = 100 + row // G * S
    assert tokens[row, :S].tolist() == list(range(first, first + S))
    first = 1000 + row * R
    assert tokens[row, S:].tolist() == list(range(first, first + R))


def test_positions_count_the_real_tokens_on():
  batch = assembled()
  for row in range(B):
    n = int(LENGTHS[row // G])
    positions = batch.positions[row].tolist()
    assert positions[S - n :] == list(range(n + R))
    assert positions[: S - n] == [0] * (S - n)


def test_masks_are_the_lengths():
  batch = assembled()
  for row in range(B):
    n, answered = int(LENGTHS[row // G]), ANSWER_LENGTHS[row]
    answer = [True] * answered + [False] * (R - answered)
    assert batch.response_mask[row].tolist() == answer
    assert batch.mask[row].tolist() == [False] * (S - n) + [True] * n + answer


def test_what_is_not_known_yet_is_zero():
  batch = assembled()
  assert batch.old_logps.shape == (B, R)
  assert batch.advantages.shape == (B,)
  assert batch.old_logps.dtype == batch.advantages.dtype == jnp.float32
  assert not batch.old_logps.any()
  assert not batch.advantages.any()
  assert batch.experts is None


def numbered(groups, group):
  """A rollout in which every leaf of row i holds i."""
  rows = groups * group
  fill = lambda *shape: jnp.broadcast_to(
    jnp.arange(rows).reshape(rows, *[1] * len(shape)), (rows, *shape)
  )
  return rollout.Rollout(
    tokens=fill(7),
    positions=fill(7),
    mask=fill(7),
    response_mask=fill(3),
    old_logps=fill(3),
    advantages=fill(),
    experts=fill(2, 3, 2),
  )


SHAPES = pytest.mark.parametrize(
  ("groups", "group", "count", "micro"),
  [(6, 4, 3, 2), (6, 4, 1, 24), (6, 4, 6, 1), (4, 3, 2, 6), (5, 2, 1, 5)],
)


@SHAPES
def test_minibatches_hold_every_row_once_and_groups_whole(
  groups, group, count, micro
):
  cut = rollout.minibatches(
    numbered(groups, group),
    jax.random.key(1),
    count=count,
    group=group,
    micro=micro,
  )
  each = groups * group // count
  order = np.asarray(cut.advantages)
  assert order.shape == (count, each // micro, micro)
  assert sorted(order.flat) == list(range(groups * group))
  for minibatch in order.reshape(count, each):
    whole = minibatch.reshape(-1, group)
    assert (whole // group == whole[:, :1] // group).all()
    assert (whole % group == np.arange(group)).all()
  for leaf in jax.tree.leaves(cut):  # the rows of all leaves move together
    index = order.reshape(*order.shape, *[1] * (leaf.ndim - 3))
    assert (leaf == index).all()


def test_minibatches_are_shuffled_by_their_key():
  whole = numbered(8, 2)
  cut = lambda seed: np.asarray(
    rollout.minibatches(
      whole, jax.random.key(seed), count=4, group=2, micro=4
    ).advantages
  )
  assert (cut(0) == cut(0)).all()
  firsts = {tuple(cut(seed).flat) for seed in range(8)}
  assert len(firsts) == 8
  assert tuple(range(16)) not in firsts


def test_no_routing_stays_none():
  cut = rollout.minibatches(
    assembled(), jax.random.key(0), count=3, group=G, micro=2
  )
  assert cut.experts is None
  assert cut.tokens.shape == (3, 2, 2, S + R)


def test_dropped_choices_come_to_the_metrics(monkeypatch):
  """Were the layers to leave some out, the run would say so."""
  cfg = model.variant("tiny", dtype="float32")
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), cfg)
  prompts = Prompts(jnp.ones((P, S), jnp.int32), LENGTHS)
  zeros = jnp.zeros((B, R))
  samples = Samples(
    jnp.ones((B, R), jnp.int32), zeros, jnp.asarray(ANSWER_LENGTHS), None, None
  )
  options = {"use_sampler": True, "micro_rows": 4, "temperature": 1.0}
  score = lambda: rollout.score(params, cfg, prompts, samples, **options)[1]
  assert score()["moe/dropped"].value() == 0
  encode = model.encode
  lossy = lambda *a: encode(*a)._replace(dropped=jnp.array([2, 3]))
  monkeypatch.setattr(model, "encode", lossy)
  assert score()["moe/dropped"].value() == 3 * (2 + 3)  # three micro-batches
