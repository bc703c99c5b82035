"""Settings: every name has its loss, and what cannot be is refused."""

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


def build(config):
  return build_program(parse(config), sharding.make_mesh(jax.devices()[:1]))


def test_every_public_policy_loss_has_a_name():
  public = {n for n in losses.__all__ if n.endswith("_loss")}
  assert {f"{n}_loss" for n in METHODS} == public - {"value_loss"}


@pytest.mark.parametrize("name", METHODS)
def test_a_name_is_that_of_its_own_loss(debug_config, name):
  """GSPO-token is GSPO where all tokens of an answer have one advantage."""
  debug_config.objective.name = name
  # RSPO is GMPO with the router's shift, which any loss can take.
  loss = losses.gmpo_loss if name == "rspo" else getattr(losses, f"{name}_loss")
  assert settings.objective(parse(debug_config)).method.func is loss


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_own_numbers(debug_config, name):
  debug_config.objective.name = name
  loss = getattr(losses, f"{name}_loss")
  own = inspect.signature(loss).parameters
  found = parse(debug_config).objective.method_settings()
  assert found == {k: own[k].default for k in found}
  for key in found:
    debug_config.objective[key] = 0.125
  assert set(parse(debug_config).objective.method_settings().values()) == {
    0.125
  }


def test_a_number_of_another_method_is_refused(debug_config):
  debug_config.objective.name = "sapo"
  debug_config.objective.clip_high = 0.2
  with pytest.raises(UserError, match=r"clip_high=0.2.* only tau_positive"):
    parse(debug_config).objective.method_settings()


def test_rspo_weighs_by_the_router_and_others_when_asked(debug_config):
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
def test_it_is_scored_where_an_update_cannot_know(
  debug_config, minibatches, objective, needed
):
  debug_config.learner.minibatches = minibatches
  debug_config.objective.update(objective)
  cfg = settings.model_config(parse(debug_config))
  assert settings.needs_old_logprobs(parse(debug_config), cfg) == needed
  in_reward = needed and minibatches == 1
  learner, *_ = settings.learners(parse(debug_config), cfg)
  assert learner.score_every_minibatch == in_reward
  debug_config.log.instruments = False  # then no routing is read
  dense = dataclasses.replace(cfg, num_experts=0, experts_per_token=0)
  trusted = objective.get("old_logps") == "sampler"
  assert settings.needs_old_logprobs(parse(debug_config), dense) == (
    needed and not trusted
  )


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_program_says_whether_it_scores(debug_config, minibatches):
  debug_config.learner.minibatches = minibatches
  assert build(debug_config).scores == (minibatches == 2)


def test_answers_are_drawn_as_the_config_says(debug_config):
  sampler = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_new_tokens": 2}
  debug_config.sampler.update(sampler)
  texts = settings.load_tokenizer(parse(debug_config))
  found = lambda: settings.sampler_config(parse(debug_config), texts)
  for key, value in debug_config.sampler.items():
    assert getattr(found(), key) == value, key
  assert found().stop_ids == texts.stop_ids
  # r2 replays the old policy's experts: nothing is recorded for it.
  for replay in ("none", "r2", "r3"):
    debug_config.objective.replay = replay
    assert found().record_routing == (replay == "r3")


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"name": "gsop"}, "objective.name='gsop': did you mean 'gspo'"),
    ({"kl_estimator": "k4"}, "objective.kl_estimator='k4': choose one of k1"),
    ({"replay": "r1"}, "objective.replay='r1': choose one of none, r2"),
    ({"mismatch": "tis"}, "objective.mismatch='tis': choose .* tis_token"),
    (
      {"mismatch": "tis_token", "old_logps": "sampler"},
      "objective.mismatch='tis_token': expected 'none' with",
    ),
    ({"reference_every": 5}, "reference_every=5: expected 0 with .*kl_coef=0"),
    ({"dual_clip": 0.5}, "objective.dual_clip=0.5: expected 0 for none"),
    ({"name": "gmpo", "dual_clip": 3.0}, "dual_clip=3.0: expected 0 with"),
    ({"kl_coef": -1.0}, "objective.kl_coef=-1.0: expected 0 or more"),
    ({"router_shift_floor": 1.5}, "router_shift_floor=1.5: expected 0 for"),
    ({"mismatch_cap": 0.5}, "mismatch_cap=0.5: expected 1 or more"),
    ({"mismatch_floor": 1.0}, "mismatch_floor=1.0: expected 0 or more, under"),
    ({"cap": 0.0}, "objective.cap=0.0: expected more than 0"),
    (
      {"name": "rspo", "router_shift_floor": 0.0},
      "router_shift_floor=0.0: expected more than 0 with .*'rspo'",
    ),
  ],
)
def test_what_makes_no_sense_is_told_at_the_start(debug_config, changes, words):
  debug_config.objective.update(changes)
  with pytest.raises(UserError, match=words):
    build(debug_config)


def test_a_critic_has_no_use_for_refill(debug_config):
  debug_config.objective.name = "ppo"
  debug_config.rollout.dynamic_sampling_rounds = 2
  with pytest.raises(UserError, match="refill_rounds=2: expected 1 with"):
    build(debug_config)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (
      {
        "rollout.max_tokens_per_iteration": 4,
        "rollout.extra_prompts_in_flight": 2,
      },
      "budget=4: .* continuous_batching.slots=0",
    ),
    (
      {"rollout.max_tokens_per_iteration": 4, "continuous_batching.slots": 4},
      "budget=4 and .*spare=0: .*both",
    ),
    (
      {"rollout.extra_prompts_in_flight": 4},
      "budget=0 and rollout.extra_prompts_in_flight=4: expected both",
    ),
    (
      {
        **{
          "rollout.max_tokens_per_iteration": 4,
          "rollout.extra_prompts_in_flight": 2,
          "continuous_batching.slots": 4,
        },
        "objective.replay": "r3",
      },
      "rollout.max_tokens_per_iteration=4: expected 0 with objective.replay='r3'",
    ),
    (
      {"rollout.max_tokens_per_iteration": -1},
      "rollout.max_tokens_per_iteration=-1: expected 0 or more",
    ),
    (
      {
        "rollout.one_step_off_policy": True,
        "rollout.dynamic_sampling_rounds": 2,
      },
      "rollout.one_step_off_policy=True: expected False with rollout.dynamic_sampling_rounds=2",
    ),
    (
      {
        "rollout.max_tokens_per_iteration": 4,
        "rollout.dynamic_sampling_rounds": 2,
      },
      "rollout.max_tokens_per_iteration=4: expected 0 with rollout.dynamic_sampling_rounds=2",
    ),
  ],
)
def test_what_waits_has_to_fit_the_rest(debug_config, changes, words):
  debug_config.update_from_flattened_dict(changes)
  with pytest.raises(UserError, match=words):
    build(debug_config)


def test_what_a_config_says_of_credit_arrives(debug_config):
  debug_config.objective.update({"name": "ppo", "zero_truncated": True})
  debug_config.critic.update({"discount": 0.5, "trace_decay": 0.25})
  credit = settings.credit(parse(debug_config))
  assert credit.zero_truncated
  assert (credit.discount, credit.trace_decay) == (0.5, 0.25)


@pytest.mark.parametrize(
  "changes", [{"replay": "r3"}, {"router_shift_floor": 0.8}, {"name": "rspo"}]
)
def test_a_dense_model_has_no_routing(debug_config, changes):
  debug_config.model.variant = "qwen3-0.6b"
  debug_config.objective.update(changes)
  with pytest.raises(UserError, match="the model is dense"):
    build(debug_config)


def test_only_ppo_does_without_a_group(debug_config):
  debug_config.rollout.group_size = 1
  debug_config.learner.micro_batch_size = 1
  with pytest.raises(UserError, match="group_size=1: expected at least 2"):
    build(debug_config)
  debug_config.objective.name = "ppo"
  assert build(debug_config).abstract.critic is not None


def test_a_state_holds_no_weights_that_nothing_reads(debug_config):
  state = build(debug_config).abstract
  assert state.reference is None
  assert state.critic is None
  debug_config.objective.kl_coef = 0.1
  debug_config.model.dtype = "bfloat16"
  for estimator in ("k1", "k2", "k3"):
    debug_config.objective.kl_estimator = estimator
    reference = build(debug_config).abstract.reference
    assert {x.dtype.name for x in jax.tree.leaves(reference)} == {"bfloat16"}
