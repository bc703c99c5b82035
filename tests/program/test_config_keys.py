"""The error for a key that does not exist suggests the right one."""

import pytest

from gspo_jax.configs import common
from gspo_jax.program.config_keys import OTHER_NAMES, hint
from gspo_jax.record.identity import flatten

KEYS = set(flatten(common.get_config().to_dict()))


def test_the_table_is_of_keys_that_exist_and_of_names_that_do_not():
  assert {key.partition("=")[0] for key in OTHER_NAMES} <= KEYS
  for key, names in OTHER_NAMES.items():
    assert len(set(names)) == len(names), key
    assert not {n for n in names if n in KEYS} - {"num_steps"}, key


def meant(text):
  return text.removeprefix("did you mean ").partition(" (")[0].rstrip("?")


@pytest.mark.parametrize(
  ("typed", "key"),
  [
    # TRL
    ("num_generations", "rollout.group_size"),
    ("objective.beta", "objective.kl_coef"),
    ("scale_rewards", "objective.advantage_estimator"),
    # verl
    ("algorithm.adv_estimator", "objective.advantage_estimator"),
    ("cast_lm_head_to_fp32", "model.float32_head"),
    ("mask_truncated_completions", "objective.truncated"),
    ("optim.lr", "optim.learning_rate"), ("optim", "optim.name"),
    ("actor_rollout_ref.actor.optim.lr", "optim.learning_rate"),
    ("actor_rollout_ref.rollout.n", "rollout.group_size"),
    ("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples"),
    # other spellings
    ("data.batch-size", "data.prompts"), ("maxGradNorm", "optim.clip_norm"),
    # a name of several keys: the section that was typed decides
    ("learning_rate", "optim.learning_rate"),
    ("cold_start.lr", "cold_start.learning_rate"), ("eval.n", "eval.samples"),
  ],
)  # fmt: skip
def test_names_of_other_trainers(typed, key):
  assert meant(hint(typed, KEYS)) == repr(key)


def test_a_suggestion_says_what_its_number_counts():
  expected = "'learner.minibatches' (optimizer steps an iteration)?"
  assert hint("ppo_mini_batch_size", KEYS) == f"did you mean {expected}"


@pytest.mark.parametrize(
  ("typed", "meant"),
  [("optim.b1", "optim.name=adamw:b1=0.9"),
   ("min_lr", "optim.decay=cosine:min_lr_ratio=0.1"),
   ("objective.clip_low", "objective.name=gspo:clip_low=3e-4"),
   ("critic.clip", "objective.name=ppo:critic_clip=0.2"),
   ("objective.cap", "objective.name=cispo:cap=5.0"),
   ("tis_imp_ratio_cap", "objective.mismatch=tis_token:cap=2.0")],
)  # fmt: skip
def test_a_number_may_belong_to_a_spec(typed, meant):
  assert hint(typed, KEYS) == f"did you mean {meant!r}?"


@pytest.mark.parametrize(
  ("typed", "keys"),
  [("temperature", "'sampler.temperature'"),
   ("log.every", "'checkpoint.every' or 'eval.every'"),
   ("evals.samples", "'eval.samples'"),
   ("optim.learning_rat", "'optim.learning_rate'"), ("sed", "'seed'"),
   ("objective.names", "'objective.name' or 'reward.names'")],
)  # fmt: skip
def test_another_section_and_a_typo(typed, keys):
  assert meant(hint(typed, KEYS)) == keys


OPTIM = "clip_norm, decay, freeze_moe_router, learning_rate, name, warmup_steps"


@pytest.mark.parametrize(
  ("typed", "text"),
  [
    ("optim.momentum", f"optim has {OPTIM}"),
    ("model.scan",
     "model has checkpoint, dtype, exact, float32_head, float32_router, "),
    ("optim.b3.x", f"optim has {OPTIM}"),
    # A last part that means another thing in each section.
    ("checkpoint.dir", "checkpoint has every, keep"),
    ("data.name", "data has "),
    ("tree.depth",
     "sections are checkpoint, cold_start, continuous_batching, data, "),
    ("tree", "; without one: num_steps, seed"),
  ],
)  # fmt: skip
def test_without_a_likely_one_all_are_listed(typed, text):
  assert text in hint(typed, KEYS)


def test_a_key_that_this_config_lacks_is_not_proposed():
  assert meant(hint("lr", KEYS - {"optim.learning_rate"})) == (
    "'cold_start.learning_rate'"
  )
