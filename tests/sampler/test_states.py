"""A model with states in the continuous sampler: where a response starts."""

import functools
from types import SimpleNamespace

import continuous_sampler
import jax
import numpy as np
import pytest
from families import SHORT
from random_model import weights

from gspo_jax.sampler import static
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import Prompts, SamplerConfig

P, S, G, R = 2, 11, 3, 16
CFG = SHORT["qwen3.5"]
CONFIG = SamplerConfig(G, R, stop_ids=(3, 5), temperature=0.9)
KEY = jax.random.key(3)


def prompts(*lengths):
  tokens = np.random.default_rng(0).integers(6, 24, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array(lengths, np.int32))


@functools.cache
def sampler(slots=3, num_pages=0):
  """Of less than four slots, every segment computes all."""
  batching = ContinuousBatchingConfig(
    slots, 4, num_pages, prefill_chunk=8, segment_steps=4
  )
  return continuous_sampler.build(CFG, CONFIG, batching, S)


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
  continuous_sampler.assert_same(samples, expected)
  assert sum(counts) > expected.lengths.sum()


@pytest.mark.parametrize("length", [1, 6, S])
def test_a_state_from_a_row_gives_the_same_bits(length):
  """A group starts in one round, or behind others, one after the other."""
  rows, parts = [], []

  def prefill(*args):
    rows.append(np.asarray(args[-1][1]))
    return sampler().jitted.prefill(*args)

  generate = continuous_sampler.spied(sampler(), prefill=prefill)
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
