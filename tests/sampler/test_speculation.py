"""Drafted tokens change no response, whether they are right or wrong."""

import dataclasses
import functools

import continuous_sampler
import jax
import numpy as np
import pytest
from families import FAMILIES
from random_model import weights

from gspo_jax import model
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler import samples as sampling
from gspo_jax.sampler import stop_strings
from gspo_jax.sampler.continuous import config as continuous_config
from gspo_jax.sampler.continuous import jit, speculation
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import UNFINISHED, Prompts, SamplerConfig

P, S, G, R, J = 4, 9, 4, 24, 4
B = P * G
DENSE = model.variant(
  "tiny",
  num_layers=1,
  vocab_size=24,
  num_experts=0,
  dtype="float32",
)
CONFIG = SamplerConfig(G, R, stop_ids=(3,), temperature=0.9)
BATCHING = ContinuousBatchingConfig(
  slots=8, page_size=4, segment_steps=5, prefill_chunk=8
)
KEY = jax.random.key(1)
LETTERS = continuous_sampler.Letters()


def prompts():
  """Of many lengths, padded on the left."""
  tokens = np.random.default_rng(0).integers(6, 24, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array([1, 4, 8, S], np.int32))


@functools.cache
def build(config=CONFIG, cfg=DENSE, batching=BATCHING, devices=1):
  axes = {"data": 2, "expert": 2, "tensor": 2} if devices == 8 else {}
  return continuous_sampler.build(
    cfg, config, batching, S, devices=devices, **axes
  )


def speculating(config):
  return dataclasses.replace(config, speculation=J - 1)


def run(generate, **options):
  samples = generate(weights(generate.cfg), prompts(), KEY, **options)
  return jax.device_get(samples)


assert_same = functools.partial(
  continuous_sampler.assert_same, fields=("experts",), atol=1e-5
)


def spied(generate, calls):
  """Adds to `calls` the drafts and the slot-steps of each segment."""

  def decode(params, state, samples, *rest):
    before = int(samples.slot_steps)
    state, samples, results = generate.jitted.decode(
      params, state, samples, *rest
    )
    calls.append((rest[-1], int(samples.slot_steps) - before))
    return state, samples, results

  return continuous_sampler.spied(generate, decode=decode)


@functools.cache
def half_idle():
  """Speculates on half of the slots; also returns the responses without."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(continuous_config, "_DRAFTING", 2)
    generate, calls = build(speculating(CONFIG)), []
    samples = run(spied(generate, calls))
  return samples, calls, run(build())


def test_responses_are_those_without_drafts():
  """Responses wait for slots; then few are left, with drafts."""
  samples, calls, expected = half_idle()
  assert len(np.unique(expected.lengths)) > 2
  assert_same(samples, expected)
  steps, accepted = samples.drafts
  assert 0.1 * steps < accepted < (J - 1) * steps
  assert {number for number, _ in calls} == {0, J - 1}
  computed = sum(tokens for number, tokens in calls if number)
  assert computed % (2 * J) == 0  # of 2 or 4 slots
  assert computed >= J * steps
  assert sum(tokens for _, tokens in calls) == samples.slot_steps


def test_right_drafts_save_steps_and_wrong_ones_end_speculation(monkeypatch):
  """The number of tokens a step is J, or 1. No response changes."""
  expected, shift = half_idle()[2], [0]

  def drafts(row, num_tokens):
    at = np.minimum(num_tokens[:, None] + np.arange(J - 1), R - 1)
    return (expected.tokens[row[:, None], at] + shift[0]) % 24

  def draft(samples, row, num_tokens, **_):
    shape = jax.ShapeDtypeStruct((len(row), J - 1), np.int32)
    return jax.pure_callback(drafts, shape, row, num_tokens)

  monkeypatch.setattr(continuous_config, "_DRAFTING", 2)
  monkeypatch.setattr(speculation, "draft", draft)
  monkeypatch.setattr(speculation, "_TRIED", 20)
  generate, calls = build.__wrapped__(speculating(CONFIG)), []
  right = run(spied(generate, calls))
  assert_same(right, expected)
  steps, accepted = right.drafts
  assert accepted > 0.8 * (J - 1) * steps  # an end cuts the last step
  assert calls[-1][0] == J - 1
  shift[0] = 1
  wrong = run(spied(generate, calls))
  assert_same(wrong, expected)
  steps, accepted = wrong.drafts
  assert accepted == 0
  # Two segments are planned before the second one's results are known.
  assert 20 <= steps < 20 + 3 * 4 * BATCHING.segment_steps
  assert calls[-1][0] == 0


def test_a_draft_follows_the_longest_and_then_the_last_match():
  """Against a search in Python, on two shards."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 4, (B, R)).astype(np.int32)
  lengths = rng.integers(9, R + 1, B).astype(np.int32)
  rows = np.array([1, 6, 7, 9, 15, 12], np.int32)  # of both shards
  samples = sampling.empty_samples(P, S, DENSE, CONFIG)
  samples = dataclasses.replace(samples, tokens=tokens, lengths=lengths)
  search = functools.partial(speculation.draft, count=2, group_size=G)
  with jax.set_mesh(sharding.make_mesh(jax.devices()[:2], data=2)):
    found = jax.jit(search)(samples, rows, lengths[rows])
  for row, draft in zip(rows, np.asarray(found), strict=True):
    own, best = tokens[row, : lengths[row]].tolist(), (0,)
    for other in range(row // G * G, row // G * G + G):
      text = tokens[other].tolist()
      for end in range(lengths[other] - 1):
        match = 0
        while match < min(4, end + 1, len(own)) and (
          text[end - match] == own[-1 - match]
        ):
          match += 1
        best = max(best, (match, other == row, end, -other, text[end + 1]))
    assert best[0] > 1
    assert draft[0] == best[-1]


def test_accepted_tokens_are_those_of_one_step_after_another():
  """Stop tokens, stop strings, the least length and pauses end a response."""
  rng, m = np.random.default_rng(0), 400
  stop = stop_strings.build(("ba", "aab"), LETTERS)
  config = dataclasses.replace(CONFIG, stop=stop, min_new_tokens=4)
  fed, token = rng.integers(0, 6, (2, m, J)).astype(np.int32)
  fed[:, 1:] = np.where(rng.random((m, J - 1)) < 0.8, token[:, :-1], fed[:, 1:])
  num_tokens = rng.integers(0, 6, m).astype(np.int32)
  stop_at = num_tokens + rng.integers(1, 6, m).astype(np.int32)
  state = rng.integers(0, len(stop.table), m).astype(np.int32)
  taken, states, stopped, done = (
    np.asarray(x)
    for x in speculation.accept(fed, token, num_tokens, stop_at, state, config)
  )
  counts = taken.sum(1)
  assert {*counts} == {1, 2, 3, 4}
  ends = dict.fromkeys(("token", "string", "pause", "draft"), 0)
  for i, count in enumerate(counts):
    assert taken[i, :count].all()
    now = state[i]
    for t in range(count):
      entry = int(stop.table[now, token[i, t]])
      now, ended = entry % len(stop.table), entry >= len(stop.table)
      is_stop = token[i, t] in config.stop_ids
      length = num_tokens[i] + t + 1
      ended &= length >= 4
      assert states[i, t] == now
      assert stopped[i, t] == (is_stop or ended)
      pauses = length == stop_at[i]
      assert done[i, t] == (is_stop or ended or pauses)
      ends["token"] += is_stop
      ends["string"] += ended
      ends["pause"] += pauses
      agrees = t + 1 < J and fed[i, t + 1] == token[i, t]
      ends["draft"] += not agrees
      assert (t + 1 < count) == (agrees and not done[i, t])
  assert min(ends.values()) > 20


def paused(generate):
  """Pauses after 3 and 8 tokens."""
  samples = None
  for length in (3, 8, R):
    samples = run(generate, resume_from=samples, stop_at=np.full(B, length))
    assert (samples.finish == UNFINISHED).any() == (length < R)
  return samples


STOP = stop_strings.build(("ba", "kk", "ge"), LETTERS)
ROUTING = {"record_routing": True}
CASES = {
  # changes of CONFIG, the model, changes of BATCHING, devices, how to run
  "stop strings": ({"stop": STOP, "min_new_tokens": 6}, DENSE, {}, 1, run),
  "greedy": ({"temperature": 0.0}, DENSE, {}, 1, run),
  "top-k, top-p": ({"top_k": 8, "top_p": 0.8}, DENSE, {}, 1, run),
  "pauses": (ROUTING, FAMILIES["glm-4.5"], {}, 1, paused),
  "few pages": ({}, DENSE, {"num_pages": 15}, 1, run),
  "windows, sinks": (
    ROUTING | {"stop_ids": (3, 5, 8)},
    *(FAMILIES["gpt-oss"], {}, 1, run),
  ),
  "latents": (ROUTING, FAMILIES["deepseek-v3"], {}, 1, run),
  "devices": (ROUTING, FAMILIES["glm-4.5"], {"slots": 32}, 8, run),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_speculation_holds_with(name, monkeypatch):
  changes, cfg, sizes, devices, how = CASES[name]
  monkeypatch.setattr(continuous_config, "_DRAFTING", 2)
  monkeypatch.setattr(jit, "_FEWEST_ROWS", 4)
  config = dataclasses.replace(CONFIG, **changes)
  batching = dataclasses.replace(BATCHING, **sizes)
  expected = how(build(config, cfg, batching, devices))
  samples = how(build(speculating(config), cfg, batching, devices))
  assert_same(samples, expected)
  if config.keeps_ids:
    ids = lambda x: np.sort(x.kept_ids, axis=1).swapaxes(1, 2)
    real = np.arange(R) < expected.lengths[:, None]
    np.testing.assert_array_equal(ids(samples)[real], ids(expected)[real])
  steps, accepted = samples.drafts
  assert 0 < accepted < (J - 1) * steps


def test_a_model_with_states_cannot_speculate():
  with pytest.raises(UserError, match="speculation=3: expected 0 for a model"):
    build(speculating(CONFIG), FAMILIES["qwen3.5"])
