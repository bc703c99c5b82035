"""Continuous batching gives the static sampler's samples, in fewer steps."""

import dataclasses
import functools
from types import SimpleNamespace

import continuous_sampler
import jax
import numpy as np
import pytest
from continuous_sampler import Letters, assert_same, spied
from families import SHORT
from random_model import weights as random_weights

from benchmarks import lengths as known_lengths
from benchmarks import pod
from gspo_jax import model, sampler
from gspo_jax.learner import train_batch
from gspo_jax.plan.iteration.decoding import replay
from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler import stop_strings
from gspo_jax.sampler.continuous import config as continuous_config
from gspo_jax.sampler.continuous import jit, placement
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import STOPPED, UNFINISHED, Prompts, SamplerConfig

P, S, G, R = 8, 14, 3, 24
B = P * G
PAD = 7
SAMPLED = SamplerConfig(
  G, R, stop_ids=(known_lengths.STOP, 31), temperature=0.9, pad_id=PAD
)
ROUTING = dataclasses.replace(SAMPLED, record_routing=True)
GREEDY = SamplerConfig(1, R, stop_ids=(3, 5), temperature=0, pad_id=PAD)
CFG = model.variant("tiny", vocab_size=32, num_layers=1, dtype="float32")
SMALL = ContinuousBatchingConfig(
  slots=8, page_size=4, segment_steps=6, prefill_chunk=8
)
MESH = {"data": 2, "expert": 2, "tensor": 2}
KEY = 1
OTHERS = [name for name in SHORT if name != "gpt-oss"]


@functools.cache
def weights(seed=0):
  return jax.jit(model.init, static_argnums=1)(jax.random.key(seed), CFG)


def prompts():
  """Of many lengths from one token on, padded on the left."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(6, 32, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array([1, 2, 4, 5, 8, 9, 13, S], np.int32))


def build(batching=SMALL, config=SAMPLED, prompt=S, cfg=CFG, **axes):
  devices = 8 if axes else 1
  return continuous_sampler.build(
    cfg, config, batching, prompt, devices=devices, **axes
  )


# Each is compiled once for all tests of this file.
@functools.cache
def one_device():
  return build()


@functools.cache
def few_pages():
  """So few that responses start again; routing is recorded."""
  batching = dataclasses.replace(SMALL, slots=6, num_pages=13)
  return build(batching, ROUTING)


@functools.cache
def one_slot():
  """Long segments, prefills of one chunk, one greedy response a prompt."""
  batching = dataclasses.replace(
    SMALL, slots=1, segment_steps=99, prefill_chunk=16
  )
  return build(batching, GREEDY)


@functools.cache
def eight_devices():
  return build(dataclasses.replace(SMALL, slots=16), ROUTING, **MESH)


@functools.cache
def jitted_logps(replay):
  return jax.jit(
    functools.partial(
      train_batch.response_logps,
      cfg=CFG,
      temperature=SAMPLED.temperature,
      replay=replay,
    )
  )


def replayed(samples, seed=0, *, replay=True):
  """The pass over whole responses, by default with their experts."""
  batch = train_batch.unpacked(prompts(), samples.tokens, samples.lengths)
  routes = samples.experts.swapaxes(0, 1)
  out = jitted_logps(replay)(weights(seed), batch=batch, routes=routes)
  return jax.device_get(out)


def run(generate, *, seed=0, key=KEY, **options):
  samples = generate(weights(seed), prompts(), jax.random.key(key), **options)
  return jax.device_get(samples)


@functools.cache
def jitted_static(config):
  return jax.jit(functools.partial(sampler.generate, cfg=CFG, sampler=config))


@functools.cache
def static(config=SAMPLED, *, key=KEY, seed=0):
  """The samples of the static sampler, with their routing."""
  generate = jitted_static(dataclasses.replace(config, record_routing=True))
  samples = generate(weights(seed), prompts=prompts(), key=jax.random.key(key))
  return jax.device_get(samples)


assert_same_routing = functools.partial(
  continuous_sampler.assert_same_routing, prompts=prompts()
)


@pytest.mark.parametrize(
  "make",
  [one_device, few_pages, one_slot, eight_devices],
)
def test_samples_are_those_of_the_static_sampler(make):
  """With the same key, whatever the slots, the pages and the neighbours."""
  generate, counts = make(), []
  count = lambda n, tokens: counts.append((n, tokens))
  expected = static(generate.config)
  progress = SimpleNamespace(advance=count, note="")
  samples = run(generate, progress=progress)
  several = generate.shards > 1
  assert progress.note.startswith("; fullest: shard ") == several
  assert (expected.lengths == R).any() != (expected.lengths == R).all()
  assert_same(samples, expected)
  if generate.config.record_routing:
    assert_same_routing(samples, expected)
  else:
    assert samples.experts is None
  finished, tokens = np.sum(counts, axis=0)
  assert finished == len(samples.lengths)
  if make is few_pages:  # some were preempted
    assert tokens > samples.lengths.sum()
  else:
    assert tokens == samples.lengths.sum()


def test_another_call_another_key_and_other_weights():
  generate = one_device()
  first, again = run(generate), run(generate)
  assert_same(first, again)
  other = run(generate, key=2)
  assert_same(other, static(key=2))
  assert (first.tokens != other.tokens).any()
  assert_same(run(generate, key=2, seed=1), static(key=2, seed=1))
  assert generate.jitted.decode.num_programs == 1  # 8 slots
  several = [n for n, f in vars(generate.jitted).items() if f.most > 1]
  assert several == ["prefill", "write_prefix_routing"]
  assert generate.buckets(continues=False) == (8, 16)
  line = generate.describe(continues=False)
  assert line.startswith("continuous batching: 8 slots, 88 pages of 4 ")
  assert line.endswith("prefills of up to 8, 16 tokens")


@pytest.mark.parametrize("make", [one_device, eight_devices])
def test_a_subset_of_the_slots_is_computed_for_the_last_responses(
  make, monkeypatch
):
  """Of each shard's 8 or 4 a half or quarter that holds all, and none new."""
  monkeypatch.setattr(jit, "_FEWEST_ROWS", 2)
  generate, segments, steps_of_segments = make(), [], []
  slots, shards = generate.batching.slots, generate.shards

  def decode(params, state, samples, plan, compute_slots, *rest):
    before = int(samples.slot_steps)
    state, samples, results = generate.jitted.decode(
      params, state, samples, plan, compute_slots, *rest
    )
    computed = slots if compute_slots is None else compute_slots.size
    steps, remainder = divmod(int(samples.slot_steps) - before, computed)
    assert 0 <= steps <= generate.batching.segment_steps
    steps_of_segments.append(steps)
    assert not remainder
    active = np.asarray(plan.active)
    most = active.reshape(shards, -1).sum(1).max()
    few = most <= slots // shards // 2
    assert (computed < slots) == few
    if compute_slots is not None:
      subset = np.asarray(compute_slots).reshape(shards, -1)
      assert most <= subset.shape[1] in (2, slots // shards // 2)
      assert subset.shape[1] == 2 or most > subset.shape[1] // 2
      assert np.unique(subset).size == subset.size
      shard = np.arange(shards)[:, None]
      assert (subset // (slots // shards) == shard).all()
      assert active[subset].sum() == active.sum()
    segments.append(computed)
    return state, samples, results

  assert_same(run(spied(generate, decode=decode)), static())
  assert set(segments) == {slots, slots // 2, 2 * shards}
  # At most two are planned ahead for nothing: few enough are left for a subset,
  # or none. So what then works is smaller.
  steps = steps_of_segments
  for i in np.flatnonzero(np.array(steps) == 0):
    assert any(steps[i : i + 3]) or i + 3 > len(steps)
    later = zip(segments[i:], steps[i:], strict=True)
    assert all(computed < segments[i] for computed, n in later if n)


def slot_steps_of(lengths, slots, segment_steps):
  """Slot-steps of responses of known lengths, by the rules of a segment."""
  waiting, left, total = list(lengths), np.zeros(slots, int), 0
  sizes = [slots]
  while sizes[-1] >= 16:
    sizes.append(sizes[-1] // 2)
  while waiting or left.any():
    for slot in np.flatnonzero(left == 0):
      if waiting:
        left[slot] = waiting.pop(0)
    active = (left > 0).sum()
    if waiting:
      min_active = active - max(1, active // 8)
    else:
      min_active = max([n for n in sizes if n < active], default=0)
    computed = min(n for n in sizes if n >= active)
    for _ in range(segment_steps):
      left, total = np.maximum(left - 1, 0), total + computed
      if (left > 0).sum() <= min_active:
        break
  return total


def migrate_often(monkeypatch):
  for name, value in {"_MOST": 1, "_LEAST": 1, "_SEGMENTS": 1}.items():
    monkeypatch.setattr(placement, name, value)


@pytest.mark.parametrize(
  ("config", "pause"),
  [
    (dataclasses.replace(ROUTING, speculation=2), R),
    (ROUTING, 6),  # the others are continued in a second call
  ],
)
def test_samples_are_the_same_when_responses_move(config, pause, monkeypatch):
  """Every segment, as soon as one shard has more than another."""
  migrate_often(monkeypatch)
  monkeypatch.setattr(continuous_config, "_DRAFTING", 1)
  batching = dataclasses.replace(SMALL, slots=B, segment_steps=2)
  generate, moved = build(batching, config, **MESH), []

  def move_slots(state, moves, rows):
    moved.append(int((np.asarray(moves.target) < B // 4).sum()))
    return generate.jitted.move_slots(state, moves, rows)

  spy, reported = spied(generate, move_slots=move_slots), {}
  run_on = functools.partial(
    spy, weights(), prompts(), jax.random.key(KEY), on_finished=reported.update
  )
  if pause == R:
    samples = run_on()
  else:
    samples = run_on(stop_at=np.full(B, pause))
    moved.clear()
    samples = run_on(resume_from=samples, stop_at=np.full(B, R))
  assert sum(moved) >= 3
  samples = jax.device_get(samples)
  assert_same(samples, static())
  assert_same_routing(samples, static())
  assert sorted(reported) == list(range(B))
  for number, response in reported.items():
    assert response.length == samples.lengths[number]
    np.testing.assert_array_equal(
      response.tokens[: response.length],
      samples.tokens[number][: response.length],
    )


def spied_loans(monkeypatch):
  """Numbers of responses that are lent, from now on."""
  lent, loans = [], placement.Placement._loans

  def spy(self, facts):
    lent.append(len(found := loans(self, facts)))
    return found

  monkeypatch.setattr(placement.Placement, "_loans", spy)
  return lent


def test_samples_are_the_same_where_a_response_starts_on_another_shard(
  monkeypatch,
):
  """Shards have 8 responses, 2 slots and 13 pages; running ones move, too."""
  migrate_often(monkeypatch)
  batching = dataclasses.replace(SMALL, segment_steps=2, num_pages=4 * 13)
  generate, reported = build(batching, ROUTING, **MESH), {}
  lent = spied_loans(monkeypatch)
  samples = run(generate, on_finished=reported.update)
  assert sum(lent) >= 2
  assert_same(samples, static())
  assert_same_routing(samples, static())
  assert sorted(reported) == list(range(B))
  lengths = [reported[number].length for number in range(B)]
  np.testing.assert_array_equal(lengths, samples.lengths)


def test_slot_steps_follow_the_lengths_of_the_responses():
  """An idle slot gets the next response soon; idle ones are counted, too."""
  params = known_lengths.countdown(weights())
  lengths = known_lengths.long_tailed(P, R)
  batch = known_lengths.prompts(lengths, S)
  samples = one_device()(params, batch, jax.random.key(0))
  expected = np.repeat(lengths, G)
  np.testing.assert_array_equal(samples.lengths, expected)
  countdown = expected[:, None] - 1 - np.arange(R)
  padded = np.where(countdown < 0, PAD, countdown)
  np.testing.assert_array_equal(samples.tokens, padded)
  assert samples.slot_steps == slot_steps_of(expected, 8, SMALL.segment_steps)
  assert samples.slot_steps < B * lengths.max() / 2  # those of static batching


@pytest.mark.parametrize("make", [few_pages, eight_devices])
def test_a_plan_replays_the_same_steps(make):
  """`plan.iteration.decoding` runs the host's half of the sampler alone."""
  samples = run(make())
  assert len(np.unique(samples.lengths)) > 3
  lengths = Lengths(prompts().lengths, samples.lengths)
  decoding = replay(make(), lengths, block=1)
  assert decoding.slot_steps == samples.slot_steps
  assert decoding.prefilled % 8 == 0


@pytest.mark.parametrize(("slots", "pages"), [(32, 0), (128, 1600)])
def test_shards_without_a_queue_take_responses(slots, pages, monkeypatch):
  """Fewer steps and reads than where each starts on the shard of its prompt."""
  rng, groups, size = np.random.default_rng(0), 64, 8
  logs = rng.normal(5, 0.7, (groups, 1)) + rng.normal(0, 0.7, (groups, size))
  responses = np.exp(logs).clip(1, 2000).astype(int).ravel()
  lengths = Lengths(np.full(groups, S), responses)
  config = SamplerConfig(size, 2000, stop_ids=(3,))
  batching = dataclasses.replace(
    SMALL, slots=slots, segment_steps=32, num_pages=pages, page_size=8
  )
  count = lambda: replay(build(batching, config, **MESH), lengths, block=1)
  read = lambda found: sum(x.most_blocks for x in found.by_rows.values())
  found = count()
  monkeypatch.setattr(placement.Placement, "can_lend", lambda *_: False)
  before = count()
  assert found.steps < 0.9 * before.steps
  assert read(found) < 0.9 * read(before)


@pytest.mark.parametrize(
  ("own", "slots"), [([0], 8), ([0], 16), ([1, 3], 8), ([2, 3], 16)]
)
def test_a_host_plans_as_one_host_for_all_plans(own, slots, monkeypatch):
  """From the facts and results of all: the same programs, with its rows."""
  monkeypatch.setattr(jit, "_FEWEST_ROWS", 1)
  lent = spied_loans(monkeypatch)
  lengths = np.random.default_rng(0).integers(4, R // 2, B)
  lengths[: B // 4], lengths[-3:] = 1, R
  batching = dataclasses.replace(SMALL, slots=slots, segment_steps=2)
  four = build(batching, **MESH)
  host = functools.partial(
    pod.run_host, four, lengths=lengths, prompt_lengths=prompts().lengths
  )
  whole = host(range(4))
  one = host(own, whole=whole)
  assert slots == 16 or sum(lent) >= 2

  def assert_rows(x, all_x):
    assert type(x) is type(all_x)
    if np.ndim(x):
      x, all_x = x.reshape(len(own), -1), all_x.reshape(4, -1)[own]
    np.testing.assert_array_equal(x, all_x)

  for name in ("shared", "prefills", "plans", "moved"):
    arrays, all_arrays = getattr(one, name), getattr(whole, name)
    assert len(arrays) == len(all_arrays) > 2
    jax.tree.map(assert_rows, arrays, all_arrays)
  assert {plan[1] is None for plan in one.plans} == {True, False}


def test_what_a_sampler_cannot_do_is_an_error():
  with pytest.raises(UserError, match=r"\(8, 14\): expected \[P, 15\]"):
    run(build(prompt=S + 1))


def test_tokens_after_the_end_of_a_response_are_cleared():
  """A response that started again may have left more than it now has."""
  samples = run(one_device())
  shorter = dataclasses.replace(samples, lengths=np.ones(B, np.int32))
  final = one_device().jitted.finalize(shorter)
  assert (final.tokens[:, 1:] == PAD).all()
  assert not final.logps[:, 1:].any()
  np.testing.assert_array_equal(final.tokens[:, 0], samples.tokens[:, 0])


def test_a_prefill_takes_an_eighth_of_the_pages():
  generate = build(dataclasses.replace(SMALL, slots=4))  # 176 tokens
  batches = [generate.prefill_batch(T) for T in (1, 2, 8, 16, 640)]
  assert batches == [8, 8, 2, 1, 1]


def test_a_shard_without_requests_waits_for_the_others():
  """Responses pause at different lengths, all of a shard at 0 among them."""
  samples, prompt = None, np.arange(B) // G
  for stop_at in (prompt, np.where(prompt < 4, 0, R), np.full(B, R)):
    samples = run(eight_devices(), resume_from=samples, stop_at=stop_at)
  assert_same(samples, static())


def test_a_resumed_response_is_the_one_without_a_pause():
  """Paused every 7 tokens, with the same key: nothing is lost."""
  samples, whole, reported = None, static().lengths, {}
  for length in (7, 14, 21, 28):
    samples = run(
      few_pages(),
      resume_from=samples,
      stop_at=np.full(B, length),
      on_finished=reported.update,
    )
    np.testing.assert_array_equal(samples.lengths, np.minimum(whole, length))
    unfinished = samples.finish == UNFINISHED
    np.testing.assert_array_equal(unfinished, whole > length)
    assert sorted(reported) == np.flatnonzero(~unfinished).tolist()
  assert_same(samples, static())
  assert_same_routing(samples, static())
  # So the ratio of an update that replays the experts is the same number.
  np.testing.assert_array_equal(
    replayed(samples).logps, replayed(run(few_pages())).logps
  )
  np.testing.assert_allclose(replayed(samples).logps, samples.logps, atol=2e-5)


def fed_before(lengths):
  """[B, S + R]: tokens that are fed when responses have `lengths`."""
  column, prompt_lengths = np.arange(S + R), np.repeat(prompts().lengths, G)
  real = column >= S - prompt_lengths[:, None]
  fed = real & (column < (S + lengths - 1)[:, None])
  return fed & (lengths > 0)[:, None]


@pytest.mark.parametrize("make", [few_pages, eight_devices])
def test_a_token_keeps_the_experts_of_the_first_call_that_fed_it(make):
  """Whatever weights prefill it again: they change with every call."""
  generate, rng = make(), np.random.default_rng(0)
  prompt, g = np.arange(B) // G, np.arange(B) % G
  samples, fed, seen = None, np.zeros((B, S + R), bool), []
  expected = np.zeros((B, S + R, CFG.num_layers, 2))
  first = np.where(prompt % 2, rng.integers(1, 9, B), np.where(g == 1, 6, 0))
  first = np.where(prompt % 4, first, 0)
  for seed, stop_at in enumerate((first, first + 5, np.full(B, R))):
    samples = generate(
      weights(seed),
      prompts(),
      jax.random.key(KEY),
      resume_from=samples,
      stop_at=stop_at,
    )
    found = jax.device_get(samples)
    whole = replayed(found, seed, replay=False).experts.transpose(1, 2, 0, 3)
    new = fed_before(found.lengths) & ~fed
    expected[new], fed = whole[new], fed | new
    seen.append(whole)
    experts = found.experts.swapaxes(1, 2)
    np.testing.assert_array_equal(np.sort(experts[fed]), np.sort(expected[fed]))
  assert (found.finish != UNFINISHED).all()
  # The last weights, or those before, choose others for the same tokens.
  for whole in seen[1:]:
    assert (np.sort(whole[fed]) != np.sort(expected[fed])).mean() > 0.1


@pytest.mark.parametrize(
  "name",
  ["gpt-oss", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)],
)
def test_a_family_samples_as_one_pass_says_whole_or_in_parts(name):
  """Windows, sinks and routes, with shared prefixes and few pages."""
  cfg = dataclasses.replace(SHORT[name], vocab_size=32)
  params = random_weights(cfg)
  key, batching = jax.random.key(KEY), few_pages().batching
  generate = build(batching, ROUTING, cfg=cfg)
  static = functools.partial(sampler.generate, cfg=cfg, sampler=ROUTING)
  expected = jax.device_get(jax.jit(static)(params, prompts=prompts(), key=key))
  samples = jax.device_get(generate(params, prompts(), key))
  assert (expected.lengths == R).any() != (expected.lengths == R).all()
  assert_same(samples, expected)
  assert_same_routing(samples, expected)
  parts = None
  for length in (7, 14, 21, 28):
    parts = generate(
      params, prompts(), key, resume_from=parts, stop_at=np.full(B, length)
    )
  parts = jax.device_get(parts)
  assert_same(parts, expected)
  assert_same_routing(parts, expected)


@functools.cache
def stopping():
  """Stop strings, and a sampler with them."""
  pairs = tuple(x + y for x in "hlmnopqrstuvwxyz" for y in "acegik")
  letters = Letters(b"ab", b"cd", b"ef", b"gh", b"ij", b"kl")
  stop = stop_strings.build(("b", *pairs), letters)
  return stop, build(config=dataclasses.replace(SAMPLED, stop=stop))


def test_a_stop_string_ends_a_response_in_both_samplers():
  """Also in one that pauses within a string, or in the middle of a batch."""
  stop, generate = stopping()
  expected, reported = static(generate.config), {}
  first = run(generate, stop_at=np.full(B, 4), on_finished=reported.update)
  pauses = first.finish == UNFINISHED
  states = [stop.state(ids[:4]) for ids in first.tokens]
  assert np.count_nonzero(pauses & (np.array(states) > 0)) > 3
  samples = run(generate, resume_from=first, on_finished=reported.update)
  assert_same(samples, expected)
  # Without stop strings the tokens are the same, and go on behind a string.
  longer, early = static(), 0
  for a, ids in enumerate(longer.tokens.tolist()):
    length = longer.lengths[a]
    ends = [n for n in range(1, length + 1) if stop.ended(ids[:n])]
    assert expected.lengths[a] == min([*ends, length])
    assert reported[a].stopped == (expected.finish[a] == STOPPED)
    early += bool(ends)
  assert early > 5


def test_responses_are_reported_while_the_next_segment_decodes():
  events, reported, generate = [], set(), one_device()

  def spy(name):
    def call(*args):
      events.append(name)
      return getattr(generate.jitted, name)(*args)

    return call

  def on_finished(responses):
    events.append("report")
    assert not reported & responses.keys()
    reported.update(responses)

  functions = {name: spy(name) for name in ("decode", "read_rows")}
  run(spied(generate, **functions), on_finished=on_finished)
  assert reported == {*range(B)}
  assert events.count("read_rows") >= events.count("report") > 2
  reports = np.flatnonzero(np.array(events) == "report").tolist()
  for i in reports[:-1]:
    assert events[i - 1] == "decode"
  assert reports[-1] == len(events) - 1  # nothing is left to decode


@pytest.mark.parametrize("make", [one_device, eight_devices])
def test_the_last_segments_are_planned_before_results_are_read(
  make, monkeypatch
):
  """At most one is unknown, and none while responses wait for a slot."""
  monkeypatch.setattr(placement, "_SEGMENTS", 99)
  generate, unread = make(), [0]
  started, at_start = [], []

  def decode(params, state, samples, plan, *rest):
    waiting = sum(started) < B
    started.append(int(np.asarray(plan.new).sum()))
    at_start.append((waiting, unread[0]))
    unread[0] += 1
    return generate.jitted.decode(params, state, samples, plan, *rest)

  def read(results):
    unread[0] -= 1
    return device_get(results)

  device_get = jax.device_get
  spy = spied(generate, decode=decode)
  monkeypatch.setattr(jax, "device_get", read)
  samples = spy(weights(), prompts(), jax.random.key(KEY))
  monkeypatch.undo()
  assert_same(jax.device_get(samples), static())
  assert unread == [0]
  assert {(True, 0), (False, 1)} <= set(at_start)
  assert set(at_start) <= {(True, 0), (False, 0), (False, 1)}


def test_hosts_exchange_the_lengths_and_no_token(monkeypatch):
  """In a call the prompts, and 5 bytes a response: its length and finish."""
  gathered, gather = [], multihost.to_host

  def spy(tree):
    gathered.append(sum(x.nbytes for x in jax.tree.leaves(tree)))
    return gather(tree)

  monkeypatch.setattr(multihost, "to_host", spy)
  batch, key = prompts(), jax.random.key(KEY)
  samples, reported = None, {}
  for length in (7, R):
    samples = eight_devices()(
      weights(),
      batch,
      key,
      resume_from=samples,
      stop_at=np.full(B, length),
      on_finished=reported.update,
    )
  size_of_prompts = batch.tokens.nbytes + batch.lengths.nbytes
  assert sum(gathered) == 2 * (size_of_prompts + 5 * B)
  monkeypatch.undo()
  samples = jax.device_get(samples)
  assert_same(samples, static())
  assert sorted(reported) == list(range(B))
