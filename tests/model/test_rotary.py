"""Stretched rotary embeddings: YaRN by index; test_hf.py has Llama 3's."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.model import rotary

# Of Qwen3's model cards, and with every other key.
QWEN3 = 128, 1e6, model.YarnScaling(4.0, 32768)
CASES = {
  "qwen3": QWEN3, "llama": (64, 5e5, model.YarnScaling(8.0, 8192, 24.0, 2.0)),
  "not truncated": (64, 1e4, model.YarnScaling(32.0, 4096, truncate=False)),
  "attention factor": (*(64, 1e4),
   model.YarnScaling(2.0, 4096, attention_factor=1.25)),
  "short": (8, 1000.0, model.YarnScaling(8.0, 32, 3.0, 0.1)),
  "one index": (8, 1e4, model.YarnScaling(4.0, 300, 4.0, 4.0, truncate=False)),
  "no frequency is fast": (8, 1000.0, model.YarnScaling(8.0, 32)),
  "no frequency is slow": (8, 100.0, model.YarnScaling(8.0, 4096)),
}  # fmt: skip


def frequencies(head_dim, theta, scaling):
  unscaled = theta ** (-jnp.arange(0, head_dim, 2) / head_dim)
  return np.asarray(scaling.scale(unscaled, theta))


def by_index(head_dim, theta, scaling):
  """YaRN's frequencies one by one, in double precision."""
  half = head_dim // 2
  # Of a real index i, theta^(-i / half) has so many periods in `length` tokens.
  log_periods = lambda i: (
    math.log(scaling.length / (2 * math.pi)) - i / half * math.log(theta)
  )
  slope = log_periods(1) - log_periods(0)
  solve = lambda beta: (math.log(beta) - log_periods(0)) / slope
  first, last = solve(scaling.beta_fast), solve(scaling.beta_slow)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, head_dim - 1)
  out = []
  for i in range(half):
    frequency = theta ** (-i / half)
    if i <= first:
      out.append(frequency)
    elif i >= last:
      out.append(frequency / scaling.factor)
    else:
      share = (i - first) / (last - first)
      out.append((1 - share) * frequency + share * frequency / scaling.factor)
  return out


@pytest.mark.parametrize("name", CASES)
def test_yarn_index_by_index(name):
  expected = by_index(*CASES[name])
  np.testing.assert_allclose(frequencies(*CASES[name]), expected, rtol=2e-5)


def test_sines_and_cosines_are_multiplied_by_the_attention_factor():
  positions = jnp.arange(5)[None]
  for factor in (None, 1.25):
    scaling = dataclasses.replace(QWEN3[2], attention_factor=factor)
    sin, cos = rotary.angles(positions, *QWEN3[:2], scaling)
    expected = factor or 0.1 * math.log(4.0) + 1
    np.testing.assert_allclose(np.hypot(sin, cos), expected, rtol=1e-6)
