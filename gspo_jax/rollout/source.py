"""The source of rollouts that a config asks for.

On-policy: the policy that learns samples responses to new prompts. Partial
rollouts: a response is sampled over several iterations. Off-policy: a batch is
sampled some iterations before it is used. A source is called with the policy's
weights and the iteration that learns from the batch. A checkpoint stores its
`pending` samples and its `get_state`.
"""

from gspo_jax.rollout.config import RolloutConfig
from gspo_jax.rollout.context import RolloutContext
from gspo_jax.rollout.off_policy import OffPolicy
from gspo_jax.rollout.on_policy import OnPolicy
from gspo_jax.rollout.partial import PartialRollouts
from gspo_jax.sampler.functions import SamplerFunctions

Source = OnPolicy | PartialRollouts | OffPolicy


def make_source(
  rollout: RolloutConfig,
  context: RolloutContext,
  functions: SamplerFunctions,
  *,
  last_step: int,
) -> Source:
  source: Source
  if rollout.max_tokens_per_iteration:
    source = PartialRollouts(
      context,
      context.generate.jitted.empty_samples,  # type: ignore[union-attr]  # continuous
      functions,
      max_tokens=rollout.max_tokens_per_iteration,
      extra_prompts=context.prompts,
    )
  else:
    source = OnPolicy(
      context,
      functions.merge_groups,
      rounds=rollout.dynamic_sampling_rounds,
    )
  if rollout.max_staleness or functions.separate:
    source = OffPolicy(
      source,
      context,
      functions.empty_samples(),
      max_staleness=rollout.max_staleness,
      last_step=last_step,
      separate=functions.separate,
    )
  return source
