"""Held-out accuracy: every problem once, sampled and greedy."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.data import pipeline, prompt_batch, tokenizers
from gspo_jax.evaluate import held_out
from gspo_jax.rewards.pool import PendingRewards, RewardPool, Rewards
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import Samples
from gspo_jax.tasks.chain import Chain

BYTES = tokenizers.load("bytes")
PROBLEMS = pipeline.take(Chain((3,)), prompt_batch.PromptConfig(BYTES, 16), 10)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def pool():
  with RewardPool(("final_answer",), (1.0,), workers=1) as pool:
    yield pool


def experiment(pool, batch, max_failed=0.5, **functions):
  """As much of an experiment as an evaluation reads, on one device."""
  program = SimpleNamespace(
    tokenizer=BYTES,
    sampler=SimpleNamespace(
      eval_prompts=batch,
      stop=None,
      mesh=sharding.make_mesh(jax.devices()[:1]),
      weights=lambda policy: policy,
      **functions,
    ),
  )
  config = SimpleNamespace(
    eval=SimpleNamespace(samples=2),
    reward=SimpleNamespace(max_failed=max_failed, pass_threshold=0.5),
  )
  return SimpleNamespace(
    program=program,
    config=config,
    held_out=PROBLEMS,
    reward_pool=pool,
    conversations=None,
    keys=SimpleNamespace(evaluate=KEY),
  )


class ScriptedSampler:
  """Two responses a prompt: a correct one for `solved`, and a wrong one."""

  def __init__(self, solved):
    self.solved = {p.text: p.reference for p in solved}
    self.shapes, self.keys = [], []

  def __call__(self, params, prompts, key):
    assert params == "params"
    self.shapes.append((prompts.tokens.shape, prompts.lengths.shape))
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    tokens = np.asarray(prompts.tokens)
    texts = [BYTES.decode(row).lstrip("\ufffd") for row in tokens]
    pairs = [[f"#{self.solved.get(text, 'x')}", "#wrong"] for text in texts]
    return samples_of(list(itertools.chain(*pairs)))


def samples_of(responses, width=8):
  tokens = np.zeros((len(responses), width), np.int32)
  lengths = np.zeros(len(responses), np.int32)
  for i, text in enumerate(responses):
    ids = [*BYTES.encode(text), *BYTES.stop_ids]
    tokens[i, : len(ids)], lengths[i] = ids, len(ids)
  zeros = np.zeros_like(tokens, np.float32)
  samples = Samples(tokens, zeros, lengths, lengths > 0, np.int32(width))
  return jax.tree.map(jnp.asarray, samples)


@pytest.mark.parametrize("batch", [1, 4, 5, 13, 25])
def test_each_problem_is_evaluated_once(batch, pool):
  solved = [p for i, p in enumerate(PROBLEMS.problems) if i in (2, 8, 9)]
  sampler = ScriptedSampler(solved)
  correct = held_out.first_rewards(
    experiment(pool, batch), sampler, "params", KEY, 2
  )
  right = np.isin(np.arange(10), (2, 8, 9))
  np.testing.assert_array_equal(correct, np.stack([right, 0 * right], 1))
  # One compiled function serves, and no two of its calls share a key.
  assert set(sampler.shapes) == {((batch, 16), (batch,))}
  assert len(sampler.shapes) == -(-10 // batch)
  assert len(set(sampler.keys)) == len(sampler.keys)


class FailingPool:
  """A reward pool that fails on the responses with "wrong"."""

  model = None

  def submit(self, responses, group_size):
    failed = np.array(["wrong" in response.text for response in responses])
    zeros = np.zeros(len(failed), np.float32)
    scores = Rewards(zeros, {"broken": zeros}, failed, ("why", "and why"))
    return PendingRewards.computed(scores)


def test_it_stops_where_too_many_responses_fail():
  """One of two to each of ten; two more problems fill up the last batch."""
  call = lambda most: held_out.first_rewards(
    experiment(FailingPool(), 4, most), ScriptedSampler([]), "params", KEY, 2
  )
  assert call(0.5).shape == (10, 2)
  with pytest.raises(multihost.AgreedError, match=r"12 of 24 .* reason: why$"):
    call(0.4)


def test_sampled_and_greedy_responses_have_scalars_of_their_own(monkeypatch):
  monkeypatch.setattr(
    held_out, "first_rewards", lambda experiment, generate, *rest: generate
  )
  run = experiment(
    None,
    4,
    generate_eval=np.array([[1, 0], [0, 0]]),
    generate_greedy=np.array([[1], [1]]),
  )
  metrics = held_out.evaluate(run, None)
  assert metrics["eval/pass@1"] == 0.25
  assert metrics["eval/greedy"] == 1
