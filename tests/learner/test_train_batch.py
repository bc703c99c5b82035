"""Train batches: each token of a response is where the packing says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import unpacked
from families import DENSE
from random_model import weights

from benchmarks import pod
from gspo_jax import model
from gspo_jax.learner import critic, packing, reference_pass, train_batch
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.packing import PackingConfig
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.learner.train_step import TrainState
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import Prompts, Samples

P, G, S, R, L, K = 8, 8, 5, 6, 2, 2
B, W = P * G, S + R
PROMPT_LENGTHS = np.array([5, 1, 3, 2, 5, 4, 1, 2], np.int32)
LENGTHS = (np.arange(B) % (R + 1)).astype(np.int32)  # of responses; some empty
# Numbered: the tokens of prompts from 100, of responses from 1000.
PROMPTS = Prompts(
  (100 + np.arange(P * S)).reshape(P, S).astype(np.int32), PROMPT_LENGTHS
)
TOKENS = (1000 + np.arange(B * R)).reshape(B, R).astype(np.int32)
LOGPS = -np.random.default_rng(0).random((B, R), np.float32)
EXPERTS = np.random.default_rng(1).integers(0, 8, (B, L, W, K), np.uint8)
KEPT = np.random.default_rng(2).integers(0, 99, (B, 3, R), np.int32)
CFG = PackingConfig(W, minibatches=2, micro_batch_size=8, shards=8)


def packed_lengths():
  return np.where(LENGTHS > 0, PROMPT_LENGTHS.repeat(G) + LENGTHS, 0)


@functools.cache
def placed(width):
  order = packing.shuffled_groups(jax.random.key(0), P, G)
  cfg = dataclasses.replace(CFG, width=width)
  return packing.pack(packed_lengths(), order, cfg), cfg


def pack(width=W, devices=1, experts=EXPERTS, turns=None, **mesh):
  """The batch on the host, of a mesh of these devices."""
  places, cfg = placed(width)
  mesh = sharding.make_mesh(jax.devices()[:devices], **mesh)
  with jax.set_mesh(mesh):
    rows = sharding.batch_sharding(mesh)
    put = lambda x: jax.device_put(x, rows)
    batch = jax.jit(packing.pack_responses, static_argnames="cfg")(
      *map(put, (PROMPTS, TOKENS, LENGTHS)),
      places,
      cfg=cfg,
      logps=put(LOGPS),
      experts=None if experts is None else put(experts),
      of_ids={"kept_ids": put(KEPT), "head_ids": None},
      turns=None if turns is None else put(turns),
    )
  return places, jax.device_get(batch)


@pytest.fixture(scope="module", params=[W, 2 * W])
def batch(request):
  """(packing, its batch on one device), of narrow rows and of wide ones."""
  return pack(request.param)


def each_row(batch):
  """[B, ...] leaves: rows through all minibatches."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), batch.rows)


def sequences(places):
  """(response, row, columns of its prompt, columns of its response)."""
  for b in np.flatnonzero(LENGTHS):
    n, first = PROMPT_LENGTHS[b // G], places.offset[b]
    middle = first + n
    prompt, response = range(first, middle), range(middle, middle + LENGTHS[b])
    yield b, places.row[b], list(prompt), list(response)


def test_a_prompt_and_its_response_stand_where_they_were_packed(batch):
  places, packed = batch
  rows = each_row(packed)
  expected = np.zeros_like(rows.tokens)
  positions, segments = np.zeros_like(expected), np.zeros_like(expected)
  for b, row, prompt, response in sequences(places):
    n, both = len(prompt), prompt + response
    expected[row, prompt] = PROMPTS.tokens[b // G, S - n :]
    expected[row, response] = TOKENS[b, : LENGTHS[b]]
    positions[row, both] = range(len(both))
    earlier = (places.row == row) & (places.offset <= places.offset[b])
    segments[row, both] = earlier.sum()
  np.testing.assert_array_equal(rows.tokens, expected)
  np.testing.assert_array_equal(rows.positions, positions)
  np.testing.assert_array_equal(rows.segment_ids, segments)
  assert rows.segment_ids.max() > 1  # several share a row


def test_what_an_environment_wrote_is_read_and_not_learnt():
  """Only the mask and the sampler's log-probs know of turns."""
  turns = np.random.default_rng(2).integers(0, 3, (B, R), np.int16)
  places, packed = pack(experts=None, turns=turns)
  _, single = pack(experts=None)
  rows, whole = each_row(packed), each_row(single)
  mask = np.zeros(rows.tokens.shape, bool)
  for b, row, _, response in sequences(places):
    mask[row, response] = turns[b, : LENGTHS[b]] > 0
  np.testing.assert_array_equal(rows.response_mask, mask[:, 1:])
  assert 0 < mask.sum() < whole.response_mask.sum()
  for name in ("tokens", "positions", "segment_ids"):
    np.testing.assert_array_equal(getattr(rows, name), getattr(whole, name))
  expected = np.where(mask[:, 1:], whole.sampler_logps, 0)
  np.testing.assert_array_equal(rows.sampler_logps, expected)


def test_response_fields_are_at_the_tokens_of_responses(batch):
  places, packed = batch
  rows = each_row(packed)
  mask = np.zeros(rows.tokens.shape, bool)
  index, logps = np.zeros(mask.shape, int), np.zeros(mask.shape, np.float32)
  for b, row, _, response in sequences(places):
    mask[row, response] = True
    index[row, response] = b
    logps[row, response] = LOGPS[b, : LENGTHS[b]]
  # The first token of a row is never of a response: the columns leave it out.
  assert not mask[:, 0].any()
  np.testing.assert_array_equal(rows.response_mask, mask[:, 1:])
  np.testing.assert_array_equal(rows.response_index, index[:, 1:])
  np.testing.assert_array_equal(rows.sampler_logps, logps[:, 1:])
  segments = rows.segment_ids[:, 1:]
  np.testing.assert_array_equal(rows.response_segments, segments)
  for zeros in (rows.old_logps, rows.advantages):
    assert zeros.shape == rows.response_mask.shape
    assert zeros.dtype == np.float32
    assert not zeros.any()


def test_recorded_experts_and_kept_ids_are_those_of_their_tokens(batch):
  places, packed = batch
  rows = each_row(packed)
  assert rows.experts.shape == (B, L, rows.tokens.shape[1], K)
  assert rows.experts.dtype == np.uint8
  assert rows.kept_ids.shape == (B, 3, rows.tokens.shape[1] - 1)
  same = np.testing.assert_array_equal
  for b, row, prompt, response in sequences(places):
    experts = EXPERTS[b, :, S - len(prompt) : S + len(response)]
    same(rows.experts[row][:, prompt + response], experts)
    columns = np.array(response) - 1
    same(rows.kept_ids[row][:, columns], KEPT[b, :, : len(response)])


def test_rows_are_cut_into_minibatches_and_micro_batches(batch):
  places, packed = batch
  assert packed.rows.tokens.shape[:3] == (2, B // 2 // 8, 8)
  np.testing.assert_array_equal(
    packed.num_micro_batches, places.num_micro_batches
  )
  used = packed.rows.segment_ids.any((2, 3))
  np.testing.assert_array_equal(used.sum(1), packed.num_micro_batches)


@pytest.mark.parametrize(
  "mesh",
  [{"data": 8}, {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2},
   {"data": 2, "context": 2, "expert": 2}],
)  # fmt: skip
def test_on_eight_devices_the_batch_is_the_same(mesh):
  """Each packs its own rows; experts and kept ids at padding are any."""
  turns = np.random.default_rng(2).integers(0, 3, (B, R), np.int16)
  _, one = pack(turns=turns)
  _, eight = pack(devices=8, turns=turns, **mesh)
  same = np.testing.assert_array_equal
  real = np.moveaxis(one.rows.segment_ids > 0, -1, 0)
  experts = lambda x: np.moveaxis(x.rows.experts, 4, 0)[real]
  same(experts(one), experts(eight))
  kept = lambda x: np.moveaxis(x.rows.kept_ids, 4, 0)[real[1:]]
  same(kept(one), kept(eight))
  bare = lambda x: x._replace(
    rows=dataclasses.replace(x.rows, experts=None, kept_ids=None)
  )
  jax.tree.map(same, bare(one), bare(eight))


def test_a_device_receives_its_part_however_many_there_are():
  row = 128 * (1024 + 16384)
  for devices in (8, 512):
    received = pod.packing_bytes(
      data=2, fsdp=devices // 8, expert=4, routing=True
    )
    # Tokens, log-probs and experts of 48 layers, twice.
    assert received["all_to_all"] == 2 * row * (4 + 4 + 48 * 8)
    # Lengths of prompts, and of prompts with responses.
    assert received["all_gather"] == 2 * 4 * 128 * devices


def test_the_reference_runs_on_the_micro_batches_that_hold_responses(
  monkeypatch,
):
  _, packed = pack(experts=None)
  packed = packed._replace(num_micro_batches=np.array([1, 4], np.int32))
  packed = jax.tree.map(jnp.asarray, packed)
  double = lambda params, cfg, batch, **_: TokenLogprobs(
    2.0 * batch.tokens[:, 1:], None
  )
  monkeypatch.setattr(train_batch, "response_logps", double)
  logps = packed.rows.old_logps - 1
  rows = dataclasses.replace(packed.rows, reference_logps=logps)
  result = reference_pass.add_reference_and_values(
    TrainState(0, {}, (), reference={}),
    packed._replace(rows=rows),
    cfg=None,
    temperature=1.0,
  )
  expected = 2.0 * packed.rows.tokens[..., 1:]
  expected = expected.at[0, 1:].set(-1)  # not computed: what the batch has
  np.testing.assert_array_equal(result.rows.reference_logps, expected)


def test_unpacked_responses_have_a_row_each():
  rows = train_batch.unpacked(PROMPTS, TOKENS, LENGTHS)
  for b in range(B):
    n, m = PROMPT_LENGTHS[b // G], LENGTHS[b]
    prompt, response = PROMPTS.tokens[b // G], TOKENS[b]
    assert rows.tokens[b].tolist() == [*prompt, *response]
    assert rows.positions[b].tolist() == [0] * (S - n) + [*range(n + R)]
    mask = [0] * (S - n) + [1] * (n + m) + [0] * (R - m)
    assert rows.segment_ids[b].tolist() == mask
    assert rows.response_mask[b].tolist() == [True] * m + [False] * (R - m)
    assert set(rows.response_index[b].tolist()) == {b}
  assert rows.old_logps.shape == rows.advantages.shape == (B, R)


def test_packed_rows_have_the_log_probs_and_values_of_single_rows():
  cfg = dataclasses.replace(DENSE, vocab_size=2048)
  head = np.random.default_rng(3).normal(size=cfg.embed_dim)
  params = weights(cfg) | {"value_head": head.astype(np.float32)}
  both = jax.jit(
    lambda rows: (
      train_batch.response_logps(params, cfg, rows).logps,
      critic.values(params, cfg, rows),
    )
  )
  _, packed = pack(2 * W, experts=None)
  rows = dataclasses.replace(each_row(packed), kept_ids=None)
  shape = packed.rows.old_logps.shape
  logps, values = (x.reshape(shape) for x in both(rows))
  rows = dataclasses.replace(packed.rows, old_logps=logps, values=values)
  found = unpacked.by_response(packed._replace(rows=rows), LENGTHS, R)
  alone = both(train_batch.unpacked(PROMPTS, TOKENS, LENGTHS))
  mask = np.arange(R) < LENGTHS[:, None]
  for name, expected in zip(("old_logps", "values"), alone, strict=True):
    np.testing.assert_allclose(found[name][mask], expected[mask], atol=2e-5)


def test_a_train_batch_has_the_fields_that_the_update_reads():
  places, packing_config = placed(W)
  make = functools.partial(
    packing.train_batch_from_samples,
    PROMPTS,
    Samples(TOKENS, LOGPS, LENGTHS, None, None),
    places,
    cfg=model.variant("tiny"),
    instruments=False,
    packing_config=packing_config,
  )
  plain = make(objective=ObjectiveConfig()).rows
  assert isinstance(plain, TrainBatch)
  mask = np.asarray(plain.response_mask)
  logps = LOGPS[np.arange(R) < LENGTHS[:, None]]
  assert sorted(plain.sampler_logps[mask].tolist()) == sorted(logps.tolist())
  assert not plain.old_logps.any()
  assert plain.reference_logps is plain.values is plain.returns is None
  assert plain.experts is plain.router_logps is None
  trusting = make(objective=ObjectiveConfig(old_logps="sampler")).rows
  np.testing.assert_array_equal(trusting.old_logps, plain.sampler_logps)
  replayed = make(objective=ObjectiveConfig(replay="r2")).rows
  assert replayed.router_logps is None
  whole = make(
    objective=ObjectiveConfig("ppo:router_shift_floor=0.5", kl_coef=0.1)
  ).rows
  lead = (2, 4, 8)
  for rows in (replayed, whole):
    assert rows.experts.shape == (*lead, L, W, K)
    assert rows.experts.dtype == np.uint8
  assert whole.router_logps.shape == (*lead, L, W - 1, K)
  for x in (whole.reference_logps, whole.values, whole.returns):
    assert x.shape == (*lead, W - 1)
