"""Where the answers of an iteration come from, and what waits for the next.

  Fresh: all to new questions, by the policy that is to learn from them. DAPO's
    dynamic sampling, if asked for, is in `refill`.
  Partial: an answer draws so many tokens an iteration, and goes on in the next
    one (Kimi k1.5, arXiv 2501.12599, sec. 2.6.2). More questions are in flight
    than are learnt from, so that long answers do not hold a batch.
  Ahead: one step off-policy. The next batch is drawn before this one is learnt
    from, while its answers are verified.

Each is called with the policy and the iteration that is to learn from the
answers; the first two also with the iteration that it is now, if that is
another. What waits is in `arrays` and `get_state`, for a checkpoint.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from gspo_jax import answer, refill
from gspo_jax.data import prompt_batch
from gspo_jax.data.curriculum import Curriculum
from gspo_jax.refill import Cost, Draw
from gspo_jax.rewards.pool import Scorer
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import UNFINISHED, Prompts, Samples


class Batch(NamedTuple):
  """What an iteration learns from.

  Attributes:
    kept: P groups of answers, all ended.
    costs: what was drawn for it. In flight, that is of all questions there.
    spent: tokens that were drawn while it was waited for.
    drawn_at: the iteration that drew its tokens, the mean over them.
    continued: the share of its answers that were drawn in several stints.
  """

  kept: Draw
  costs: list[Cost]
  spent: int
  drawn_at: float
  continued: float = 0.0


class Sampling(NamedTuple):
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
  scorer: Scorer
  rows: jax.sharding.Sharding
  key: Callable[[int], jax.Array]
  prompts: int
  group: int
  tells: bool

  def asked(self, batch: dict) -> Prompts:
    """On the devices."""
    return multihost.lay(Prompts(batch["tokens"], batch["length"]), self.rows)

  def judged(self, batch: dict, samples: Samples) -> Draw:
    """Answers that have ended, which each host begins to verify."""
    answers = answer.read(samples, batch, self.tokenizer)
    marks = answer.mark(self.scorer, answers, self.group, samples.lengths)
    return Draw(batch, samples, answers, functools.cache(marks))


def tokens(costs: list[Cost]) -> int:
  """Of all answers, also of those that were discarded."""
  return sum(int(cost.tokens) for cost in costs)


class Fresh:
  """Draws a batch of answers to new questions.

  Args:
    sampling: what drawing takes.
    merge: `groups.merge`, jitted.
    rounds: `data.refill_rounds`.
  """

  arrays = None

  def __init__(self, sampling: Sampling, merge, *, rounds: int):
    self._sampling, self._merge, self._rounds = sampling, merge, rounds

  def __call__(self, params, step: int, now: int | None = None) -> Batch:
    s, key = self._sampling, self._sampling.key(step)

    def draw(number):
      batch = s.curriculum.draw(step)
      own = s.asked(batch), jax.random.fold_in(key, number)
      if not s.tells:
        return s.judged(batch, s.generate(params, *own))
      reader = answer.Reader(batch, s.tokenizer, s.group)
      stream = answer.Stream(s.scorer, reader)
      samples = s.generate(params, *own, tell=stream.tell)
      marks = stream.marks(s.group, samples.lengths)
      return Draw(batch, samples, stream.answers, marks)

    kept, costs = refill.collect(draw, self._merge, rounds=self._rounds)
    drawn_at = step if now is None else now
    return Batch(kept, costs, tokens(costs), float(drawn_at))

  def get_state(self) -> dict:
    """Nothing waits."""
    return {}

  def set_state(self, arrays, state: dict) -> None:
    """Nothing waits."""


class Partial:
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
    self, sampling: Sampling, fresh, choose, regroup, *, budget, shards, spare
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

  def __call__(self, params, step: int, now: int | None = None) -> Batch:
    s, samples = self._sampling, self.arrays
    batch = self._fill(step)
    P, Q, G = s.prompts, self._flight, s.group
    before, R = multihost.fetch(samples.lengths), samples.tokens.shape[1]
    key = s.key(step)
    draw = lambda samples, until: s.generate(
      params, s.asked(batch), key, begun=samples, until=until
    )
    samples = draw(samples, np.minimum(before + self._budget, R))
    ended = self._ended(samples)
    slot_steps = int(samples.slot_steps)
    if (missing := P - ended.sum()) > 0:
      more = np.isin(np.arange(Q), self._oldest(~ended)[:missing]).repeat(G)
      samples = draw(samples, np.where(more, R, 0))
      ended = self._ended(samples)
      slot_steps += int(samples.slot_steps)
    lengths = multihost.fetch(samples.lengths)
    self._at += (lengths - before) * float(step if now is None else now)
    self._stints += lengths > before
    chosen = self._oldest(ended)[:P]
    rows = _rows(chosen, G)
    found = s.judged(
      prompt_batch.pick(batch, chosen), self._choose(samples, chosen)
    )
    drawn = int((lengths - before).sum())
    cost = Cost(found.batch, found.marks, drawn, slot_steps)
    drawn_at = float(self._at[rows].sum() / lengths[rows].sum())
    continued = float((self._stints[rows] > 1).mean())
    stays = ~np.isin(np.arange(Q), chosen)
    self._keep(batch, samples, self._oldest(stays))
    return Batch(found, [cost], drawn, drawn_at, continued)

  def get_state(self) -> dict:
    """JSON: the questions in flight, and when their answers were drawn."""
    return {
      "places": _places(self._batch),
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
    rows = _rows(index, self._sampling.group)
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
    finish = multihost.fetch(samples.finish).reshape(self._flight, -1)
    return (finish != UNFINISHED).all(axis=1)

  def _keep(self, batch, samples, left):
    """Those groups stay, as the oldest; the rest is room for new ones."""
    index = np.full(self._flight, -1, np.int32)
    index[self._places[: len(left)]] = left
    self.arrays = self._regroup(samples, index)
    self._batch = prompt_batch.pick(batch, left) if len(left) else None
    rows = _rows(index, self._sampling.group)
    stays = np.repeat(index >= 0, self._sampling.group)
    self._at = np.where(stays, self._at[rows], 0)
    self._stints = np.where(stays, self._stints[rows], 0)


class Ahead:
  """Gives the batch that was drawn in the last iteration, and draws the next.

  After the last iteration none is drawn: a run that is then made longer draws
  its next batch with the policy that learns from it.

  Args:
    inner: draws.
    sampling: that `inner` draws with.
    nothing: Samples of a batch, to stand in a checkpoint where none wait.
    last: the last iteration.
  """

  def __init__(self, inner, sampling: Sampling, nothing: Samples, *, last: int):
    self._inner, self._sampling = inner, sampling
    self._nothing, self._last, self._ready = nothing, last, None

  def __call__(self, params, step: int) -> Batch:
    ready, spent = self._ready, 0
    if ready is None:
      ready = self._inner(params, step)
      spent = ready.spent
    self._ready = None
    if step < self._last:
      self._ready = self._inner(params, step + 1, now=step)
      spent += self._ready.spent
    return ready._replace(spent=spent)

  @property
  def arrays(self) -> dict:
    """Answers that wait."""
    ready = self._ready.kept.samples if self._ready else self._nothing
    return {"ready": ready, "inner": self._inner.arrays}

  def get_state(self) -> dict:
    """JSON."""
    state = {"inner": self._inner.get_state(), "places": []}
    if self._ready:
      state["places"] = _places(self._ready.kept.batch)
      state["tokens"] = int(self._ready.costs[0].tokens)
      state["slot_steps"] = int(self._ready.costs[0].slot_steps)
      state["drawn_at"] = self._ready.drawn_at
      state["continued"] = self._ready.continued
    return state

  def set_state(self, arrays: dict, state: dict) -> None:
    """Goes to where `arrays` and `get_state` were; verifies anew."""
    self._inner.set_state(arrays["inner"], state["inner"])
    self._ready = None
    if state["places"]:
      batch = self._sampling.curriculum.recall(state["places"])
      kept = self._sampling.judged(batch, arrays["ready"])
      spent = state["tokens"], state["slot_steps"]
      cost = Cost(kept.batch, kept.marks, *spent)
      how = state["drawn_at"], state["continued"]
      self._ready = Batch(kept, [cost], 0, *how)


Source = Fresh | Partial | Ahead


def _rows(groups, group):
  return (groups[:, None] * group + np.arange(group)).ravel()


def _places(batch) -> list[list[int]]:
  if not batch:
    return []
  names = "stage", "part", "index"
  return np.stack([batch[name] for name in names], axis=1).tolist()
