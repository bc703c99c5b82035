"""The next token: sampling, and truncation by top-k, top-p and min length."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.data import tokenizers
from gspo_jax.runtime import sharding
from gspo_jax.sampler import next_token, stop_strings
from gspo_jax.sampler.samples import SamplerConfig, SamplingParams

V, STOPS = 11, (4, 1)


def nucleus(probs, top_p):
  """The fewest likeliest tokens of total probability `top_p`, as a mask."""
  keep, total = np.zeros(len(probs), bool), 0.0
  for token in np.argsort(-probs):
    if total < top_p:
      keep[token] = True
    total += probs[token]
  return keep


def kept_tokens(probs, step=0, **config):
  sampler = SamplerConfig(1, 8, STOPS, **config)
  steps = jnp.full(len(probs), step)
  logps = next_token.truncate(jnp.log(jnp.asarray(probs)), steps, sampler)
  return np.isfinite(logps)


def kept_ids(probs, step=0, **config):
  """The mask of the tokens that `keep` lists, after checks of its results."""
  sampler = SamplerConfig(1, 8, STOPS, **config)
  steps, K = jnp.full(len(probs), step), sampler.num_kept(probs.shape[1])
  log_probs = jnp.log(jnp.asarray(probs))
  ids, logps = next_token.keep(log_probs, steps, sampler, K)
  assert ids.shape == logps.shape == (len(probs), K)
  kept = np.zeros(probs.shape, bool)
  for row, mask, some, found in zip(probs, kept, ids, logps, strict=True):
    is_kept = np.isfinite(found)
    mask[some[is_kept]] = True
    assert mask.sum() == is_kept.sum()  # each once
    assert (some[~is_kept] == some[0]).all()
    expected = np.log(row[some] / row[mask].sum())
    np.testing.assert_allclose(found[is_kept], expected[is_kept], atol=1e-5)
  return kept


@pytest.mark.parametrize("top_p", [1e-6, 0.2, 0.5, 0.8, 0.99])
def test_top_p_keeps_the_nucleus(top_p):
  probs = np.random.default_rng(0).dirichlet(np.full(V, 0.5), 20)
  expected = np.stack([nucleus(p, top_p) for p in probs])
  np.testing.assert_array_equal(kept_tokens(probs, top_p=top_p), expected)
  np.testing.assert_array_equal(kept_ids(probs, top_p=top_p), expected)
  # Of the whole probability, as far as three ids reach.
  likeliest = np.argsort(np.argsort(-probs)) < 3
  found = kept_ids(probs, top_p=top_p, kept_ids=3)
  np.testing.assert_array_equal(found, expected & likeliest)


@pytest.mark.parametrize("kept", [kept_tokens, kept_ids])
def test_min_p_is_a_share_of_the_likeliest_allowed_token(kept):
  probs = np.random.default_rng(0).dirichlet(np.full(V, 0.5), 20)
  least = lambda p: p >= 0.3 * p.max(-1, keepdims=True)
  np.testing.assert_array_equal(kept(probs, min_p=0.3), least(probs))
  allowed = np.where(np.isin(np.arange(V), STOPS), 0, probs)
  found = kept(probs, min_p=0.3, min_new_tokens=2)
  np.testing.assert_array_equal(found, least(allowed))
  assert kept(probs, min_p=1.0).sum() == len(probs)


@pytest.mark.parametrize("kept", [kept_tokens, kept_ids])
def test_top_p_is_of_what_top_k_left(kept):
  probs = np.array([[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]])
  # Two thirds and one third are left, and the first alone reaches 0.6.
  found = kept(probs, top_k=2, top_p=0.6)
  assert found.tolist() == [[True, False, False, False, False, False]]


def test_top_k_keeps_all_that_tie_with_the_kth():
  probs = np.array([[0.1, 0.3, 0.2, 0.2, 0.2], [0.4, 0.1, 0.1, 0.2, 0.2]])
  assert kept_tokens(probs, top_k=2).tolist() == [
    [False, *[True] * 4],
    [True, False, False, True, True],
  ]
  # A list of ids has no room for ties.
  assert kept_ids(probs, top_k=2).sum(1).tolist() == [2, 2]
  assert kept_ids(probs, top_k=99).all()
  one = kept_tokens(probs, top_k=1)
  assert one.argmax(1).tolist() == [1, 0]
  assert (one.sum(1) == 1).all()
  assert kept_tokens(probs, top_k=5).all()
  assert kept_tokens(probs, top_k=99).all()


def test_min_new_tokens_counts_the_stop_token():
  probs = np.full((1, V), 1 / V)
  stops = np.isin(np.arange(V), STOPS)
  for step, early in ((0, True), (1, True), (2, False)):
    kept = kept_tokens(probs, step, min_new_tokens=3)
    np.testing.assert_array_equal(kept[0], ~(stops & early))


def test_a_stop_token_or_a_stop_string_ends_a_response():
  strings = stop_strings.build(("ab",), tokenizers.load("bytes"))
  sampler = SamplerConfig(1, 8, (257,), stop=strings, min_new_tokens=3)
  tokens, lengths = jnp.array([*b"bba", 257, 257]), jnp.array([2, 3, 3, 1, 3])
  state, ends = next_token.stop(tokens, lengths, jnp.ones(5, int), sampler)
  assert state.tolist() == [2, 2, 1, 0, 0]  # all came behind an "a"
  assert ends.tolist() == [False, True, False, True, True]


def test_ids_are_kept_only_of_a_truncated_distribution():
  config = functools.partial(SamplerConfig, 2, 8, STOPS)
  assert not config(temperature=0.7).truncates
  assert not config(temperature=0).truncates
  assert not config(min_new_tokens=4, kept_ids=9).keeps_ids
  for changes in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.1}):
    assert config(**changes).truncates
    assert config(**changes).keeps_ids
    assert not config(**changes, kept_ids=0).keeps_ids


def sampled_tokens(logits, count, **config):
  """`count` samples of the next token, each with its own key."""
  sampler = SamplerConfig(1, 8, STOPS, **config)
  keys = jax.vmap(jax.random.fold_in, (None, 0))(
    jax.random.key(0), jnp.arange(count)
  )
  rows = jnp.broadcast_to(logits, (count, len(logits)))
  steps = jnp.zeros(count, jnp.int32)
  return jax.device_get(next_token.sample_token(rows, keys, steps, sampler))


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.6}, {"top_k": 2}])
def test_the_head_has_the_likeliest_ids_that_were_sampled_among(truncation):
  logits = np.random.default_rng(3).normal(size=V).astype(np.float32)
  config = {"temperature": 0.7, **truncation}
  new = sampled_tokens(logits, 2, head_ids=4, **config)
  probs = np.exp(np.float64(logits) / 0.7)
  probs /= probs.sum()
  order = np.argsort(-probs)
  many = {"top_p": nucleus(probs, 0.6).sum(), "top_k": 2}
  kept = min((many[name] for name in truncation), default=V)
  total = probs[order[:kept]].sum()
  size = min(4, truncation.get("top_k", V))
  expected = np.full(size, -np.inf)
  expected[:kept] = np.log(probs[order[:kept]] / total)[:size]
  for ids, logps in zip(new["head_ids"], new["head_logps"], strict=True):
    np.testing.assert_allclose(logps, expected, rtol=1e-5)
    np.testing.assert_array_equal(ids[:kept], order[:kept][:size])


@pytest.mark.parametrize(
  ("config", "kept"),
  [
    ({"temperature": 0.7}, lambda p: p > 0),
    ({"temperature": 1.5, "top_p": 0.6}, lambda p: nucleus(p, 0.6)),
    ({"temperature": 1.5, "top_p": 0.6, "kept_ids": 0},
     lambda p: nucleus(p, 0.6)),
  ],
  ids=["temperature", "top_p", "off-policy"],
)  # fmt: skip
def test_frequencies_and_log_probs_are_those_of_the_logits(config, kept):
  """With `kept_ids=0`, log-probs are before truncation."""
  count = 4096
  logits = np.random.default_rng(1).normal(size=V).astype(np.float32)
  new = sampled_tokens(logits, count, **config)
  tokens, logps = new["tokens"], new["logps"]
  probs = np.exp(np.float64(logits) / config["temperature"])
  probs /= probs.sum()
  keep = kept(probs)
  total = 1 if "kept_ids" in config else probs[keep].sum()
  np.testing.assert_allclose(logps, np.log(probs / total)[tokens], 1e-4)
  counts = np.bincount(tokens, minlength=V)
  assert 1 < keep.sum() < V or "top_p" not in config
  assert (counts[~keep] == 0).all()
  expected = count * probs[keep] / probs[keep].sum()
  chi_square = ((counts[keep] - expected) ** 2 / expected).sum()
  # One in 10,000 for ten degrees of freedom. The seed is fixed.
  assert chi_square < 36


def test_top_k_of_one_and_temperature_zero_take_the_likeliest_token():
  logits = np.random.default_rng(2).normal(size=V).astype(np.float32)
  one = {"temperature": 2.0, "top_k": 1}
  for config in (one | {"kept_ids": 0}, one, {"temperature": 0.0}):
    new = sampled_tokens(logits, 8, **config)
    assert (new["tokens"] == logits.argmax()).all()
    scaled = jax.nn.log_softmax(logits / (config["temperature"] or 1.0))
    expected = 0.0 if "kept_ids" in new else scaled[logits.argmax()]
    np.testing.assert_allclose(new["logps"], expected, 1e-5)


TRUNCATION = {"top_p": 0.9, "min_p": 1e-3}


@pytest.mark.parametrize(
  ("vocab", "truncation"),
  [(7, {}), (258, {}), (300, TRUNCATION), (512, TRUNCATION), (4096, {})],
)
def test_tokens_have_their_probabilities(vocab, truncation):
  """Of blocks without a token, too, and with one; 7 tokens are one block."""
  rng = np.random.default_rng(vocab)
  probs = rng.dirichlet(np.full(vocab, 0.5))
  size = vocab // 4
  probs[:size] = 0
  probs[size + 1 : 2 * size] = 0
  logps = jnp.log(jnp.asarray(probs, jnp.float32)) - 3.0  # sum to less than 1
  sampler = SamplerConfig(1, 8, STOPS, **truncation)
  (logps,) = next_token.truncate(logps[None], jnp.zeros(1, int), sampler)
  probs = np.where(np.isfinite(logps), probs, 0)
  probs /= probs.sum()
  draws = 20_000
  keys = jax.random.split(jax.random.key(0), draws)
  sample = jax.jit(jax.vmap(next_token.categorical, (0, None)))
  counts = np.bincount(sample(keys, logps), minlength=vocab)
  assert (counts[probs == 0] == 0).all()
  # Rare tokens together. The chi-square of n cells has about n +- sqrt(2 n).
  cells = np.where(probs * draws < 5, vocab, np.arange(vocab))
  add = lambda x: np.bincount(cells, x)
  found, expected = add(counts), add(probs * draws)
  found, expected = found[expected > 0], expected[expected > 0]
  chi_square = ((found - expected) ** 2 / expected).sum()
  assert chi_square < len(found) + 4 * np.sqrt(2 * len(found))


def test_an_equal_share_of_uniform_numbers_falls_on_each_probability():
  """Up to the one at each of its ends. So small ones do not vanish."""
  probs = np.random.default_rng(0).dirichlet(np.full(129, 0.1))
  probs[::3] = 0
  probs /= probs.sum()
  numbers = jnp.arange(2**15) / 2**15
  find = jax.jit(jax.vmap(next_token._inverse_cdf, (0, None)))
  places = find(numbers, jnp.log(jnp.asarray(probs)))
  counts = np.bincount(places, minlength=129)
  assert (counts[probs == 0] == 0).all()
  assert np.abs(counts - probs * 2**15).max() < 1.1
  assert (np.diff(places) >= 0).all()


@pytest.mark.parametrize("size", [1, 2, 129, 1187])
def test_no_uniform_number_falls_on_what_is_forbidden(size):
  """Also 1, and where probabilities are too small for a sum in float32."""
  numbers = jnp.array([0, 2**-23, 0.5, 1 - 2**-23, 1])
  find = jax.jit(jax.vmap(next_token._inverse_cdf, (0, None)))
  rng = np.random.default_rng(size)
  for spread in (0, 5, 60):
    for share in (0.0, 0.5, 0.99):
      logps = rng.normal(0, spread, size).astype(np.float32)
      logps[rng.random(size) < share] = -np.inf
      logps[rng.integers(size)] = -7.0
      places = find(numbers, logps)
      assert np.isfinite(logps[places]).all()
      one = np.where(np.arange(size) == places[2], np.float32(-90), -np.inf)
      assert (find(numbers, one) == places[2]).all()


def test_devices_that_share_a_vocabulary_do_not_gather_it():
  """But a number of each of 16 blocks, and one block of each row."""
  rows, vocab, sampler = 8, 512, SamplerConfig(1, 8, STOPS)

  def sample(logits, keys):
    axes = next_token.ROW_AXES, next_token.VOCAB_AXES
    logits, steps = sharding.constrain(logits, *axes), jnp.zeros(rows, int)
    return next_token.sample_token(logits, keys, steps, sampler)["tokens"]

  keys = jax.random.split(jax.random.key(0), rows)
  logits = jax.random.normal(jax.random.key(1), (rows, vocab))
  with jax.set_mesh(sharding.make_mesh(jax.devices()[:4], data=2, tensor=2)):
    shared = jax.jit(sample).lower(logits, keys).compile()
    tokens = shared(logits, keys)
  np.testing.assert_array_equal(tokens, jax.jit(sample)(logits, keys))
  sent = re.findall(r"(\S+) (all-\w+|collective-\w+)\(", shared.as_text())
  gathered = [shape for shape, kind in sent if kind == "all-gather"]
  assert [shape.split("{")[0] for shape in gathered] == ["f32[4,16]"]
  assert len(sent) <= 6


PARAMS = (
  SamplingParams(), SamplingParams(0.0), SamplingParams(1.4, top_k=5),
  SamplingParams(1.2, top_p=0.6), SamplingParams(1.2, top_p=1e-50),
  SamplingParams(0.7, min_p=0.1),
  SamplingParams(1.5, top_k=9, top_p=0.8, min_p=0.02),
  SamplingParams(0.0, top_k=1),
)  # fmt: skip


def test_each_row_is_sampled_with_its_params():
  """As a sampler with these samples it, whatever the others have."""
  logits = np.random.default_rng(0).normal(0, 2, (48, 32)).astype(np.float32)
  keys, steps = jax.random.split(jax.random.key(0), 48), np.arange(48) // 8
  config = SamplerConfig(1, 8, (3, 5), kept_ids=0, min_new_tokens=3)
  sample = jax.jit(next_token.sample_token, static_argnums=3)
  new = sample(logits, keys, steps, config, np.float32(PARAMS * 6))
  for i, params in enumerate(PARAMS):
    own = dataclasses.replace(config, **params._asdict())
    one = sample(logits, keys, steps, own)
    same = np.testing.assert_array_equal
    same(new["tokens"][i::8], one["tokens"][i::8])
    np.testing.assert_allclose(
      new["logps"][i::8], one["logps"][i::8], atol=1e-5
    )
