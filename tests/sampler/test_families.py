"""Families: one response of both samplers and of the trainer."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from continuous_sampler import assert_same, assert_same_routing, build
from families import SHORT, each_family
from random_model import weights

from gspo_jax.learner import train_batch
from gspo_jax.sampler import static
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import UNFINISHED, Prompts, SamplerConfig

P, S, G, R = 8, 9, 3, 12
B = P * G
CONFIG = SamplerConfig(G, R, (3, 5), temperature=0.9, record_routing=True)
BATCHING = ContinuousBatchingConfig(
  slots=16, page_size=4, segment_steps=5, prefill_chunk=8
)
KEY = jax.random.key(1)


def prompts():
  """Of many lengths, padded on the left."""
  tokens = np.random.default_rng(0).integers(6, 24, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array([1, 2, 3, 4, 5, 7, 8, S], np.int32))


@functools.cache
def expected(name):
  """The samples of the static sampler."""
  cfg = SHORT[name]
  generate = functools.partial(static.generate, cfg=cfg, sampler=CONFIG)
  samples = jax.jit(generate)(weights(cfg), prompts=prompts(), key=KEY)
  return jax.device_get(samples)


@pytest.mark.slow
@pytest.mark.parametrize("routing", [False, True])
@each_family
def test_pauses_on_a_mesh_change_no_response(name, routing):
  """All pause twice; a group shares the pages of its prompt."""
  cfg, axes = SHORT[name], {"data": 2, "expert": 2, "tensor": 2}
  config = dataclasses.replace(CONFIG, record_routing=routing)
  generate = build(cfg, config, BATCHING, S, devices=8, **axes)
  whole, samples = expected(name), None
  for length in (4, 9, R):
    samples = generate(
      weights(cfg),
      prompts(),
      KEY,
      resume_from=samples,
      stop_at=np.full(B, length),
    )
    unfinished = jax.device_get(samples.finish) == UNFINISHED
    np.testing.assert_array_equal(unfinished, whole.lengths > length)
  samples = jax.device_get(samples)
  assert_same(samples, whole)
  if routing:
    assert_same_routing(samples, whole, prompts())


@each_family
def test_the_trainer_gives_the_samplers_log_probs(name):
  """With its own experts, and with the sampler's."""
  cfg, samples = SHORT[name], expected(name)
  routes = samples.experts.swapaxes(0, 1)
  assert len(routes) == cfg.num_moe_layers
  batch = jax.device_get(
    train_batch.unpacked(prompts(), samples.tokens, samples.lengths)
  )

  @functools.partial(jax.jit, static_argnums=1)
  def score(routes, replay):
    return train_batch.response_logps(
      weights(cfg),
      cfg,
      batch,
      temperature=CONFIG.temperature,
      routes=routes,
      replay=replay,
    ).logps

  mask = batch.response_mask
  assert samples.lengths.min() < R
  for options in ((None, False), (routes, True)):
    logps = np.asarray(score(*options))
    np.testing.assert_allclose(logps[mask], samples.logps[mask], atol=2e-5)
