"""A continuous sampler whose trainer and sampler share one mesh."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.model import lora
from gspo_jax.runtime import sharding
from gspo_jax.sampler import continuous


def build(
  cfg, config, batching, max_prompt_length, *, devices=1, by_row=False, **axes
):
  mesh = sharding.make_mesh(jax.devices()[:devices], **axes)
  key = jax.random.key(0)
  shapes = jax.eval_shape(
    lambda: lora.join(model.init(key, cfg), lora.init(key, cfg))
  )
  return continuous.build_continuous_sampler(
    cfg,
    config,
    batching=batching,
    max_prompt_length=max_prompt_length,
    params_sharding=model.shardings(shapes, mesh),
    mesh=mesh,
    sampler_mesh=mesh,
    by_row=by_row,
  )


def spied(generate, **functions):
  """The sampler with some of its jitted functions replaced."""
  jitted = SimpleNamespace(**vars(generate.jitted) | functions)
  return dataclasses.replace(generate, jitted=jitted)


def assert_same(samples, expected, *, fields=(), atol=2e-5):
  """Equal tokens and ends; other rows may round a log-prob in another way."""
  for name in ("tokens", "lengths", "finish", *fields):
    found = getattr(samples, name)
    np.testing.assert_array_equal(found, getattr(expected, name), name)
  np.testing.assert_allclose(samples.logps, expected.logps, atol=atol)


def assert_same_routing(samples, expected, prompts):
  """Of prompts, which a group shares, and of responses; any k elsewhere."""
  assert samples.experts.shape == expected.experts.shape
  assert samples.experts.dtype == expected.experts.dtype
  column, (rows, S) = np.arange(samples.experts.shape[2]), prompts.tokens.shape
  group_size = len(samples.lengths) // rows
  fed = column >= S - np.repeat(prompts.lengths, group_size)[:, None]
  fed &= column < S + samples.lengths[:, None] - 1
  sets = lambda x: np.sort(x.swapaxes(1, 2)[fed])
  np.testing.assert_array_equal(sets(samples.experts), sets(expected.experts))
  assert (samples.experts[..., 0] != samples.experts[..., 1]).all()


class Letters:
  """A tokenizer of one letter a token, behind some tokens of two."""

  fingerprint = "letters"

  def __init__(self, *pairs):
    self.pairs = [*pairs]

  def token_bytes(self):
    return self.pairs + [bytes([ord("a") + i]) for i in range(26)]
