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

  A response may be K = `rollout.max_sequences` rows of the samples.
  """

  prompts: PromptBatch  # of the data; an environment may write others
  samples: Samples  # [P * G * K] of all hosts, on the devices
  # This host's responses, by row; the text of a conversation has all its turns.
  responses: Mapping[int, Response]
  rewards: PendingRewards  # of all hosts; call `result` on every host
  # [P * G] float32 `turns`, `tool_calls` and `tool_errors`, and
  # [P * G, max_turns] float32 `rewards`, NaN for turns that were not taken; {}
  # without an environment.
  conversation: Mapping[str, np.ndarray] = {}
  environment_seconds: float = 0.0  # devices waited so long for environments


class RolloutCost(NamedTuple):
  prompts: PromptBatch
  rewards: PendingRewards  # of all responses, the discarded ones too
  tokens: int | jax.Array
  slot_steps: int | jax.Array  # decode steps, each times the rows decoded


class RolloutBatch(NamedTuple):
  """What a source gives; a checkpoint has the numbers, by their names."""

  samples: ScoredSamples  # P groups of finished responses
  # One for each batch that was sampled; with partial rollouts, one for all
  # prompts in flight.
  costs: Sequence[RolloutCost]
  sampled_tokens: int  # in this iteration, for this and later batches
  policy_step: float  # mean over tokens of the iteration that sampled them
  resumed_fraction: float = 0.0  # responses that took several iterations
  epochs: float = 0.0  # see `Curriculum.epochs`, with this batch
  # Wall time of a dedicated sampler for this batch; 0 if trainer and sampler
  # share devices.
  seconds: float = 0.0


def prompts_on_device(
  batch: PromptBatch, batch_sharding: jax.sharding.Sharding
) -> Prompts:
  prompts = Prompts(batch.tokens, batch.lengths)
  return multihost.to_global(prompts, batch_sharding)


def sampled_tokens(costs: Sequence[RolloutCost]) -> int:
  """Tokens of all responses, discarded ones included."""
  return sum(int(cost.tokens) for cost in costs)


def slot_steps(costs: Sequence[RolloutCost]) -> int:
  return sum(int(cost.slot_steps) for cost in costs)


def group_rows(groups: np.ndarray, group_size: int) -> np.ndarray:
  return (groups[:, None] * group_size + np.arange(group_size)).ravel()
