"""What all sources of rollouts need to sample and to score."""

from typing import NamedTuple

import jax

from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rollout import scoring
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.player import Player
from gspo_jax.sampler.functions import Sampler
from gspo_jax.sampler.samples import Samples
from gspo_jax.sampler.stop_strings import StopStrings


class IterationKeys(NamedTuple):
  sample: jax.Array
  shuffle: jax.Array


def iteration_keys(rng: jax.Array, step: int) -> IterationKeys:
  """The random keys of iteration `step`; the same after a resume."""
  return IterationKeys(*jax.random.split(jax.random.fold_in(rng, step)))


class RolloutContext(NamedTuple):
  curriculum: Curriculum
  # Partial rollouts and conversations need a `ContinuousSampler`, which
  # resumes responses.
  generate: Sampler
  tokenizer: Tokenizer
  reward_pool: RewardPool | None  # None with an environment, which rewards
  batch_sharding: jax.sharding.NamedSharding  # of arrays [B, ...]
  rng: jax.Array  # the key of all iterations; see `iteration_keys`
  prompts: int  # P
  group_size: int  # G
  stop: StopStrings | None  # of the sampler
  max_failed: float  # `reward.max_failed`
  conversations: Player | None = None  # None: no environment

  def start_scoring(
    self, batch: PromptBatch, samples: Samples
  ) -> ScoredSamples:
    """Starts to score finished responses; each host scores its rows."""
    assert self.reward_pool
    responses = scoring.decode_responses(
      samples, batch, self.tokenizer, self.stop
    )
    rewards = scoring.score_responses(
      self.reward_pool, responses, self.group_size, samples.lengths
    )
    return ScoredSamples(batch, samples, responses, rewards)
