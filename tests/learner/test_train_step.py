"""The update: exact under splitting and over devices, and it learns."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import unpacked

from gspo_jax import model
from gspo_jax.configs import tiny_cpu
from gspo_jax.learner import train_batch, train_step
from gspo_jax.learner.packing import Packing
from gspo_jax.learner.train_batch import PackedBatch
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import METHODS
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import Program, build_program
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import Prompts, Samples


def shrink(config):
  """Two minibatches of up to two micro-batches of eight rows."""
  config.data.prompts = 8
  config.learner.micro_batch_size = 8
  config.learner.minibatches = 2
  return config


@pytest.fixture
def config(debug_config):
  return shrink(debug_config)


# A policy without a model: every token has one log-prob, wherever it stands.
P, G, S, R, V = 8, 4, 3, 6, 16
B = P * G
DENSE = model.variant("tiny", num_experts=0, experts_per_token=0)


def unigram_logprobs(params, cfg, batch, **options):
  logps = jax.nn.log_softmax(params["logits"])
  responses = batch.tokens[:, -R:]
  entropy = -(jnp.exp(logps) * logps).sum()
  return TokenLogprobs(logps[responses], jnp.full(responses.shape, entropy))


@pytest.fixture
def unigram(config, monkeypatch):
  """(method=, old_logps=) -> settings of that policy's update; its params."""
  monkeypatch.setattr(train_batch, "response_logps", unigram_logprobs)

  def learner(method="gspo", old_logps="recompute"):
    config.objective.name, config.objective.old_logps = method, old_logps
    config.sampler.max_new_tokens = R
    policy = settings.learners(parse(config), DENSE).policy
    # The table of parameters has no row for this policy's.
    return policy._replace(optimizer=optax.adam(1e-3))

  rng = np.random.default_rng(0)
  return learner, {"logits": jnp.asarray(rng.normal(size=V), jnp.float32)}


def unigram_batch(sampler_logps=False):
  """Random responses of all lengths, of a policy not quite the present one.

  One a row; `unpacked.cut` makes minibatches of them.
  """
  rng = np.random.default_rng(1)
  ids = lambda *shape: rng.integers(0, V, shape).astype(np.int32)
  prompts = Prompts(ids(P, S), np.full(P, S, np.int32))
  responses, logps = ids(B, R), rng.normal(-2.8, 0.2, (B, R))
  batch = train_batch.unpacked(prompts, responses, rng.integers(1, R + 1, B))
  logps = jnp.asarray(logps, jnp.float32)
  advantages = np.repeat(rng.standard_normal((B, 1)), R, axis=1)
  return dataclasses.replace(
    batch,
    old_logps=logps if sampler_logps else batch.old_logps,
    advantages=jnp.asarray(advantages, jnp.float32),
    sampler_logps=logps,
  )


# The rows of the minibatches.
ORDER = np.random.default_rng(2).permutation(B)


def cut(batch):
  return unpacked.cut(batch, 2, 8, ORDER)


@pytest.mark.parametrize("method", ["gspo", "dapo", "dr_grpo"])
def test_micro_batches_leave_the_gradient_alone(unigram, method):
  """One whole batch through the loss as users call it, against eight cuts."""
  learner, params = unigram
  # The old policy is such that some ratios are clipped and some are not.
  batch = unigram_batch(sampler_logps=True)
  rows = jax.tree.map(lambda x: x.reshape(8, 4, *x.shape[1:]), batch)
  grads, _, metrics = jax.jit(
    lambda params, rows: train_step.gradient(params, rows, learner(method))
  )(params, rows)

  def loss(params):
    return METHODS[method](
      unigram_logprobs(params, DENSE, batch).logps,
      batch.old_logps,
      batch.advantages[:, 0],
      batch.response_mask,
    )

  expected, whole = jax.jit(jax.grad(loss, has_aux=True))(params)
  norm = metrics["grad/norm"].value()
  assert norm > 0
  np.testing.assert_allclose(
    grads["logits"], expected["logits"], atol=1e-6 * norm
  )
  for key, metric in whole.items():
    value = metrics[key].value()
    np.testing.assert_allclose(value, metric.value(), atol=1e-5)


def test_the_samplers_log_probs_can_be_the_old_ones(unigram):
  learner, params = unigram
  learner = learner(old_logps="sampler")
  state = train_step.init_state(params, optimizer=learner.optimizer)
  batch = unigram_batch(sampler_logps=True)
  step = jax.jit(functools.partial(train_step.update, learner=learner))
  same, packed, first = step(state, cut(batch), apply_updates=False)
  assert int(same.step) == 0
  np.testing.assert_array_equal(same.params["logits"], params["logits"])
  scored = unpacked.join(packed, ORDER)
  for name in ("old_logps", "tokens", "sampler_logps"):
    np.testing.assert_array_equal(getattr(scored, name), getattr(batch, name))
  _, _, second = step(same, packed, apply_updates=True)
  metrics = jax.tree.map(jnp.add, first, second)
  # The gap is measured all the same, and of every response once.
  assert metrics["mismatch/sequence_abs_mean"].count == B
  out = unigram_logprobs(params, DENSE, batch).logps
  gap = np.abs(out - batch.sampler_logps)[np.asarray(batch.response_mask)]
  assert metrics["mismatch/token_abs_mean"].value() == pytest.approx(
    gap.mean(), rel=1e-5
  )
  # The first minibatch is that far from ratio 1.
  assert metrics["ratio/first_minibatch_std"].value() > 0.01


def test_old_log_probs_are_of_the_policy_before_the_update(unigram):
  """In every minibatch, so that the ratio of the second one is not 1."""
  learner, params = unigram
  learner = learner()
  state = train_step.init_state(params, optimizer=learner.optimizer)
  batch = unigram_batch()
  step = jax.jit(functools.partial(train_step.update, learner=learner))
  state, packed, first = step(state, cut(batch), apply_updates=False)
  scored = unpacked.join(packed, ORDER)
  expected = unigram_logprobs(params, DENSE, batch).logps
  computed = np.asarray(scored.old_logps) != 0
  # All but the first minibatch, of which the update computes them.
  assert computed.all(1).sum() >= B // 2
  np.testing.assert_allclose(
    scored.old_logps[computed], expected[computed], rtol=1e-6
  )
  _, _, second = step(state, packed, apply_updates=True)
  metrics = jax.tree.map(jnp.add, first, second)
  assert metrics["ratio/first_minibatch_std"].value() == 0
  assert metrics["ratio/moved"].value() > 0
  assert metrics["mismatch/sequence_abs_mean"].count == B


class Iteration(NamedTuple):
  """All that an iteration makes; arrays are numpy's but for the states'.

  `batch` is the packed batch; `old_logps` are of the responses, [B, R], the
  sampler's where they were not computed.
  """

  program: Program
  params: model.Params
  prompts: Prompts
  samples: Samples
  packing: Packing
  batch: PackedBatch
  old_logps: np.ndarray
  state: train_step.TrainState
  new: train_step.TrainState
  metrics: dict


def build(config, devices=1, **mesh):
  mesh = sharding.make_mesh(jax.devices()[:devices], **mesh)
  return build_program(parse(config), mesh)


def pack(learner, prompts, samples):
  lengths = multihost.to_host(samples.lengths)
  return learner.pack(prompts.lengths, lengths, jax.random.key(2))


def iterate(program, rewards):
  """One iteration on random prompts."""
  rng, learner = np.random.default_rng(0), program.learner
  tokens = rng.integers(0, 256, (8, 8)).astype(np.int32)
  prompts = Prompts(tokens, rng.integers(3, 9, 8).astype(np.int32))
  with jax.set_mesh(program.mesh):
    state = learner.init_state(program.init_params(jax.random.key(0)))
    # Copies: a NumPy view of a buffer would forbid its donation.
    params = jax.tree.map(np.array, state.params)
    samples = program.sampler.generate(state.params, prompts, jax.random.key(1))
    packing = pack(learner, prompts, samples)
    batch = learner.make_train_batch(prompts, samples, packing)
    state, batch, _ = learner.compute_old_logps(state, batch)
    rewards = multihost.to_global(
      np.float32(rewards), sharding.batch_sharding(program.mesh)
    )
    batch = learner.assign_advantages(batch, rewards, samples.finish)
    kept = jax.device_get(batch)
    new, _, metrics = learner.update(state, batch)
  samples = jax.device_get(samples)
  # Of the first minibatch only one micro-batch has old log-probs.
  found = unpacked.by_response(kept, samples.lengths, samples.logps.shape[1])
  found = found["old_logps"]
  old_logps = np.where(found != 0, found, samples.logps)
  return Iteration(
    program,
    params,
    prompts,
    samples,
    packing,
    kept,
    old_logps,
    state,
    new,
    metrics,
  )


REWARDS = np.where(np.arange(32) % 2, 1.0, -1.0)


@pytest.fixture(scope="module")
def one():
  """An iteration on one device."""
  return iterate(build(shrink(tiny_cpu.get_config("debug"))), REWARDS)


MESHES = {
  "2 data": (2, {"data": 2}, {}),
  "2 tensor": (2, {"data": 1, "tensor": 2}, {}),
  "4 data, expert": (4, {"data": 2, "expert": 2}, {}),
  "4 fsdp, decoding by experts": (4, {"data": 1, "fsdp": 4}, {"expert": 4}),
  "8 data": (8, {"data": 8}, {}),
  "2 context": (2, {"data": 1, "context": 2}, {}),
  "8 fsdp, context, expert": (
    8,
    {"data": 1, "fsdp": 2, "context": 2, "expert": 2},
    {},
  ),
  # Two devices have the same key head, here and below.
  "4 context": (4, {"data": 1, "context": 4}, {}),
  "8 context, expert, tensor, decoding otherwise": (
    8,
    {"data": 1, "context": 2, "expert": 2, "tensor": 2},
    {"expert": 4, "tensor": 1},
  ),
  "8 expert": (8, {"data": 1, "expert": 8}, {}),
  "8 fsdp, expert, tensor, decoding otherwise": (
    8,
    {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2},
    {"expert": 4, "tensor": 1},
  ),
}
# The others take a quarter of a minute each. Other files test fsdp.
DEFAULT = "8 context, expert, tensor, decoding otherwise"


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name == DEFAULT else pytest.mark.slow)
    for name in MESHES
  ],
)
def test_many_devices_do_as_one(one, config, name):
  devices, mesh, sampler_mesh = MESHES[name]
  config.sampler_mesh.update(sampler_mesh)
  many = iterate(build(config, devices, **mesh), REWARDS)
  np.testing.assert_array_equal(one.samples.tokens, many.samples.tokens)
  close = np.testing.assert_allclose
  close(one.samples.logps, many.samples.logps, atol=1e-5)
  close(one.old_logps, many.old_logps, atol=1e-5)
  # The first moment is linear in the gradients; the parameters are not: Adam
  # divides by a gradient's size, and so blows up the rounding of a small one.
  moments = one.new.opt_state[1][0].mu, many.new.opt_state[1][0].mu
  jax.tree.map(functools.partial(close, atol=2e-7), *moments)
  jax.tree.map(
    functools.partial(close, atol=3e-6), one.new.params, many.new.params
  )
  norm = one.metrics["grad/norm"].value()
  assert many.metrics["grad/norm"].value() == pytest.approx(norm, rel=1e-5)
  loss = one.metrics["loss/policy"].value()
  assert many.metrics["loss/policy"].value() == pytest.approx(loss, abs=1e-6)
  if mesh["data"] == 1:  # parameters and moments are split over all devices
    for tree in (many.new.params, moments[1]):
      gate_up = tree["layers"]["moe"]["gate_up"]
      assert gate_up.addressable_shards[0].data.size == gate_up.size / devices


def test_good_responses_become_likelier_and_the_state_is_donated(one):
  samples = one.samples
  batch = train_batch.unpacked(one.prompts, samples.tokens, samples.lengths)
  logprobs = jax.jit(
    lambda params: (
      train_batch.response_logps(params, one.program.cfg, batch).logps
    )
  )
  gain = logprobs(one.new.params) - logprobs(one.params)
  gain = np.where(batch.response_mask, gain, 0)
  per_response = gain.sum(1) / batch.response_mask.sum(1)
  good = REWARDS > 0
  assert per_response[good].mean() > per_response[~good].mean() + 1e-4
  # The second minibatch is off-policy.
  assert one.metrics["ratio/moved"].value() > 0
  assert int(one.new.step) == 1
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(one.state.params))


def test_an_update_starts_at_ratio_one(one):
  """Its forward pass is that of the old log-probs; the sampler's is another."""
  gap = one.old_logps - one.samples.logps
  assert 0 < np.abs(gap).max() < 1e-5
  assert one.metrics["ratio/first_minibatch_std"].value() == 0


def test_a_second_compilation_is_an_error(one):
  one.program.check_compiled_once()
  longer = Prompts(np.zeros((8, 9), np.int32), np.ones(8, np.int32))
  with jax.set_mesh(one.program.mesh):
    one.program.learner.make_train_batch(longer, one.samples, one.packing)
  with pytest.raises(RuntimeError, match="make_train_batch was compiled 2 "):
    one.program.check_compiled_once()


@pytest.mark.slow  # two more programs
def test_critic_reference_and_replay_on_many_devices_do_as_one(config):
  config.objective.update(
    {"name": "ppo", "kl_coef": 0.1, "mismatch": "tis_token", "replay": "r3"}
  )

  def whole(devices, **mesh):
    program = build(config, devices, **mesh)
    rng, learner = np.random.default_rng(0), program.learner
    tokens = rng.integers(0, 256, (8, 8)).astype(np.int32)
    prompts = Prompts(tokens, np.full(8, 8, np.int32))
    rewards = rng.standard_normal(32).astype(np.float32)
    with jax.set_mesh(program.mesh):
      state = learner.init_state(program.init_params(jax.random.key(0)))
      samples = program.sampler.generate(
        state.params, prompts, jax.random.key(1)
      )
      packing = pack(learner, prompts, samples)
      batch = learner.make_train_batch(prompts, samples, packing)
      state, batch, _ = learner.compute_old_logps(state, batch)
      batch = learner.add_reference_and_values(state, batch)
      batch = learner.assign_advantages(batch, rewards, samples.finish)
      kept = jax.device_get(batch)
      new, _, _ = learner.update(state, batch)
    lengths = jax.device_get(samples.lengths)
    kept = unpacked.by_response(kept, lengths, samples.logps.shape[1])
    return kept, jax.device_get(new)

  kept, new = whole(1)
  config.sampler_mesh.update({"expert": 4, "tensor": 1})
  kept8, new8 = whole(8, data=1, context=2, expert=2, tensor=2)
  for name in ("advantages", "returns", "reference_logps"):
    np.testing.assert_allclose(kept[name], kept8[name], atol=1e-5)
  same = functools.partial(np.testing.assert_allclose, atol=1e-5)
  jax.tree.map(same, new.params, new8.params)
  jax.tree.map(same, new.critic.params, new8.critic.params)
