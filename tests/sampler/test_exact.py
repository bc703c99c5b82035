"""`model.exact`: the trainer's log-probs are the sampler's in every bit.

The trainer's are from the forward pass of a gradient, over rows that several
sequences share. The sampler pauses, runs out of pages, and has slots whose
number changes, so that no token is in the same batch twice.
"""

import dataclasses
import functools

import continuous_sampler
import jax
import numpy as np
import pytest
from random_model import base_and_adapters, weights

from gspo_jax import model
from gspo_jax.learner import packing, train_batch
from gspo_jax.learner.packing import PackingConfig
from gspo_jax.model import (
  exact,
  exact_attention,
  lora,
  rounding,
)
from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import Prompts, SamplerConfig

P, S, G, R = 8, 40, 2, 45
B, W = P * G, 192
SAMPLER = SamplerConfig(G, R, stop_ids=(3, 5, 9), temperature=0.9)
# 24 pages of 8 tokens hold two of the longest responses.
BATCHING = ContinuousBatchingConfig(
  slots=8, page_size=8, num_pages=24, segment_steps=7, prefill_chunk=16
)
PACKING = PackingConfig(
  W, minibatches=1, micro_batch_size=2, multiple=exact_attention.align("cpu")
)
SMALL = {"vocab_size": 64, "num_layers": 2, "exact": True}
WINDOWS = model.variant("tiny-gpt-oss", dtype="bfloat16", **SMALL)
MODELS = {
  "dense": model.variant("tiny", num_experts=0, experts_per_token=0, **SMALL),
  "one key head": model.variant("tiny", num_kv_heads=1, **SMALL),
  "qwen3-moe": model.variant("tiny", **SMALL),
  "glm-4.5": model.variant("tiny-glm-4.5", **SMALL),
  "minimax-m2": model.variant("tiny-minimax-m2", **SMALL),
  "gpt-oss": WINDOWS,
  "moonlight": model.variant("tiny-moonlight", **SMALL),
  "qwen3-next": model.variant("tiny-qwen3.5", linear_fused=True, **SMALL),
  "qwen3.5, dense": model.variant("tiny-qwen3.5-dense", **SMALL),
}


def prompts():
  """From one token on, padded on the left."""
  tokens = np.random.default_rng(0).integers(10, 64, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array([1, 2, 7, 8, 9, 23, 39, S], np.int32))


def sampled(cfg, params, sampler=SAMPLER, batching=BATCHING, **axes):
  """Responses that pause twice."""
  generate = continuous_sampler.build(
    cfg, sampler, batching, S, devices=8 if axes else 1, **axes
  )
  samples = None
  for length in (5, 21, R):
    samples = generate(
      params,
      prompts(),
      jax.random.key(1),
      resume_from=samples,
      stop_at=np.full(B, length),
    )
  return jax.device_get(samples)


def scored(cfg, params, samples, rows=PACKING, mesh=None, *, replay=False):
  """Log-probs of the responses by trainer and sampler, their tokens alone."""
  lengths = np.repeat(prompts().lengths, G) + samples.lengths
  places = packing.pack(lengths, np.random.default_rng(1).permutation(B), rows)

  @functools.partial(jax.jit, compiler_options=rounding.OPTIONS)
  def step(params, places):
    batch, _ = packing.pack_responses(
      prompts(),
      samples.tokens,
      samples.lengths,
      places,
      rows,
      logps=samples.logps,
      kept_ids=samples.kept_ids,
      experts=samples.experts,
    )
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), batch)

    def loss(params):
      out = train_batch.response_logps(
        params,
        cfg,
        batch,
        temperature=SAMPLER.temperature,
        routes=batch.experts.swapaxes(0, 1) if replay else None,
        replay=replay,
      )
      return (out.logps * batch.response_mask).sum(), out.logps

    gradient, logps = jax.grad(loss, has_aux=True)(params)
    return gradient, logps, batch.sampler_logps, batch.response_mask

  with jax.set_mesh(mesh or sharding.make_mesh(jax.devices()[:1])):
    gradient, *of_tokens = jax.device_get(step(params, places))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
  trainer, sampler, mask = of_tokens
  assert mask.sum() == samples.lengths.sum() > 150
  return trainer[mask], sampler[mask]


def test_the_trainer_gives_the_samplers_bits():
  """gpt-oss has windows, sinks, biases and experts."""
  params = weights(WINDOWS)
  samples = sampled(WINDOWS, params)
  np.testing.assert_array_equal(*scored(WINDOWS, params, samples))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_each_family_is_exact(name, dtype):
  cfg = dataclasses.replace(MODELS[name], dtype=dtype)
  params = weights(cfg)
  samples = sampled(cfg, params)
  np.testing.assert_array_equal(*scored(cfg, params, samples))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"remat": "none"}, {"unroll": 1}])
def test_how_the_backward_pass_is_made_changes_no_bit(changes):
  samples = sampled(WINDOWS, weights(WINDOWS))
  cfg = dataclasses.replace(WINDOWS, **changes)
  np.testing.assert_array_equal(*scored(cfg, weights(cfg), samples))


@pytest.mark.slow
@pytest.mark.parametrize(
  "sampler",
  [
    {"top_p": 0.8, "kept_ids": 16},
    {"speculation": 3},
  ],
)
def test_each_way_to_sample_is_exact(sampler):
  cfg = MODELS["qwen3-moe"]
  params, config = weights(cfg), dataclasses.replace(SAMPLER, **sampler)
  samples = sampled(cfg, params, config)
  np.testing.assert_array_equal(*scored(cfg, params, samples))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "glm-4.5"])
def test_a_replay_of_the_samplers_experts_is_exact(name):
  """They are the trainer's own."""
  cfg = dataclasses.replace(MODELS[name], dtype="float32")
  config = dataclasses.replace(SAMPLER, record_routing=True)
  samples = sampled(cfg, weights(cfg), config)
  for replay in (False, True):
    found = scored(cfg, weights(cfg), samples, replay=replay)
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_exact(dtype):
  cfg = dataclasses.replace(
    MODELS["qwen3-moe"], dtype=dtype, lora=model.LoraConfig(rank=4)
  )
  params = lora.join(*base_and_adapters(cfg))
  samples = sampled(cfg, params)
  np.testing.assert_array_equal(*scored(cfg, params, samples))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "minimax-m2", "qwen3-next"])
def test_meshes_that_split_rows_and_experts_differently_are_exact(name):
  """MiniMax-M2 has a norm over the heads of all devices."""
  cfg = MODELS[name]
  params = weights(cfg)
  batching = dataclasses.replace(BATCHING, slots=16, num_pages=96)
  samples = sampled(cfg, params, batching=batching, data=4, tensor=2)
  mesh = sharding.make_mesh(jax.devices()[:8], fsdp=2, expert=2, tensor=2)
  rows = dataclasses.replace(PACKING, micro_batch_size=4, shards=4)
  found = scored(cfg, params, samples, rows, mesh)
  np.testing.assert_array_equal(*found)


def other_blocks_of_keys(patch):
  """Steps of 32 keys in the trainer, and of 64 in the sampler."""
  rows, pages = exact_attention.of_rows, exact_attention.of_pages

  def of(function, keys):
    def call(*args, **options):
      patch.setattr(exact_attention, "KEYS", keys)
      return function(*args, **options)

    return call

  patch.setattr(exact_attention, "of_rows", of(rows, 32))
  patch.setattr(exact_attention, "of_pages", of(pages, 64))


FORMS = {
  "blocks of keys": other_blocks_of_keys,
  "blocks of tokens": lambda patch: patch.setattr(
    exact, "_in_blocks", lambda function, first, axes, *args: function(*args)
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_needed(form, monkeypatch):
  """Products of few and of many rows are equal on some CPUs, so not theirs."""
  cfg = dataclasses.replace(MODELS["qwen3-moe"], dtype="float32")
  FORMS[form](monkeypatch)
  params = weights(cfg)
  trainer, sampler = scored(cfg, params, sampled(cfg, params))
  assert (trainer != sampler).any()
