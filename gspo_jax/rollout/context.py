"""What all sources of rollouts need to sample and to score."""

from typing import NamedTuple

import jax

from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.config import RolloutConfig
from gspo_jax.rollout.player import Player
from gspo_jax.rollout.scoring import ResponseDecoder, Scorer
from gspo_jax.sampler.functions import SamplerFunctions
from gspo_jax.sampler.samples import Samples, finished_responses


class IterationKeys(NamedTuple):
  sample: jax.Array
  shuffle: jax.Array


def iteration_keys(rng: jax.Array, step: int) -> IterationKeys:
  """The random keys of iteration `step`; the same after a resume."""
  return IterationKeys(*jax.random.split(jax.random.fold_in(rng, step)))


class RolloutContext(NamedTuple):
  rollout: RolloutConfig
  curriculum: Curriculum
  # Partial rollouts and conversations need a `ContinuousSampler`, which
  # resumes responses.
  sampler: SamplerFunctions
  tokenizer: Tokenizer
  reward_pool: RewardPool | None  # None with an environment, which rewards
  rng: jax.Array  # the key of all iterations; see `iteration_keys`
  prompts: int  # P
  max_failed: float  # `reward.max_failed`
  conversations: Player | None = None  # None: no environment

  def scorer(self, batch: PromptBatch) -> Scorer:
    """For the responses to a batch; each host scores its rows."""
    assert self.reward_pool
    decode = ResponseDecoder(
      batch, self.tokenizer, self.rollout.group_size, self.sampler.stop
    )
    return Scorer(self.reward_pool, decode)

  def scored(self, batch: PromptBatch, samples: Samples) -> ScoredSamples:
    """Starts to score finished responses."""
    scorer = self.scorer(batch)
    scorer.add(finished_responses(samples))
    return scorer.scored(samples)
