"""The source of rollouts that a config asks for."""

from gspo_jax.rollout.on_policy import OnPolicy
from gspo_jax.rollout.one_step_off import OneStepOffPolicy
from gspo_jax.rollout.partial import PartialRollouts

Source = OnPolicy | PartialRollouts | OneStepOffPolicy
