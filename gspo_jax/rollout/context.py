"""What all sources of rollouts need to sample and to score."""

from typing import NamedTuple

import jax

from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rollout import scoring
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.conversations import Conversations
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.sampler.functions import Sampler
from gspo_jax.sampler.samples import Samples
from gspo_jax.sampler.stop_strings import StopStrings


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
    generate: samples; partial rollouts and conversations need a
      `ContinuousSampler`, which resumes responses.
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
  generate: Sampler
  tokenizer: Tokenizer
  reward_pool: RewardPool | EnvironmentPool
  batch_sharding: jax.sharding.Sharding
  rng: jax.Array
  prompts: int
  group_size: int
  stop: StopStrings | None
  max_failed: float
  conversations: Conversations | None = None

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
