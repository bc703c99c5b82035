"""The containers of a rollout: its context, scored samples, and their cost."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.rewards.pool import Response, RewardPool
from gspo_jax.rollout import scoring
from gspo_jax.rollout.conversations import (
  REWARD,
  Conversations,
  EnvironmentPool,
)
from gspo_jax.rollout.scoring import ComputedRewards, PendingRewards, Rewards
from gspo_jax.runtime import multihost
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.functions import Generate
from gspo_jax.sampler.samples import Prompts, Samples
from gspo_jax.sampler.stop_strings import StopStrings


class ScoredSamples(NamedTuple):
  """The responses to a batch of P prompts, G each, and their rewards.

  Attributes:
    prompts: P of them.
    samples: the responses of all hosts, on the devices.
    responses: those of this host, by their row, 0 to P * G - 1.
    rewards: of all hosts; call `result` on every host.
    conversation: what an environment counted, by name, [P * G, ...] each; {}
      without one.
    environment_seconds: that the devices waited for environments.
  """

  prompts: PromptBatch
  samples: Samples
  responses: Mapping[int, Response]
  rewards: PendingRewards | ComputedRewards
  conversation: Mapping[str, np.ndarray] = {}
  environment_seconds: float = 0.0


class RolloutCost(NamedTuple):
  """The cost of sampling a batch.

  Attributes:
    prompts: of the batch.
    rewards: of all its responses, also of those that are discarded.
    tokens: sampled.
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
    seconds: that a sampler with devices of its own took for it; 0 without.
  """

  samples: ScoredSamples
  costs: Sequence[RolloutCost]
  sampled_tokens: int
  policy_step: float
  resumed_fraction: float = 0.0
  epochs: float = 0.0
  seconds: float = 0.0


class IterationKeys(NamedTuple):
  """The random keys of an iteration."""

  sample: jax.Array
  shuffle: jax.Array


def iteration_keys(rng: jax.Array, step: int) -> IterationKeys:
  """The keys of iteration `step`; a resumed run gets the same ones."""
  return IterationKeys(*jax.random.split(jax.random.fold_in(rng, step)))


class RolloutContext(NamedTuple):
  """What sampling and scoring need.

  Attributes:
    curriculum: gives the prompts.
    generate: `sampler.functions.Generate`; a `ContinuousSampler` also resumes
      responses, and reports them as they finish.
    tokenizer: of the policy.
    reward_pool: scores responses.
    batch_sharding: of arrays whose first axis is the batch.
    rng: the key of all iterations; see `iteration_keys`.
    prompts: P, prompts of a batch.
    group_size: G, responses a prompt.
    stop: the stop strings of the sampler; None: there are none.
    max_failed: `reward.max_failed`.
    conversations: samples conversations; None: there is no environment.
  """

  curriculum: Curriculum
  generate: Generate | ContinuousSampler
  tokenizer: Tokenizer
  reward_pool: RewardPool | EnvironmentPool
  batch_sharding: jax.sharding.Sharding
  rng: jax.Array
  prompts: int
  group_size: int
  stop: StopStrings | None
  max_failed: float
  conversations: Conversations | None = None

  def keys(self, step: int) -> IterationKeys:
    """The random keys of iteration `step`."""
    return iteration_keys(self.rng, step)

  def start_scoring(
    self, batch: PromptBatch, samples: Samples
  ) -> ScoredSamples:
    """Begins to score finished responses, each host those of its rows."""
    responses = scoring.decode_responses(
      samples, batch, self.tokenizer, self.stop
    )
    rewards = scoring.score_responses(
      self.reward_pool, responses, self.group_size, samples.lengths
    )
    return ScoredSamples(batch, samples, responses, rewards)

  def conversations_state(self, scored: ScoredSamples) -> dict:
    """JSON of what samples of conversations do not have; {} without them.

    Those are the prompts that environments began with, and what they gave.
    """
    if not self.conversations:
      return {}
    prompts, rewards = scored.prompts, scored.rewards.result()
    return {
      "prompts": [prompts.ids(p) for p in range(len(prompts))],
      "rewards": rewards.total.tolist(),
      "failed": rewards.failed.tolist(),
      "conversation": {
        name: x.tolist() for name, x in scored.conversation.items()
      },
    }

  def restore(
    self, batch: PromptBatch, samples: Samples, conversations: dict
  ) -> ScoredSamples:
    """A batch of a checkpoint; single responses are scored again.

    Args:
      batch: the prompts of the data.
      samples: the responses.
      conversations: of `conversations_state`.
    """
    if not conversations:
      return self.start_scoring(batch, samples)
    tokens, lengths = batch.tokens.copy(), batch.lengths.copy()
    for p, ids in enumerate(conversations["prompts"]):
      tokens[p] = self.tokenizer.pad_id
      tokens[p, tokens.shape[1] - len(ids) :] = ids
      lengths[p] = len(ids)
    batch = dataclasses.replace(batch, tokens=tokens, lengths=lengths)
    total = np.array(conversations["rewards"], np.float32)
    failed = np.array(conversations["failed"])
    rewards = Rewards(total, {REWARD: total}, failed, reasons=())
    return ScoredSamples(
      batch,
      samples,
      scoring.decode_responses(samples, batch, self.tokenizer, self.stop),
      ComputedRewards(rewards),
      {
        name: np.array(values, np.float32)
        for name, values in conversations["conversation"].items()
      },
    )


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
