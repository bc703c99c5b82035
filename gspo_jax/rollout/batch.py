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
  """The responses to a batch of P prompts, G each, and their rewards."""

  prompts: PromptBatch  # with an environment, as it wrote them
  samples: Samples  # [P * G] of all hosts, on the devices
  # Of this host, by row. The text of a conversation is the whole of it.
  responses: Mapping[int, Response]
  rewards: PendingRewards  # of all hosts; call `result` on every host
  # [P * G] float32 `turns`, `tool_calls` and `tool_errors`, and
  # [P * G, max_turns] float32 `rewards`, NaN for turns that were not taken; {}
  # without an environment.
  conversation: Mapping[str, np.ndarray] = {}
  environment_seconds: float = 0.0  # that the devices waited for environments


class RolloutCost(NamedTuple):
  """The cost of sampling a batch."""

  prompts: PromptBatch
  rewards: PendingRewards  # of all responses, the discarded ones too
  tokens: int | jax.Array
  slot_steps: int | jax.Array  # decode steps, each times the rows decoded


class RolloutBatch(NamedTuple):
  """The batch that an iteration learns from."""

  samples: ScoredSamples  # P groups of finished responses
  # Of the batches that were sampled for it; with partial rollouts, of all
  # prompts in flight.
  costs: Sequence[RolloutCost]
  sampled_tokens: int  # in this iteration, also for later ones
  policy_step: float  # mean over tokens of the iteration that sampled them
  resumed_fraction: float = 0.0  # of responses that took several iterations
  epochs: float = 0.0  # see `Curriculum.epochs`, with this batch
  # Wall time of a dedicated sampler for this batch; 0 if trainer and sampler
  # share devices.
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
