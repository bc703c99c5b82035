"""A model with states in the continuous sampler: starts, pauses, turns."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from families import FAMILIES
from random_model import weights

from gspo_jax import model
from gspo_jax.learner import train_batch
from gspo_jax.runtime import sharding
from gspo_jax.sampler import continuous, engine, static
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import (
  UNFINISHED,
  Prompts,
  SamplerConfig,
)

P, S, G, R = 2, 11, 3, 16
B = P * G
CFG = dataclasses.replace(FAMILIES["qwen3.5"], num_layers=2)
CONFIG = SamplerConfig(G, R, stop_ids=(3, 5), temperature=0.9)
KEY = jax.random.key(3)


def prompts(*lengths):
  tokens = np.random.default_rng(0).integers(6, 24, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array(lengths, np.int32))


@functools.cache
def sampler(slots=3, num_pages=0):
  """Of less than four slots, every segment computes all."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  return continuous.build_continuous_sampler(
    CFG,
    CONFIG,
    batching=ContinuousBatchingConfig(
      slots=slots,
      num_pages=num_pages,
      page_size=4,
      segment_steps=4,
      prefill_chunk=8,
    ),
    max_prompt_length=S,
    params_sharding=model.shardings(weights(CFG), mesh),
    mesh=mesh,
    sampler_mesh=mesh,
  )


def spied(spy, **keys):
  """The sampler, which gives each prefill's arguments to `spy`."""
  generate = sampler(**keys)

  def prefill(params, state, *rest):
    spy(*rest)
    return generate.jitted.prefill(params, state, *rest)

  jitted = dataclasses.replace(generate.jitted, prefill=prefill)
  return dataclasses.replace(generate, jitted=jitted)


def test_samples_are_those_of_the_static_sampler():
  """Some are preempted, and start again; the last ones are computed alone."""
  counts = []
  advance = lambda finished, tokens: counts.append(tokens)
  samples = sampler(slots=4, num_pages=8)(
    weights(CFG),
    prompts(7, S),
    KEY,
    progress=SimpleNamespace(advance=advance),
  )
  generate = functools.partial(static.generate, cfg=CFG, sampler=CONFIG)
  expected = jax.jit(generate)(weights(CFG), prompts=prompts(7, S), key=KEY)
  for field in ("tokens", "lengths", "finish"):
    found = getattr(samples, field)
    np.testing.assert_array_equal(found, getattr(expected, field), field)
  np.testing.assert_allclose(samples.logps, expected.logps, atol=2e-5)
  assert sum(counts) > expected.lengths.sum()


@pytest.mark.parametrize("length", [1, 6, S])
def test_a_state_from_a_row_gives_the_same_bits(length):
  """A group starts in one round, or behind others, one after the other."""
  rows, parts = [], []
  generate = spied(lambda *args: rows.append(np.asarray(args[-1][1])))
  for first in (0, R):
    stop_at = np.array([first] * (G - 1) + [0] + [R] * G)
    samples = generate(weights(CFG), prompts(5, length), KEY, stop_at=stop_at)
    parts.append(jax.device_get(samples))
  # A source of 1 is none: the second run keeps the state of the second prompt.
  assert [row.min() for row in rows] == [1, 1, 0]
  together, apart = parts
  for field in ("tokens", "logps", "lengths"):
    found, expected = (getattr(x, field)[G:] for x in (apart, together))
    np.testing.assert_array_equal(found, expected, field)
  assert together.lengths[G:].min() > 1


@pytest.mark.parametrize("num_pages", [0, 8])
def test_a_pause_that_adds_no_token_keeps_the_states(num_pages):
  """It is prefilled again if another response has had its slot.

  Or where pages run out, here those of one long response.
  """
  lengths, whole = [], sampler()(weights(CFG), prompts(5, S), KEY)
  spy = lambda tokens, counts, *rest: lengths.append(counts.tolist())
  generate = functools.partial(
    spied(spy, num_pages=num_pages),
    weights(CFG),
    prompts(5, S),
    KEY,
    prefix_cache=continuous.PrefixCache(keeps_idle=True),
  )
  # At each call, the tokens at which a response pauses, with three slots.
  stops = (
    (3, 0, 0, 0, 2, 2),
    (6, 0, 0, 0, 2, 4),
    (6, 0, 0, 3, 2, 6),
    (R,) * B,
  )
  samples, prefilled = None, []
  for stop_at in stops:
    lengths.clear()
    samples = generate(resume_from=samples, stop_at=np.array(stop_at))
    prefilled.append(sum(map(sum, lengths)))
  whole, apart = jax.device_get((whole, samples))
  for field in ("tokens", "lengths", "finish"):
    np.testing.assert_array_equal(
      getattr(apart, field), getattr(whole, field), field
    )
  np.testing.assert_allclose(apart.logps, whole.logps, atol=2e-5)
  assert (apart.lengths > (6, 0, 0, 3, 2, 6)).all()
  if num_pages:
    return
  # The prompts; nothing; the prompt of response 3.
  assert prefilled[:3] == [4 + S - 1, 0, S - 1]
  # That took the slot of response 0. The last ones lose theirs by and by.
  assert prefilled[3] == (4 + 6) + 4 + (S + 2) + (S + 1) + (S + 5)


def test_an_engine_prefills_a_request_once(monkeypatch):
  """Not each of its chunks."""
  monkeypatch.setattr(engine, "CHUNK", 4)
  mesh, counts = sharding.make_mesh(jax.devices()[:1]), []
  built = engine.build_engine_sampler(
    CFG,
    dataclasses.replace(CONFIG, temperature=0),
    batching=ContinuousBatchingConfig(slots=3, page_size=4, prefill_chunk=8),
    context=S + R,
    params_sharding=model.shardings(weights(CFG), mesh),
    mesh=mesh,
    sampler_mesh=mesh,
  )
  jitted = built.chunk.jitted

  def prefill(params, state, tokens, lengths, *rest):
    counts.extend(lengths.tolist())
    return jitted.prefill(params, state, tokens, lengths, *rest)

  spying = dataclasses.replace(jitted, prefill=prefill)
  built = dataclasses.replace(
    built, chunk=dataclasses.replace(built.chunk, jitted=spying)
  )
  batch = prompts(7, S)
  asked = [
    engine.Generation(row[S - n :], R)
    for row, n in zip(batch.tokens, batch.lengths, strict=True)
  ]
  with engine.Engine(built, weights(CFG), KEY) as e:
    for generation in asked:
      e.submit(generation)
    e.run(lambda: all(g.finish for g in asked))
  assert sorted(filter(None, counts)) == [6, S - 1]
  greedy = dataclasses.replace(CONFIG, group_size=1, temperature=0)
  generate = functools.partial(static.generate, cfg=CFG, sampler=greedy)
  expected = jax.jit(generate)(weights(CFG), prompts=batch, key=KEY)
  lengths = expected.lengths.tolist()
  assert max(lengths) > 8
  for g, tokens, n in zip(asked, expected.tokens, lengths, strict=True):
    assert g.tokens == tokens[:n].tolist()


def test_turns_are_prefilled_again_and_have_the_trainers_log_probs():
  """All tokens are computed, whatever pages the last call left."""
  lengths = []

  def spy(tokens, counts, pages, num_cached, sources):
    assert num_cached is None
    lengths.extend(np.asarray(counts).tolist())

  batch, given = prompts(4, S), np.zeros((B, R), bool)
  converse = functools.partial(
    spied(spy), weights(CFG), batch, KEY, prefix_cache=continuous.PrefixCache()
  )
  samples = converse(stop_at=np.arange(B) % 3 + 3)
  for turn in range(2):
    before = jax.device_get(samples)
    count = np.where(before.lengths < R - 3, np.arange(B) % 3, 0)
    count = count.astype(np.int32)
    finish = np.where(count, UNFINISHED, before.finish).astype(np.int8)
    tokens = np.full((B, R), 7 + turn, np.int32)
    joined = sampler().append_tokens(samples, tokens, count, finish)
    column = np.arange(R)
    start = before.lengths[:, None]
    given |= (column >= start) & (column < start + count[:, None])
    lengths.clear()
    samples = converse(resume_from=joined, stop_at=before.lengths + count + 4)
    prefixes = np.repeat(batch.lengths, G) + before.lengths + count - 1
    assert sorted(lengths) == sorted(prefixes[finish == UNFINISHED])
  found = jax.device_get(samples)
  assert given.sum() > 6
  whole = train_batch.unpacked(batch, found.tokens, found.lengths)
  scored = jax.jit(
    lambda params: (
      train_batch.response_logps(
        params, CFG, whole, temperature=CONFIG.temperature
      ).logps
    )
  )(weights(CFG))
  sampled = np.asarray(whole.response_mask) & ~given
  np.testing.assert_allclose(
    found.logps[sampled], np.asarray(scored)[sampled], atol=2e-5
  )
