"""What a config gives each wing: losses, samplers, advantages, state."""

import dataclasses
import inspect

import jax
import pytest

from gspo_jax import losses
from gspo_jax.learner.objective import METHODS
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError


def test_every_public_policy_loss_has_a_name():
  public = {n for n in losses.__all__ if n.endswith("_loss")}
  assert {f"{n}_loss" for n in METHODS} == public - {"value_loss"}


@pytest.mark.parametrize("name", METHODS)
def test_a_name_is_bound_to_its_loss(debug_config, name):
  """GSPO-token is GSPO where the tokens of a response share an advantage."""
  debug_config.objective.name = name
  # RSPO is GMPO with the router's shift, which any loss can take.
  loss = losses.gmpo_loss if name == "rspo" else getattr(losses, f"{name}_loss")
  assert settings.objective(parse(debug_config)).method.func is loss


@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_of_a_method_are_its_defaults_or_the_configs(
  debug_config, name
):
  debug_config.objective.name = name
  loss = getattr(losses, f"{name}_loss")
  parameters = inspect.signature(loss).parameters
  numbers = parse(debug_config).objective.method_settings()
  assert numbers == {k: parameters[k].default for k in numbers}
  for key in numbers:
    debug_config.objective[key] = 0.125
  numbers = parse(debug_config).objective.method_settings()
  assert set(numbers.values()) == {0.125}


def test_the_router_shift_is_on_in_rspo_and_where_it_is_set(debug_config):
  floor = lambda: settings.objective(parse(debug_config)).shift_floor
  assert floor() is None
  debug_config.objective.router_shift_floor = 0.7
  assert floor() == 0.7
  debug_config.objective.name = "rspo"
  debug_config.objective.router_shift_floor = -1
  signature = inspect.signature(losses.rspo_loss)
  assert floor() == signature.parameters["floor"].default


def test_k1_goes_into_the_reward_and_not_into_the_loss(debug_config):
  debug_config.objective.kl_coef = 0.1
  in_loss = lambda: settings.objective(parse(debug_config)).kl_coef
  in_reward = lambda: settings.credit(parse(debug_config)).kl_coef
  assert (in_loss(), in_reward()) == (0.1, 0.0)
  debug_config.objective.kl_estimator = "k1"
  assert (in_loss(), in_reward()) == (0.0, 0.1)


@pytest.mark.parametrize(
  ("minibatches", "objective", "needed"),
  [
    (1, {}, False),
    (2, {}, True),
    (1, {"kl_coef": 0.1, "kl_estimator": "k3"}, False),
    (1, {"kl_coef": 0.1, "kl_estimator": "k1"}, True),
    (1, {"kl_coef": 0.0, "kl_estimator": "k1"}, False),
    (2, {"old_logps": "sampler"}, True),  # for the routing
    (2, {"old_logps": "sampler", "replay": "r2"}, True),
    (2, {"old_logps": "sampler", "kl_estimator": "k1", "kl_coef": 0.1}, True),
    (1, {"old_logps": "sampler", "kl_estimator": "k1", "kl_coef": 0.1}, False),
  ],
)
def test_old_logprobs_are_computed_where_an_update_lacks_them(
  debug_config, minibatches, objective, needed
):
  debug_config.learner.minibatches = minibatches
  debug_config.objective.update(objective)
  cfg = settings.model_config(parse(debug_config).model)
  assert settings.needs_old_logprobs(parse(debug_config), cfg) == needed
  in_reward = needed and minibatches == 1
  learners = settings.learners(parse(debug_config), cfg)
  assert learners.policy.old_logps_of_every_minibatch == in_reward
  debug_config.log.instruments = False  # then no routing is read
  dense = dataclasses.replace(cfg, num_experts=0, experts_per_token=0)
  trusted = objective.get("old_logps") == "sampler"
  assert settings.needs_old_logprobs(parse(debug_config), dense) == (
    needed and not trusted
  )


def test_responses_are_sampled_as_the_config_says(debug_config):
  sampler = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
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
  # r2 replays the old policy's experts: nothing is recorded for it.
  for replay in ("none", "r2", "r3"):
    debug_config.objective.replay = replay
    assert found().record_routing == (replay == "r3")


def test_another_num_steps_moves_a_decay_that_is_resumed(debug_config):
  """Of 4 updates an iteration, after 5 iterations of 10, which are now 20."""
  debug_config.num_steps, debug_config.learner.minibatches = 20, 4
  debug_config.optim.update({"learning_rate": 1.0, "warmup_steps": 0})
  changed = lambda end: settings.changed_decay(
    parse(debug_config), {"num_steps": end}, 5
  )
  assert changed(10) is None  # it is constant
  debug_config.optim.decay = "linear"
  assert changed(20) is None
  assert changed(10) == (
    "optim.decay='linear' now ends at num_steps=20, not 10: the learning rate "
    "goes on at 0.75, not 0.5"
  )
  constant = {"num_steps": 10, "optim": {"decay": "constant"}}
  assert settings.changed_decay(parse(debug_config), constant, 5) == (
    "the learning rate goes on at 0.75, not 1"
  )


def test_credit_has_the_numbers_of_the_config(debug_config):
  debug_config.objective.update({"name": "ppo", "zero_truncated": True})
  debug_config.critic.update({"discount": 0.5, "trace_decay": 0.25})
  credit = settings.credit(parse(debug_config))
  assert credit.zero_truncated
  assert (credit.discount, credit.trace_decay) == (0.5, 0.25)


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
