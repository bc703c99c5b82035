"""Rollouts: answers in line with their prompts, groups whole in minibatches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import losses, model
from gspo_jax.learner import objective, train_batch
from gspo_jax.learner.train_batch import (
  MinibatchSplit,
  TrainBatch,
  TrainBatchFields,
)
from gspo_jax.logprobs import token_logprobs
from gspo_jax.losses import EDGES
from gspo_jax.sampler.samples import Prompts, Samples

P, G, S, R = 3, 4, 5, 6
B = P * G
LENGTHS = jnp.array([5, 1, 3])
ANSWER_LENGTHS = np.arange(B) % (R + 1)


def assembled():
  prompts = Prompts(100 + jnp.arange(P * S).reshape(P, S), LENGTHS)
  responses = 1000 + jnp.arange(B * R).reshape(B, R)
  return train_batch.make_train_batch(
    prompts, responses, jnp.asarray(ANSWER_LENGTHS)
  )


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


SHAPES = pytest.mark.parametrize(
  ("groups", "group", "count", "micro"),
  [(6, 4, 3, 2), (6, 4, 1, 24), (6, 4, 6, 1), (4, 3, 2, 6), (5, 2, 1, 5)],
)


def split(batch, key, count, group, micro):
  order = jax.random.permutation(key, batch.tokens.shape[0] // group)
  return MinibatchSplit(order, count, micro).split(batch)


@SHAPES
def test_what_was_cut_is_joined_again(groups, group, count, micro):
  whole = numbered(groups, group)
  order = jax.random.permutation(jax.random.key(1), groups)
  cut = MinibatchSplit(order, count, micro)
  fields = vars(cut.split(whole))
  assert whole.experts is not None
  joined = cut.join({k: x for k, x in fields.items() if x is not None})
  assert {"experts", "old_logps"} <= set(joined)
  for name, x in joined.items():
    np.testing.assert_array_equal(x, getattr(whole, name))


@SHAPES
def test_minibatches_hold_every_row_once_and_groups_whole(
  groups, group, count, micro
):
  whole = numbered(groups, group)
  cut = split(whole, jax.random.key(1), count, group, micro)
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
    split(whole, jax.random.key(seed), 4, 2, 4).advantages
  )
  assert (cut(0) == cut(0)).all()
  firsts = {tuple(cut(seed).flat) for seed in range(8)}
  assert len(firsts) == 8
  assert tuple(range(16)) not in firsts


def test_no_routing_stays_none():
  cut = split(assembled(), jax.random.key(0), 3, G, 2)
  assert cut.experts is None
  assert cut.tokens.shape == (3, 2, 2, S + R)


CFG = model.variant("tiny", dtype="float32")
DENSE = dataclasses.replace(CFG, num_experts=0, experts_per_token=0)


@functools.cache
def weights(cfg=CFG):
  init = jax.jit(model.init, static_argnums=1)
  return init(jax.random.key(0), cfg)


def texts(experts=None):
  """Prompts, and samples that no policy drew."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.integers(0, 256, shape).astype(np.int32)
  logps = -rng.random((B, R), np.float32)
  lengths = jnp.asarray(ANSWER_LENGTHS)
  samples = Samples(draw(B, R), logps, lengths, None, None, experts)
  return Prompts(draw(P, S), LENGTHS), samples


def anywhere():
  """Routes [B, L, T, k] that no router chose."""
  rng = np.random.default_rng(1)
  shape = (B, CFG.num_layers, S + R, CFG.num_experts)
  order = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
  return order[..., : CFG.experts_per_token].astype(np.uint8)


@functools.cache
def score(sent=False, cfg=CFG, instruments=True):
  """What the old policy says of `texts`: (rollout, metrics)."""
  prompts, samples = texts(anywhere() if sent else None)
  fields = TrainBatchFields(experts=True, router_logps=True)
  batch = train_batch.train_batch_from_samples(prompts, samples, cfg, fields)
  chosen = objective.Objective(
    losses.gspo_loss,
    replay="r3" if sent else "none",
    instruments=instruments,
  )
  run = functools.partial(
    objective.policy_loss, cfg=cfg, objective=chosen, temperature=0.7
  )
  found = jax.device_get(jax.jit(run)(weights(cfg), batch, True))
  batch = dataclasses.replace(jax.device_get(batch), **found.old)
  return batch, found.measured


def forced(batch, **sent):
  """`token_logprobs` of all rows of a rollout at once."""
  run = functools.partial(
    token_logprobs, cfg=CFG, response_length=R, temperature=0.7
  )
  text = {"tokens": batch.tokens, "positions": batch.positions}
  replay = "routes" in sent
  return jax.jit(functools.partial(run, replay=replay))(
    weights(), **text, mask=batch.mask, **sent
  )


@pytest.mark.parametrize("sent", [False, True])
def test_the_routing_kept_is_the_one_scored_under(sent):
  """R2: the old policy's own; R3: the sampler's, wherever that went."""
  batch, _ = score(sent)
  routes = {"routes": anywhere().swapaxes(0, 1)} if sent else {}
  expected = forced(batch, **routes)
  np.testing.assert_allclose(batch.old_logps, expected.logps, atol=1e-5)
  equal = np.testing.assert_array_equal
  equal(batch.experts, np.swapaxes(expected.experts, 0, 1))
  assert batch.experts.dtype == np.uint8
  assert batch.experts.shape == (B, 2, S + R, 2)
  router = np.swapaxes(expected.router_logps, 0, 1)
  np.testing.assert_allclose(batch.router_logps, router, atol=1e-5)
  if sent:
    equal(batch.experts, anywhere())
    assert np.abs(batch.old_logps - forced(batch).logps).mean() > 0.01


def test_a_rollout_has_what_the_update_reads():
  prompts, samples = texts()
  make = functools.partial(
    train_batch.train_batch_from_samples, prompts, samples, CFG
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
  assert whole.router_logps.shape == (B, 2, R, 2)
  for x in (whole.reference_logps, whole.values, whole.advantages):
    assert x.shape == (B, R)


def test_the_metrics_of_the_routing():
  batch, metrics = score()
  mask = batch.response_mask
  entropy = np.asarray(forced(batch).router_entropy)
  expected = [layer[mask].mean() for layer in entropy]
  found = metrics["moe/layer_router_entropy"].value()
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  load = metrics["moe/layer_load_max"].value()
  assert load.shape == (2,)
  assert (load > 1).all()
  for name in ("router_entropy", "load_max"):
    layers = metrics[f"moe/layer_{name}"].value()
    mean = metrics[f"moe/{name}"].value()
    assert mean == pytest.approx(layers.mean(), rel=1e-5)


def test_the_gap_is_the_trainer_s_less_the_sampler_s():
  batch, metrics = score()
  _, samples = texts()
  gap, mask = batch.old_logps - samples.logps, batch.response_mask
  of_rows = [row[m].mean() for row, m in zip(gap, mask, strict=True) if m.any()]
  for unit, values in (("token", gap[mask]), ("sequence", of_rows)):
    counts = metrics[f"mismatch/{unit}_gap"].value()
    np.testing.assert_array_equal(counts, np.histogram(values, EDGES)[0])
    mean = metrics[f"mismatch/{unit}_abs_mean"].value()
    assert mean == pytest.approx(np.abs(values).mean(), rel=1e-5)


def test_instruments_that_are_left_out_are_those_that_there_are():
  _, metrics = score()
  _, kept = score(instruments=False)
  assert set(kept) < set(metrics)
  assert set(metrics) - set(kept) < set(objective.INSTRUMENTS)
  assert all(np.ndim(metric.value()) == 0 for metric in kept.values())


def test_a_dense_model_has_no_routing():
  batch, metrics = score(cfg=DENSE)
  assert batch.experts is batch.router_logps is None
  assert not [name for name in metrics if name.startswith("moe/")]


def test_dropped_choices_come_to_the_metrics(monkeypatch):
  """Were the layers to leave some out, the run would say so."""
  assert score()[1]["moe/dropped"].value() == 0
  encode = model.hidden_states

  def lossy(*args, **options):
    out = encode(*args, **options)
    dropped = jnp.array([2, 3])
    return out._replace(routing=out.routing._replace(dropped=dropped))

  monkeypatch.setattr(model, "encode", lossy)
  _, metrics = score.__wrapped__()
  assert metrics["moe/dropped"].value() == 2 + 3
