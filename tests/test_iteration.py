"""One iteration, with a program that only notes what it is given."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gspo_jax.iteration import iterate

from gspo_jax import model, train
from gspo_jax.data import tokenizers
from gspo_jax.data.tasks import Problem
from gspo_jax.learner import credit, experience, train_batch, train_step
from gspo_jax.learner.train_step import TrainState
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.program import experiment, settings
from gspo_jax.program.config import parse
from gspo_jax.rewards.pool import RewardPool, Scores
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import Samples


class Spy:
  """A program, and a curriculum, that notes the keys it is given."""

  mesh = sharding.make_mesh(jax.devices()[:1])
  plain = tokenizers.load("bytes")
  scores, appraise = True, None

  def __init__(self):
    self.keys, self.cuts = [], []

  def generate(self, params, prompts, key):
    self.keys.append(key)
    tokens = jnp.full((4, 3), ord("#"), jnp.int32)
    ones = jnp.ones(4, jnp.int32)
    return Samples(tokens, jnp.zeros((4, 3)), ones, ones * 0, jnp.int32(1))

  def assemble(self, prompts, samples):
    return train_batch.make_train_batch(
      prompts, samples.tokens, samples.lengths
    )

  def score(self, state, batch, key):
    self.cuts.append(key)
    return state, batch, {}

  def merge(self, kept, new, index):
    return kept

  def assign(self, batch, rewards, finish):
    return batch

  def update(self, state, batch, key):
    self.keys.append(key)
    return state, batch, {}

  def draw(self, step):
    return {
      "tokens": np.zeros((2, 3), np.int32),
      "length": np.ones(2, np.int32),
      "problems": [Problem("1?", "1", "#1")] * 2,
    }

  def record(self, batch, correct):
    pass

  def check_compiled_once(self):
    pass

  def schedule(self, step):
    return 1.0


class Broken:
  """A scorer that fails, from some answer on."""

  def __init__(self, after=0):
    self.after = after

  def submit(self, answers):
    zeros = np.zeros(len(answers), np.float32)
    failed = np.arange(len(answers)) >= self.after
    scores = Scores(zeros, {"broken": zeros}, failed, ("why",))
    return SimpleNamespace(result=lambda: scores)


def test_a_reward_that_always_fails_stops_it(debug_config):
  """All that was drawn counts, whatever dynamic sampling keeps of it."""
  spy = Spy()
  keys = experiment.Keys(*jax.random.split(jax.random.key(0), 4))
  run = experiment.Experiment(
    debug_config, None, spy, Broken(), None, None, None, keys
  )
  debug_config.rollout.group_size = 2
  debug_config.rollout.dynamic_sampling_rounds = 3
  debug_config.reward.max_failed = 1.0
  source = train._rollouts(run, spy)
  with pytest.raises(
    multihost.AgreedError, match=r"iteration 7: 12 of 12 .* why$"
  ):
    iterate(run, TrainState(0, None, None), spy, source, 7)


@pytest.mark.parametrize("most", [0.25, 0.5])
def test_as_many_rewards_may_fail_as_the_config_says(debug_config, most):
  spy = Spy()
  keys = experiment.Keys(*jax.random.split(jax.random.key(0), 4))
  scorer = Broken(after=2)
  run = experiment.Experiment(
    debug_config, None, spy, scorer, None, None, None, keys
  )
  debug_config.rollout.group_size = 2
  debug_config.reward.max_failed = most
  source, state = train._rollouts(run, spy), TrainState(0, None, None)
  if most < 0.5:
    with pytest.raises(multihost.AgreedError, match=r"iteration 7: 2 of 4 "):
      iterate(run, state, spy, source, 7)
  else:
    _, row, *_ = iterate(run, state, spy, source, 7)
    assert row["reward/failed"] == 0.5


def test_every_step_and_use_has_its_own_key(debug_config):
  spy = Spy()
  keys = experiment.Keys(*jax.random.split(jax.random.key(0), 4))
  scorer = RewardPool(("final_answer",), (1.0,), workers=1)
  run = experiment.Experiment(
    debug_config, None, spy, scorer, None, None, None, keys
  )
  debug_config.rollout.group_size = 2
  debug_config.rollout.dynamic_sampling_rounds = (
    2  # both are drawn: no group is mixed
  )
  state = TrainState(0, None, None)
  with scorer:
    source = train._rollouts(run, spy)
    for step in (1, 2, 1):
      iterate(run, state, spy, source, step)
  drawn, cuts = (
    [tuple(jax.random.key_data(k).tolist()) for k in keys]
    for keys in (spy.keys, spy.cuts)
  )
  assert len(set(drawn[:6])) == 6
  assert drawn[:3] == drawn[6:]  # the same step repeats
  assert cuts == drawn[2::3]  # scores are cut as the update is


def test_where_no_score_is_needed_none_is_made(debug_config):
  spy = Spy()
  spy.scores = False
  keys = experiment.Keys(*jax.random.split(jax.random.key(0), 4))
  scorer = RewardPool(("final_answer",), (1.0,), workers=1)
  run = experiment.Experiment(
    debug_config, None, spy, scorer, None, None, None, keys
  )
  debug_config.rollout.group_size = 2
  with scorer:
    iterate(run, TrainState(0, None, None), spy, train._rollouts(run, spy), 1)
  assert (len(spy.cuts), len(spy.keys)) == (0, 2)


# What each answer earns: in no order, and no group like another.
EARNED = np.array([[5.0, 1.0], [2.0, 9.0], [3.0, 3.5]], np.float32)
P, G, R = 3, 2, 3
LENGTHS = np.array([1, 3, 2, 2, 3, 1], np.int32)
FIRST = ord("a")  # answer 0 begins with it, answer 1 with the next letter


CFG = model.variant("tiny", num_experts=0, experts_per_token=0)


def table(params, cfg, rows, **how):
  """A policy whose parameters are log-probs, found by the answer's letter."""
  logps = params["logps"][rows.tokens[:, -R] - FIRST]
  return TokenLogprobs(logps, jnp.zeros_like(logps))


class Tabular(Spy):
  """A program of that policy: it draws six answers that can be told apart."""

  def __init__(self, config):
    super().__init__()
    learner, *_ = settings.learners(parse(config), CFG)
    self.learner = learner._replace(optimizer=optax.sgd(1.0))
    update = functools.partial(train_step.update, learner=self.learner)
    self.step = jax.jit(
      lambda *given, apply_updates: update(*given, apply_updates=apply_updates)
    )
    self.scores = settings.needs_old_logprobs(parse(config), CFG)
    self.fields = settings.train_batch_fields(parse(config), CFG)
    self.credit = settings.credit(parse(config))
    self.used, self.recorded = [], []

  def generate(self, params, prompts, key):
    self.used.append(params)
    tokens = FIRST + jnp.arange(P * G)[:, None] + 10 * jnp.arange(R)
    cut = jnp.zeros(P * G, jnp.int8)
    logps = jnp.zeros((P * G, R))
    return Samples(tokens, logps, jnp.asarray(LENGTHS), cut, jnp.int32(1))

  def assemble(self, prompts, samples):
    return train_batch.train_batch_from_samples(
      prompts, samples, CFG, self.fields
    )

  def score(self, state, batch, key):
    self.used.append(state.params)
    return self.step(state, batch, key, apply_updates=False)

  def assign(self, batch, rewards, finish):
    self.assigned = credit.assign_advantages(
      batch, rewards, finish, credit=self.credit
    )
    return self.assigned

  def update(self, state, batch, key):
    return self.step(state, batch, key, apply_updates=True)

  def draw(self, step):
    tokens = np.array([[0, ord("1") + p] for p in range(P)], np.int32)
    return {
      "tokens": tokens,
      "length": np.ones(P, np.int32),
      "problems": [Problem(f"{p + 1}", f"{p + 1}", "") for p in range(P)],
    }

  def record(self, batch, correct):
    self.recorded.append(correct)


class Judge:
  """Scores answers, each only beside its own question."""

  def submit(self, answers):
    total = []
    for answer in answers:
      p, row = int(answer.prompt) - 1, ord(answer.text[0]) - FIRST
      assert (row // G, len(answer.text)) == (p, LENGTHS[row])
      assert answer.reference == answer.prompt
      total.append(EARNED[p, row % G])
    total = np.array(total, np.float32)
    failed = np.zeros(len(total), bool)
    # Two rewards: what is paid is their sum, and not the first of them.
    parts = {"right": total * 0, "length": total}
    scores = Scores(total, parts, failed, ())
    return SimpleNamespace(result=lambda: scores)


@pytest.fixture
def tabular(debug_config, monkeypatch):
  """A run of that program, and its state."""
  monkeypatch.setattr(experience, "logprobs", table)
  debug_config.objective.name = "dr_grpo"
  debug_config.rollout.group_size = G
  debug_config.learner.minibatches = P  # one of them begins unscored
  debug_config.learner.micro_batch_size = G // 2
  program = Tabular(debug_config)
  keys = experiment.Keys(*jax.random.split(jax.random.key(0), 4))
  run = experiment.Experiment(
    debug_config, None, program, Judge(), None, None, None, keys
  )
  logps = -np.random.default_rng(0).random((P * G, R), np.float32)
  params = {"logps": jnp.asarray(logps)}
  optimizer = program.learner.optimizer
  return run, train_step.init_state(params, optimizer=optimizer)


def test_a_reward_meets_the_gradient_of_its_own_answer(tabular):
  run, state = tabular
  program = run.program
  source = train._rollouts(run, program)
  new, row, _, shown = iterate(run, state, program, source, 1)
  advantages = EARNED - EARNED.mean(1, keepdims=True)
  assigned = program.assigned
  letters = np.asarray(assigned.tokens[:, -R]) - FIRST
  np.testing.assert_array_equal(letters, np.arange(P * G))
  np.testing.assert_allclose(assigned.advantages, advantages.ravel())
  # On-policy the loss of Dr. GRPO falls by A / (G R) for each token.
  mask = np.arange(R) < LENGTHS[:, None]
  expected = np.where(mask, advantages.reshape(-1, 1), 0) / (G * R)
  change = new.params["logps"] - state.params["logps"]
  np.testing.assert_allclose(change, expected, atol=1e-6)
  assert int(new.step) == 1
  assert row["ratio/moved"] == 0
  # Of all answers, scored before the update or in it; the sampler said 0.
  gap = np.abs(state.params["logps"])[mask].mean()
  assert row["mismatch/token_abs_mean"] == pytest.approx(gap)
  assert row["ratio/first_minibatch_std"] == 0
  assert row["reward/mean"] == pytest.approx(EARNED.mean())
  assert row["reward/length"] == pytest.approx(EARNED.mean())
  assert row["reward/right"] == 0
  assert row["response/length"] == LENGTHS.mean()
  assert [s[0] for s in shown] == ["1", "2", "3"]
  assert [s[1][0] for s in shown] == ["a", "c", "e"]
  assert [s[3] for s in shown] == EARNED[:, 0].tolist()


def test_the_policy_that_draws_and_scores_is_the_newest(tabular):
  run, state = tabular
  program = run.program
  source = train._rollouts(run, program)
  for step in (1, 2, 3):
    before = state.params
    state, *_ = iterate(run, state, program, source, step)
    assert all(params is before for params in program.used)
    assert len(program.used) == 2
    program.used.clear()


def test_it_is_told_how_old_the_answers_are(tabular):
  run, state = tabular
  program = run.program
  fresh = train._rollouts(run, program)
  run.config.rollout.one_step_off_policy = True

  def source(params, step):
    ready = fresh(params, step)
    return ready._replace(drawn_at=step - 1.25, continued=0.5)

  _, row, *_ = iterate(run, state, program, source, 4)
  assert row["rollout/staleness"] == 1.25
  assert row["rollout/continued"] == 0.5


def test_all_that_was_drawn_is_recorded(tabular):
  """What refill discards is known to the curriculum, too."""
  run, state = tabular
  program = run.program
  fresh = train._rollouts(run, program)

  def source(params, step):
    first, second = (fresh(params, step) for _ in range(2))
    return second._replace(costs=[*first.costs, *second.costs])

  iterate(run, state, program, source, 1)
  assert [correct.shape for correct in program.recorded] == [(P, G)] * 2
