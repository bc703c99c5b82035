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
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.answer import Marks
from gspo_jax.data import prompt_batch
from gspo_jax.rewards.pool import Answer
from gspo_jax.sampler.samples import Samples


class Draw(NamedTuple):
  """The answers to a batch of P questions, G each.

  Attributes:
    batch: of `data.prompts`.
    samples: the answers of all hosts, on the devices.
    answers: those that this host drew, by their row of the P * G.
    marks: what they earned; call it on every host.
  """

  batch: dict
  samples: Samples
  answers: Mapping[int, Answer]
  marks: Callable[[], Marks]


class Cost(NamedTuple):
  """What a batch took.

  Attributes:
    batch: its questions.
    marks: what they earned.
    tokens: that were drawn.
    slot_steps: decode steps times the rows that took them.
  """

  batch: dict
  marks: Callable[[], Marks]
  tokens: int | jax.Array
  slot_steps: int | jax.Array


def collect(
  draw: Callable[[int], Draw], merge: Callable, *, rounds: int
) -> tuple[Draw, list[Cost]]:
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
    if drawn and mixed(kept.marks()).all():
      break
    new = draw(number)
    new = new._replace(marks=functools.cache(new.marks))
    spent = new.samples.lengths.sum(), new.samples.slot_steps
    drawn.append(Cost(new.batch, new.marks, *spent))
    kept = _pick(kept, new, merge) if number else new
  return kept, drawn


def mixed(marks: Marks) -> np.ndarray:
  """[P] bool, whether a group's rewards differ."""
  return np.ptp(marks.total, axis=1) > 0


def report(kept: Draw, drawn: list[Cost]) -> dict[str, float]:
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
    "refill/mixed_groups": float(mixed(first).mean()),
  }


def _pick(kept: Draw, new: Draw, merge) -> Draw:
  """The first P of the mixed groups of both, and then of the others."""
  marks = [kept.marks(), new.marks()]
  both = np.concatenate([mixed(m) for m in marks])
  count, group = marks[0].total.shape
  index = np.argsort(~both, kind="stable")[:count].astype(np.int32)
  rows = (index[:, None] * group + np.arange(group)).ravel().tolist()
  shift = lambda answers: {count * group + i: a for i, a in answers.items()}
  answers = {**kept.answers, **shift(new.answers)}
  found = _pick_marks(*marks, index)
  return Draw(
    batch=prompt_batch.pick(prompt_batch.join([kept.batch, new.batch]), index),
    samples=merge(kept.samples, new.samples, index),
    answers={i: answers[row] for i, row in enumerate(rows) if row in answers},
    marks=lambda: found,
  )


def _pick_marks(kept: Marks, new: Marks, index) -> Marks:
  pick = lambda a, b: np.concatenate([a, b])[index]
  return Marks(
    *jax.tree.map(pick, kept[:3], new[:3]), reasons=kept.reasons + new.reasons
  )
