"""Answers are drawn from the policy: its log-probs, its odds, its ends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.learner import train_batch
from gspo_jax.logprobs import token_logprobs
from gspo_jax.model import cache as kv
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler import next_token as drawing
from gspo_jax.sampler import static as static_sampler
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, Prompts, SamplerConfig

V, P, S, G, R = 11, 3, 5, 4, 12
B = P * G
STOPS, PAD = (4, 1), 9
CFG = model.variant(
  "tiny",
  vocab_size=V,
  num_layers=1,
  embed_dim=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  mlp_dim=12,
  num_experts=4,
  rope_theta=50.0,
  dtype="float32",
)
BASE = SamplerConfig(G, R, STOPS, temperature=0.7, pad_id=PAD)
assemble = jax.jit(train_batch.make_train_batch)
GREEDY = SamplerConfig(2, R, STOPS, temperature=0, pad_id=PAD)
PLAIN = SamplerConfig(G, R, STOPS, min_new_tokens=4, pad_id=PAD)


@functools.cache
def weights(stop=0.0, cfg=CFG):
  """Random ones; the logit of each stop token is `stop` times a positive.

  Feature 0 of the stream is large and positive whatever the tokens.
  """
  rng = np.random.default_rng(8)  # answers of every length, greedy ones too
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))

  def fill(path, leaf):
    mean = 1.0 if path[-1].key == "scale" else 0.0
    return rng.normal(mean, 0.3, leaf.shape).astype(np.float32)

  params = jax.tree.map_with_path(fill, shapes)
  if stop:
    params["embed"][:, 0] = 20
    params["final_norm"]["scale"][0] = 1
    params["head"][0] = 0
    params["head"][0, list(STOPS)] = stop
  return params


def prompts(count=P):
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, V, (P, S)).astype(np.int32)[:count]
  return Prompts(tokens, np.array([5, 1, 3], np.int32)[:count])


@functools.cache
def compiled(sampler, first_slots, cfg=CFG):
  """`generate`, traced anew for each size of the first cache."""

  def generate(params, prompts, key):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(static_sampler, "_FIRST_SLOTS", first_slots)
      return static_sampler.generate(params, cfg, prompts, key, sampler=sampler)

  return jax.jit(generate)


def draw(sampler=BASE, text=None, *, stop=0.0, seed=0, first_slots=64):
  generate = compiled(sampler, first_slots)
  text = prompts() if text is None else text
  return jax.device_get(generate(weights(stop), text, jax.random.key(seed)))


@functools.cache
def scorer(temperature):
  score = functools.partial(
    token_logprobs, response_length=R, temperature=temperature
  )
  return jax.jit(lambda params, *text: score(params, CFG, *text).logps)


def teacher_forced(sampler, samples, stop=0.0):
  """Log-probs and mask [B, R] of the samples, as the trainer computes them."""
  batch = assemble(prompts(), samples.tokens, samples.lengths)
  text = batch.tokens, batch.positions, batch.mask
  logps = scorer(sampler.temperature)(weights(stop), *text)
  return np.asarray(logps), np.asarray(batch.response_mask)


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
  "sampler", [BASE, PLAIN, GREEDY], ids=["tempered", "plain", "greedy"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_logps_equal_teacher_forced_ones(sampler, seed):
  samples = draw(sampler, seed=seed)
  logps, mask = teacher_forced(sampler, samples)
  assert mask.sum() == samples.lengths.sum() > 2 * len(mask)
  np.testing.assert_allclose(samples.logps[mask], logps[mask], atol=1e-5)
  assert (samples.logps[~mask] == 0).all()
  stopped = np.flatnonzero(samples.finish == STOPPED)
  last = samples.logps[stopped, samples.lengths[stopped] - 1]
  assert (last < 0).all()  # the stop token has a log-prob like any other


def test_rows_end_where_they_should():
  seen = set()
  for seed in range(4):
    samples = draw(seed=seed)
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
  # All the ways to end were met: at once, in between, and cut.
  assert {(True, False, STOPPED), (False, False, STOPPED)} <= seen
  assert (False, True, TRUNCATED) in seen


def test_a_stop_as_the_very_first_token():
  samples = draw(stop=50.0)
  assert (samples.lengths == 1).all()
  assert (samples.finish == STOPPED).all()
  assert np.isin(samples.tokens[:, 0], STOPS).all()
  assert (samples.tokens[:, 1:] == PAD).all()
  assert samples.slot_steps == B
  logps, mask = teacher_forced(BASE, samples, stop=50.0)
  assert (mask.sum(1) == 1).all()
  # Logits near 50 come in steps of 4e-6.
  np.testing.assert_allclose(samples.logps[mask], logps[mask], atol=2e-5)
  assert (samples.logps[:, 1:] == 0).all()
  assert len(set(samples.logps[:, 0])) > 1


def test_rows_that_never_stop_are_truncated():
  samples = draw(stop=-50.0)
  assert (samples.lengths == R).all()
  assert (samples.finish == TRUNCATED).all()
  assert samples.slot_steps == B * R


def test_min_new_tokens_delays_the_stop():
  samples = draw(PLAIN, stop=50.0)
  assert (samples.lengths == PLAIN.min_new_tokens).all()
  assert (samples.finish == STOPPED).all()
  logps, mask = teacher_forced(PLAIN, samples, stop=50.0)
  assert samples.logps[:, 0].max() < -10  # of the untruncated distribution
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5)
  close(samples.logps[mask], logps[mask])


def test_answers_and_keys_differ_and_the_same_key_repeats():
  # The same prompt everywhere: what differs is the draw alone.
  same = jax.tree.map(lambda x: np.stack([x[0]] * P), prompts())
  first, again, other = (
    draw(text=same, stop=-50.0, seed=seed) for seed in (0, 0, 1)
  )
  assert_equal(first, again)
  rows = [tuple(row) for x in (first, other) for row in x.tokens]
  assert len(set(rows)) == 2 * B
  # A token's draw is its own, too: no row repeats one token.
  assert all(len(set(row)) > 2 for row in rows)


def test_what_padding_holds_does_not_matter():
  text = prompts()
  noise = np.where(text.mask, text.tokens, (text.tokens + 3) % V)
  assert_equal(draw(), draw(text=Prompts(noise, text.lengths)))


def test_a_row_does_not_depend_on_its_neighbours():
  few, many = draw(text=prompts(2)), draw()
  for name in ("tokens", "lengths", "finish"):
    assert_equal(getattr(few, name), getattr(many, name)[: 2 * G])
  np.testing.assert_allclose(few.logps, many.logps[: 2 * G], atol=1e-5)


@pytest.mark.parametrize("stop", [0.0, 50.0, -50.0])
def test_doubling_the_cache_changes_nothing(stop):
  small = draw(first_slots=2, stop=stop)  # 2, 4, 8, 11 slots
  large = draw(first_slots=64, stop=stop)
  np.testing.assert_allclose(small.logps, large.logps, atol=1e-5)
  for name in ("tokens", "lengths", "finish", "slot_steps"):
    assert_equal(getattr(small, name), getattr(large, name))


def test_short_answers_never_touch_the_longer_caches(monkeypatch):
  grown = []
  grow = lambda cache, slots: grown.append(slots) or cache_grow(cache, slots)
  cache_grow = kv.grow
  monkeypatch.setattr(kv, "grow", grow)
  monkeypatch.setattr(static_sampler, "_FIRST_SLOTS", 2)
  trace = functools.partial(static_sampler.generate, cfg=CFG, sampler=BASE)
  shapes = jax.make_jaxpr(
    lambda p, x, key: trace(p, prompts=x, key=key).tokens
  )(weights(), prompts(), jax.random.key(0))
  assert grown == [4, 8, R - 1]
  # Each longer cache appears first inside the branch of a cond.
  top = {v.aval.shape for e in shapes.eqns for v in e.outvars}
  heads = (CFG.num_kv_heads, CFG.head_dim)
  assert (B, heads[0], 2, heads[1]) in top
  assert not {(B, heads[0], s, heads[1]) for s in grown} & top


def test_temperature_zero_takes_the_argmax_of_the_full_forward():
  samples = draw(GREEDY)
  batch = assemble(prompts(), samples.tokens, samples.lengths)
  forward = jax.jit(model.forward, static_argnums=1)
  out = forward(weights(), CFG, batch.tokens, batch.positions, batch.mask)
  best = np.asarray(out.logits)[:, S - 1 : -1].argmax(-1)
  mask = np.asarray(batch.response_mask)
  assert mask.sum() > 2 * len(mask)
  assert_equal(samples.tokens[mask], best[mask])
  assert_equal(samples.tokens[::2], samples.tokens[1::2])


def test_top_k_of_one_is_greedy():
  one = SamplerConfig(2, R, STOPS, temperature=2.0, top_k=1, pad_id=PAD)
  assert_equal(draw(one).tokens, draw(GREEDY).tokens)


ROWS = 4096
ONE = functools.partial(SamplerConfig, ROWS, 1, STOPS)


def nucleus(probs, top_p):
  """The fewest likeliest tokens of total probability `top_p`, as a mask."""
  keep, total = np.zeros(len(probs), bool), 0.0
  for token in np.argsort(-probs):
    if total < top_p:
      keep[token] = True
    total += probs[token]
  return keep


@pytest.mark.parametrize(
  ("sampler", "kept"),
  [
    (ONE(temperature=0.7), lambda p: p > 0),
    (ONE(temperature=1.5, top_p=0.6), lambda p: nucleus(p, 0.6)),
  ],
  ids=["temperature", "top_p"],
)
def test_frequencies_are_the_policys(sampler, kept):
  text = prompts(1)
  samples = draw(sampler, text)
  forward = jax.jit(model.forward, static_argnums=1)
  out = forward(weights(), CFG, text.tokens, text.positions, text.mask)
  logits = np.float64(out.logits)[0, -1]
  odds = np.exp(logits / sampler.temperature)
  odds /= odds.sum()
  tokens = samples.tokens[:, 0]
  np.testing.assert_allclose(samples.logps[:, 0], np.log(odds)[tokens], 1e-4)
  counts = np.bincount(tokens, minlength=V)
  keep = kept(odds)
  assert (counts[~keep] == 0).all()
  expected = ROWS * odds[keep] / odds[keep].sum()
  chi_square = ((counts[keep] - expected) ** 2 / expected).sum()
  # One in 10,000 for ten degrees of freedom. The seed is fixed.
  assert chi_square < 36
  assert keep.sum() > 1


def kept_by_truncation(probs, step=0, **config):
  sampler = SamplerConfig(1, 8, STOPS, **config)
  steps = jnp.full(len(probs), step)
  left = drawing.truncate(jnp.log(jnp.asarray(probs)), steps, sampler)
  return np.isfinite(left)


@pytest.mark.parametrize("top_p", [1e-6, 0.2, 0.5, 0.8, 0.99])
def test_top_p_keeps_the_nucleus(top_p):
  probs = np.random.default_rng(0).dirichlet(np.full(V, 0.5), 20)
  kept = kept_by_truncation(probs, top_p=top_p)
  assert_equal(kept, np.stack([nucleus(p, top_p) for p in probs]))


def test_top_p_counts_what_top_k_left():
  probs = np.array([[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]])
  # Two thirds and one third are left, and 0.6 is reached by the first.
  kept = kept_by_truncation(probs, top_k=2, top_p=0.6)
  assert kept.tolist() == [[True, False, False, False, False, False]]


def test_top_k_favours_none_of_equals():
  probs = np.array([[0.1, 0.3, 0.2, 0.2, 0.2], [0.4, 0.1, 0.1, 0.2, 0.2]])
  two = kept_by_truncation(probs, top_k=2)
  assert two.tolist() == [
    [False, *[True] * 4],
    [True, False, False, True, True],
  ]
  one = kept_by_truncation(probs, top_k=1)
  assert one.argmax(1).tolist() == [1, 0]
  assert (one.sum(1) == 1).all()
  assert kept_by_truncation(probs, top_k=5).all()
  assert kept_by_truncation(probs, top_k=99).all()


def test_min_new_tokens_counts_the_stop_itself():
  probs = np.full((1, V), 1 / V)
  stops = np.isin(np.arange(V), STOPS)
  for step, early in ((0, True), (1, True), (2, False)):
    kept = kept_by_truncation(probs, step, min_new_tokens=3)
    assert_equal(kept[0], ~(stops & early))


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("group_size", 0),
    ("max_new_tokens", 0),
    ("stop_ids", ()),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_new_tokens", -1),
  ],
)
def test_a_bad_value_is_a_user_error_that_names_it(name, value):
  good = {"group_size": 2, "max_new_tokens": 4, "stop_ids": (1,)}
  with pytest.raises(UserError) as error:
    SamplerConfig(**{**good, name: value})
  assert f"sampler.{name}={value!r}: expected" in str(error.value)


def test_truncates_says_whether_some_tokens_cannot_be_drawn():
  assert not BASE.truncates
  assert not GREEDY.truncates
  assert PLAIN.truncates
  assert ONE(top_k=3).truncates
  assert ONE(top_p=0.6).truncates


# Recorded routing.

DEEP = dataclasses.replace(CFG, num_layers=2)
RECORD = dataclasses.replace(BASE, record_routing=True)


@functools.cache
def recorded(first_slots=64, cfg=DEEP, sampler=RECORD):
  generate = compiled(sampler, first_slots, cfg)
  samples = generate(weights(cfg=cfg), prompts(), jax.random.key(0))
  return jax.device_get(samples)


def replayed(params, samples, routes, replay=True, cfg=DEEP):
  """`token_logprobs` of the samples, and the tokens that were fed, [B, T]."""
  batch = assemble(prompts(), samples.tokens, samples.lengths)
  text = batch.tokens, batch.positions, batch.mask
  scored = jax.jit(
    functools.partial(
      token_logprobs,
      cfg=cfg,
      response_length=R,
      temperature=0.7,
      replay=replay,
    )
  )(params, tokens=text[0], positions=text[1], mask=text[2], routes=routes)
  last = S + np.asarray(samples.lengths)[:, None] - 1
  fed = np.asarray(batch.mask) & (np.arange(S + R) != last)
  return scored, fed, np.asarray(batch.response_mask)


@pytest.mark.parametrize("first_slots", [2, 64])
def test_the_experts_recorded_are_those_of_the_full_forward(first_slots):
  samples = recorded(first_slots)  # of 2, 4, 8, 11 slots, or of 11
  assert samples.experts.dtype == np.uint8
  assert samples.experts.shape == (B, 2, S + R, 2)
  scored, fed, _ = replayed(weights(cfg=DEEP), samples, None, replay=False)
  assert fed.sum() == G * prompts().lengths.sum() + samples.lengths.sum() - B
  by_token = lambda x, axes: np.sort(np.transpose(x, axes)[fed])
  found = by_token(samples.experts, (0, 2, 1, 3))
  np.testing.assert_array_equal(found, by_token(scored.experts, (1, 2, 0, 3)))
  counts = np.bincount(found[:, 0].ravel()), np.bincount(found[:, 1].ravel())
  assert (counts[0] != counts[1]).any()  # the layers are not one another


def test_what_was_never_fed_has_experts_all_the_same():
  experts = recorded().experts
  assert experts.max() < DEEP.num_experts
  assert (experts[..., 0] != experts[..., 1]).all()


def test_without_recording_nothing_is_kept():
  generate = compiled(BASE, 64, DEEP)
  shapes = weights(cfg=DEEP), prompts(), jax.random.key(0)
  plain = generate.lower(*shapes).compile().as_text()
  noted = compiled(RECORD, 64, DEEP).lower(*shapes).compile().as_text()
  array = f"u8[{DEEP.num_layers},{B},{R},"
  assert array not in plain
  assert array in noted


def test_recording_changes_no_answer():
  plain = recorded(sampler=BASE)
  assert plain.experts is None
  noted = dataclasses.replace(recorded(), experts=None)
  assert_equal(noted, plain)


def test_replay_of_what_was_recorded_gives_the_samplers_log_probs():
  """R3, in float32; and it holds where the router would go elsewhere."""
  samples = recorded()
  routes = samples.experts.swapaxes(0, 1)
  scored, _, mask = replayed(weights(cfg=DEEP), samples, routes)
  np.testing.assert_allclose(scored.logps[mask], samples.logps[mask], atol=1e-5)
  np.testing.assert_array_equal(scored.experts, routes)
  moved = jax.tree.map(np.copy, weights(cfg=DEEP))
  moved["layers"]["moe"]["router"] += 0.2 * np.random.default_rng(0).normal(
    size=moved["layers"]["moe"]["router"].shape
  ).astype(np.float32)
  free, fed, _ = replayed(moved, samples, routes, replay=False)
  flipped = np.sort(free.experts) != np.sort(routes)
  assert 0.05 < flipped[:, fed].mean() < 0.8
  held, _, _ = replayed(moved, samples, routes)
  np.testing.assert_array_equal(held.experts, routes)
  gap = lambda x: np.abs(x.logps - samples.logps)[mask].mean()
  assert gap(held) < gap(free)


@pytest.mark.parametrize("experts", [0, 32])
def test_in_bf16_the_trainer_rounds_as_the_sampler(experts):
  """Of small sums, whose order does not matter, no difference is left."""
  low = dataclasses.replace(DEEP, dtype="bfloat16", num_experts=experts)
  samples = recorded(cfg=low)
  scored, _, mask = replayed(weights(cfg=low), samples, None, False, low)
  gap = np.abs(scored.logps - samples.logps)[mask]
  assert gap.max() < 1e-5


def test_a_dense_model_records_no_routing():
  dense = dataclasses.replace(CFG, num_experts=0, experts_per_token=0)
  assert recorded(cfg=dense).experts is None


def test_recording_on_a_mesh():
  """Rows over `data` and `expert`: in their order, as on one device."""
  samples = recorded()
  four = lambda x: np.concatenate([x, x[:1]])  # prompts
  text = Prompts(four(prompts().tokens), four(prompts().lengths))
  generate = jax.jit(
    functools.partial(static_sampler.generate, cfg=DEEP, sampler=RECORD)
  )
  mesh = sharding.make_mesh(jax.devices()[:4], data=2, expert=2)
  with jax.set_mesh(mesh):
    many = generate(weights(cfg=DEEP), prompts=text, key=jax.random.key(0))
  np.testing.assert_array_equal(many.tokens[:B], samples.tokens)
  np.testing.assert_array_equal(many.experts[:B], samples.experts)
