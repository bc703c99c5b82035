"""Continuous refill draws what the static sampler draws, in fewer steps."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from benchmarks import lengths
from gspo_jax import model, sampler
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler import continuous
from gspo_jax.sampler.paging import ContinuousBatchingConfig
from gspo_jax.sampler.samples import STOPPED, UNFINISHED, Prompts, SamplerConfig

P, S, G, R = 8, 14, 3, 24
DRAW = SamplerConfig(G, R, stop_ids=(3, 5), temperature=0.9, pad_id=7)
CFG = model.variant("tiny", vocab_size=32, dtype="float32")
SMALL = ContinuousBatchingConfig(
  slots=4, page_size=4, segment_steps=6, prefill_chunk=8
)


@functools.cache
def weights(seed=0):
  return jax.jit(model.init, static_argnums=1)(jax.random.key(seed), CFG)


def prompts():
  """Of all lengths from one token on, padded on the left."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(6, 32, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array([1, 2, 4, 5, 8, 9, 13, S], np.int32))


def build(paging, draw=DRAW, cfg=CFG, axes=None, prompt=S):
  """Compiled once for all tests that ask for the same."""
  return _built(paging, draw, cfg, tuple((axes or {}).items()), prompt)


@functools.cache
def _built(paging, draw, cfg, axes, prompt):
  devices = jax.devices()[: 8 if axes else 1]
  mesh = sharding.make_mesh(devices, **dict(axes))
  abstract = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
  return continuous.build(
    cfg,
    draw,
    paging=paging,
    prompt=prompt,
    params=sharding.state_shardings(abstract, mesh),
    mesh=mesh,
    decoding=mesh,
  )


@functools.cache
def generate(draw=DRAW):
  return jax.jit(functools.partial(sampler.generate, sampler=draw, cfg=CFG))


@functools.cache
def static(draw=DRAW, key=1, seed=0):
  drawn = generate(draw)(
    weights(seed), prompts=prompts(), key=jax.random.key(key)
  )
  assert (drawn.lengths == R).any() != (drawn.lengths == R).all()
  return jax.device_get(drawn)


def assert_same(drawn, wanted):
  for name in ("tokens", "lengths", "finish"):
    found = getattr(drawn, name)
    np.testing.assert_array_equal(found, getattr(wanted, name), name)
  np.testing.assert_allclose(drawn.logps, wanted.logps, atol=2e-5)


PAGINGS = {
  "four slots": SMALL,
  "one slot": dataclasses.replace(SMALL, slots=1),
  "more slots than answers": dataclasses.replace(SMALL, slots=32),
  "long segments, one chunk": dataclasses.replace(
    SMALL, segment_steps=99, prefill_chunk=16
  ),
  "so few pages that answers start again": dataclasses.replace(
    SMALL, slots=6, num_pages=13
  ),
}


@pytest.mark.parametrize("name", PAGINGS)
def test_answers_are_those_of_the_static_sampler(name):
  """The same key, whatever the slots, the pages and the neighbours."""
  draw = build(PAGINGS[name])
  assert_same(draw(weights(), prompts(), jax.random.key(1)), static())


def test_a_greedy_answer_a_prompt():
  draw = SamplerConfig(1, R, stop_ids=(3, 5), temperature=0, pad_id=7)
  key = jax.random.key(0)
  wanted = generate(draw)(weights(), prompts=prompts(), key=key)
  assert_same(build(SMALL, draw)(weights(), prompts(), key), wanted)


def test_another_call_another_key_and_other_weights():
  draw = _built.__wrapped__(SMALL, DRAW, CFG, (), S)  # nobody else called it
  first, again, other, improved = (
    draw(weights(seed), prompts(), jax.random.key(key))
    for key, seed in ((1, 0), (1, 0), (2, 0), (2, 1))
  )
  assert_same(first, again)
  assert_same(other, static(key=2))
  assert_same(improved, static(key=2, seed=1))  # by the weights of that call
  assert (first.tokens != other.tokens).any()
  # Prefills of one text and of several, of up to 8 tokens and of up to 16.
  assert draw.buckets(continues=False) == (8, 16)
  assert draw.devices.prefill.jitted._cache_size() <= 4
  assert draw.devices.decode.jitted._cache_size() == 2  # all slots, and one
  once = {k for k, most in draw.compilations().items() if most == 1}
  assert once == {"lay_out", "begin", "peek", "finish"}
  for name in once - {"peek"}:
    assert getattr(draw.devices, name).jitted._cache_size() == 1, name
  said = draw.describe(continues=False)
  assert said.endswith("prefills of up to 8, 16 tokens")


@pytest.mark.parametrize("axes", [None, {"data": 2, "expert": 2, "tensor": 2}])
def test_a_part_of_the_slots_is_enough_for_the_last_answers(axes):
  """A quarter of each shard's 64 or 16, for a group of 3 that goes on."""
  wide = dataclasses.replace(CFG, vocab_size=128)
  params = lengths.countdown(model.init(jax.random.key(0), wide))
  each, seen = np.array([2, 3, 2, 24, 4, 2, 3, 2]), []
  how = SamplerConfig(3, 24, stop_ids=(lengths.STOP,))
  many = ContinuousBatchingConfig(
    slots=64, page_size=8, segment_steps=2, prefill_chunk=8
  )
  draw = build(many, how, wide, axes, prompt=8)

  def decode(params, state, samples, orders, few, floor, key):
    active = np.asarray(orders.active).reshape(draw.shards, -1)
    before = int(samples.slot_steps)
    state, samples = draw.devices.decode(
      params, state, samples, orders, few, floor, key
    )
    computed = 64 if few is None else few.size
    steps, rest = divmod(int(samples.slot_steps) - before, computed)
    assert 0 < steps <= many.steps
    assert not rest
    new = bool(np.asarray(orders.new).any())
    seen.append((computed, active, new))
    if few is not None:
      which, own = np.asarray(few).reshape(draw.shards, -1), active.shape[1]
      assert which.shape[1] == own // 4
      assert np.unique(which).size == which.size
      assert (which // own == np.arange(draw.shards)[:, None]).all()
      assert active.ravel()[which].sum() == active.sum()
    return state, samples

  functions = dataclasses.replace(draw.devices, decode=decode)
  spied = dataclasses.replace(draw, devices=functions)
  drawn = spied(params, lengths.prompts(each, 8), jax.random.key(0))
  left = np.repeat(each, 3)[:, None] - 1 - np.arange(24)
  np.testing.assert_array_equal(drawn.lengths, np.repeat(each, 3))
  np.testing.assert_array_equal(drawn.tokens, np.maximum(left, 0))
  few = 64 // draw.shards // 4
  for computed, active, new in seen:
    assert (computed < 64) == (active.sum(1).max() <= few and not new)
  assert {computed for computed, *_ in seen} == {64, 16}


@pytest.mark.parametrize(
  "axes",
  [{"data": 2, "expert": 2, "tensor": 2}, {"data": 8}],
  ids=["2 x 2 x 2", "data 8"],
)
def test_on_eight_devices(axes):
  draw = build(dataclasses.replace(SMALL, slots=8), axes=axes)
  assert_same(draw(weights(), prompts(), jax.random.key(1)), static())


def test_slot_steps_follow_the_answers():
  """Few are idle, and all are counted."""
  draw = SamplerConfig(4, 96, stop_ids=(lengths.STOP,))
  cfg = dataclasses.replace(CFG, vocab_size=128)
  params = lengths.countdown(model.init(jax.random.key(0), cfg))
  each = lengths.long_tailed(48, 96)
  run = build(
    ContinuousBatchingConfig(
      slots=5, page_size=8, segment_steps=8, prefill_chunk=8
    ),
    draw,
    cfg,
    prompt=8,
  )
  drawn = run(params, lengths.prompts(each, 8), jax.random.key(0))
  np.testing.assert_array_equal(
    drawn.lengths.reshape(-1, 4), each[:, None] * np.ones(4)
  )
  useful = drawn.lengths.sum() / drawn.slot_steps
  assert 0.85 < useful < 1
  static = drawn.lengths.mean() / 96
  assert useful > 3 * static


def test_prompts_of_another_width_are_refused():
  with pytest.raises(UserError, match=r"\(8, 14\): expected \[P, 15\]"):
    build(SMALL, prompt=S + 1)(weights(), prompts(), jax.random.key(1))


def test_what_a_first_attempt_left_is_cleared():
  drawn = jax.device_get(build(SMALL)(weights(), prompts(), jax.random.key(1)))
  long = dataclasses.replace(drawn, lengths=np.ones(P * G, np.int32))
  cut = build(SMALL).devices.finish(long)
  assert (cut.tokens[:, 1:] == DRAW.pad_id).all()
  assert not cut.logps[:, 1:].any()
  np.testing.assert_array_equal(cut.tokens[:, 0], drawn.tokens[:, 0])


@pytest.mark.parametrize(
  ("name", "axes"),
  [
    ("four slots", None),
    ("so few pages that answers start again", None),
    ("more slots than answers", {"data": 2, "expert": 2, "tensor": 2}),
  ],
)
def test_the_routing_is_that_of_the_static_sampler(name, axes):
  """Of prompts, which all answers share, and of answers; any k elsewhere."""
  record = dataclasses.replace(DRAW, record_routing=True)
  wanted, draw = static(record), build(PAGINGS[name], record, axes=axes)
  drawn = jax.device_get(draw(weights(), prompts(), jax.random.key(1)))
  assert_same(drawn, wanted)
  assert drawn.experts.shape == wanted.experts.shape
  assert drawn.experts.dtype == wanted.experts.dtype
  asked = np.repeat(prompts().lengths, G)[:, None]
  slot = np.arange(S + R)
  fed = (slot >= S - asked) & (slot < S + drawn.lengths[:, None] - 1)
  sets = lambda x: np.sort(x.swapaxes(1, 2)[fed])
  np.testing.assert_array_equal(sets(drawn.experts), sets(wanted.experts))
  assert (drawn.experts[..., 0] != drawn.experts[..., 1]).all()


def test_routing_is_not_recorded_over_several_calls():
  draw = build(SMALL, dataclasses.replace(DRAW, record_routing=True))
  rest = {"until": np.full(P * G, 3)}
  with pytest.raises(UserError, match="until: expected neither"):
    draw(weights(), prompts(), jax.random.key(1), **rest)


def test_long_texts_are_prefilled_a_few_at_a_time():
  """A prefill takes an eighth of the pages."""
  pages = build(SMALL).sizes.pages * SMALL.page
  assert pages == 176
  assert [build(SMALL).at_once(T) for T in (1, 2, 8, 16, 640)] == [
    8,
    8,
    2,
    1,
    1,
  ]


def test_a_shard_without_work_waits_for_the_others():
  """And what one is told of an answer is of that answer, on all shards."""
  axes = {"data": 2, "expert": 2, "tensor": 2}
  draw = build(dataclasses.replace(SMALL, slots=32), axes=axes)
  begun, have = None, np.arange(P * G) // G  # of each question another number
  for until in (have, np.where(have < 4, 0, R), np.full(P * G, R)):
    begun = draw(
      weights(), prompts(), jax.random.key(1), begun=begun, until=until
    )
  assert_same(begun, static())
  assert draw.devices.decode.jitted._cache_size() == 2  # few slots, too


def test_a_cut_answer_goes_on_as_if_it_had_not_been_cut():
  """In stints of 7 tokens, with the same key: as at once, and none is lost."""
  draw, samples = build(SMALL), None
  for have in (7, 14, 21, 28):
    samples = draw(
      weights(),
      prompts(),
      jax.random.key(1),
      begun=samples,
      until=np.full(P * G, have),
    )
    wanted = static().lengths
    np.testing.assert_array_equal(samples.lengths, np.minimum(wanted, have))
    paused = samples.finish == UNFINISHED
    np.testing.assert_array_equal(paused, wanted > have)
  assert_same(samples, static())
  assert draw.devices.decode.jitted._cache_size() == 2


def test_answers_that_ended_are_left_alone():
  draw = build(SMALL)
  until = np.where(np.arange(P * G) % 2, R, 5)
  begun = draw(weights(), prompts(), jax.random.key(1), until=until)
  before = jax.device_get(begun)
  # Another key: what is drawn now is not what would have been drawn then.
  after = draw(weights(), prompts(), jax.random.key(2), begun=begun)
  ended = before.finish != UNFINISHED
  assert 0 < ended.sum() < P * G
  for name in ("tokens", "logps", "lengths", "finish"):
    found = np.asarray(getattr(after, name))
    np.testing.assert_array_equal(found[ended], getattr(before, name)[ended])
  first = np.asarray(after.tokens)[~ended, :5]
  np.testing.assert_array_equal(first, before.tokens[~ended, :5])
  assert (after.finish != UNFINISHED).all()
  assert (np.asarray(after.tokens) != static().tokens)[~ended].any()


@pytest.mark.parametrize("axes", [None, {"data": 2, "expert": 2, "tensor": 2}])
def test_it_tells_of_each_answer_once_as_it_ends(axes):
  told, calls = {}, []

  def tell(ended):
    assert not told.keys() & ended.keys()
    told.update(ended)
    calls.append(len(ended))

  draw = build(dataclasses.replace(SMALL, slots=32), axes=axes)
  samples = draw(weights(), prompts(), jax.random.key(1), tell=tell)
  assert sorted(told) == list(range(P * G))
  assert len(calls) > 2
  for answer, ended in told.items():
    assert ended.length == samples.lengths[answer]
    assert ended.stopped == (samples.finish[answer] == STOPPED)
    np.testing.assert_array_equal(
      ended.tokens[: ended.length], samples.tokens[answer, : ended.length]
    )


def test_it_tells_while_the_next_segment_is_decoded():
  events, draw = [], build(SMALL)

  def watched(name):
    def call(*args):
      events.append(name)
      return getattr(draw.devices, name)(*args)

    return call

  spied = {name: watched(name) for name in ("decode", "peek")}
  tell = lambda ended: events.append("tell")
  functions = dataclasses.replace(draw.devices, **spied)
  sample = dataclasses.replace(draw, devices=functions)
  sample(weights(), prompts(), jax.random.key(1), tell=tell)
  assert events.count("tell") == events.count("peek") > 2
  for i in np.flatnonzero(np.array(events[:-2]) == "peek").tolist():
    assert events[i + 1 : i + 3] == ["decode", "tell"]
  assert events[-2:] == ["peek", "tell"]  # none is left to decode


def test_it_does_not_tell_of_answers_that_pause():
  told = {}
  draw, until = build(SMALL), np.full(P * G, 7)
  rest = {"until": until, "tell": told.update}
  samples = draw(weights(), prompts(), jax.random.key(1), **rest)
  ended = np.flatnonzero(samples.finish != UNFINISHED)
  assert 0 < len(ended) < P * G
  assert sorted(told) == ended.tolist()
