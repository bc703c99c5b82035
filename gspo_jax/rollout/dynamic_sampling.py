"""Dynamic sampling: groups of equal rewards are replaced by new groups.

DAPO (Yu et al. 2025, arXiv 2503.14476, sec. 3.2). A group with equal rewards
has no advantage and teaches nothing. So further batches are sampled until one
batch is full of groups whose rewards differ. Departures:
  1. The number of batches is limited. Then groups of equal rewards fill the
     batch, so that it keeps its shape.
  2. A group is kept if its rewards differ, even if all its responses are
     correct, as with overlong shaping.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from gspo_jax.data.prompt_batch import join
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.rollout.batch import (
  RolloutCost,
  ScoredSamples,
  group_rows,
  sampled_tokens,
)
from gspo_jax.rollout.context import RolloutContext
from gspo_jax.rollout.scoring import wait_scored


def sample_until_mixed(
  context: RolloutContext, sample: Callable[[int], ScoredSamples], label: str
) -> tuple[ScoredSamples, list[RolloutCost]]:
  """Samples batches until P groups have mixed rewards, at most some rounds.

  One round waits for rewards only if they are those of conversations. `sample`
  samples the batch of a round (from 0); P and G never change. Returns P groups,
  the first with mixed rewards and then the first others; and the cost of each
  batch.
  """
  rounds = context.rollout.dynamic_sampling_rounds
  kept: ScoredSamples | None = None
  costs: list[RolloutCost] = []
  for i in range(rounds):
    if kept and kept.rewards.result().mixed_groups.all():
      break
    new = sample(i)
    tokens, slot_steps = new.samples.num_sampled, new.samples.slot_steps
    costs.append(RolloutCost(new.prompts, new.rewards, tokens, slot_steps))
    if rounds > 1 or new.conversation:
      size = rounds * new.rewards.size
      pending = [cost.rewards for cost in costs]
      wait_scored(pending, context.max_failed, label=label, size=size)
    kept = _merge(kept, new, context.sampler.merge_groups) if kept else new
  assert kept
  return kept, costs


def metrics(
  kept: ScoredSamples, costs: Sequence[RolloutCost]
) -> dict[str, float]:
  """`dynamic_sampling/*`: the cost of a batch, and its first round.

  `reward` and `mixed_groups` are of the first round, before groups are
  replaced; compare them with `reward/mean` and `reward/mixed_groups` of a run
  without dynamic sampling. Discarded tokens are of groups that are not learnt
  from.
  """
  first, groups = costs[0].rewards.result(), len(kept.rewards.result().total)
  tokens = sampled_tokens(costs)
  discarded = tokens - int(kept.samples.num_sampled)
  return {
    "dynamic_sampling/rounds": len(costs),
    "dynamic_sampling/groups_sampled": len(costs) * groups,
    "dynamic_sampling/groups_discarded": (len(costs) - 1) * groups,
    "dynamic_sampling/tokens_sampled": tokens,
    "dynamic_sampling/tokens_discarded": discarded,
    "dynamic_sampling/tokens_discarded_share": discarded / tokens,
    "dynamic_sampling/reward": float(first.total.mean()),
    "dynamic_sampling/mixed_groups": float(first.mixed_groups.mean()),
  }


def _merge(
  kept: ScoredSamples, new: ScoredSamples, merge_groups
) -> ScoredSamples:
  """The first P groups with mixed rewards, then the first others."""
  kept_rewards, new_rewards = kept.rewards.result(), new.rewards.result()
  mixed = np.concatenate([kept_rewards.mixed_groups, new_rewards.mixed_groups])
  P, G = kept_rewards.total.shape
  index = np.argsort(~mixed, kind="stable")[:P].astype(np.int32)
  pick = lambda a, b: np.concatenate([a, b])[index]
  total, parts, failed = jax.tree.map(pick, kept_rewards[:3], new_rewards[:3])
  reasons = kept_rewards.reasons + new_rewards.reasons
  responses = dict(kept.responses)
  responses |= {P * G + row: x for row, x in new.responses.items()}
  rows_of_both = group_rows(index, G)
  rows = enumerate(rows_of_both.tolist())
  return ScoredSamples(
    prompts=join([kept.prompts, new.prompts]).pick(index),
    samples=merge_groups(kept.samples, new.samples, index),
    responses={i: responses[row] for i, row in rows if row in responses},
    rewards=PendingRewards.computed(Rewards(total, parts, failed, reasons)),
    conversation={
      name: np.concatenate([values, new.conversation[name]])[rows_of_both]
      for name, values in kept.conversation.items()
    },
    environment_seconds=kept.environment_seconds + new.environment_seconds,
  )
