"""What a config gives each wing: losses, samplers, advantages, state."""

import dataclasses

import jax
import pytest

from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError


@pytest.mark.parametrize(
  ("minibatches", "objective", "needed"),
  [
    (1, {}, False),
    (2, {}, True),
    (1, {"kl_coef": 0.1, "kl_estimator": "k3"}, False),
    (1, {"kl_coef": 0.1, "kl_estimator": "k1"}, True),
    (2, {"old_logps": "sampler"}, True),  # for the routing
    (2, {"old_logps": "sampler", "replay": "r2"}, True),
    (1, {"old_logps": "sampler", "kl_estimator": "k1", "kl_coef": 0.1}, False),
  ],
)
def test_old_logps_are_computed_where_an_update_lacks_them(
  debug_config, minibatches, objective, needed
):
  debug_config.learner.minibatches = minibatches
  debug_config.objective.update(objective)
  cfg = settings.model_config(parse(debug_config).model)
  assert settings.needs_old_logps(parse(debug_config), cfg) == needed
  in_reward = needed and minibatches == 1
  learner = settings.policy_learner(parse(debug_config), cfg)
  assert learner.recompute_first_minibatch == in_reward
  debug_config.log.instruments = False  # then no routing is read
  dense = dataclasses.replace(cfg, num_experts=0, experts_per_token=0)
  trusted = objective.get("old_logps") == "sampler"
  assert settings.needs_old_logps(parse(debug_config), dense) == (
    needed and not trusted
  )


@pytest.mark.parametrize(
  ("changes", "old_logps"),
  [({}, "sampler"), ({"rollout.max_staleness": 1}, "recompute"),
   ({"rollout.max_tokens_per_iteration": 4}, "recompute"),
   ({"model.exact": False}, "recompute")],
)  # fmt: skip
def test_exact_log_probs_of_the_newest_weights_are_the_old_ones(
  debug_config, changes, old_logps
):
  """Then no pass compares the routers, either."""
  debug_config.model.exact = True
  debug_config.continuous_batching.slots = 4
  debug_config.update_from_flattened_dict(changes)
  config = parse(debug_config).with_exact_logps()
  assert config.objective.old_logps == old_logps
  cfg = settings.model_config(config.model)
  recomputed = old_logps == "recompute"
  assert settings.needs_old_logps(config, cfg) == recomputed
  assert settings.compares_routers(config) == recomputed


def test_responses_are_sampled_as_the_config_says(debug_config):
  sampler = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "kept_ids": 7}
  debug_config.sampler.update(sampler)
  config = parse(debug_config)
  tokenizer = settings.load_tokenizer(
    config, settings.model_config(config.model)
  )
  found = lambda: settings.sampler_config(parse(debug_config), tokenizer)
  for key, value in debug_config.sampler.items():
    assert getattr(found(), key) == (value or None if key == "stop" else value)
  debug_config.sampler.stop = ("</a>",)
  assert found().stop.strings == ("</a>",)
  assert found().stop_ids == tokenizer.stop_ids


def test_prompts_are_made_as_the_config_says(debug_config):
  keys = {"instruction": "Q: {problem}", "system_prompt": "Add:"}
  keys |= {"max_prompt_length": 9, "too_long": "drop"}
  debug_config.data.update(keys)
  made = build_program(
    parse(debug_config), sharding.make_mesh(jax.devices()[:1]), training=False
  ).prompt_config
  found = made.instruction, made.system, made.width, made.too_long
  assert found == (*keys.values(),)


def test_another_num_steps_moves_a_decay_that_is_resumed(debug_config):
  """Of 4 updates an iteration, after 5 iterations of 10, which are now 20."""
  debug_config.num_steps, debug_config.learner.minibatches = 20, 4
  debug_config.optim.update({"learning_rate": 1.0, "warmup_steps": 0})
  changed = lambda end: settings.changed_decay(
    parse(debug_config), {"num_steps": end}, 5
  )
  assert changed(10) == ""  # it is constant
  debug_config.optim.decay = "linear"
  assert changed(20) == ""
  assert changed(10) == (
    "optim.decay='linear' now ends at num_steps=20, not 10: the learning rate "
    "goes on at 0.75, not 0.5"
  )
  constant = {"num_steps": 10, "optim": {"decay": "constant"}}
  assert settings.changed_decay(parse(debug_config), constant, 5) == (
    "the learning rate goes on at 0.75, not 1"
  )


def test_a_state_holds_only_weights_that_an_update_reads(debug_config):
  def abstract():
    mesh = sharding.make_mesh(jax.devices()[:1])
    return build_program(parse(debug_config), mesh).learner.abstract

  assert abstract().reference is None
  assert abstract().critic is None
  debug_config.objective.kl_coef = 0.1
  debug_config.model.dtype = "bfloat16"
  for estimator in ("k1", "k2", "k3"):
    debug_config.objective.kl_estimator = estimator
    reference = abstract().reference
    assert {x.dtype.name for x in jax.tree.leaves(reference)} == {"bfloat16"}
  debug_config.objective.name = "ppo"
  assert abstract().critic is not None


def test_a_config_file_may_set_other_sizes_of_the_model(debug_config):
  debug_config.model.num_experts = debug_config.model.experts_per_token = 0
  cfg = settings.model_config(parse(debug_config).model)
  assert (cfg.num_experts, cfg.experts_per_token) == (0, 0)
  debug_config.model.num_expert = 4
  with pytest.raises(UserError, match="did you mean 'num_experts'"):
    settings.model_config(parse(debug_config).model)
