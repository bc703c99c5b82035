"""Dynamic sampling: groups of equal rewards make room for further ones.

DAPO (Yu et al. 2025, arXiv 2503.14476, sec. 3.2). A group whose answers all
earn the same has no advantage and teaches nothing, so further batches are drawn
until one is full of groups that do. Departures:
  1. A budget ends it. Groups of equal rewards then fill the batch up, without
     advantage, and it keeps its shape.
  2. The rewards decide, and not the verdict alone: with overlong shaping, all
     right answers of a group may still differ, and it is kept.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np

from gspo_jax.data import prompt_batch
from gspo_jax.rollout.batch import RolloutCost, ScoredSamples
from gspo_jax.rollout.scoring import Rewards


def sample_until_mixed(
  draw: Callable[[int], ScoredSamples], merge: Callable, *, rounds: int
) -> tuple[ScoredSamples, list[RolloutCost]]:
  """Draws until P groups have unequal rewards, `rounds` times at most.

  With one round nothing waits for the marks.

  Args:
    draw: gives the batch of a round, from 0 on; the same P and G every time.
    merge: `groups.merge`, jitted.
    rounds: the budget, 1 or more batches.

  Returns:
    P groups, the first mixed ones that were drawn, then the first others; and
    all the batches that it took.
  """
  kept, drawn = None, []
  for number in range(rounds):
    if drawn and has_mixed_rewards(kept.marks()).all():
      break
    new = draw(number)
    new = new._replace(marks=functools.cache(new.marks))
    spent = new.samples.lengths.sum(), new.samples.slot_steps
    drawn.append(RolloutCost(new.batch, new.marks, *spent))
    kept = _pick(kept, new, merge) if number else new
  return kept, drawn


def has_mixed_rewards(marks: Rewards) -> np.ndarray:
  """[P] bool, whether a group's rewards differ."""
  return np.ptp(marks.total, axis=1) > 0


def metrics(kept: ScoredSamples, drawn: list[RolloutCost]) -> dict[str, float]:
  """`refill/*`: what a batch cost.

  `reward` and `mixed_groups` are of the first batch, which nobody picked: the
  policy's own, as `reward/mean` and `reward/mixed_groups` are without refill.
  """
  first, groups = drawn[0].marks(), len(kept.marks().total)
  tokens = sum(int(cost.tokens) for cost in drawn)
  return {
    "refill/rounds": len(drawn),
    "refill/groups_drawn": len(drawn) * groups,
    "refill/groups_discarded": (len(drawn) - 1) * groups,
    "refill/tokens_drawn": tokens,
    "refill/tokens_discarded_share": 1
    - int(kept.samples.lengths.sum()) / tokens,
    "refill/reward": float(first.total.mean()),
    "refill/mixed_groups": float(has_mixed_rewards(first).mean()),
  }


def _pick(kept: ScoredSamples, new: ScoredSamples, merge) -> ScoredSamples:
  """The first P of the mixed groups of both, and then of the others."""
  marks = [kept.marks(), new.marks()]
  both = np.concatenate([has_mixed_rewards(m) for m in marks])
  count, group = marks[0].total.shape
  index = np.argsort(~both, kind="stable")[:count].astype(np.int32)
  rows = (index[:, None] * group + np.arange(group)).ravel().tolist()
  shift = lambda answers: {count * group + i: a for i, a in answers.items()}
  answers = {**kept.answers, **shift(new.answers)}
  found = _pick_marks(*marks, index)
  return ScoredSamples(
    batch=prompt_batch.pick(prompt_batch.join([kept.batch, new.batch]), index),
    samples=merge(kept.samples, new.samples, index),
    answers={i: answers[row] for i, row in enumerate(rows) if row in answers},
    marks=lambda: found,
  )


def _pick_marks(kept: Rewards, new: Rewards, index) -> Rewards:
  pick = lambda a, b: np.concatenate([a, b])[index]
  return Rewards(
    *jax.tree.map(pick, kept[:3], new[:3]), reasons=kept.reasons + new.reasons
  )
