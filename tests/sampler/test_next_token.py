"""The next token: sampling, and truncation by top-k, top-p and min length."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.data import tokenizers
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
  tokens, logps, _ = sampled_tokens(logits, count, **config)
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
    tokens, logps, ids = sampled_tokens(logits, 8, **config)
    assert (tokens == logits.argmax()).all()
    scaled = jax.nn.log_softmax(logits / (config["temperature"] or 1.0))
    expected = scaled[logits.argmax()] if ids is None else 0.0
    np.testing.assert_allclose(logps, expected, 1e-5)


@pytest.mark.parametrize("vocab", [24, 16, 7])
def test_tokens_of_a_large_vocabulary_have_their_probabilities(
  vocab, monkeypatch
):
  monkeypatch.setattr(next_token, "LARGE_VOCAB", vocab)
  rng = np.random.default_rng(vocab)
  probs = rng.dirichlet(np.full(vocab, 0.5))
  size = vocab // 4  # of the four blocks of 24 or 16; 7 tokens are one block
  probs[:size] = 0  # a block without a token
  probs[size + 1 : 2 * size] = 0  # a block with one
  probs /= probs.sum()
  draws = 100_000
  keys = jax.random.split(jax.random.key(0), draws)
  logps = jnp.log(jnp.asarray(probs)) - 3.0  # need not sum to one
  sample = jax.jit(jax.vmap(next_token.categorical, (0, None)))
  counts = np.bincount(sample(keys, logps), minlength=vocab)
  sigma = np.sqrt(draws * probs * (1 - probs))
  assert (np.abs(counts - draws * probs) <= 4.5 * sigma).all()


PARAMS = (
  SamplingParams(),
  SamplingParams(0.0),
  SamplingParams(1.4, top_k=5),
  SamplingParams(1.2, top_p=0.6),
  SamplingParams(1.2, top_p=1e-50),
  SamplingParams(0.7, min_p=0.1),
  SamplingParams(1.5, top_k=9, top_p=0.8, min_p=0.02),
  SamplingParams(0.0, top_k=1),
)


def test_each_row_is_sampled_with_its_params():
  """As a sampler with these samples it, whatever the others have."""
  logits = np.random.default_rng(0).normal(0, 2, (48, 32)).astype(np.float32)
  keys, steps = jax.random.split(jax.random.key(0), 48), np.arange(48) // 8
  config = SamplerConfig(1, 8, (3, 5), kept_ids=0, min_new_tokens=3)
  sample = jax.jit(next_token.sample_token, static_argnums=3)
  token, logp, _ = sample(logits, keys, steps, config, np.float32(PARAMS * 6))
  for i, params in enumerate(PARAMS):
    own = dataclasses.replace(config, **params._asdict())
    tokens, logps, _ = sample(logits, keys, steps, own)
    np.testing.assert_array_equal(token[i::8], tokens[i::8])
    np.testing.assert_allclose(logp[i::8], logps[i::8], atol=1e-5)
