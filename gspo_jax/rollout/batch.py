"""What a rollout gives: scored samples, and their cost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.rewards.pool import PendingRewards
from gspo_jax.rewards.reward import Response
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import Prompts, Samples


class ScoredSamples(NamedTuple):
  """The responses to a batch of P prompts, G each, and their rewards.

  Attributes:
    prompts: P of them; with an environment, as it wrote them.
    samples: the responses of all hosts, on the devices.
    responses: of this host, by row, 0 to P * G - 1. The text of a conversation
      is the whole of it.
    rewards: of all hosts; call `result` on every host.
    conversation: [P * G] float32 `turns`, `tool_calls` and `tool_errors`, and
      [P * G, max_turns] float32 `rewards`, NaN for turns that were not taken;
      {} without an environment.
    environment_seconds: seconds that the devices waited for environments.
  """

  prompts: PromptBatch
  samples: Samples
  responses: Mapping[int, Response]
  rewards: PendingRewards
  conversation: Mapping[str, np.ndarray] = {}
  environment_seconds: float = 0.0


class RolloutCost(NamedTuple):
  """The cost of sampling a batch.

  Attributes:
    prompts: of the batch.
    rewards: of all its responses, also of those that are discarded.
    tokens: tokens sampled.
    slot_steps: decode steps, each times the rows that were decoded.
  """

  prompts: PromptBatch
  rewards: PendingRewards
  tokens: int | jax.Array
  slot_steps: int | jax.Array


class RolloutBatch(NamedTuple):
  """The batch that an iteration learns from.

  Attributes:
    samples: P groups of finished responses.
    costs: of the batches that were sampled for it. With partial rollouts, the
      cost of all prompts in flight.
    sampled_tokens: tokens that were sampled in this iteration, also for later
      ones.
    policy_step: the mean over tokens of the iteration whose policy sampled
      them.
    resumed_fraction: share of responses that took several iterations.
    epochs: passes over the problems, with this batch; see `Curriculum.epochs`.
    seconds: wall time of a dedicated sampler for this batch; 0 if trainer and
      sampler share devices.
  """

  samples: ScoredSamples
  costs: Sequence[RolloutCost]
  sampled_tokens: int
  policy_step: float
  resumed_fraction: float = 0.0
  epochs: float = 0.0
  seconds: float = 0.0


def prompts_on_device(
  batch: PromptBatch, batch_sharding: jax.sharding.Sharding
) -> Prompts:
  """The prompts of a batch as global arrays."""
  prompts = Prompts(batch.tokens, batch.lengths)
  return multihost.to_global(prompts, batch_sharding)


def sampled_tokens(costs: Sequence[RolloutCost]) -> int:
  """Tokens of all responses, also of those that are discarded."""
  return sum(int(cost.tokens) for cost in costs)


def slot_steps(costs: Sequence[RolloutCost]) -> int:
  """Decode steps, each times the rows that were decoded."""
  return sum(int(cost.slot_steps) for cost in costs)


def group_rows(groups: np.ndarray, group_size: int) -> np.ndarray:
  """The row numbers of these groups."""
  return (groups[:, None] * group_size + np.arange(group_size)).ravel()
