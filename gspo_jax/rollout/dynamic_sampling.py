"""Dynamic sampling: groups of equal rewards are replaced by sampled ones.

DAPO (Yu et al. 2025, arXiv 2503.14476, sec. 3.2). A group whose responses all
have the same reward has no advantage and teaches nothing. So further batches
are sampled until one batch is full of groups whose rewards differ. Departures:
  1. The number of batches is limited. Groups of equal rewards then fill the
     batch up, without advantage, and it keeps its shape.
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
from gspo_jax.rollout.scoring import wait_scored
from gspo_jax.sampler.samples import Samples


def sample_until_mixed(
  sample: Callable[[int], ScoredSamples],
  merge_groups: Callable[[Samples, Samples, jax.Array], Samples],
  *,
  rounds: int,
  max_failed: float,
  label: str,
) -> tuple[ScoredSamples, list[RolloutCost]]:
  """Samples batches until P groups have mixed rewards, at most `rounds`.

  With one round nothing waits for the rewards.

  Args:
    sample: samples the batch of a round, counted from 0; P and G are the same
      in every round.
    merge_groups: see `SamplerFunctions`.
    rounds: the maximum number of batches, at least 1.
    max_failed: as for `wait_scored`, of the responses of all rounds.
    label: what is sampled, for the log.

  Returns:
    P groups, the first ones with mixed rewards and then the first others; and
    the cost of each batch.
  """
  kept, costs = None, []
  for i in range(rounds):
    if i and kept.rewards.result().mixed_groups.all():
      break
    new = sample(i)
    costs.append(
      RolloutCost(
        new.prompts,
        new.rewards,
        new.samples.num_sampled,
        new.samples.slot_steps,
      )
    )
    if rounds > 1:
      size = rounds * new.rewards.size
      wait_scored(
        [x.rewards for x in costs], max_failed, label=label, size=size
      )
    kept = _merge(kept, new, merge_groups) if i else new
  return kept, costs


def metrics(
  kept: ScoredSamples, costs: Sequence[RolloutCost]
) -> dict[str, float]:
  """`dynamic_sampling/*`: the cost of a batch, and its first round.

  `reward` and `mixed_groups` are of the first round, before any group is
  replaced. They compare with `reward/mean` and `reward/mixed_groups` of a run
  without dynamic sampling. Discarded tokens are those of groups that the
  iteration does not learn from.
  """
  first, groups = costs[0].rewards.result(), len(kept.rewards.result().total)
  tokens = sampled_tokens(costs)
  discarded = tokens - int(kept.samples.num_sampled)
  scalars = {
    "rounds": len(costs),
    "groups_sampled": len(costs) * groups,
    "groups_discarded": (len(costs) - 1) * groups,
    "tokens_sampled": tokens,
    "tokens_discarded": discarded,
    "tokens_discarded_share": discarded / tokens,
    "reward": float(first.total.mean()),
    "mixed_groups": float(first.mixed_groups.mean()),
  }
  return {f"dynamic_sampling/{name}": x for name, x in scalars.items()}


def _merge(
  kept: ScoredSamples, new: ScoredSamples, merge_groups
) -> ScoredSamples:
  """The first P groups of both with mixed rewards, then the first others."""
  kept_rewards, new_rewards = kept.rewards.result(), new.rewards.result()
  mixed = np.concatenate([kept_rewards.mixed_groups, new_rewards.mixed_groups])
  P, G = kept_rewards.total.shape
  index = np.argsort(~mixed, kind="stable")[:P].astype(np.int32)
  responses = dict(kept.responses)
  responses |= {P * G + row: x for row, x in new.responses.items()}
  rows_of_both = group_rows(index, G)
  rows = enumerate(rows_of_both.tolist())
  return ScoredSamples(
    prompts=join([kept.prompts, new.prompts]).pick(index),
    samples=merge_groups(kept.samples, new.samples, index),
    responses={i: responses[row] for i, row in rows if row in responses},
    rewards=PendingRewards.computed(
      _merge_rewards(kept_rewards, new_rewards, index)
    ),
    conversation={
      name: np.concatenate([values, new.conversation[name]])[rows_of_both]
      for name, values in kept.conversation.items()
    },
    environment_seconds=kept.environment_seconds + new.environment_seconds,
  )


def _merge_rewards(kept: Rewards, new: Rewards, index) -> Rewards:
  pick = lambda a, b: np.concatenate([a, b])[index]
  return Rewards(
    *jax.tree.map(pick, kept[:3], new[:3]), reasons=kept.reasons + new.reasons
  )
