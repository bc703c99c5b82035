"""One iteration, with a small program in which every value can be traced."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import unpacked

from gspo_jax import model, train
from gspo_jax.data import tokenizers
from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.learner import credit, packing, train_batch, train_step
from gspo_jax.learner.packing import PackingConfig
from gspo_jax.learner.train_step import TrainState
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.experiment import Experiment, Keys
from gspo_jax.program.learner_functions import LearnerFunctions
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import Samples
from gspo_jax.sampler.static import StaticSampler

KEYS = Keys(*jax.random.split(jax.random.key(0), 4))
BYTES = tokenizers.load("bytes")


class Curriculum:
  """Gives the same prompts again and again; notes what is recorded."""

  epochs = num_solved = 0

  def __init__(self, count):
    self.count, self.recorded = count, []

  def next_batch(self, step):
    problems = [Problem(f"{p + 1}", f"{p + 1}", "") for p in range(self.count)]
    ids = [[0, ord("1") + p] for p in range(self.count)]
    return PromptBatch(
      problems,
      np.array(ids, np.int32),
      np.ones(self.count, np.int32),
      np.zeros((self.count, 3), np.int32),
      np.full(self.count, step, np.int32),
    )

  def record(self, prompts, correct):
    self.recorded.append(correct)


def make_run(config, pool, generate, learner, prompts):
  """A run of these functions, with rewards of `pool`."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  program = SimpleNamespace(
    mesh=mesh,
    tokenizer=BYTES,
    sampler=SimpleNamespace(
      generate=StaticSampler(None, generate),
      merge_groups=lambda kept, new, index: kept,
      stop=None,
      mesh=mesh,
      separate=None,
    ),
    learner=learner,
    check_compiled_once=lambda: None,
  )
  experiment = Experiment(parse(config), None, program, pool, *[None] * 3, KEYS)
  curriculum = Curriculum(prompts)
  source = train._source(experiment, curriculum)
  return train.Run(experiment, curriculum, source, None, None, (), {})


class FailingPool:
  """A reward pool that fails, from some response on."""

  takes_groups, model = False, None
  take_restarts = staticmethod(lambda: 0)

  def __init__(self, first=0):
    self.first = first

  def submit(self, responses, group_size=1):
    zeros = np.zeros(len(responses), np.float32)
    failed = np.arange(len(responses)) >= self.first
    scores = Rewards(zeros, {"broken": zeros}, failed, ("why",))
    return PendingRewards.computed(scores)


class Recorder:
  """Functions that note their calls; 2 responses to 2 prompts."""

  def __init__(self, needs_old_logps=True):
    self.sample_keys, self.steps = [], []
    self.learner = LearnerFunctions(
      recompute_first_minibatch=False,
      abstract=None,
      init_state=None,
      learning_rate=lambda step: 1.0,
      packing=PackingConfig(width=5, minibatches=1, micro_batch_size=4),
      group_size=2,
      make_train_batch=lambda prompts, samples, packing: packing,
      needs_old_logps=needs_old_logps,
      add_reference_and_values=None,
      assign_advantages=lambda batch, rewards, finish: batch,
      step=self.step,
    )

  def generate(self, params, prompts, key):
    self.sample_keys.append(as_tuple(key))
    tokens = jnp.full((4, 3), ord("#"), jnp.int32)
    ones = jnp.ones(4, jnp.int32)
    return Samples(tokens, jnp.zeros((4, 3)), ones, ones * 0, jnp.int32(1))

  def step(self, state, batch, apply_updates):
    self.steps.append(bool(apply_updates))
    return state, batch, {}


class TwoRewards:
  """Two rewards of four responses; the second leaves one out."""

  takes_groups, model = False, None
  take_restarts = staticmethod(lambda: 0)
  right = np.float32([1, 0, 0.5, 0.4])
  length = np.float32([0.1, 0.2, np.nan, 0.4])

  def submit(self, responses, group_size=1):
    parts = {"right": self.right, "length": self.length}
    if not responses:
      parts = {name: part[:0] for name, part in parts.items()}
    total = self.right + np.nan_to_num(self.length)
    total = total[: len(responses)]
    scores = Rewards(total, parts, np.zeros(len(total), bool), ())
    return PendingRewards.computed(scores)


@pytest.mark.parametrize(
  ("estimator", "expected"),
  [("rloo", [1.1, 0.2, 0.5, 0.8]),
   ("gdpo", [[1, 0.1], [0, 0.2], [0.5, np.nan], [0.4, 0.4]]),
   ("pass_at_k:k=2", [1, 0, 1, 0])],
)  # fmt: skip
def test_the_estimator_gets_the_rewards_that_it_compares(
  config, estimator, expected
):
  config.objective.advantage_estimator = estimator
  config.reward.names, config.reward.weights = ("right", "length"), (1.0, 1.0)
  functions, found = Recorder(), []
  learner = dataclasses.replace(
    functions.learner, assign_advantages=lambda b, r, f: found.append(r) or b
  )
  run = make_run(config, TwoRewards(), functions.generate, learner, 2)
  _, (metrics, *_) = train.iterate(run, STATE, 1)
  np.testing.assert_allclose(found[0], expected)
  assert metrics["reward/length"] == pytest.approx(0.7 / 3)


def as_tuple(key):
  return tuple(jax.random.key_data(key).tolist())


@pytest.fixture
def config(debug_config):
  debug_config.rollout.group_size = 2
  return debug_config


STATE = TrainState(0, None, None)


def test_as_many_rewards_may_fail_as_the_config_allows(config):
  config.reward.max_failed = 0.5
  functions = Recorder()
  run = lambda: make_run(
    config, FailingPool(2), functions.generate, functions.learner, 2
  )
  _, (metrics, *_) = train.iterate(run(), STATE, 7)
  assert metrics["reward/failed"] == 0.5
  assert metrics["reward/mean"] == 0
  config.reward.max_failed = 0.25
  with pytest.raises(multihost.AgreedError, match=r"iteration 7: 2 of 4 "):
    train.iterate(run(), STATE, 7)


def test_every_step_and_use_has_its_own_key(config, pool, monkeypatch):
  config.rollout.dynamic_sampling_rounds = 2  # no group is mixed: both rounds
  functions, shuffles = Recorder(), []

  def shuffled_groups(key, groups, group_size):
    shuffles.append(as_tuple(key))
    return np.arange(groups * group_size)

  monkeypatch.setattr(packing, "shuffled_groups", shuffled_groups)
  run = make_run(config, pool, functions.generate, functions.learner, 2)
  for step in (1, 2, 1):
    train.iterate(run, STATE, step)
  samples = functions.sample_keys
  assert len({*samples[:4], *shuffles[:2]}) == 6
  # The same step has the same keys again.
  assert samples[:2] == samples[4:]
  assert shuffles[:1] == shuffles[2:]
  # Old log-probs come first.
  assert functions.steps == [False, True] * 3


def test_no_old_logps_are_computed_where_none_are_needed(config, pool):
  functions = Recorder(needs_old_logps=False)
  run = make_run(config, pool, functions.generate, functions.learner, 2)
  train.iterate(run, STATE, 1)
  assert functions.steps == [True]


# The reward of each response: in no order, and no group like another.
REWARDS = np.array([[5.0, 1.0], [2.0, 9.0], [3.0, 3.5]], np.float32)
P, G, R = 3, 2, 3
LENGTHS = np.array([1, 3, 2, 2, 3, 1], np.int32)
FIRST = ord("a")  # response 0 begins with it, response 1 with the next letter
LETTERS = FIRST + np.arange(P * G)[:, None] + 10 * np.arange(R)
CFG = model.variant("tiny", num_experts=0, experts_per_token=0)


def tabular_logprobs(params, cfg, batch, **options):
  """A policy whose parameters are log-probs, of each letter of `generate`."""
  letters = batch.tokens[:, 1:] - FIRST
  row, place = letters % 10, letters // 10
  logps = params["logps"][row, jnp.clip(place, 0, R - 1)]
  return TokenLogprobs(logps, jnp.zeros_like(logps))


OPTIMIZER = optax.sgd(1.0)
COMPILED = {}  # the functions of an objective


def compiled(config):
  """`update`, `make_train_batch` and `assign_advantages`."""
  objective = config.objective
  if objective not in COMPILED:
    learner = settings.policy_learner(config, CFG)
    learner = learner._replace(optimizer=OPTIMIZER)
    make_train_batch = functools.partial(
      packing.train_batch_from_samples,
      cfg=CFG,
      objective=objective,
      instruments=config.log.instruments,
      packing_config=settings.packing(
        config, sharding.make_mesh(jax.devices()[:1])
      ),
    )
    assign_advantages = functools.partial(
      credit.assign_advantages, objective=objective, group_size=G
    )
    COMPILED[objective] = (
      jax.jit(functools.partial(train_step.update, learner=learner)),
      *map(jax.jit, (make_train_batch, assign_advantages)),
    )
  return COMPILED[objective]


class TabularPolicy:
  """That policy samples six responses that can be told apart, and learns."""

  def __init__(self, config):
    config = parse(config)
    self.update, make_train_batch, self.assign = compiled(config)
    self.params_used, self.batch = [], None
    self.learner = LearnerFunctions(
      recompute_first_minibatch=False,
      abstract=None,
      init_state=None,
      learning_rate=lambda step: 1.0,
      group_size=G,
      make_train_batch=make_train_batch,
      packing=settings.packing(config, sharding.make_mesh(jax.devices()[:1])),
      needs_old_logps=settings.needs_old_logps(config, CFG),
      add_reference_and_values=None,
      assign_advantages=self.assign_advantages,
      step=self.step,
    )

  def generate(self, params, prompts, key):
    self.params_used.append(params)
    tokens = jnp.asarray(LETTERS)
    truncated = jnp.zeros(P * G, jnp.int8)
    logps, lengths = jnp.zeros((P * G, R)), jnp.asarray(LENGTHS)
    return Samples(tokens, logps, lengths, truncated, jnp.int32(1))

  def assign_advantages(self, batch, rewards, finish):
    self.batch = self.assign(batch, rewards, finish)
    return self.batch

  def step(self, state, batch, apply_updates):
    if not apply_updates:
      self.params_used.append(state.params)
    return self.update(state, batch, apply_updates=apply_updates)


class ScriptedPool:
  """Scores responses by `REWARDS`, and checks that their problem is theirs."""

  takes_groups, model = False, None
  take_restarts = staticmethod(lambda: 0)

  def submit(self, responses, group_size=1):
    total = []
    for response in responses:
      p, row = int(response.prompt) - 1, ord(response.text[0]) - FIRST
      assert (row // G, len(response.text)) == (p, LENGTHS[row])
      assert response.reference == response.prompt
      total.append(REWARDS[p, row % G])
    total = np.array(total, np.float32)
    # Two rewards: the total is their sum, and not the first of them.
    parts = {"right": total * 0, "length": total}
    scores = Rewards(total, parts, np.zeros(len(total), bool), ())
    return PendingRewards.computed(scores)


@pytest.fixture
def tabular(config, monkeypatch):
  """A run of that policy, its functions, and its state."""
  monkeypatch.setattr(train_batch, "response_logps", tabular_logprobs)
  config.objective.name = "dr_grpo"
  config.learner.minibatches = P  # the update computes old log-probs of one
  config.learner.micro_batch_size = G // 2
  config.data.prompts, config.sampler.max_new_tokens = P, R
  config.log.samples = P
  monkeypatch.setattr(train, "_SAMPLES_EVERY", 1)
  policy = TabularPolicy(config)
  run = make_run(config, ScriptedPool(), policy.generate, policy.learner, P)
  logps = -np.random.default_rng(0).random((P * G, R), np.float32)
  params = {"logps": jnp.asarray(logps)}
  return run, policy, train_step.init_state(params, optimizer=OPTIMIZER)


def test_a_reward_reaches_the_gradient_of_its_own_response(tabular):
  run, policy, state = tabular
  new, (metrics, _, shown) = train.iterate(run, state, 1)
  advantages = REWARDS - REWARDS.mean(1, keepdims=True)
  mask = np.arange(R) < LENGTHS[:, None]
  packed = policy.batch.rows
  letters = np.asarray(packed.tokens)[..., 1:][np.asarray(packed.response_mask)]
  assert sorted(letters) == sorted(LETTERS[mask])
  found = unpacked.by_response(policy.batch, LENGTHS, R)["advantages"]
  np.testing.assert_allclose(
    found, np.where(mask, advantages.reshape(-1, 1), 0), atol=1e-6
  )
  # On-policy the loss of Dr. GRPO falls by A / (G R) for each token.
  expected = np.where(mask, advantages.reshape(-1, 1), 0) / (G * R)
  change = new.params["logps"] - state.params["logps"]
  np.testing.assert_allclose(change, expected, atol=1e-6)
  assert int(new.step) == 1
  assert metrics["ratio/moved"] == 0
  # Of all responses, in the pass before the update or in the update itself;
  # the sampler's log-probs are 0.
  gap = np.abs(state.params["logps"])[mask].mean()
  assert metrics["mismatch/token_abs_mean"] == pytest.approx(gap)
  assert metrics["ratio/first_minibatch_std"] == 0
  assert metrics["reward/mean"] == pytest.approx(REWARDS.mean())
  assert metrics["reward/length"] == pytest.approx(REWARDS.mean())
  assert metrics["reward/right"] == 0
  assert metrics["response/length"] == LENGTHS.mean()
  assert [sample[0] for sample in shown] == ["1", "2", "3"]
  assert [sample[1][0] for sample in shown] == ["a", "c", "e"]
  assert [sample[3] for sample in shown] == REWARDS[:, 0].tolist()


def test_a_reward_of_a_turn_reaches_the_gradient_of_its_turn(config, tabular):
  """A token that the environment wrote, turn 0, has no gradient."""
  run, _, state = tabular
  turns = np.array([[1, 0, 0], [1, 0, 2], [1, 2, 0], [1, 2, 0], [1, 1, 2],
                    [1, 0, 0]], np.int16)  # fmt: skip
  by_turn = np.array([[5, 0], [2, 9], [3, 3.5], [1, 7], [4, 6], [8, 0]], float)
  by_turn[turns.max(1) < 2, 1] = np.nan
  config.objective.name, config.objective.credit = "dr_grpo", "turn"
  config.rollout.environment, config.rollout.max_turns = "calculator", 2
  config.reward.names = config.reward.weights = ()
  config.continuous_batching.slots = P * G
  policy = TabularPolicy(config)
  config = run.experiment.config.replace(
    objective={"credit": "turn"}, rollout={"environment": "calculator"}
  )

  def source(params, step):
    batch = run.source(params, step)
    scored = batch.samples
    counts = turns.max(1).astype(np.float32)
    return batch._replace(
      samples=scored._replace(
        samples=dataclasses.replace(scored.samples, turns=jnp.asarray(turns)),
        conversation=dict.fromkeys(
          ("turns", "tool_calls", "tool_errors"), counts
        )
        | {"rewards": np.float32(by_turn)},
      )
    )

  program = run.experiment.program
  program.learner = policy.learner
  experiment = dataclasses.replace(
    run.experiment, config=config, program=program
  )
  new, _ = train.iterate(
    run._replace(experiment=experiment, source=source), state, 1
  )
  expected = np.zeros((P * G, R))
  for row, turn in np.argwhere(~np.isnan(by_turn)):
    group = np.arange(P * G) // G == row // G
    to_go = np.nansum(by_turn[:, turn:], 1)
    others = to_go[group & ~np.isnan(by_turn[:, turn])]
    expected[row, turns[row] == turn + 1] = to_go[row] - others.mean()
  assert len({*expected[expected != 0]}) == np.count_nonzero(expected) - 1
  change = new.params["logps"] - state.params["logps"]
  np.testing.assert_allclose(change, expected / (G * R), atol=1e-6)


def test_the_newest_policy_samples_and_computes_old_logps(tabular):
  run, policy, state = tabular
  for step in (1, 2, 3):
    before = state.params
    state, *_ = train.iterate(run, state, step)
    assert len(policy.params_used) == 2
    assert all(params is before for params in policy.params_used)
    policy.params_used.clear()


def test_staleness_is_a_metric_off_policy(tabular):
  run, _, state = tabular
  config = run.experiment.config.replace(rollout={"max_staleness": 1})
  experiment = dataclasses.replace(run.experiment, config=config)

  def source(params, step):
    batch = run.source(params, step)
    return batch._replace(
      policy_step=step - 1.25, resumed_fraction=0.5, sampled_tokens=0
    )

  stale = run._replace(experiment=experiment, source=source)
  _, (metrics, *_) = train.iterate(stale, state, 4)
  assert metrics["rollout/staleness"] == 1.25
  assert metrics["rollout/resumed_fraction"] == 0.5
  # The last iteration learns from a batch, and samples none.
  rate = metrics["throughput/tokens_per_second"]
  assert rate * metrics["time/iteration"] == pytest.approx(LENGTHS.sum())
  assert metrics["throughput/sampler_tokens_per_second"] == 0


def test_discarded_batches_are_recorded(tabular):
  """The curriculum is given the rewards of all sampled responses."""
  run, _, state = tabular

  def source(params, step):
    first, second = (run.source(params, step) for _ in range(2))
    return second._replace(costs=[*first.costs, *second.costs])

  rollout = {"dynamic_sampling_rounds": 2}
  config = run.experiment.config.replace(rollout=rollout)
  experiment = dataclasses.replace(run.experiment, config=config)
  twice = run._replace(experiment=experiment, source=source)
  _, (metrics, *_) = train.iterate(twice, state, 1)
  assert [x.shape for x in run.curriculum.recorded] == [(P, G)] * 2
  # Half of the tokens, and so half of the time that sampling took.
  assert metrics["dynamic_sampling/tokens_discarded"] == LENGTHS.sum()
  share = metrics["time/generate_discarded"] / metrics["time/generate"]
  assert share == 0.5
