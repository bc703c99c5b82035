"""The source of rollouts that a config asks for.

On-policy: the policy that learns samples responses to new prompts. Partial
rollouts: a response is sampled over several iterations. Off-policy: a batch is
sampled some iterations before it is used. A source is called with the policy's
weights and the iteration that learns from the batch. A checkpoint stores its
`pending` samples and its `get_state`.
"""

from gspo_jax.rollout.context import RolloutContext
from gspo_jax.rollout.off_policy import OffPolicy
from gspo_jax.rollout.on_policy import OnPolicy
from gspo_jax.rollout.partial import PartialRollouts

Source = OnPolicy | PartialRollouts | OffPolicy


def make_source(context: RolloutContext, *, last_step: int) -> Source:
  rollout = context.rollout
  partial = rollout.max_tokens_per_iteration
  source = PartialRollouts(context) if partial else OnPolicy(context)
  if rollout.max_staleness or context.sampler.separate:
    return OffPolicy(source, context, last_step=last_step)
  return source
