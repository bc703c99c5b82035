"""Samples become responses, and responses get rewards."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import TextIO

import jax
import numpy as np

from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.pool import PendingRewards, RewardPool, Rewards, too_many
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import (
  FinishedResponse,
  Samples,
  finished_responses,
)
from gspo_jax.sampler.stop_strings import StopStrings, response_text

MAX_REASONS = 3  # for failures, of this host
_TICK = 0.25  # seconds between two looks at how many failed


@dataclasses.dataclass(eq=False)
class ResponseDecoder:
  """Decodes prompts and responses into the text that rewards read.

  A prompt has its chat template, as the policy reads it.
  """

  batch: PromptBatch
  tokenizer: Tokenizer
  group_size: int
  stop: StopStrings | None = None
  _prompts: dict[int, str] = dataclasses.field(default_factory=dict)

  def __call__(self, row: int, finished: FinishedResponse) -> Response:
    """The response of row p * G + g; see `response_text`."""
    p = row // self.group_size
    if p not in self._prompts:
      self._prompts[p] = self.tokenizer.decode(self.batch.ids(p))
    tokens = finished.tokens[: finished.length].tolist()
    problem = self.batch.problems[p]
    return Response(
      self._prompts[p],
      response_text(tokens, finished.stopped, self.tokenizer, self.stop),
      problem.reference,
      finished.length,
      len(finished.tokens),
      problem.columns,
      problem,
      int(self.batch.steps[p]),
    )


class Scorer:
  """Scores responses as they finish, while others are being sampled.

  If a reward takes groups, a response waits for the rest of its group.
  """

  def __init__(self, pool: RewardPool, decode: ResponseDecoder):
    self._pool, self._decode = pool, decode
    self.responses: dict[int, Response] = {}  # by row
    # A host without responses needs the names of the rewards, too.
    self._pending = [pool.submit([])]
    self._rows: list[int] = []
    self._incomplete: dict[int, list[int]] = {}  # rows by group

  def add(self, finished: Mapping[int, FinishedResponse]) -> None:
    """Starts to score these responses, by row; add each row once."""
    self.responses |= {row: self._decode(row, x) for row, x in finished.items()}
    rows, size = list(finished), self._decode.group_size
    if self._pool.takes_groups:
      rows = self._complete(rows)
    self._rows += rows
    responses = [self.responses[row] for row in rows]
    self._pending.append(self._pool.submit(responses, size))

  def _complete(self, rows: list[int]) -> list[int]:
    complete, size = [], self._decode.group_size
    for row in rows:
      group = self._incomplete.setdefault(row // size, [])
      group.append(row)
      if len(group) == size:
        complete += sorted(self._incomplete.pop(row // size))
    return complete

  def scored(self, samples: Samples) -> ScoredSamples:
    """The samples with the rewards of all hosts, after all were added.

    A response may have moved to another host. Groups that no host got whole are
    scored by the host of their rows.
    """
    size = samples.lengths.size
    if self._pool.takes_groups and jax.process_count() > 1:
      scored = multihost.allgather_rows(dict.fromkeys(self._rows, 1), size)
      self._incomplete.clear()
      self.add(
        {
          row: response
          for row, response in finished_responses(samples).items()
          if not scored[row]
        }
      )
    calls = [row for part in self._pending for row in part.calls]
    rewards = PendingRewards(size, calls, lambda: self._gathered(size))
    return ScoredSamples(self._decode.batch, samples, self.responses, rewards)

  def _gathered(self, size: int) -> Rewards:
    """The rewards [P, G] of the P * G = `size` responses of all hosts."""
    parts = [part.result() for part in self._pending]
    group_size = self._decode.group_size

    def gather(values) -> np.ndarray:
      local = dict(zip(self._rows, itertools.chain(*values), strict=True))
      return multihost.allgather_rows(local, size).reshape(-1, group_size)

    names = parts[0].parts
    reasons = itertools.chain(*(part.reasons for part in parts))
    rewards = Rewards(
      gather(part.total for part in parts),
      {name: gather(part.parts[name] for part in parts) for name in names},
      gather(part.failed for part in parts) > 0,
      tuple(dict.fromkeys(reasons)),
    )
    if self._pool.model:
      rewards = self._pool.add_model(rewards, self.responses)
    total, failed = rewards.total, rewards.failed
    paid = pay_failures_least(total.reshape(-1, 1), failed.ravel(), group_size)
    return rewards._replace(
      total=paid.reshape(total.shape), reasons=rewards.reasons[:MAX_REASONS]
    )


def wait_scored(
  pending: Sequence[PendingRewards],
  max_failed: float,
  *,
  label: str,
  size: int = 0,
) -> list[Rewards]:
  """Waits for all hosts' rewards; stops every process if too many failed.

  One host stops as soon as too many have failed: a reward that always reaches
  its time limit would cost that time for each response. Several hosts wait for
  all, because each counts only its responses.

  `pending` are of all hosts. `max_failed` is the share of the responses
  that may fail, but never all. `label` says in the error what was sampled.
  `size` is the most responses in all; 0: as many as in `pending`. Raises
  `multihost.AgreedError` if more failed.
  """
  size = size or sum(part.size for part in pending)
  alone = jax.process_count() == 1
  wrong = lambda count: (
    too_many(count, size, max_failed, label) if alone else ""
  )
  if error := wait_for_calls(pending, wrong, label=label):
    raise multihost.AgreedError(error)
  rewards = [part.result() for part in pending]
  # `failed` is the same on every process; the reasons differ.
  count = sum(int(part.failed.sum()) for part in rewards)
  if error := too_many(count, size, max_failed, label):
    local = [reason for part in rewards for reason in part.reasons]
    reasons = multihost.allgather_json(local[0] if local else "")
    reason = next(filter(None, reasons))
    raise multihost.AgreedError(f"{error}; the first reason: {reason}")
  return rewards


def wait_for_calls(
  pending: Sequence[PendingRewards],
  wrong: Callable[[int], str],
  *,
  label: str,
  file: TextIO | None = None,
) -> str:
  """Waits for this host's calls; stops with an error text if too many fail.

  `wrong` gives the error text for a count of failures, "" for none. The
  returned text has a reason added. Progress is printed to `file` (None: stdout)
  with the label.
  """
  waiting = [row for part in pending for row in part.calls]
  size, failures = len(waiting), []

  def take_ended() -> int:
    nonlocal waiting
    before, waiting = waiting, []
    for row in before:
      if all(call.has_ended for call in row):
        failures.extend([x for call in row if (x := call.failure())][:1])
      else:
        waiting.append(row)
    return len(before) - len(waiting)

  done = take_ended()
  progress = Progress(
    f"scoring {label}", size, "responses", done=done, file=file
  )
  with progress:
    while waiting:
      calls = {call.started.done for row in waiting for call in row}
      futures.wait(calls, _TICK)
      progress.advance(take_ended())
      if error := wrong(len(failures)):
        reason = next(iter(failures), "see those of earlier batches")
        return f"{error}; the first reason: {reason}"
  return ""


def rewards_apart(rewards: Rewards, weights: Sequence[float]) -> np.ndarray:
  """[P * G, N], each reward unweighted; NaN where it is left out.

  A failed response gets of each reward what `pay_failures_least` gives; the
  least pay is the highest number if the weight is negative.
  """
  failed, G = rewards.failed.ravel(), rewards.failed.shape[1]
  paid = [
    sign * pay_failures_least(sign * part.reshape(-1, 1), failed, G)
    for sign, part in zip(np.sign(weights), rewards.parts.values(), strict=True)
  ]
  return np.concatenate(paid, axis=1, dtype=np.float32)


def pay_failures_least(
  rewards_BN: np.ndarray, failed_B: np.ndarray, G: int
) -> np.ndarray:
  """Rewards where a failure pays no better than a wrong response.

  A failed response gets at most 0 for a turn. Its reward-to-go at every turn is
  at most the lowest of its group's successful responses; the reward of its last
  turn is lowered for this. B is of all hosts; N counts turns (1 without an
  environment), NaN where a turn was not taken.
  """
  failed_B1, taken_BN = failed_B[:, None], ~np.isnan(rewards_BN)
  kept_BN = np.where(taken_BN & ~failed_B1, rewards_BN, 0)
  to_go_BN = np.cumsum(kept_BN[:, ::-1], axis=1)[:, ::-1]
  # At most 0 where one of the group failed.
  lowest_PN = to_go_BN.reshape(-1, G, rewards_BN.shape[1]).min(1)
  lowest_BN = np.repeat(np.minimum.accumulate(lowest_PN, axis=1), G, axis=0)
  last_B1 = taken_BN.sum(1, keepdims=True) - 1
  is_last_BN = np.arange(rewards_BN.shape[1]) == last_B1
  cap_BN = np.where(is_last_BN, lowest_BN, 0)
  return np.where(failed_B1, np.minimum(rewards_BN, cap_BN), rewards_BN)
