"""What a rollout gives: scored samples, and what they cost."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from gspo_jax.data.curriculum import Curriculum
from gspo_jax.rewards.pool import Response, RewardPool
from gspo_jax.rollout import scoring
from gspo_jax.rollout.scoring import Rewards
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import Prompts, Samples


class ScoredSamples(NamedTuple):
  """The answers to a batch of P questions, G each.

  Attributes:
    batch: of `data.prompts`.
    samples: the answers of all hosts, on the devices.
    answers: those that this host drew, by their row of the P * G.
    marks: what they earned; call it on every host.
  """

  batch: dict
  samples: Samples
  answers: Mapping[int, Response]
  marks: Callable[[], Rewards]


class RolloutCost(NamedTuple):
  """What a batch took.

  Attributes:
    batch: its questions.
    marks: what they earned.
    tokens: that were drawn.
    slot_steps: decode steps times the rows that took them.
  """

  batch: dict
  marks: Callable[[], Rewards]
  sampled_tokens: int | jax.Array
  slot_steps: int | jax.Array


class RolloutBatch(NamedTuple):
  """What an iteration learns from.

  Attributes:
    kept: P groups of answers, all ended.
    costs: what was drawn for it. In flight, that is of all questions there.
    spent: tokens that were drawn while it was waited for.
    drawn_at: the iteration that drew its tokens, the mean over them.
    continued: the share of its answers that were drawn in several stints.
  """

  kept: ScoredSamples
  costs: list[RolloutCost]
  spent: int
  drawn_at: float
  continued: float = 0.0


class RolloutContext(NamedTuple):
  """What drawing takes.

  Attributes:
    curriculum: gives the questions.
    generate: (params, prompts, key) -> Samples.
    tokenizer: of the policy.
    scorer: of answers.
    rows: where arrays of rows lie.
    key: iteration -> key.
    prompts: P, groups of a batch.
    group: G, answers a question.
    tells: whether `generate` tells of answers as they end.
  """

  curriculum: Curriculum
  generate: Callable
  tokenizer: Any
  scorer: RewardPool
  rows: jax.sharding.Sharding
  key: Callable[[int], jax.Array]
  prompts: int
  group: int
  tells: bool

  def asked(self, batch: dict) -> Prompts:
    """On the devices."""
    return multihost.to_global(
      Prompts(batch["tokens"], batch["length"]), self.rows
    )

  def judged(self, batch: dict, samples: Samples) -> ScoredSamples:
    """Answers that have ended, which each host begins to verify."""
    answers = scoring.decode_responses(samples, batch, self.tokenizer)
    marks = scoring.score_responses(
      self.scorer, answers, self.group, samples.lengths
    )
    return ScoredSamples(batch, samples, answers, functools.cache(marks))


def sampled_tokens(costs: list[RolloutCost]) -> int:
  """Of all answers, also of those that were discarded."""
  return sum(int(cost.tokens) for cost in costs)


def group_rows(groups, group):
  return (groups[:, None] * group + np.arange(group)).ravel()


def places(batch) -> list[list[int]]:
  if not batch:
    return []
  names = "stage", "part", "index"
  return np.stack([batch[name] for name in names], axis=1).tolist()
