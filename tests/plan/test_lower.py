"""What a plan lowers: the functions that a run calls, as it calls them."""

import dataclasses

import continuous_sampler
import jax
import pytest

from gspo_jax.plan import lower
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous import paged_decode
from gspo_jax.sampler.samples import Prompts


def built(config, **sizes):
  config.data.prompts = config.learner.micro_batch_size = 8
  config.model.num_layers = 1
  return build_program(
    parse(config), sharding.make_mesh(jax.devices()[:4], **sizes)
  )


def with_continuous_batching(config):
  sizes = {"slots": 8, "page_size": 8, "prefill_chunk": 16}
  config.continuous_batching.update(sizes)
  return built(config, fsdp=2, expert=2)


def test_a_run_without_pages(debug_config):
  made = built(debug_config, data=4)
  lowered = lower.functions(parse(debug_config), made)
  assert list(lowered) == ["generate", "update", "old_logps"]
  # One program, so that both round alike.
  assert lowered["old_logps"] is lowered["update"]
  assert set(lowered) < set(lower.FUNCTIONS)


@pytest.mark.parametrize("slots", [0, 8])
def test_a_sampler_with_devices_of_its_own(debug_config, slots):
  """It is lowered for them, with weights in the dtype of the model."""
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  debug_config.model.dtype = "bfloat16"
  debug_config.sampler_mesh.devices = 4
  debug_config.continuous_batching.update(
    {"slots": slots, "page_size": 8, "prefill_chunk": 16}
  )
  config = parse(debug_config)
  devices, own = sharding.split_devices(4)
  made = build_program(
    config, sharding.make_mesh(devices, fsdp=-1), sampler_devices=own
  )
  lowered = lower.functions(config, made)
  name = "decode_params" if slots else "generate"
  weights, *_ = lowered[name].in_avals[0]
  assert {x.dtype.name for x in jax.tree.leaves(weights)} == {"bfloat16"}
  devices_of = lambda name: {
    device
    for x in jax.tree.leaves(lowered[name].out_info)
    for device in x.sharding.device_set
  }
  assert devices_of(name) == {*own}
  assert devices_of("update") == {*devices}


def test_a_run_with_pages(debug_config):
  made = with_continuous_batching(debug_config)
  lowered = lower.functions(parse(debug_config), made)
  names = ["decode_params", "prefill", "generate", "update", "old_logps"]
  assert list(lowered) == names
  # All shards' longest prompts; and every slot's state goes in and comes out.
  tokens = lowered["prefill"].in_avals[0][2]
  sampler = made.sampler.generate
  assert made.sampler.generate.mesh == sampler.jitted.decode.mesh
  longest = sampler.batching.buckets(debug_config.data.max_prompt_length)[-1]
  assert tokens.shape == (
    sampler.prefill_batch(longest) * sampler.shards,
    longest,
  )
  (_, state, samples, plan, *_), _ = lowered["generate"].in_avals
  out_state, out_samples, results = lowered["generate"].out_info
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(state) == shapes(out_state)
  assert shapes(samples) == shapes(out_samples)
  shapes = {x.shape for x in jax.tree.leaves(results)}
  assert shapes == {(8,), ()}  # of slots, and a sum
  assert {x.shape[0] for x in jax.tree.leaves(plan)} == {8}


def test_the_segment_plan_is_that_of_a_run(debug_config, monkeypatch):
  """Of the shapes and types that `decode` is called with."""
  made, given = with_continuous_batching(debug_config), []
  functions = made.sampler.generate.jitted
  lowered = lower.functions(parse(debug_config), made)
  planned = lowered["generate"].in_avals[0][3]

  def decode(params, state, samples, plan, *rest):
    given.append(plan)
    return functions.decode(params, state, samples, plan, *rest)

  spied = continuous_sampler.spied(made.sampler.generate, decode=decode)
  P, S = debug_config.data.prompts, debug_config.data.max_prompt_length
  ones = jax.numpy.ones((P, S), jax.numpy.int32)
  prompts = Prompts(ones, ones.sum(1))
  spied(made.init_params(jax.random.key(0)), prompts, jax.random.key(1))
  shapes = lambda x: [(x.shape, x.dtype) for x in jax.tree.leaves(x)]
  for field in dataclasses.fields(paged_decode.SegmentPlan):
    called = getattr(given[0], field.name)
    assert shapes(called) == shapes(getattr(planned, field.name)), field.name


def test_a_run_with_partial_rollouts(debug_config):
  """All responses in flight decode; a prefill has a prompt and a response."""
  debug_config.rollout.update({"max_tokens_per_iteration": 4})
  made = with_continuous_batching(debug_config)
  lowered = lower.functions(parse(debug_config), made)
  tokens = lowered["prefill"].in_avals[0][2]
  sizes = made.sampler.generate.sizes
  room = sizes.max_prompt_length + sizes.max_new_tokens
  chunk = debug_config.continuous_batching.prefill_chunk
  assert room - 1 <= tokens.shape[1] < room + chunk
  group = debug_config.rollout.group_size
  samples = lowered["generate"].out_info[1]
  assert samples.lengths.shape[0] == (debug_config.data.prompts + 8) * group
  learnt = lowered["update"].in_avals[0][1].rows.tokens
  assert learnt.size // learnt.shape[-1] == debug_config.data.prompts * group


def test_an_update_has_rows_for_all_sequences_of_episodes(debug_config):
  debug_config.rollout.update({"environment": "guessing", "max_sequences": 3})
  debug_config.reward.names = ()
  made = with_continuous_batching(debug_config)
  lowered = lower.functions(parse(debug_config), made)
  responses = debug_config.data.prompts * debug_config.rollout.group_size
  learnt = lowered["update"].in_avals[0][1].rows.tokens
  assert learnt.size // learnt.shape[-1] == 3 * responses
