"""Partial rollouts."""

import numpy as np

from gspo_jax.data import prompt_batch
from gspo_jax.rollout.batch import (
  RolloutBatch,
  RolloutContext,
  RolloutCost,
  group_rows,
  places,
)
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import UNFINISHED, Samples


class PartialRollouts:
  """Draws answers a stint an iteration; gives the first P groups that ended.

  Where fewer than P have ended, the oldest of the others are drawn to their
  end. Questions stay in the order in which they were asked.

  A group is verified when it is given, and not while others decode. Of an
  answer that goes on, the prompt and what it drew are prefilled anew, for the
  weights have changed. What is drawn depends on the number of shards, for a
  place has its keys.

  Args:
    sampling: what drawing takes; `generate` continues answers.
    fresh: count of questions -> Samples, of which nothing is drawn.
    choose: `groups.take`, jitted, for P groups.
    regroup: the same for all in flight.
    budget: tokens that an answer may draw in an iteration.
    shards: D, parts of the devices that have questions of their own.
    spare: questions in flight beside P.
  """

  def __init__(
    self,
    sampling: RolloutContext,
    fresh,
    choose,
    regroup,
    *,
    budget,
    shards,
    spare,
  ):
    self._sampling, self._choose, self._regroup = sampling, choose, regroup
    self._budget, self._flight = budget, sampling.prompts + spare
    # By age, where each question is: one for each shard in turn, so that none
    # has all those that are nearly done.
    places = np.arange(self._flight).reshape(shards, -1)
    self._places = places.T.ravel().astype(np.int32)
    answers = self._flight * sampling.group
    self._batch, self.arrays = None, fresh(self._flight)
    self._at = np.zeros(answers)  # iterations, summed over an answer's tokens
    self._stints = np.zeros(answers, int)  # calls that drew some of it

  def __call__(self, params, step: int, now: int | None = None) -> RolloutBatch:
    s, samples = self._sampling, self.arrays
    batch = self._fill(step)
    P, Q, G = s.prompts, self._flight, s.group
    before, R = multihost.to_host(samples.lengths), samples.tokens.shape[1]
    key = s.key(step)
    draw = lambda samples, until: s.generate(
      params, s.asked(batch), key, resume_from=samples, stop_at=until
    )
    samples = draw(samples, np.minimum(before + self._budget, R))
    ended = self._ended(samples)
    slot_steps = int(samples.slot_steps)
    if (missing := P - ended.sum()) > 0:
      more = np.isin(np.arange(Q), self._oldest(~ended)[:missing]).repeat(G)
      samples = draw(samples, np.where(more, R, 0))
      ended = self._ended(samples)
      slot_steps += int(samples.slot_steps)
    lengths = multihost.to_host(samples.lengths)
    self._at += (lengths - before) * float(step if now is None else now)
    self._stints += lengths > before
    chosen = self._oldest(ended)[:P]
    rows = group_rows(chosen, G)
    found = s.judged(
      prompt_batch.pick(batch, chosen), self._choose(samples, chosen)
    )
    drawn = int((lengths - before).sum())
    cost = RolloutCost(found.batch, found.marks, drawn, slot_steps)
    drawn_at = float(self._at[rows].sum() / lengths[rows].sum())
    continued = float((self._stints[rows] > 1).mean())
    stays = ~np.isin(np.arange(Q), chosen)
    self._keep(batch, samples, self._oldest(stays))
    return RolloutBatch(found, [cost], drawn, drawn_at, continued)

  def get_state(self) -> dict:
    """JSON: the questions in flight, and when their answers were drawn."""
    return {
      "places": places(self._batch),
      "order": self._places.tolist(),
      "at": self._at.tolist(),
      "stints": self._stints.tolist(),
    }

  def set_state(self, arrays: Samples, state: dict) -> None:
    """Goes to where `arrays` and `get_state` were, on any number of shards."""
    places = state["places"]
    self._batch = self._sampling.curriculum.recall(places) if places else None
    index = np.zeros(self._flight, np.int32)
    index[self._places] = state["order"]
    self.arrays = self._regroup(arrays, index)
    rows = group_rows(index, self._sampling.group)
    self._at = np.array(state["at"])[rows]
    self._stints = np.array(state["stints"])[rows]

  def _fill(self, step) -> dict:
    """The questions in flight, in their places; new ones are the youngest."""
    old = [self._batch] if self._batch else []
    count = self._flight - sum(len(b["problems"]) for b in old)
    by_age = prompt_batch.join(
      [*old, self._sampling.curriculum.draw(step, count)]
    )
    return prompt_batch.pick(by_age, np.argsort(self._places))

  def _oldest(self, which_Q) -> np.ndarray:
    """The places of those questions, the oldest first."""
    return self._places[which_Q[self._places]]

  def _ended(self, samples) -> np.ndarray:
    finish = multihost.to_host(samples.finish).reshape(self._flight, -1)
    return (finish != UNFINISHED).all(axis=1)

  def _keep(self, batch, samples, left):
    """Those groups stay, as the oldest; the rest is room for new ones."""
    index = np.full(self._flight, -1, np.int32)
    index[self._places[: len(left)]] = left
    self.arrays = self._regroup(samples, index)
    self._batch = prompt_batch.pick(batch, left) if len(left) else None
    rows = group_rows(index, self._sampling.group)
    stays = np.repeat(index >= 0, self._sampling.group)
    self._at = np.where(stays, self._at[rows], 0)
    self._stints = np.where(stays, self._stints[rows], 0)
