"""The section `rollout` of a config: where responses come from."""

import dataclasses

from gspo_jax.rollout.agent import PREFIX
from gspo_jax.runtime.key import AT_LEAST_1, ZERO_OR_MORE, Range, key


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  group_size: int = key(8, "responses a prompt", AT_LEAST_1)
  dynamic_sampling_rounds: int = key(
    1,
    "DAPO: batches to sample at most, until one is full of groups whose "
    "rewards differ; 1: no dynamic sampling",
    AT_LEAST_1,
  )
  max_staleness: int = key(
    0,
    "iterations from the policy that samples a batch to the one that learns "
    "from it: exactly this number, but for the first batches, and besides "
    "those that a partial response takes. With 1 the next batch is sampled "
    "before the update, while its rewards are computed.",
    ZERO_OR_MORE,
  )
  max_tokens_per_iteration: int = key(
    0,
    "partial rollouts: tokens a response may add in an iteration; it continues "
    "in the next one, beside data.prompts new prompts. 0: all. Needs "
    "continuous_batching.slots.",
    ZERO_OR_MORE,
  )
  environment: str = key(
    "",
    "what answers the policy between its responses, and gives the reward: of "
    "BUILT_IN in gspo_jax/rollout/environment.py, or package.module.Class; "
    '"name:key=value" sets its arguments. "openai:NAME": an agent, which calls '
    "the policy over HTTP; NAME is of BUILT_IN in gspo_jax/rollout/agent.py, "
    'or package.module.function. "": none, one response a prompt. '
    "Needs continuous_batching.slots and reward.names=(); "
    "sampler.max_new_tokens is the length of the whole conversation.",
  )
  max_turns: int = key(
    8,
    "responses of a conversation at most",
    Range("1 to 32767", lambda x: 1 <= x < 2**15),
  )
  max_sequences: int = key(
    1,
    "sequences of an episode at most. Each has one importance ratio, and the "
    "advantage of the episode. More than 1: a response whose context "
    "does not begin with an earlier sequence begins a new one, as where a chat "
    "template drops the thinking of earlier turns.",
    AT_LEAST_1,
  )

  @property
  def plays_agents(self) -> bool:
    """Whether agents call the policy over HTTP; see `agents`."""
    return self.environment.startswith(PREFIX)

  @property
  def continues(self) -> bool:
    """Whether later calls of the sampler continue a response."""
    return self.max_tokens_per_iteration > 0 or bool(self.environment)

  @property
  def is_off_policy(self) -> bool:
    """Whether an iteration learns from responses of an earlier one."""
    return self.max_staleness > 0 or self.max_tokens_per_iteration > 0
