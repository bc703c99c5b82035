"""The update: exact under splitting and over devices, and it learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.learner import train_step
from gspo_jax.learner.objective import METHODS
from gspo_jax.logprobs import token_logprobs
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import Prompts


def build(config, devices=1, **mesh):
  mesh = sharding.make_mesh(jax.devices()[:devices], **mesh)
  return build_program(parse(config), mesh)


def iterate(run, seed=0, prompts=8, advantages=None):
  """One iteration on made-up prompts and rewards; returns all it made."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 256, (prompts, 8)).astype(np.int32)
  lengths = rng.integers(3, 9, prompts).astype(np.int32)
  with jax.set_mesh(run.mesh):
    state = run.learner.init_state(run.init_params(jax.random.key(seed)))
    # Copies: a NumPy view of a buffer would forbid its donation.
    params = jax.tree.map(np.array, state.params)
    asked = Prompts(tokens, lengths)
    samples = run.sampler.generate(state.params, asked, jax.random.key(1))
    rollout = run.learner.make_train_batch(asked, samples)
    state, rollout, _ = run.learner.compute_old_logprobs(
      state, rollout, jax.random.key(2)
    )
    rows = rollout.tokens.shape[0]
    if advantages is None:
      advantages = rng.standard_normal(rows)
    advantages = multihost.to_global(
      np.float32(advantages), sharding.batch_sharding(run.mesh)
    )
    rollout = dataclasses.replace(rollout, advantages=advantages)
    kept = jax.device_get(rollout)
    new, _, metrics = run.learner.update(state, rollout, jax.random.key(2))
  # The first minibatch is not scored but for one micro-batch.
  scored = kept.old_logps != 0
  old_logps = np.where(scored, kept.old_logps, samples.logps)
  kept = dataclasses.replace(kept, old_logps=old_logps)
  return params, jax.device_get(samples), kept, state, new, metrics


def shrink(config):
  """Two minibatches of two micro-batches of eight rows."""
  config.data.prompts = 8
  config.learner.micro_batch_size = 8
  config.learner.minibatches = 2
  return config


@pytest.fixture
def config(debug_config):
  return shrink(debug_config)


@pytest.fixture(scope="module")
def one():
  """A program on one device, and an iteration of it."""
  from configs import tiny_cpu

  run = build(shrink(tiny_cpu.get_config("debug")))
  rows = 8 * 4
  advantages = np.where(np.arange(rows) % 2, 1.0, -1.0)
  return run, *iterate(run, advantages=advantages)


@pytest.mark.parametrize("name", ["gspo", "dapo"])
def test_micro_batches_leave_the_gradient_alone(one, config, name):
  """One whole batch through the loss as users call it, against eight cuts."""
  run, params, _, rollout, *_ = one
  config.objective.name = name
  method = METHODS[name]
  # Old log-probs that differ, so that some ratios are clipped and some not.
  shift = np.random.default_rng(1).normal(0, 0.2, rollout.old_logps.shape)
  rollout = dataclasses.replace(
    rollout, old_logps=(rollout.old_logps + shift).astype(np.float32)
  )
  learner, *_ = settings.learners(parse(config), run.cfg)
  cut = jax.tree.map(lambda x: x.reshape(8, 4, *x.shape[1:]), rollout)
  grads, _, metrics = jax.jit(
    lambda p, b: train_step.gradient(p, b, learner)
  )(params, cut)  # fmt: skip

  def loss(params):
    scored = token_logprobs(
      params,
      run.cfg,
      rollout.tokens,
      rollout.positions,
      rollout.mask,
      response_length=rollout.response_mask.shape[1],
    )
    return method(
      scored.logps,
      rollout.old_logps,
      rollout.advantages,
      rollout.response_mask,
    )

  expected, whole = jax.jit(jax.grad(loss, has_aux=True))(params)
  scale = metrics["grad/norm"].value()
  assert scale > 0
  for a, b in zip(
    jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-6 * scale)
  for key, metric in whole.items():
    found = metrics[key].value()
    np.testing.assert_allclose(found, metric.value(), atol=1e-5)


MESHES = {
  "2 data": (2, {"data": 2}, {}),
  "2 tensor": (2, {"data": 1, "tensor": 2}, {}),
  "4 data, expert": (4, {"data": 2, "expert": 2}, {}),
  "4 fsdp, decoding by experts": (4, {"data": 1, "fsdp": 4}, {"expert": 4}),
  "8 data": (8, {"data": 8}, {}),
  "8 expert": (8, {"data": 1, "expert": 8}, {}),
  "8 fsdp, expert, tensor, decoding otherwise": (
    8,
    {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2},
    {"expert": 4, "tensor": 1},
  ),
}


# Half a minute each, and a minute on a slow machine; the others cover the axes.
SLOW = ("2 data", "2 tensor", "4 data, expert", "8 data")


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
    for name in MESHES
  ],
)
def test_many_devices_do_as_one(one, config, name):
  devices, mesh, decoding = MESHES[name]
  config.sampler_mesh.update(decoding)
  _, _, samples, rollout, _, new, metrics = one
  many = build(config, devices, **mesh)
  eight = iterate(many, advantages=rollout.advantages)
  _, samples8, rollout8, _, new8, metrics8 = eight
  np.testing.assert_array_equal(samples.tokens, samples8.tokens)
  np.testing.assert_allclose(samples.logps, samples8.logps, atol=1e-5)
  np.testing.assert_allclose(rollout.old_logps, rollout8.old_logps, atol=1e-5)
  same = lambda a, b, atol: np.testing.assert_allclose(a, b, atol=atol)
  # The first moment is linear in the gradients; the parameters are not: Adam
  # divides by a gradient's size, and so blows up the rounding of a small one.
  moments = new.opt_state[1][0].mu, new8.opt_state[1][0].mu
  jax.tree.map(functools.partial(same, atol=2e-7), *moments)
  jax.tree.map(functools.partial(same, atol=3e-6), new.params, new8.params)
  norm = metrics["grad/norm"].value()
  assert metrics8["grad/norm"].value() == pytest.approx(norm, rel=1e-5)
  loss = metrics["loss/policy"].value()
  assert metrics8["loss/policy"].value() == pytest.approx(loss, abs=1e-6)


def test_parameters_and_moments_are_split(config):
  run = build(config, 8, data=1, fsdp=2, expert=4)
  with jax.set_mesh(run.mesh):
    state = run.learner.init_state(run.init_params(jax.random.key(0)))
  for tree in (state.params, state.opt_state[1][0].mu):
    gate_up = tree["layers"]["moe"]["gate_up"]
    assert gate_up.addressable_shards[0].data.size == gate_up.size / 8


def test_good_answers_become_likelier_and_the_state_is_donated(one):
  run, params, _, rollout, old, new, metrics = one
  good = rollout.advantages > 0
  asked = rollout.tokens, rollout.positions, rollout.mask
  R = rollout.response_mask.shape[1]
  score = jax.jit(
    lambda p: token_logprobs(p, run.cfg, *asked, response_length=R).logps
  )
  gain = np.where(rollout.response_mask, score(new.params) - score(params), 0)
  per_row = gain.sum(1) / rollout.response_mask.sum(1)
  assert per_row[good].mean() > per_row[~good].mean() + 1e-4
  assert (
    metrics["ratio/moved"].value() > 0
  )  # the second minibatch is off-policy
  assert int(new.step) == 1
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))


def test_a_rollout_starts_at_ratio_one(one):
  """The trainer scores its own rollout as the update's first pass does."""
  _, _, samples, rollout, *_, metrics = one
  gap = np.where(rollout.response_mask, rollout.old_logps - samples.logps, 0)
  assert 0 < np.abs(gap).max() < 1e-5
  assert metrics["ratio/first_minibatch_std"].value() == 0


def test_a_second_compilation_is_an_error(one):
  run, params, *_ = one
  run.check_compiled_once()
  longer = Prompts(np.zeros((8, 9), np.int32), np.ones(8, np.int32))
  with jax.set_mesh(run.mesh):
    run.sampler.generate(params, longer, jax.random.key(0))
  with pytest.raises(RuntimeError, match="generate was compiled 2 times"):
    run.check_compiled_once()


def test_the_samplers_log_probs_can_be_the_old_ones(one, config):
  _, params, samples, rollout, *_ = one
  config.objective.old_logps = "sampler"
  run = build(config)
  S = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
  first = slice(None, None, config.rollout.group_size)
  asked = Prompts(
    rollout.tokens[first, :S], rollout.mask[first, :S].sum(1).astype(np.int32)
  )
  with jax.set_mesh(run.mesh):
    state = run.learner.init_state(jax.tree.map(jnp.asarray, params))
    trusted, key = (
      run.learner.make_train_batch(asked, samples),
      jax.random.key(2),
    )
    state, trusted, scored = run.learner.compute_old_logprobs(
      state, trusted, key
    )
    kept = jax.device_get(trusted)
    _, _, learnt = run.learner.update(state, trusted, key)
  metrics, trusted = jax.tree.map(jnp.add, scored, learnt), kept
  np.testing.assert_array_equal(trusted.old_logps, samples.logps)
  np.testing.assert_array_equal(trusted.tokens, rollout.tokens)
  # The gap is measured all the same, and of every response.
  assert metrics["mismatch/sequence_abs_mean"].count == len(samples.tokens)
  assert 0 < metrics["mismatch/sequence_abs_mean"].value() < 1e-6
  # That is how far the first minibatch is from ratio 1.
  assert 0 < metrics["ratio/first_minibatch_std"].value() < 1e-6


@pytest.mark.slow  # two programs more
def test_critic_reference_and_replay_on_many_devices_do_as_one(config):
  config.objective.update(
    {"name": "ppo", "kl_coef": 0.1, "mismatch": "tis_token", "replay": "r3"}
  )

  def whole(devices, **mesh):
    run = build(config, devices, **mesh)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (8, 8)).astype(np.int32)
    asked = Prompts(tokens, np.full(8, 8, np.int32))
    rewards = rng.standard_normal(32).astype(np.float32)
    with jax.set_mesh(run.mesh):
      state = run.learner.init_state(run.init_params(jax.random.key(0)))
      samples = run.sampler.generate(state.params, asked, jax.random.key(1))
      rollout = run.learner.make_train_batch(asked, samples)
      state, rollout, _ = run.learner.compute_old_logprobs(
        state, rollout, jax.random.key(2)
      )
      rollout = run.learner.add_reference_and_values(state, rollout)
      rollout = run.learner.assign_advantages(rollout, rewards, samples.finish)
      kept = jax.device_get(rollout)
      new, _, _ = run.learner.update(state, rollout, jax.random.key(2))
    return kept, jax.device_get(new)

  kept, new = whole(1)
  config.sampler_mesh.update({"expert": 4, "tensor": 1})
  kept8, new8 = whole(8, data=1, fsdp=2, expert=2, tensor=2)
  for name in ("experts", "advantages", "returns", "reference_logps"):
    np.testing.assert_allclose(
      getattr(kept, name), getattr(kept8, name), atol=1e-5
    )
  same = functools.partial(np.testing.assert_allclose, atol=1e-5)
  jax.tree.map(same, new.params, new8.params)
  jax.tree.map(same, new.critic.params, new8.critic.params)
