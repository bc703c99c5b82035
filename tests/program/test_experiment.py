"""What a run must agree with, and its keys."""

from types import SimpleNamespace

import jax
import pytest

from gspo_jax.program import experiment
from gspo_jax.runtime.errors import UserError


def run(config, *, reference=None, critic=None):
  abstract = SimpleNamespace(reference=reference, critic=critic)
  program = SimpleNamespace(abstract=abstract)
  keys = experiment.Keys(*jax.random.split(jax.random.key(0), 4))
  cold = {"seed": 3}
  return experiment.Experiment(
    config, None, program, None, None, None, cold, keys
  )


def test_a_state_of_rl_agrees_with_more_than_a_cold_start(debug_config):
  plain = run(debug_config)
  assert experiment.checkpoint_identity(plain) == plain.identity == {"seed": 3}
  judged = experiment.checkpoint_identity(
    run(debug_config, reference={}, critic={})
  )
  assert set(judged) - {"seed"} == {
    "a reference (objective.kl_coef)",
    "a critic (objective.name='ppo')",
  }


@pytest.mark.parametrize(
  ("rollout", "word"),
  [({"ahead": True}, True), ({"budget": 6, "spare": 2}, 2)],
)
def test_answers_that_wait_are_for_the_same_prompts(
  debug_config, rollout, word
):
  before = experiment.checkpoint_identity(run(debug_config))
  debug_config.rollout.update(rollout)
  found = experiment.checkpoint_identity(run(debug_config))
  shapes = {
    "data.prompts": debug_config.data.prompts,
    "data.max_prompt_length": debug_config.data.max_prompt_length,
    "data.system_prompt": debug_config.data.system_prompt,
    "data.instruction": debug_config.data.instruction,
    "rollout.group_size": debug_config.rollout.group_size,
    "sampler.max_new_tokens": debug_config.sampler.max_new_tokens,
  }
  rest = {k: v for k, v in found.items() if k not in before | shapes}
  assert found == before | shapes | rest
  assert list(rest.values()) == [word]


def test_a_steps_keys_are_its_own(debug_config):
  keys = [
    k
    for step in (1, 2)
    for k in experiment.iteration_keys(run(debug_config), step)
  ]
  assert len({tuple(jax.random.key_data(k).tolist()) for k in keys}) == 4


def test_a_reward_is_named_with_its_key(debug_config):
  debug_config.reward.names = ("operator.neg",)
  message = (
    r"reward.names=\('operator.neg',\): reward 'operator.neg' takes \(a, /\)"
  )
  with pytest.raises(UserError, match=message):
    experiment._scorer(debug_config.reward)
