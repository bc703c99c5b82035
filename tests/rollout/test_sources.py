"""Answers that wait for a later iteration; the policy signs what it draws."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.data import prompt_batch, tokenizers
from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.datasets import Stage
from gspo_jax.data.tasks import Problem
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rollout.batch import RolloutContext, sampled_tokens
from gspo_jax.rollout.on_policy import OnPolicy
from gspo_jax.rollout.one_step_off import OneStepOffPolicy
from gspo_jax.rollout.partial import PartialRollouts
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  FinishedResponse,
  SamplerConfig,
  empty_samples,
  take_groups,
)

BYTES = tokenizers.load("bytes")
P, G, R, BUDGET, SPARE = 4, 3, 20, 6, 2
DRAW = SamplerConfig(G, R, stop_ids=BYTES.stop_ids, pad_id=BYTES.pad_id)
DENSE = model.variant("qwen3-0.6b")
PROBLEMS = [Problem(f"q{i:02d}", str(i), "") for i in range(61)]
STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def one_device():
  with jax.set_mesh(sharding.make_mesh(jax.devices()[:1])):
    yield


@pytest.fixture(scope="module")
def scorer():
  with RewardPool(("final_answer",), (1.0,), workers=1) as pool:
    yield pool


def length(question, g):
  """Tokens of an answer: a third of them longer than two stints."""
  return 1 + (int(question[1:]) * 7 + g * 5) % R


class Policy:
  """Each of its tokens is the number of the iteration that drew it."""

  def __init__(self):
    self.keys = []

  def fresh(self, count):
    return empty_samples(count, 6, DENSE, DRAW)

  def __call__(self, params, prompts, key, resume_from=None, stop_at=None):
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    drawn = jax.device_get(resume_from or self.fresh(len(prompts.tokens)))
    drawn = jax.tree.map(np.array, drawn)
    stop_at = np.full(len(drawn.lengths), R) if stop_at is None else stop_at
    questions = [BYTES.decode(row[-3:]) for row in np.asarray(prompts.tokens)]
    slot_steps = 0
    for a in np.flatnonzero(drawn.finish == UNFINISHED):
      most = length(questions[a // G], a % G)
      stop = min(most, max(stop_at[a], drawn.lengths[a]))
      drawn.tokens[a, drawn.lengths[a] : stop] = params
      slot_steps += stop - drawn.lengths[a]
      drawn.lengths[a] = stop
      if stop == most:
        drawn.finish[a] = TRUNCATED if most == R else STOPPED
    return dataclasses.replace(drawn, slot_steps=np.int32(slot_steps))


def start(scorer, kind, *, policy=None, last=STEPS, P=P, spare=SPARE, shards=2):
  """The source of that kind, and its curriculum."""
  curriculum = Curriculum(
    [Stage(1, PROBLEMS[:40]), Stage(5, PROBLEMS[40:])],
    prompt_batch.PromptConfig(BYTES, 6),
    batch=P,
    seed=0,
  )
  rows = sharding.batch_sharding(sharding.make_mesh(jax.devices()[:1]))
  policy = policy or Policy()
  generate = lambda params, prompts, key, **rest: jax.device_put(
    policy(params, prompts, key, **rest)
  )
  sampling = RolloutContext(
    curriculum=curriculum,
    generate=generate,
    tokenizer=BYTES,
    scorer=scorer,
    rows=rows,
    key=lambda step: jax.random.fold_in(jax.random.key(0), step),
    prompts=P,
    group=G,
    tells=False,
  )
  take = jax.jit(functools.partial(take_groups, cfg=DENSE, sampler=DRAW))
  if kind == "fresh" or kind == "ahead":
    source = OnPolicy(sampling, None, rounds=1)
  else:
    source = PartialRollouts(
      sampling,
      policy.fresh,
      take,
      take,
      budget=BUDGET,
      shards=shards,
      spare=spare,
    )
  if kind.startswith("ahead"):
    nothing = empty_samples(P, 6, DENSE, DRAW)
    source = OneStepOffPolicy(source, sampling, nothing, last=last)
  return source, curriculum


def seen(batch):
  """All that an iteration is given, as plain values."""
  samples = jax.device_get(batch.kept.samples)
  real = np.arange(R) < samples.lengths[:, None]
  return {
    "questions": [p.text for p in batch.kept.batch["problems"]],
    "prompts": batch.kept.batch["tokens"].tolist(),
    "stages": batch.kept.batch["stage"].tolist(),
    "tokens": np.where(real, samples.tokens, -1).tolist(),
    "finish": samples.finish.tolist(),
    "rewards": batch.kept.marks().total.tolist(),
    "drawn_at": batch.drawn_at,
    "continued": batch.continued,
    "cost": sampled_tokens(batch.costs),
    "steps": int(batch.costs[0].slot_steps),
  }


def run(scorer, kind, first=1, last=STEPS):
  source, _ = start(scorer, kind, last=last)
  return [seen(source(step, step)) for step in range(first, last + 1)]


KINDS = ["fresh", "partial", "ahead", "ahead of partial"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_whole_and_every_question_comes_once(scorer, kind):
  on_policy = run(scorer, kind)
  asked = [q for batch in on_policy for q in batch["questions"]]
  assert len(asked) == len(set(asked)) == STEPS * P
  for batch in on_policy:
    for a, tokens in enumerate(batch["tokens"]):
      most = length(batch["questions"][a // G], a % G)
      drawn = [t for t in tokens if t >= 0]
      assert len(drawn) == most
      assert drawn == sorted(drawn)
      wanted = TRUNCATED if most == R else STOPPED
      assert batch["finish"][a] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_told_when_the_tokens_were_drawn(scorer, kind):
  """The tokens say so themselves."""
  for step, batch in enumerate(run(scorer, kind), 1):
    rows = [[t for t in row if t >= 0] for row in batch["tokens"]]
    every = [t for row in rows for t in row]
    np.testing.assert_allclose(batch["drawn_at"], np.mean(every))
    if kind != "ahead of partial":  # whose first policy draws two stints
      several = np.mean([len(set(row)) > 1 for row in rows])
      np.testing.assert_allclose(batch["continued"], several)
    latest = step - 1 if kind.startswith("ahead") and step > 1 else step
    assert max(every) == latest


def test_a_stint_is_of_the_budget_and_nobody_waits_who_need_not(scorer):
  on_policy = run(scorer, "partial")
  assert any(batch["continued"] for batch in on_policy)
  forced = 0
  for batch in on_policy:
    for row in batch["tokens"]:
      tags = [t for t in row if t >= 0]
      stints = [tags.count(t) for t in sorted(set(tags))]
      # All but the last one are whole; that one is longer where it must be.
      assert set(stints[:-1]) <= {BUDGET}
      forced += stints[-1] > BUDGET
  assert forced
  # Oldest first: a question waits no longer than one that was asked after it.
  order = [q for batch in run(scorer, "fresh") for q in batch["questions"]]
  place = {q: i for i, q in enumerate(order)}
  for batch in on_policy[:4]:  # of the first stage, which asks in one order
    asked = [place.get(q, len(place)) for q in batch["questions"]]
    assert asked == sorted(asked)


def test_where_too_few_have_ended_the_oldest_are_drawn_to_their_end(scorer):
  on_policy = run(scorer, "partial")
  order = [q for batch in run(scorer, "fresh") for q in batch["questions"]]
  place = lambda q: order.index(q) if q in order else len(order)
  tags = {  # of each question, the iterations that drew each answer
    q: [[t for t in row if t >= 0] for row in batch["tokens"][i * G :][:G]]
    for batch in on_policy
    for i, q in enumerate(batch["questions"])
  }
  compared = 0
  for step in (1, 2, 3, 4):  # of the first stage, which asks in one order
    forced = [q for q in tags if max(r.count(step) for r in tags[q]) > BUDGET]
    cut = [q for q in tags if any({step, step + 1} <= {*r} for r in tags[q])]
    for old in forced:
      for new in cut:
        assert place(old) < place(new)
        compared += 1
  assert compared


def test_the_longest_answers_take_as_many_stints_as_they_need(scorer):
  source, _ = start(scorer, "partial", P=1, spare=11)
  found = [seen(source(step, step)) for step in range(1, STEPS + 1)]
  rows = [row for batch in found for row in batch["tokens"]]
  assert max(len({*row} - {-1}) for row in rows) == -(-R // BUDGET)


def test_all_tokens_are_paid_for_once(scorer):
  source, _ = start(scorer, "partial")
  on_policy = [seen(source(step, step)) for step in range(1, STEPS + 1)]
  learnt = sum(t >= 0 for b in on_policy for row in b["tokens"] for t in row)
  waiting = int(source.arrays.lengths.sum())
  assert sum(b["cost"] for b in on_policy) == learnt + waiting
  assert sum(b["steps"] for b in on_policy) == learnt + waiting


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_goes_through_a_checkpoint(scorer, kind):
  whole = run(scorer, kind)
  source, curriculum = start(scorer, kind)
  before = [seen(source(step, step)) for step in (1, 2, 3)]
  arrays = jax.device_put(jax.device_get(source.arrays))
  saved = json.loads(json.dumps([source.get_state(), curriculum.get_state()]))
  again, curriculum = start(scorer, kind)
  curriculum.set_state(saved[1])
  again.set_state(arrays, saved[0])
  after = [seen(again(step, step)) for step in range(4, STEPS + 1)]
  assert before + after == whole


@pytest.mark.parametrize("kind", KINDS)
def test_each_iteration_draws_with_its_own_key(scorer, kind):
  policy = Policy()
  source, _ = start(scorer, kind, policy=policy)
  for step in range(1, STEPS + 1):
    source(step, step)
  # What is drawn to its end goes on with the key of its stint.
  runs = [key for key, _ in itertools.groupby(policy.keys)]
  assert len(runs) == len(set(runs)) == STEPS


def test_answers_are_verified_while_others_are_drawn(scorer):
  """As many have been submitted as were told of, before the last is drawn."""
  submitted = []

  class Listens:
    def submit(self, answers):
      submitted.append(len(answers))
      return scorer.submit(answers)

  def generate(params, prompts, key, *, on_finished):
    samples = Policy()(params, prompts, key)
    ended = [
      FinishedResponse(row, int(n), stopped=True)
      for row, n in zip(samples.tokens, samples.lengths, strict=True)
    ]
    for some in (range(5), range(5, P * G)):
      on_finished({i: ended[i] for i in some})
      assert submitted[-1] == len(some)
    return jax.device_put(samples)

  source, _ = start(Listens(), "fresh")
  told = source._sampling._replace(generate=generate, tells=True)
  batch = OnPolicy(told, None, rounds=1)(1, 1)
  assert sorted(batch.kept.answers) == list(range(P * G))
  assert batch.kept.marks().total.shape == (P, G)


def test_what_waits_goes_on_on_another_number_of_shards(scorer):
  """The same answers to the same questions, the oldest first."""
  whole = run(scorer, "partial")
  source, curriculum = start(scorer, "partial")
  before = [seen(source(step, step)) for step in (1, 2, 3)]
  saved = source.get_state(), curriculum.get_state()
  again, curriculum = start(scorer, "partial", shards=1)
  curriculum.set_state(saved[1])
  again.set_state(source.arrays, saved[0])
  after = [seen(again(step, step)) for step in range(4, STEPS + 1)]
  assert before + after == whole


def test_a_batch_ahead_is_that_of_one_iteration_before(scorer):
  """And nothing is drawn after the last."""
  ahead, fresh = run(scorer, "ahead"), run(scorer, "fresh")
  assert [b["questions"] for b in ahead] == [b["questions"] for b in fresh]
  assert [b["drawn_at"] for b in ahead] == [1, *range(1, STEPS)]
  source, _ = start(scorer, "ahead", last=2)
  spent = [source(step, step).spent for step in (1, 2)]
  assert spent == [fresh[0]["cost"] + fresh[1]["cost"], 0]
  assert source.get_state()["places"] == []
  assert not source.arrays["ready"].lengths.any()
