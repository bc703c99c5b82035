"""Held-out accuracy: every problem once, sampled and greedy."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from byte_samples import samples_of

from gspo_jax.data import pipeline, prompt_batch, tokenizers
from gspo_jax.evaluate import held_out
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import (
  SamplerConfig,
  SamplingParams,
  finished_responses,
)
from gspo_jax.tasks.chain import Chain

BYTES = tokenizers.load("bytes")
PROBLEMS = pipeline.take(Chain((3,)), prompt_batch.PromptConfig(BYTES, 16), 10)
KEY = jax.random.key(0)


class Pool:
  """Scores the reference 1, and fails on the responses that have `fails`."""

  takes_groups, model = False, None

  def __init__(self, fails="nothing"):
    self.fails = fails

  def submit(self, responses, group_size=1):
    right = np.float32([r.text == f"#{r.reference}" for r in responses])
    failed = np.array([self.fails in response.text for response in responses])
    scores = Rewards(right, {"it": right}, failed, ("why", "and why"))
    return PendingRewards.computed(scores)


def experiment(pool, respond, shards=1, max_failed=0.5):
  """As much of an experiment as an evaluation reads."""
  program = SimpleNamespace(
    tokenizer=BYTES,
    sampler=SimpleNamespace(
      respond=respond,
      padded=lambda count: np.arange(-(-count // shards) * shards) % count,
      stop=None,
      weights=lambda policy: policy,
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
  """A right and a wrong response if in `solved`; greedily if not."""

  config = SamplerConfig(temperature=0.5, top_k=7)
  batch_sharding = sharding.batch_sharding(
    sharding.make_mesh(jax.devices()[:1])
  )

  def __init__(self, solved):
    self.solved = {p.text for p in solved}
    self.references = {p.text: p.reference for p in PROBLEMS.problems}

  def __call__(self, params, prompts, key, *, on_finished, **options):
    samples = self._samples(params, prompts, key, **options)
    on_finished(finished_responses(samples))
    return samples

  def _samples(self, params, prompts, key, group_size, sampling, progress):
    assert (params, key) == ("params", KEY)
    tokens = np.asarray(prompts.tokens)
    texts = [BYTES.decode(row).lstrip("\ufffd") for row in tokens]
    answers = [f"#{self.references[text]}" for text in texts]
    right = [text in self.solved for text in texts]
    pairs = list(zip(answers, right, strict=True))
    if group_size == 1:
      assert sampling == SamplingParams(temperature=0.0)
      return samples_of(["#wrong" if x else answer for answer, x in pairs])
    assert (group_size, sampling) == (2, SamplingParams(0.5, 7))
    both = [(answer if x else "#wrong", "#wrong") for answer, x in pairs]
    return samples_of(list(itertools.chain(*both)))


@pytest.mark.parametrize("shards", [1, 4, 25])
def test_each_problem_is_evaluated_once(shards):
  """Sampled and greedy, whatever number of prompts fills the shards."""
  solved = [p for i, p in enumerate(PROBLEMS.problems) if i in (2, 8, 9)]
  run = experiment(Pool(), ScriptedSampler(solved), shards)
  sampling = ScriptedSampler.config.params
  correct = held_out.first_rewards(run, "params", KEY, 2, sampling)
  right = np.isin(np.arange(10), (2, 8, 9))
  np.testing.assert_array_equal(correct, np.stack([right, 0 * right], 1))
  metrics = held_out.evaluate(run, "params")
  assert metrics["eval/pass@1"] == np.float32(0.15)
  assert metrics["eval/greedy"] == np.float32(0.7)


def test_it_stops_where_too_many_responses_fail():
  """One of two to each of ten; two more problems fill the shards."""
  sampling = ScriptedSampler.config.params
  solving = ScriptedSampler(PROBLEMS.problems)
  call = lambda most: held_out.first_rewards(
    experiment(Pool("wrong"), solving, 4, most), "params", KEY, 2, sampling
  )
  assert call(0.5).shape == (10, 2)
  with pytest.raises(multihost.AgreedError, match=r"12 of 24 .* reason: why$"):
    call(0.4)
