"""Worker processes that compute rewards while the caller goes on.

If a reward raises, hangs, dies, runs out of memory or returns no finite number,
only its response or group is marked as failed: its total is the weighted sum of
its other rewards, at most 0. `too_many` decides whether the caller should stop.
A reward that returns None is left out of its response's sum; a response whose
rewards all return None has failed.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.rewards import reward
from gspo_jax.rewards.reward import EXAMPLE, Needs, Outcome, Response
from gspo_jax.runtime import errors
from gspo_jax.workers.pool import Call, Pool, Started

MODEL = "model:"  # and a folder: the name of a reward model
_MAX_REASONS = 3  # for failures


class Rewards(NamedTuple):
  """The rewards of responses: [N] as submitted, or a batch's [P, G]."""

  # float32, the weighted sum of `parts`; at most 0 where `failed`, so that a
  # failure pays no better than a wrong response. In a batch
  # `rollout.scoring.pay_failures_least` may lower it further.
  total: np.ndarray
  # By the reward's name without arguments: float32, unweighted; 0 if it failed,
  # NaN if the reward returned None, which leaves it out.
  parts: dict[str, np.ndarray]
  failed: np.ndarray  # bool, whether a reward failed
  reasons: tuple[str, ...] = ()  # for up to 3 failures on this host

  @property
  def first(self) -> np.ndarray:
    """The first reward that is not left out; 0 if all are.

    A failure is no better than the worst response of its group.
    """
    parts = np.stack([*self.parts.values()])
    place = np.argmax(~np.isnan(parts), axis=0)
    first = np.nan_to_num(np.take_along_axis(parts, place[None], axis=0)[0])
    has_failed = self.failed & (first == 0)
    scored = np.where(self.failed, 0, first)
    worst = scored.min(axis=-1, keepdims=True, initial=0)
    return np.where(has_failed, worst, first)

  @property
  def mixed_groups(self) -> np.ndarray:
    """[P] bool, whether the rewards of a group differ."""
    return np.ptp(self.total, axis=1) > 0


class PendingCall(NamedTuple):
  reward: str  # its name
  started: Started
  place: int  # of the call in `started`
  index: int  # of the response in the `reward.Outcome`s that the call returns

  @property
  def has_ended(self) -> bool:
    return self.started.has_ended(self.place)

  def outcome(self) -> Outcome:
    results = self.started.results
    done = results[self.place] or self.started.wait()[self.place]
    value, failure = done.value, done.failure
    return Outcome(None, failure) if failure else Outcome(*value[self.index])

  def failure(self) -> str:
    """Waits; returns why the reward failed, or ""."""
    failure = self.outcome().failure
    return failure and f"{self.reward}: {failure}"


class PendingRewards:
  def __init__(
    self,
    size: int,  # responses, of all hosts if these rewards are
    calls: Sequence[Sequence[PendingCall]],  # [responses of this host][rewards]
    compute: Callable[[], Rewards],  # waits for the calls; called once
  ):
    self.size, self.calls = size, calls
    # Waits for the rewards; if they are of all hosts, call it on each.
    self.result = functools.cache(compute)

  @classmethod
  def computed(cls, rewards: Rewards) -> "PendingRewards":
    return cls(rewards.total.size, (), lambda: rewards)


class RewardPool(Pool):
  """Worker processes that call rewards; a context manager.

  At the start each reward is called on the examples, to check that it returns a
  number. It may raise there: an example may lack the form that the reward
  expects of a response. An example's problem needs the columns of all others.

  `reward.named` reads the names; `weights` are of each in the total; `limits`
  are a `Pool`'s, where a call is one reward on a response or a group.

  With `model`, one name begins with `MODEL`: no worker computes this reward.
  `add_model` adds it; `model` gives the rewards [N] of responses of all hosts.
  `workdir` is the run's folder, for rewards that take it.
  """

  def __init__(
    self,
    names: Sequence[str],
    weights: Sequence[float],
    *,
    examples: Sequence[Response] = (EXAMPLE,),
    model: Callable[[Mapping[int, Response], int], Rewards] | None = None,
    workdir: str = "",
    **limits,
  ):
    self._all = tuple(name.partition(":")[0] for name in names)
    self._weights, self.model = tuple(weights), model
    self._check_names()
    rules = tuple(x for x in names if not (model and x.startswith(MODEL)))
    self.names = tuple(name.partition(":")[0] for name in rules)
    load = functools.partial(reward.load, rules, workdir)
    super().__init__(f"rewards {', '.join(names)}", load, **limits)
    self._needs = [Needs(*each) for each in self.facts]
    # Whether some reward takes all responses to a problem at once.
    self.takes_groups = any(need.group for need in self._needs)
    try:
      self._try_examples(examples)
    except BaseException:
      self.close()
      raise

  def submit(
    self, responses: Sequence[Response], group_size: int = 1
  ) -> PendingRewards:
    if self.takes_groups and len(responses) % group_size:
      raise ValueError(f"{len(responses)} responses in groups of {group_size}")
    # Columns may be large, as tests of programs are.
    unread = {"problem": None}
    if not any(need.reads_columns for need in self._needs):
      unread["columns"] = {}
    responses = [response._replace(**unread) for response in responses]
    calls = []
    for i, need in enumerate(self._needs):
      size = group_size if need.group else 1
      calls += [
        Call(i, responses[k : k + size]) for k in range(0, len(responses), size)
      ]
    started = self.start(calls)
    by_reward = {name: [] for name in self.names}
    for place, call in enumerate(calls):
      name = self.names[call.task]
      by_reward[name] += [
        PendingCall(name, started, place, k) for k in range(len(call.request))
      ]
    rows = list(zip(*by_reward.values(), strict=True))
    rows = rows or [()] * len(responses)  # a reward model alone
    return PendingRewards(len(rows), rows, lambda: self._rewards(rows))

  def _rewards(self, rows: Sequence[Sequence[PendingCall]]) -> Rewards:
    calls = [call for row in rows for call in row]
    outcomes = [call.outcome() for call in calls]
    shape = len(rows), len(self.names)
    parts = np.array([outcome.part for outcome in outcomes], np.float64)
    parts = parts.reshape(shape).astype(np.float32)
    failed = np.array([bool(outcome.failure) for outcome in outcomes], bool)
    reasons = [calls[i].failure() for i in np.flatnonzero(failed)]
    failed = failed.reshape(shape).any(1)
    unscored = np.isnan(parts).all(1)
    if self.model is None and unscored.any():
      reasons.append("no reward: all of them returned None")
      failed |= unscored
    parts = dict(zip(self.names, parts.T, strict=True))
    return Rewards(
      total=self._total(parts, failed),
      parts=parts,
      failed=failed,
      reasons=tuple(dict.fromkeys(reasons))[:_MAX_REASONS],
    )

  def _total(self, parts, failed: np.ndarray) -> np.ndarray:
    total = np.zeros(failed.shape)
    for name, weight in zip(self._all, self._weights, strict=True):
      if name in parts:
        total += np.nan_to_num(parts[name].astype(np.float64)) * weight
    return np.float32(np.where(failed, np.minimum(total, 0), total))

  def add_model(
    self, rewards: Rewards, responses: Mapping[int, Response]
  ) -> Rewards:
    """The rewards [P, G] of all hosts, with the model's; call it on each host.

    `responses` are this host's, by row p * G + g.
    """
    shape = rewards.total.shape
    scored = self.model(responses, rewards.total.size)
    parts = rewards.parts | {
      name: part.reshape(shape) for name, part in scored.parts.items()
    }
    failed = rewards.failed | scored.failed.reshape(shape)
    return Rewards(
      self._total(parts, failed),
      {name: parts[name] for name in self._all},
      failed,
      rewards.reasons + scored.reasons,
    )

  def _check_names(self) -> None:
    names, weights = self._all, self._weights
    if not names or len(names) != len(weights):
      raise errors.UserError(
        f"expected a weight for each of one or more rewards, got {names=} and "
        f"{weights=}"
      )
    if len(set(names)) < len(names):
      raise errors.UserError(f"expected each reward once, got {names=}")
    if not all(math.isfinite(weight) for weight in weights):
      raise errors.UserError(f"expected finite weights, got {weights=}")

  def _try_examples(self, examples) -> None:
    for name, need in zip(self.names, self._needs, strict=True):
      for example in examples:
        if missing := reward.missing_column(need.columns, example.columns):
          raise errors.UserError(
            f"reward {name!r}: {missing} (the problem {example.prompt[:40]!r}; "
            f"or set it, '{name}:{need.columns[0]}=VALUE')"
          )
    size = 2 if self.takes_groups else 1
    same = [example for example in examples for _ in range(size)]
    for row in self.submit(same, size).calls:
      for call in row:
        if (outcome := call.outcome()).is_wrong_type:
          raise errors.UserError(
            f"reward {call.reward!r}: {outcome.failure} for an example response"
          )


def too_many(count: int, size: int, max_failed: float, label: str) -> str:
  """The error if `count` of `size` failures are too many; else "".

  `max_failed` is the share that may fail; at least one response must succeed.
  """
  allowed = min(int(max_failed * size + 1e-6), size - 1)
  if count <= allowed:
    return ""
  return (
    f"{label}: {count} of {size} responses could not be scored, expected at "
    f"most {allowed} (reward.max_failed={max_failed:g})"
  )
