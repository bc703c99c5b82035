"""An iteration's update: it learns, on many devices as on one."""

import functools
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import unpacked

from gspo_jax.configs import tiny_cpu
from gspo_jax.learner import train_batch, train_step
from gspo_jax.program import abstract
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import Prompts


def shrink(config):
  """Two minibatches of up to two micro-batches of eight rows."""
  config.data.prompts = 8
  config.learner.micro_batch_size = 8
  config.learner.minibatches = 2
  return config


@pytest.fixture
def config(debug_config):
  return shrink(debug_config)


def build(config, devices=1, **mesh):
  mesh = sharding.make_mesh(jax.devices()[:devices], **mesh)
  return build_program(parse(config), mesh)


def random_biases(params):
  """Biases and sinks are zero at first."""
  rng = np.random.default_rng(3)

  def fill(path, x):
    if not jax.tree_util.keystr(path, simple=True).endswith(("bias", "sinks")):
      return x
    return jax.device_put(np.float32(rng.normal(0, 0.3, x.shape)), x.sharding)

  return jax.tree.map_with_path(fill, params)


def iterate(program, rewards):
  """One iteration on random prompts; arrays are numpy's but for the states'."""
  rng, learner = np.random.default_rng(0), program.learner
  tokens = rng.integers(0, 256, (8, 8)).astype(np.int32)
  prompts = Prompts(tokens, rng.integers(3, 9, 8).astype(np.int32))
  with jax.set_mesh(program.mesh):
    params = random_biases(program.init_params(jax.random.key(0)))
    state = learner.init_state(params)
    # Copies: a NumPy view of a buffer would forbid its donation.
    params = jax.tree.map(np.array, state.params)
    samples = program.sampler.generate(state.params, prompts, jax.random.key(1))
    lengths = multihost.to_host(samples.lengths)
    packing = learner.pack(prompts.lengths, lengths, jax.random.key(2))
    batch = learner.make_train_batch(prompts, samples, packing)
    state, batch, scored = learner.compute_old_logps(state, batch)
    if learner.add_reference_and_values:
      batch = learner.add_reference_and_values(state, batch)
    rewards = multihost.to_global(
      np.float32(rewards), sharding.batch_sharding(program.mesh)
    )
    batch = learner.assign_advantages(batch, rewards, samples.finish)
    kept = jax.device_get(batch)
    new, _, metrics = learner.update(state, batch)
  samples = jax.device_get(samples)
  fields = unpacked.by_response(kept, samples.lengths, samples.logps.shape[1])
  # Of the first minibatch only one micro-batch has old log-probs.
  old = fields["old_logps"]
  return SimpleNamespace(
    program=program,
    params=params,
    prompts=prompts,
    samples=samples,
    packing=packing,
    fields=fields,
    old_logps=np.where(old != 0, old, samples.logps),
    state=state,
    new=new,
    metrics=scored | metrics,
  )


REWARDS = np.where(np.arange(32) % 2, 1.0, -1.0)


@pytest.fixture(scope="module")
def one():
  """An iteration on one device."""
  config = shrink(tiny_cpu.get_config("debug"))
  config.model.num_layers = 1
  return iterate(build(config), REWARDS)


FSDP_CONTEXT = {"data": 1, "fsdp": 2, "context": 2, "expert": 2}
FSDP_TENSOR = {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}
CONTEXT_TENSOR = {"data": 1, "context": 2, "expert": 2, "tensor": 2}
DATA_CONTEXT = {"data": 2, "context": 2, "expert": 2}
OTHERWISE = {"expert": 4, "tensor": 1}
MESHES = {
  "2 tensor": (2, {"data": 1, "tensor": 2}, {}),
  "4 fsdp, decoding by experts": (4, {"data": 1, "fsdp": 4}, {"expert": 4}),
  "8 data": (8, {"data": 8}, {}),
  "8 fsdp, context, expert": (8, FSDP_CONTEXT, {}),
  # Two devices have the same key head, here and below.
  "4 context": (4, {"data": 1, "context": 4}, {}),
  "8 context, expert, tensor, decoding": (8, CONTEXT_TENSOR, OTHERWISE),
  "8 data, context, expert, decoding otherwise": (8, DATA_CONTEXT, OTHERWISE),
  "8 fsdp, expert, tensor, decoding otherwise": (8, FSDP_TENSOR, OTHERWISE),
}
# The others take a quarter of a minute each. Other files test fsdp.
DEFAULT = "8 data, context, expert, decoding otherwise"


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
  config.model.num_layers = 1  # families have more
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


# Without training a DeltaNet's outputs are so small that their norm multiplies
# rounding errors by hundreds.
DELTA_EPS = 1e-2
FAMILIES = (
  *("tiny-glm-4.5", "tiny-minimax-m2", "tiny-gpt-oss"),
  *("tiny-qwen3.5", "tiny-moonlight"),
)


def test_good_responses_become_likelier_and_the_state_is_donated(one):
  samples = one.samples
  batch = train_batch.unpacked(one.prompts, samples.tokens, samples.lengths)
  logps = jax.jit(
    lambda params: (
      train_batch.response_logps(params, one.program.cfg, batch).logps
    )
  )
  gain = logps(one.new.params) - logps(one.params)
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
  one.program.learner.make_train_batch(longer, one.samples, one.packing)
  with pytest.raises(RuntimeError, match="make_train_batch has 2 programs"):
    one.program.check_compiled_once()


@functools.cache
def one_of_family(variant, replay="r3", dtype="float32"):
  """An iteration of RSPO, with truncated sampling."""
  config = shrink(tiny_cpu.get_config("debug"))
  config.sampler.update({"top_p": 0.8, "kept_ids": 32})
  config.model.variant, config.model.dtype = variant, dtype
  if variant == "tiny-qwen3.5":
    config.model.norm_eps = DELTA_EPS
  config.objective.update({"name": "rspo", "replay": replay})
  config.objective.score_centering = 4
  return config, iterate(build(config), REWARDS)


DEFAULT_FAMILY = "tiny-glm-4.5", "r3", "float32"
OTHER_FAMILIES = {
  *itertools.product(FAMILIES, ("r2", "r3", "none"), ("float32",)),
  *itertools.product(FAMILIES, ("r3",), ("bfloat16",)),
} - {DEFAULT_FAMILY}


@pytest.mark.parametrize(
  ("variant", "replay", "dtype"),
  [DEFAULT_FAMILY,
   *(pytest.param(*x, marks=pytest.mark.slow) for x in sorted(OTHER_FAMILIES))],
)  # fmt: skip
def test_an_iteration_of_a_family(variant, replay, dtype):
  """Its layers without experts have no routes and no metrics."""
  _, one = one_of_family(variant, replay, dtype)
  cfg, metrics = one.program.cfg, one.metrics
  layers = cfg.num_moe_layers
  assert layers == 2
  value = lambda name: metrics[name].value()
  assert value("ratio/first_minibatch_std") == 0
  assert value("ratio/moved") > 0
  assert 0 < value("mismatch/centered") < (1e-3 if dtype == "float32" else 1)
  far = 1e-5 if dtype == "float32" else 0.1
  assert np.abs(one.old_logps - one.samples.logps).max() < far
  assert 1 < value("moe/load_max") < cfg.num_experts
  for name in ("layer_load_max", "layer_router_entropy"):
    assert value(f"moe/{name}").shape == (layers,)
  assert value("moe/dropped") == 0
  assert 0 < value("moe/router_entropy") < np.log(cfg.num_experts)
  assert 0 < value("moe/router_shift_ratio") < 1
  if replay == "none":
    assert value("moe/layer_flip_rate").shape == (layers,)
  if replay == "r3":
    assert one.samples.experts.shape[1] == layers
  new, old = (tree["layers"]["moe"] for tree in (one.new.params, one.params))
  for name, x in new.items():
    assert np.array_equal(x, old[name]) == (name == "choice_bias"), name


@pytest.mark.slow
@pytest.mark.parametrize(
  ("devices", "mesh"),
  [(8, {"data": 2, "fsdp": 2, "context": 2}),
   (8, {"data": 1, "context": 2, "expert": 2, "tensor": 2}),
   (8, {"data": 1, "fsdp": 2, "expert": 4})],
  ids=str,
)  # fmt: skip
@pytest.mark.parametrize("variant", FAMILIES)
def test_many_devices_do_as_one_of_a_family(variant, devices, mesh):
  config, one = one_of_family(variant)
  many = iterate(build(config, devices, **mesh), REWARDS)
  np.testing.assert_array_equal(one.samples.tokens, many.samples.tokens)
  np.testing.assert_array_equal(one.samples.experts, many.samples.experts)
  np.testing.assert_array_equal(one.samples.kept_ids, many.samples.kept_ids)
  np.testing.assert_array_equal(one.samples.head_ids, many.samples.head_ids)
  close = np.testing.assert_allclose
  close(one.samples.logps, many.samples.logps, atol=1e-5)
  close(one.old_logps, many.old_logps, atol=1e-5)
  moments = one.new.opt_state[1][0].mu, many.new.opt_state[1][0].mu
  jax.tree.map(functools.partial(close, atol=5e-7), *moments)


@pytest.mark.slow  # two more programs
def test_critic_reference_and_replay_on_many_devices_do_as_one(config):
  config.objective.update(
    {"name": "ppo", "kl_coef": 0.1, "mismatch": "tis_token", "replay": "r3"}
  )

  rewards = np.random.default_rng(0).standard_normal(32)
  one = iterate(build(config), rewards)
  config.sampler_mesh.update({"expert": 4, "tensor": 1})
  mesh = {"data": 1, "context": 2, "expert": 2, "tensor": 2}
  many = iterate(build(config, 8, **mesh), rewards)
  same = functools.partial(np.testing.assert_allclose, atol=1e-5)
  for name in ("advantages", "returns", "reference_logps"):
    same(one.fields[name], many.fields[name])
  jax.tree.map(same, one.new.params, many.new.params)
  jax.tree.map(same, one.new.critic.params, many.new.critic.params)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_without_updates_all_stays(platform, monkeypatch):
  """Also if the gradient of that pass is no number."""
  here = SimpleNamespace(platform=lambda: platform)
  monkeypatch.setattr(train_step, "sharding", here)
  old, nan = np.float32([1, 2]), np.float32([np.nan, 4])
  step = lambda yes, new: train_step._run_in_place(yes, lambda: new, old)
  add = lambda yes, new: train_step._add_if(yes, old, lambda: new)
  for function in (step, add):
    np.testing.assert_array_equal(jax.jit(function)(False, nan), old)
  np.testing.assert_array_equal(jax.jit(step)(True, nan), nan)
  np.testing.assert_array_equal(jax.jit(add)(True, nan), old + nan)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_frozen_bias_stays_in_float32(config, rank):
  """In the base below adapters, or in a reference policy."""
  config.model.variant, config.model.dtype = "tiny-glm-4.5", "bfloat16"
  config.model.lora.rank, config.objective.kl_coef = rank, 0.1
  program = build(config)
  with jax.set_mesh(program.mesh):
    params = random_biases(program.init_params(jax.random.key(0)))
    bias = np.array(params["layers"]["moe"]["choice_bias"])
    if rank:
      params = abstract.with_adapters(params, cfg=program.cfg, seed=0)
    state = program.learner.init_state(params)
  low = state.base if rank else state.reference
  assert low["layers"]["moe"]["down"].dtype == "bfloat16"
  np.testing.assert_array_equal(low["layers"]["moe"]["choice_bias"], bias)
