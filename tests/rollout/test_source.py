"""Sources of rollouts, over a policy whose tokens are iteration numbers."""

import dataclasses
import functools
import itertools
import json
import threading
import time
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.data import prompt_batch, tokenizers
from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.datasets import Stage
from gspo_jax.data.problem import Problem
from gspo_jax.record import progress
from gspo_jax.rollout.batch import RolloutBatch, ScoredSamples, sampled_tokens
from gspo_jax.rollout.config import RolloutConfig
from gspo_jax.rollout.context import RolloutContext
from gspo_jax.rollout.off_policy import OffPolicy
from gspo_jax.rollout.on_policy import OnPolicy
from gspo_jax.rollout.source import make_source
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  SamplerConfig,
  empty_samples,
  finished_responses,
  take_groups,
)

BYTES = tokenizers.load("bytes")
P, G, R, MAX_TOKENS = 4, 3, 20, 6
SAMPLING = SamplerConfig(G, R, stop_ids=BYTES.stop_ids, pad_id=BYTES.pad_id)
DENSE = model.variant("qwen3-0.6b")
PROBLEMS = [Problem(f"q{i:02d}", str(i), "") for i in range(61)]
STEPS = 8


pytestmark = pytest.mark.usefixtures("one_device")


def response_length(problem, g):
  """In tokens; a third of the responses need more than two iterations."""
  return 1 + (int(problem[1:]) * 7 + g * 5) % R


def empty(count):
  return empty_samples(count, 6, DENSE, SAMPLING)


class ScriptedPolicy:
  """Each of its tokens is `params`: the iteration that sampled it."""

  jitted = SimpleNamespace(empty_samples=empty)

  def __init__(self):
    self.keys = []

  def __call__(
    self,
    params,
    prompts,
    key,
    resume_from=None,
    stop_at=None,
    on_finished=None,
    progress=None,
  ):
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    samples = resume_from or empty(len(prompts.tokens))
    samples = jax.tree.map(np.array, jax.device_get(samples))
    if stop_at is None:
      stop_at = np.full(len(samples.lengths), R)
    problems = [BYTES.decode(row[-3:]) for row in np.asarray(prompts.tokens)]
    slot_steps = responses = 0
    for i in np.flatnonzero(samples.finish == UNFINISHED):
      whole = response_length(problems[i // G], i % G)
      stop = min(whole, max(stop_at[i], samples.lengths[i]))
      samples.tokens[i, samples.lengths[i] : stop] = params
      slot_steps += stop - samples.lengths[i]
      responses += stop > samples.lengths[i]
      samples.lengths[i] = stop
      if stop == whole:
        samples.finish[i] = TRUNCATED if whole == R else STOPPED
    if progress:  # it expects as many responses as get tokens
      progress.advance(responses)
      assert f": {responses}/{responses} responses" in progress.line()
    samples = dataclasses.replace(samples, slot_steps=np.int32(slot_steps))
    samples = jax.device_put(samples)
    if on_finished:
      on_finished(finished_responses(samples))
    return samples


def make_context(pool, generate, *, separate=None, **rollout):
  curriculum = Curriculum(
    [Stage(1, PROBLEMS[:40]), Stage(5, PROBLEMS[40:])],
    prompt_batch.PromptConfig(BYTES, 6),
    batch=P,
    seed=0,
  )
  sampler = SimpleNamespace(
    generate=generate,
    merge_groups=None,
    take_groups=take(),
    empty_samples=lambda: empty(P),
    stop=None,
    mesh=sharding.make_mesh(jax.devices()[:1]),
    separate=separate,
  )
  return RolloutContext(
    rollout=RolloutConfig(group_size=G, **rollout),
    curriculum=curriculum,
    sampler=sampler,
    tokenizer=BYTES,
    reward_pool=pool,
    rng=jax.random.key(0),
    prompts=P,
    max_failed=1.0,
  )


@functools.cache
def take():
  """One compiled function for the whole file."""
  return jax.jit(functools.partial(take_groups, cfg=DENSE, sampler=SAMPLING))


def start(pool, kind, *, policy=None, last=STEPS):
  """The source of a kind, and its curriculum."""
  context = make_context(
    pool,
    policy or ScriptedPolicy(),
    max_tokens_per_iteration=MAX_TOKENS * kind.endswith("partial"),
    max_staleness=int(kind.startswith("one step off")),
  )
  return make_source(context, last_step=last), context.curriculum


def as_plain(batch):
  """All that an iteration is given, as plain values."""
  samples = jax.device_get(batch.samples.samples)
  in_response = np.arange(R) < samples.lengths[:, None]
  return {
    "problems": [p.text for p in batch.samples.prompts.problems],
    "prompts": batch.samples.prompts.tokens.tolist(),
    "stages": batch.samples.prompts.positions[:, 0].tolist(),
    "tokens": np.where(in_response, samples.tokens, -1).tolist(),
    "finish": samples.finish.tolist(),
    "rewards": batch.samples.rewards.result().total.tolist(),
    "policy_step": batch.policy_step,
    "resumed_fraction": batch.resumed_fraction,
    "cost": sampled_tokens(batch.costs),
    "slot_steps": int(batch.costs[0].slot_steps),
  }


def iterate(source, first=1, last=STEPS):
  return [as_plain(source(step, step)) for step in range(first, last + 1)]


@pytest.fixture(scope="module")
def run(pool):
  """The batches of all iterations, by the kind of source."""
  return functools.cache(lambda kind: iterate(start(pool, kind)[0]))


def policies(row):
  """The iterations that sampled the tokens of a response."""
  return [token for token in row if token >= 0]


KINDS = ["on-policy", "partial", "one step off", "one step off partial"]


@pytest.mark.parametrize("kind", KINDS)
def test_responses_are_complete_and_problems_come_once(run, kind):
  batches = run(kind)
  problems = [text for batch in batches for text in batch["problems"]]
  assert len(problems) == len(set(problems)) == STEPS * P
  for batch in batches:
    for i, row in enumerate(batch["tokens"]):
      length = response_length(batch["problems"][i // G], i % G)
      assert len(policies(row)) == length
      assert policies(row) == sorted(policies(row))
      finish = TRUNCATED if length == R else STOPPED
      assert batch["finish"][i] == finish


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_has_the_step_of_the_policy_that_sampled_it(run, kind):
  for step, batch in enumerate(run(kind), 1):
    rows = [policies(row) for row in batch["tokens"]]
    tokens = [token for row in rows for token in row]
    np.testing.assert_allclose(batch["policy_step"], np.mean(tokens))
    # With both, the first policy samples for two iterations.
    if kind != "one step off partial":
      resumed = np.mean([len(set(row)) > 1 for row in rows])
      np.testing.assert_allclose(batch["resumed_fraction"], resumed)
    newest = step - 1 if kind.startswith("one step") and step > 1 else step
    assert max(tokens) == newest


def test_an_iteration_adds_at_most_max_tokens_unless_groups_are_missing(run):
  batches = run("partial")
  assert any(batch["resumed_fraction"] for batch in batches)
  sampled_to_the_end = 0
  for batch in batches:
    for row in batch["tokens"]:
      steps = policies(row)
      parts = [steps.count(step) for step in sorted(set(steps))]
      assert set(parts[:-1]) <= {MAX_TOKENS}
      sampled_to_the_end += parts[-1] > MAX_TOKENS
  assert sampled_to_the_end
  # Oldest first: problems are given in the order of the data.
  order = [text for batch in run("on-policy") for text in batch["problems"]]
  position = {text: i for i, text in enumerate(order)}
  for batch in batches[:4]:  # of the first stage, which has one order
    given = [position.get(text, len(order)) for text in batch["problems"]]
    assert given == sorted(given)


def test_the_oldest_are_sampled_to_their_end_where_groups_are_missing(run):
  order = [text for batch in run("on-policy") for text in batch["problems"]]
  age = lambda text: order.index(text) if text in order else len(order)
  steps = {  # of each problem, the iterations that sampled each response
    text: [policies(row) for row in batch["tokens"][i * G :][:G]]
    for batch in run("partial")
    for i, text in enumerate(batch["problems"])
  }
  compared = 0
  for step in (1, 2, 3, 4):  # of the first stage, which has one order
    ended = [
      text
      for text, rows in steps.items()
      if max(row.count(step) for row in rows) > MAX_TOKENS
    ]
    paused = [
      text
      for text, rows in steps.items()
      if any({step, step + 1} <= {*row} for row in rows)
    ]
    for old, new in itertools.product(ended, paused):
      assert age(old) < age(new)
      compared += 1
  assert compared


def test_every_sampled_token_is_counted_once(pool):
  source, _ = start(pool, "partial")
  batches = iterate(source)
  learnt = sum(len(policies(row)) for b in batches for row in b["tokens"])
  pending = int(source.pending.lengths.sum())
  assert sum(batch["cost"] for batch in batches) == learnt + pending
  assert sum(batch["slot_steps"] for batch in batches) == learnt + pending


@pytest.mark.parametrize("kind", KINDS)
def test_pending_responses_go_through_a_checkpoint(pool, run, kind):
  source, curriculum = start(pool, kind)
  before = iterate(source, last=3)
  pending = jax.device_put(jax.device_get(source.pending))
  saved = json.loads(json.dumps([source.get_state(), curriculum.get_state()]))
  resumed, curriculum = start(pool, kind)
  curriculum.set_state(saved[1])
  resumed.set_state(pending, saved[0])
  assert before + iterate(resumed, first=4) == run(kind)


def test_partial_responses_by_shard_do_not_resume(pool):
  source, _ = start(pool, "partial")
  old = source.get_state() | {"order": [0, 2, 1, 3]}
  with pytest.raises(UserError, match="older checkpoint, with partial"):
    source.set_state(source.pending, old)


@pytest.mark.parametrize("kind", KINDS)
def test_each_iteration_samples_with_its_own_key(pool, kind):
  policy = ScriptedPolicy()
  source, _ = start(pool, kind, policy=policy)
  iterate(source)
  # What is sampled to its end goes on with the key of its iteration.
  keys = [key for key, _ in itertools.groupby(policy.keys)]
  assert len(keys) == len(set(keys)) == STEPS


def test_responses_are_scored_while_others_are_sampled(
  pool, monkeypatch, capsys
):
  monkeypatch.setattr(progress, "SECONDS", 0.0)
  submitted = []

  def submit(responses, *group_size):
    submitted.append(len(responses))
    return pool.submit(responses, *group_size)

  def generate(params, prompts, key, *, on_finished, progress):
    samples = ScriptedPolicy()(params, prompts, key, progress=progress)
    finished = finished_responses(samples)
    for rows in (range(5), range(5, P * G)):
      on_finished({row: finished[row] for row in rows})
      assert submitted[-1] == len(rows)
    return samples

  scorer = SimpleNamespace(submit=submit, takes_groups=False, model=None)
  batch = OnPolicy(make_context(scorer, generate))(1, 1)
  assert sorted(batch.samples.responses) == list(range(P * G))
  assert batch.samples.rewards.result().total.shape == (P, G)
  line = f"rollout of iteration 1: {P * G} responses in "
  assert line in capsys.readouterr().out


def test_one_step_off_policy_learns_from_the_batch_sampled_before(pool, run):
  """And nothing is sampled after the last iteration."""
  ahead, on_policy = run("one step off"), run("on-policy")
  assert [b["problems"] for b in ahead] == [b["problems"] for b in on_policy]
  assert [b["policy_step"] for b in ahead] == [1, *range(1, STEPS)]
  source, _ = start(pool, "one step off", last=2)
  tokens = [source(step, step).sampled_tokens for step in (1, 2)]
  assert tokens == [on_policy[0]["cost"] + on_policy[1]["cost"], 0]
  assert source.get_state()["next"] == []
  assert not source.pending["next"][0].lengths.any()


def separate(source, timeout=9.0):
  """A source whose sampler has devices of its own, which are those here."""
  same = lambda x: x
  devices = SimpleNamespace(sync_weights=same, to_trainer=same, to_sampler=same)
  context = make_context(None, None, separate=devices, max_staleness=1)
  return OffPolicy(source, context, last_step=STEPS, timeout=timeout)


def sampled(step):
  return RolloutBatch(ScoredSamples({}, None, {}, None), [], 1, float(step))


class Weights:
  """What a weak reference can point to."""


def test_a_sampler_that_hangs_ends_the_run_in_time():
  """Also while a later batch waits, and the process can end."""
  hangs = threading.Event()

  def sample(params, step, policy_step):
    if step == 2:
      hangs.wait()
    return sampled(step)

  source = separate(sample, timeout=0.2)
  assert source(Weights(), 1).policy_step == 1
  with pytest.raises(TimeoutError, match=r"a batch in 0\.2 seconds; .*resumes"):
    source(Weights(), 2)
  source.close()  # it does not wait either
  hangs.set()


def test_a_sampler_that_fails_ahead_ends_the_run():
  """With its own error, as soon as somebody needs the batch."""

  def sample(params, step, policy_step):
    if step == 2:
      raise RuntimeError("out of memory")
    return sampled(step)

  source = separate(sample)
  assert source(Weights(), 1).policy_step == 1
  with pytest.raises(RuntimeError, match="out of memory"):
    source.wait()
  with pytest.raises(RuntimeError, match="out of memory"):
    source(Weights(), 2)
  source.close()


def test_a_sampler_keeps_no_weights_and_no_batch_that_it_does_not_need():
  source = separate(lambda params, step, policy_step: sampled(step))
  weights = Weights()
  kept = [weakref.ref(weights)]
  source(weights, 1)
  source.wait()
  del weights
  # What a function returned stands for a batch here.
  kept.append(weakref.ref(source._submit(Weights).result()))
  for _ in range(100):  # the thread returns a moment after its result is there
    if not any(each() for each in kept):
      break
    time.sleep(0.01)
  assert [each() for each in kept] == [None, None]
  source.close()
