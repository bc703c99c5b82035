"""The static sampler: log-probs, ends, keys, the cache, recorded routing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import MOE
from random_model import base_and_adapters
from random_model import weights as random_weights

from gspo_jax import model
from gspo_jax.learner import train_batch
from gspo_jax.model import cache as kv
from gspo_jax.sampler import decode_params, static
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, Prompts, SamplerConfig

V, P, S, G, R = 11, 3, 5, 4, 12
B = P * G
STOPS, PAD = (4, 1), 9
CFG = dataclasses.replace(MOE, vocab_size=V, num_experts=4, unroll=None)
SAMPLED = SamplerConfig(
  *(G, R, STOPS),
  **{"temperature": 0.7, "pad_id": PAD, "record_routing": True, "head_ids": 3},
)
GREEDY = SamplerConfig(2, R, STOPS, temperature=0, min_new_tokens=3, pad_id=PAD)
unpacked = jax.jit(train_batch.unpacked)
forward = jax.jit(model.forward, static_argnums=1)


@functools.cache
def weights(stop=0.0, cfg=CFG):
  """Random weights; the logit of each stop token is `stop` times a positive."""
  # Seed 8 gives responses of many lengths.
  params = jax.tree.map(np.copy, random_weights(cfg, seed=8))
  if stop:
    params["embed"][:, 0] = 20
    params["final_norm"]["scale"][0] = 1
    params["head"][0] = 0
    params["head"][0, list(STOPS)] = stop
  return params


def prompts():
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, V, (P, S)).astype(np.int32)
  return Prompts(tokens, np.array([5, 1, 3], np.int32))


@functools.cache
def jitted(sampler, first_slots=64, cfg=CFG):
  """`generate`, compiled for a length of the first cache."""

  def generate(params, prompts, key):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(static, "_FIRST_SLOTS", first_slots)
      return static.generate(params, cfg, prompts, key, sampler=sampler)

  return jax.jit(generate)


def generate(
  sampler=SAMPLED, batch=None, *, stop=0.0, seed=0, first_slots=64, cfg=CFG
):
  batch = prompts() if batch is None else batch
  samples = jitted(sampler, first_slots, cfg)(
    weights(stop, cfg), batch, jax.random.key(seed)
  )
  return jax.device_get(samples)


@functools.partial(jax.jit, static_argnums=(1, 4))
def score(params, cfg, batch, routes, replay):
  return train_batch.response_logps(
    params,
    cfg,
    batch,
    temperature=SAMPLED.temperature,
    routes=routes,
    replay=replay,
    head_ids=batch.head_ids,
  )


def teacher_forced(params, samples, *, routes=None, cfg=CFG):
  """The trainer's log-probs (with `routes`, replayed), and its TrainBatch."""
  batch = unpacked(prompts(), samples.tokens, samples.lengths)
  of_ids = {"kept_ids": samples.kept_ids, "head_ids": samples.head_ids}
  batch = dataclasses.replace(batch, **of_ids)
  scored = score(params, cfg, batch, routes, routes is not None)
  return jax.device_get((scored, batch))


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
  ("seed", "changes"),
  [(0, {}), (1, {}), (0, {"top_p": 0.7, "min_p": 0.1, "min_new_tokens": 3})],
)  # fmt: skip
def test_sampled_logps_equal_teacher_forced_ones(seed, changes):
  """Of truncated sampling, over the ids that the sampler kept."""
  samples = generate(dataclasses.replace(SAMPLED, **changes), seed=seed)
  scored, batch = teacher_forced(weights(), samples)
  mask = batch.response_mask
  assert mask.sum() == samples.lengths.sum() > 2 * len(mask)
  np.testing.assert_allclose(samples.logps[mask], scored.logps[mask], atol=1e-5)
  sampled, found = (
    np.moveaxis(x.head_logps, 1, -1)[mask] for x in (samples, scored)
  )
  is_id = sampled > -np.inf
  np.testing.assert_allclose(sampled[is_id], found[is_id], atol=1e-5)
  assert (samples.logps[~mask] == 0).all()
  stopped = np.flatnonzero(samples.finish == STOPPED)
  last = samples.logps[stopped, samples.lengths[stopped] - 1]
  assert (last < 0).all()  # the stop token has a log-prob like any other


def test_adapters_are_not_rounded_away():
  """Merged into weights of 16 bits, most of these would be."""
  lora = model.LoraConfig(2, 2.0, "attention")
  cfg = dataclasses.replace(CFG, dtype="bfloat16", num_layers=1, lora=lora)
  base = jax.tree.map(lambda x: jnp.asarray(x, cfg.dtype), weights(cfg=cfg))
  adapters = jax.eval_shape(lambda: model.lora.init(jax.random.key(0), cfg))
  rng = np.random.default_rng(0)
  # Products of 0.001: an eighth of the least step between weights of 0.3.
  small = lambda x: rng.normal(0, 0.02, x.shape).astype(np.float32)
  params = model.lora.join(base, jax.tree.map(small, adapters))
  key = jax.random.key(0)
  samples = jax.device_get(jitted(SAMPLED, cfg=cfg)(params, prompts(), key))
  gap = {}
  for name, tree in {"whole": params, "base": base}.items():
    scored, batch = teacher_forced(tree, samples, cfg=cfg)
    change = (samples.logps - scored.logps)[batch.response_mask]
    gap[name] = np.abs(change).mean()
  assert gap["whole"] < 0.3 * gap["base"], gap


def test_merged_adapters_sample_what_adapters_sample(monkeypatch):
  lora = model.LoraConfig(2, 0.5)
  cfg = dataclasses.replace(CFG, num_layers=1, lora=lora)
  params = model.lora.join(*base_and_adapters(cfg))
  run = lambda: jax.device_get(
    jitted.__wrapped__(SAMPLED, cfg=cfg)(params, prompts(), jax.random.key(0))
  )
  merged = run()
  monkeypatch.setattr(decode_params, "_merges", lambda *_: False)
  apart = run()
  assert not np.array_equal(merged.logps, apart.logps)  # other operations
  np.testing.assert_allclose(merged.logps, apart.logps, atol=1e-5)
  assert_equal(merged.tokens, apart.tokens)


def test_responses_end_where_they_should():
  seen = set()
  for seed in range(18, 22):
    samples = generate(seed=seed)
    assert samples.tokens.shape == samples.logps.shape == (B, R)
    assert samples.finish.dtype == np.int8
    assert samples.slot_steps == B * samples.lengths.max()
    for tokens, n, finish in zip(
      samples.tokens, samples.lengths, samples.finish, strict=True
    ):
      stops = np.flatnonzero(np.isin(tokens[:n], STOPS))
      assert stops.tolist() == ([n - 1] if finish == STOPPED else [])
      assert finish == STOPPED or n == R
      assert (tokens[n:] == PAD).all()
      seen.add((n == 1, n == R, int(finish)))
  # All kinds were seen: stopped at once, stopped later, and truncated.
  assert {(True, False, STOPPED), (False, False, STOPPED)} <= seen
  assert (False, True, TRUNCATED) in seen


@pytest.mark.parametrize("stop", [0.0, 50.0])
def test_temperature_zero_takes_the_best_allowed_token(stop):
  """And its log-prob is that of temperature 1, before truncation."""
  samples = generate(GREEDY, stop=stop)
  batch = unpacked(prompts(), samples.tokens, samples.lengths)
  out = forward(
    weights(stop), CFG, batch.tokens, batch.positions, batch.segment_ids
  )
  logits = np.array(out.logits[:, S - 1 : -1])
  logps = np.take_along_axis(
    np.asarray(jax.nn.log_softmax(logits)), samples.tokens[..., None], 2
  )[..., 0]
  early = slice(0, GREEDY.min_new_tokens - 1)
  logits[:, early, list(STOPS)] = -np.inf
  best = logits.argmax(-1)
  mask = np.asarray(batch.response_mask)
  assert_equal(samples.tokens[mask], best[mask])
  np.testing.assert_allclose(
    samples.logps[mask], logps[mask], rtol=1e-5, atol=2e-5
  )
  assert_equal(samples.tokens[::2], samples.tokens[1::2])
  assert samples.slot_steps == len(mask) * samples.lengths.max()
  if stop:
    assert (samples.lengths == GREEDY.min_new_tokens).all()
    assert (samples.finish == STOPPED).all()
    assert samples.logps[:, early].max() < -10
  else:
    assert mask.sum() > 2 * len(mask)


def test_responses_and_keys_differ_and_the_same_key_repeats():
  # One prompt for all, so that only the keys differ.
  same = jax.tree.map(lambda x: np.stack([x[0]] * P), prompts())
  first, again, other = (
    generate(batch=same, stop=-50.0, seed=seed) for seed in (0, 0, 1)
  )
  assert_equal(first, again)
  responses = [tuple(row) for x in (first, other) for row in x.tokens]
  assert len(set(responses)) == 2 * B
  # Each token has its own key, too: no response repeats one token.
  assert all(len(set(row)) > 2 for row in responses)


@pytest.mark.parametrize("stop", [0.0, 50.0])
def test_doubling_the_cache_changes_nothing(stop):
  small = generate(first_slots=4, stop=stop)  # 4, 8, 11 slots
  large = generate(stop=stop)
  np.testing.assert_allclose(small.logps, large.logps, atol=1e-5)
  for name in ("tokens", "lengths", "finish", "slot_steps"):
    assert_equal(getattr(small, name), getattr(large, name))
  if not stop:
    real = np.arange(S + R) < S + large.lengths[:, None] - 1
    sets = lambda x: np.sort(x.experts.swapaxes(1, 2)[real])
    assert_equal(sets(small), sets(large))


def test_short_responses_never_touch_the_longer_caches(monkeypatch):
  grown = []
  grow = lambda cache, slots: grown.append(slots) or cache_grow(cache, slots)
  cache_grow = kv.grow
  monkeypatch.setattr(kv, "grow", grow)
  monkeypatch.setattr(static, "_FIRST_SLOTS", 2)
  trace = functools.partial(static.generate, cfg=CFG, sampler=SAMPLED)
  shapes = jax.make_jaxpr(
    lambda p, x, key: trace(p, prompts=x, key=key).tokens
  )(weights(), prompts(), jax.random.key(0))
  assert grown == [4, 8, R - 1]
  # Each longer cache appears first inside the branch of a cond.
  top = {v.aval.shape for e in shapes.eqns for v in e.outvars}
  heads = (CFG.num_kv_heads, CFG.head_dim)
  assert (B, heads[0], 2, heads[1]) in top
  assert not {(B, heads[0], s, heads[1]) for s in grown} & top


def fed_tokens(samples, batch):
  """[B, S + R] bool: real tokens but the last of each response."""
  last = S + samples.lengths[:, None] - 1
  return (batch.segment_ids > 0) & (np.arange(S + R) != last)


def test_recorded_experts_are_those_of_the_full_forward():
  samples = generate()
  assert samples.experts.dtype == np.uint8
  assert samples.experts.shape == (B, CFG.num_layers, S + R, 2)
  scored, batch = teacher_forced(weights(), samples)
  fed = fed_tokens(samples, batch)
  assert fed.sum() == G * prompts().lengths.sum() + samples.lengths.sum() - B
  by_token = lambda x, axes: np.sort(np.transpose(x, axes)[fed])
  recorded = by_token(samples.experts, (0, 2, 1, 3))
  assert_equal(recorded, by_token(scored.experts, (1, 2, 0, 3)))
  first, second = (np.bincount(recorded[:, i].ravel()) for i in range(2))
  assert (first != second).any()  # the layers differ
  # Tokens that were not fed have k different experts, too.
  assert samples.experts.max() < CFG.num_experts
  assert (samples.experts[..., 0] != samples.experts[..., 1]).all()


def test_without_recording_samples_are_the_same_and_no_routing_is_kept():
  silent = dataclasses.replace(SAMPLED, record_routing=False)
  samples = generate(silent)
  assert samples.experts is None
  assert_equal(dataclasses.replace(generate(), experts=None), samples)
  args = weights(), prompts(), jax.random.key(0)
  text = lambda sampler: jitted(sampler).lower(*args).as_text()
  kept = f"tensor<{CFG.num_layers}x{B}x{R}x2xui8>"
  assert kept not in text(silent)
  assert kept in text(SAMPLED)


def test_replaying_the_recorded_experts_gives_the_samplers_log_probs():
  """R3, in float32; also where the router would choose other experts."""
  samples = generate()
  routes = samples.experts.swapaxes(0, 1)
  scored, batch = teacher_forced(weights(), samples, routes=routes)
  mask = batch.response_mask
  np.testing.assert_allclose(scored.logps[mask], samples.logps[mask], atol=1e-5)
  assert_equal(scored.experts, routes)
  moved = jax.tree.map(np.copy, weights())
  router = moved["layers"]["moe"]["router"]
  noise = np.random.default_rng(0).normal(size=router.shape)
  router += 0.2 * noise.astype(np.float32)
  free, _ = teacher_forced(moved, samples)
  flipped = np.sort(free.experts) != np.sort(routes)
  assert 0.05 < flipped[:, fed_tokens(samples, batch)].mean() < 0.8
  replayed, _ = teacher_forced(moved, samples, routes=routes)
  assert_equal(replayed.experts, routes)
  gap = lambda x: np.abs(x.logps - samples.logps)[mask].mean()
  assert gap(replayed) < gap(free)


@pytest.mark.parametrize(("experts", "over_heads"), [(0, False), (32, True)])
def test_in_bf16_the_trainer_rounds_as_the_sampler(experts, over_heads):
  """Sums this short do not depend on their order: no difference is left."""
  low = dataclasses.replace(
    CFG,
    dtype="bfloat16",
    num_experts=experts,
    qk_norm_over_heads=over_heads,
  )
  samples = generate(cfg=low)
  scored, batch = teacher_forced(weights(cfg=low), samples, cfg=low)
  gap = np.abs(scored.logps - samples.logps)[batch.response_mask]
  assert gap.max() < 1e-5
  assert (samples.experts is None) == (experts == 0)  # a dense model has none
