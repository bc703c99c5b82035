"""The program of a config: what it refuses, and where its arrays lie."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.logprobs import token_logprobs
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import Prompts


@pytest.mark.parametrize(
  ("sampler_mesh", "words"),
  [
    ({"expert": 3}, "expert=3 times tensor=1 does not divide the 8 devices"),
    ({"tensor": 8}, "on sampler_mesh: vocab=258 of embed .* by mesh.tensor=8"),
    ({"expert": -1}, "sampler_mesh.expert=-1: expected 0 or more"),
  ],
)
def test_a_sampler_mesh_that_does_not_fit(debug_config, sampler_mesh, words):
  debug_config.sampler_mesh.update(sampler_mesh)
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  debug_config.cold_start.batch = 16
  with pytest.raises(UserError, match=words):
    build_program(parse(debug_config), sharding.make_mesh(data=8))


def test_prompts_must_lie_evenly_where_answers_are_drawn(debug_config):
  mesh = sharding.make_mesh(tensor=8)
  debug_config.model.variant = "qwen3-8b"  # eight heads; no array is made
  debug_config.sampler_mesh.tensor = 1
  debug_config.data.prompts = 12
  with pytest.raises(UserError, match=r"rows = 8 \(sampler_mesh\); .*8 and 16"):
    build_program(parse(debug_config), mesh)


def test_generate_splits_caches_weights_and_logits(debug_config):
  """Read from the compiled program: what a device holds while it decodes."""
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  debug_config.sampler.max_new_tokens = 23
  debug_config.model.dtype = "float32"
  run = build_program(parse(debug_config), sharding.make_mesh(fsdp=2, expert=4))
  shape = jax.ShapeDtypeStruct
  prompts = Prompts(shape((8, 8), jnp.int32), shape((8,), jnp.int32))
  key = jax.eval_shape(lambda: jax.random.key(0))
  text = run.sampler.generate.lower(
    run.learner.abstract.params, prompts, key
  ).compile()
  loops = re.findall(r"= \((.*?)\) while\(", text.as_text())
  (decoding,) = [loop for loop in loops if "f32[4,4,22,16]" in loop]
  assert "f32[32,4,22,16]" not in decoding  # 32 rows, over eight devices
  assert "f32[2,64,128]" in decoding  # two experts of eight
  assert "f32[64,65]" in decoding  # a quarter of the vocabulary of 258
  assert "258]" not in decoding


def iteration(run, state, step):
  """What an iteration makes of made-up prompts and rewards."""
  rng = np.random.default_rng(step)
  tokens = rng.integers(0, 256, (4, 8)).astype(np.int32)
  asked = Prompts(tokens, np.full(4, 8, np.int32))
  samples = run.sampler.generate(state.params, asked, jax.random.key(step))
  rollout, key = (
    run.learner.make_train_batch(asked, samples),
    jax.random.key(step),
  )
  assert run.learner.needs_old_logprobs
  # Copies: a NumPy view of a buffer would forbid its donation.
  before = jax.tree.map(np.array, state)
  state, rollout, scored = run.learner.compute_old_logprobs(state, rollout, key)
  jax.tree.map(np.testing.assert_array_equal, before, state)
  rollout = run.learner.add_reference_and_values(state, rollout)
  rewards = rng.standard_normal(16).astype(np.float32)
  rollout = run.learner.assign_advantages(rollout, rewards, samples.finish)
  kept = jax.device_get(rollout)
  state, _, learnt = run.learner.update(state, rollout, key)
  metrics = jax.tree.map(jnp.add, scored, learnt)
  # Both at the sampler's temperature, else they would be far apart.
  assert metrics["mismatch/token_abs_mean"].value() < 1e-5
  assert metrics["mismatch/sequence_abs_mean"].count == len(rewards)
  return kept, state, metrics


@pytest.mark.parametrize("every", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_reference_stays_or_follows(debug_config, every):
  debug_config.objective.update({"kl_coef": 0.1, "reference_every": every})
  debug_config.sampler.temperature = 0.7
  run = build_program(
    parse(debug_config), sharding.make_mesh(jax.devices()[:1])
  )
  state = run.learner.init_state(run.init_params(jax.random.key(0)))
  before = policies = [jax.device_get(state.params)]
  for step in (1, 2, 3):
    kept, state, metrics = iteration(run, state, step)
    policies = [*policies, jax.device_get(state.params)]
    R = kept.response_mask.shape[1]
    # The policy of before the first iteration, or of after the second.
    reference = policies[2] if every and step == 3 else before[0]
    expected = token_logprobs(
      reference,
      run.cfg,
      kept.tokens,
      kept.positions,
      kept.mask,
      response_length=R,
      temperature=0.7,
    ).logps
    mask = kept.response_mask
    np.testing.assert_allclose(
      kept.reference_logps[mask], expected[mask], atol=1e-5
    )
    assert metrics["kl/reference"].value() > 0
  follows = policies[2] if every else before[0]
  jax.tree.map(np.testing.assert_array_equal, state.reference, follows)


def test_a_critic_learns_by_its_own_rate(debug_config):
  debug_config.objective.name = "ppo"
  debug_config.critic.learning_rate = 1e-9
  run = build_program(
    parse(debug_config), sharding.make_mesh(jax.devices()[:1])
  )
  state = run.learner.init_state(run.init_params(jax.random.key(0)))
  critic = jax.device_get(state.critic.params)
  policy = jax.device_get(state.params)
  kept, state, metrics = iteration(run, state, 1)
  assert kept.advantages.shape == kept.old_logps.shape
  change = lambda a, b: max(
    float(np.abs(x - y).max())
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )
  for name in ("grad/norm", "critic/grad_norm"):
    assert metrics[name].value() > 0
  assert 0 < change(critic, state.critic.params) < 1e-7
  assert change(policy, state.params) > 1e-5


def test_what_no_update_reads_is_not_kept(debug_config):
  def scored(**objective):
    debug_config.objective.update(objective)
    run = build_program(
      parse(debug_config), sharding.make_mesh(jax.devices()[:1])
    )
    shape = jax.ShapeDtypeStruct
    prompts = Prompts(shape((4, 8), jnp.int32), shape((4,), jnp.int32))
    key = jax.eval_shape(lambda: jax.random.key(0))
    samples = run.sampler.generate.lower(
      run.learner.abstract.params, prompts, key
    ).out_info
    recorded = debug_config.objective.replay == "r3"
    assert (samples.experts is not None) == recorded
    rollout = run.learner.make_train_batch.lower(prompts, samples).out_info
    apply_updates = shape((), jnp.bool_)
    lowered = run.learner.step.lower(
      run.learner.abstract, rollout, key, apply_updates
    )
    metrics = lowered.out_info[2]
    fields = dataclasses.asdict(rollout)
    return {k for k, x in fields.items() if x is not None}, set(metrics)

  routing = {"experts", "router_logps"}
  kept, measured = scored()
  assert routing <= kept
  assert "moe/layer_load_max" in measured
  debug_config.log.instruments = False
  kept, measured = scored()
  assert not routing & kept
  assert "moe/layer_load_max" not in measured
  assert scored(replay="r2")[0] & routing == {"experts"}
  assert scored(replay="r3")[0] & routing == {"experts"}
  assert routing <= scored(replay="none", name="rspo")[0]


def test_an_evaluation_draws_by_chance_and_once_greedily(debug_config):
  """Read from the programs: only the first needs random numbers."""
  debug_config.objective.replay = "r3"
  debug_config.eval.samples = 3
  run = build_program(
    parse(debug_config), sharding.make_mesh(jax.devices()[:1])
  )
  shape = jax.ShapeDtypeStruct
  prompts = Prompts(shape((4, 8), jnp.int32), shape((4,), jnp.int32))
  key = jax.eval_shape(lambda: jax.random.key(0))
  for generate, rows, random in (
    (run.sampler.generate_eval, 12, True),
    (run.sampler.generate_greedy, 4, False),
  ):
    made = generate.lower(run.learner.abstract.params, prompts, key)
    assert made.out_info.lengths.shape == (rows,)
    assert made.out_info.experts is None  # no update reads them
    assert ("threefry" in made.as_text()) == random


def test_a_function_that_compiles_again_is_told(debug_config):
  """Of a refill's prefills as many are allowed as it lists."""
  debug_config.continuous_batching.update(
    {"slots": 4, "page_size": 4, "prefill_chunk": 8}
  )
  found = build_program(
    parse(debug_config), sharding.make_mesh(jax.devices()[:1])
  )
  found.check_compiled_once()
  for name, most in found.generate.compilations().items():
    jitted = types.SimpleNamespace(_cache_size=lambda most=most: most + 1)
    functions = dataclasses.replace(
      found.generate.jitted, **{name: sharding.MeshJit(jitted, found.mesh)}
    )
    again = dataclasses.replace(found.generate, jitted=functions)
    with pytest.raises(RuntimeError, match=rf"generate\.{name} was compiled"):
      dataclasses.replace(found, generate=again).check_compiled_once()
