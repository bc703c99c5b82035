"""`model.exact`: the trainer's log-probs are the sampler's in every bit.

The trainer's are from the forward pass of a gradient, over rows that several
sequences share. The sampler pauses, runs out of pages, and has slots whose
number changes, so that no token is in the same batch twice.
"""

import dataclasses
import functools

import continuous_sampler
import jax
import jax.numpy as jnp
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
from gspo_jax.rollout.episode import (
  EpisodeSequence,
  SequenceLimits,
  episode_samples,
)
from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous import placement
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.continuous.engine import Generation
from gspo_jax.sampler.samples import STOPPED, Prompts, SamplerConfig

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
  "three experts": model.variant("tiny", experts_per_token=3, **SMALL),
}


def prompts():
  """From one token on, padded on the left."""
  tokens = np.random.default_rng(0).integers(10, 64, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array([1, 2, 7, 8, 9, 23, 39, S], np.int32))


def sampled(
  cfg,
  params,
  sampler=SAMPLER,
  batching=BATCHING,
  given=None,
  pauses=(5, 21),
  **axes,
):
  """Responses that pause twice."""
  given, devices = given or prompts(), 8 if axes else 1
  generate = continuous_sampler.build(
    cfg, sampler, batching, given.tokens.shape[1], devices=devices, **axes
  )
  samples = None
  for length in (*pauses, R):
    samples = generate(
      params,
      given,
      jax.random.key(1),
      resume_from=samples,
      stop_at=np.full(B, length),
    )
  return jax.device_get(samples)


def scored(
  cfg, params, samples, rows=PACKING, mesh=None, *, given=None, replay=False
):
  """Log-probs of the responses by trainer and sampler, their tokens alone."""
  given = given or prompts()
  lengths = np.repeat(given.lengths, G) + samples.lengths
  places = packing.pack(lengths, np.random.default_rng(1).permutation(B), rows)

  @functools.partial(jax.jit, compiler_options=rounding.OPTIONS)
  def step(params, places):
    batch, _ = packing.pack_responses(
      given,
      samples.tokens,
      samples.lengths,
      places,
      rows,
      logps=samples.logps,
      of_ids={"kept_ids": samples.kept_ids},
      experts=samples.experts,
      turns=samples.turns,
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
  assert mask.sum() == samples.num_sampled > 150
  return trainer[mask], sampler[mask]


@pytest.mark.parametrize("name", ["gpt-oss", "moonlight"])
def test_the_trainer_gives_the_samplers_bits(name):
  """gpt-oss has windows, sinks, biases and experts, Moonlight MLA."""
  cfg = MODELS[name]
  samples = sampled(cfg, weights(cfg))
  np.testing.assert_array_equal(*scored(cfg, weights(cfg), samples))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_each_family_is_exact(name, dtype):
  cfg = dataclasses.replace(MODELS[name], dtype=dtype)
  params = weights(cfg)
  samples = sampled(cfg, params)
  np.testing.assert_array_equal(*scored(cfg, params, samples))


@pytest.mark.slow
@pytest.mark.parametrize("page", [8, 32, 64, 128])
def test_any_sizes_are_exact(page):
  """Drawn are those of prompts, chunks, slots, rows and the mesh."""
  draw = np.random.default_rng(page)
  longest = int(draw.integers(2, 201))
  tokens = draw.integers(10, 64, (P, longest)).astype(np.int32)
  given = Prompts(tokens, draw.integers(1, longest + 1, P).astype(np.int32))
  least = -(-(longest - 1 + R) // page) + 1
  batching = ContinuousBatchingConfig(
    slots=int(draw.integers(2, 17)),
    page_size=page,
    num_pages=least * int(draw.integers(1, 5)),
    segment_steps=int(draw.integers(1, 20)),
    prefill_chunk=page * int(draw.integers(1, 4)),
  )
  dtype = ("float32", "bfloat16")[draw.integers(2)]
  cfg = dataclasses.replace(MODELS[draw.choice([*MODELS])], dtype=dtype)
  pauses = np.sort(draw.integers(1, R, 2)).tolist()
  samples = sampled(
    cfg, weights(cfg), batching=batching, given=given, pauses=pauses
  )
  data = int(draw.integers(1, 3))
  rows = PackingConfig(
    exact_attention.align("cpu")
    * int(draw.integers(longest + R + 3, 500) // 4),
    minibatches=1,
    micro_batch_size=data * int(draw.integers(1, 3)),
    shards=data,
    multiple=exact_attention.align("cpu"),
  )
  mesh = sharding.make_mesh(jax.devices()[:data], data=data)
  found = scored(cfg, weights(cfg), samples, rows, mesh, given=given)
  np.testing.assert_array_equal(*found)


def played(cfg, params):
  """Episodes of three turns, between which an environment writes."""
  given = prompts()
  generate = continuous_sampler.build(cfg, SAMPLER, BATCHING, S)
  ids = lambda p: given.tokens[p, -given.lengths[p] :].tolist()
  episodes = [EpisodeSequence(ids(row // G), number=0) for row in range(B)]
  with generate.open(params, jax.random.key(1), B) as engine:
    for turn in (1, 2, 3):
      asked = []
      for row, episode in enumerate(episodes):
        episode.add([10 + row] * (turn - 1 + row % 2))
        request = Generation(episode.ids, 11, row=row, response=row)
        request.num_tokens = len(episode.tokens)
        asked.append(engine.submit(request))
      engine.run(lambda: all(x.finish for x in asked))  # noqa: B023
      for request, episode in zip(asked, episodes, strict=True):
        episode.add(request.tokens, turn)
    finish = dict.fromkeys(range(B), STOPPED)
    limits = SequenceLimits(3, 1, S, R)
    by_row = {row: [episode] for row, episode in enumerate(episodes)}
    return jax.device_get(episode_samples(engine, by_row, finish, limits))


@pytest.mark.slow
def test_episodes_of_several_turns_are_exact():
  params = weights(WINDOWS)
  samples = played(WINDOWS, params)
  assert samples.turns.max() == 3
  np.testing.assert_array_equal(*scored(WINDOWS, params, samples))


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
@pytest.mark.parametrize(
  ("name", "tensor"),
  [("qwen3-moe", 2), ("minimax-m2", 2), ("dense", 4), ("qwen3-next", 2)],
)
def test_meshes_that_split_rows_and_experts_differently_are_exact(
  name, tensor, monkeypatch
):
  """MiniMax-M2 has a norm over the heads of all devices.

  Responses move as soon as one shard has more of them than another.
  """
  moved, migrate = [], placement.Placement.migrate

  def spy(self, *args):
    moved.append(migration := migrate(self, *args))
    return migration

  monkeypatch.setattr(placement.Placement, "migrate", spy)
  for constant in ("_MOST", "_LEAST", "_SEGMENTS"):
    monkeypatch.setattr(placement, constant, 1)
  np.testing.assert_array_equal(*on_meshes(MODELS[name], tensor))
  assert any(moved)


def on_meshes(cfg, tensor, between=lambda: None):
  """`scored`, by other meshes; `between` runs before the trainer does."""
  params, data = weights(cfg), 8 // tensor
  batching = dataclasses.replace(BATCHING, slots=16, num_pages=96)
  samples = sampled(cfg, params, batching=batching, data=data, tensor=tensor)
  between()
  mesh = sharding.make_mesh(
    jax.devices()[:8], fsdp=2, expert=data // 2, tensor=tensor
  )
  rows = dataclasses.replace(PACKING, micro_batch_size=4, shards=data)
  return scored(cfg, params, samples, rows, mesh)


SUM = exact.sum_in_order
BACKWARDS = exact, "sum_in_order", lambda x, axis: SUM(jnp.flip(x, axis), axis)
FORMS = {
  "blocks of keys": ("qwen3-moe", 1, (exact_attention, "KEYS", 32)),
  "blocks of tokens": (
    "qwen3-moe",
    1,
    (exact, "_in_blocks", lambda function, first, axes, *args: function(*args)),
  ),
  # A sum of two does not depend on the order.
  "order of experts": ("three experts", 1, BACKWARDS),
  "order of devices": ("dense", 4, BACKWARDS),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_needed(form, monkeypatch):
  """The sampler has another one.

  Products of few and of many rows are equal on some CPUs, so not theirs.
  """
  name, tensor, other = FORMS[form]
  cfg = dataclasses.replace(MODELS[name], dtype="float32")
  monkeypatch.setattr(*other)
  if tensor > 1:
    trainer, sampler = on_meshes(cfg, tensor, monkeypatch.undo)
  else:
    samples = sampled(cfg, weights(cfg))
    monkeypatch.undo()
    trainer, sampler = scored(cfg, weights(cfg), samples)
  assert (trainer != sampler).any()
