"""Samples become responses, and responses get rewards."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import TextIO

import jax
import numpy as np

from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.pool import (
  PendingRewards,
  RewardPool,
  Rewards,
  too_many,
)
from gspo_jax.rewards.reward import Response
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import (
  FinishedResponse,
  Samples,
  finished_responses,
)
from gspo_jax.sampler.stop_strings import StopStrings, response_text

MAX_REASONS = 3  # for failures, of this host
_TICK = 0.25  # seconds between two looks at how many failed


class ResponseDecoder:
  """Decodes responses and their prompts into the text that rewards read.

  A prompt is decoded as the policy reads it, with its chat template.

  Args:
    batch: P prompts, of a `Curriculum` or of `pipeline.take`.
    tokenizer: of the policy.
    group_size: G.
    stop: the stop strings of the sampler; None: there are none.

  Attributes:
    group_size: as above.
  """

  def __init__(
    self,
    batch: PromptBatch,
    tokenizer: Tokenizer,
    group_size: int,
    stop: StopStrings | None = None,
  ):
    self._batch, self._tokenizer, self._stop = batch, tokenizer, stop
    self.group_size, self._prompts = group_size, {}

  def __call__(self, row: int, finished: FinishedResponse) -> Response:
    """The response of row p * G + g; see `response_text`."""
    p = row // self.group_size
    if p not in self._prompts:
      self._prompts[p] = self._tokenizer.decode(self._batch.ids(p))
    tokens = finished.tokens[: finished.length].tolist()
    problem = self._batch.problems[p]
    return Response(
      self._prompts[p],
      response_text(tokens, finished.stopped, self._tokenizer, self._stop),
      problem.reference,
      finished.length,
      len(finished.tokens),
      problem.columns,
    )


def decode_responses(
  samples: Samples,
  batch: PromptBatch,
  tokenizer: Tokenizer,
  stop: StopStrings | None = None,
) -> dict[int, Response]:
  """The responses of this host's rows, by row; see `ResponseDecoder`.

  `samples` has P * G rows, a group side by side.
  """
  group_size = len(samples.tokens) // len(batch)
  decode = ResponseDecoder(batch, tokenizer, group_size, stop)
  return {
    row: decode(row, response)
    for row, response in finished_responses(samples).items()
  }


class StreamingScorer:
  """Scores responses as they finish, while others are being sampled.

  With a reward that takes groups, a response waits for the rest of its group.

  Attributes:
    responses: the responses that were added, by row.
  """

  def __init__(self, pool: RewardPool, decode: ResponseDecoder):
    self._pool, self._decode = pool, decode
    # A host without responses must have the names of the rewards, too.
    self.responses, self._pending = {}, [pool.submit([])]
    self._rows, self._incomplete = [], {}

  def add(self, finished: Mapping[int, FinishedResponse]) -> None:
    """Begins to score these responses, by row; adds each row once."""
    self.responses |= {row: self._decode(row, x) for row, x in finished.items()}
    rows, size = list(finished), self._decode.group_size
    if self._pool.takes_groups:
      rows = self._complete(rows)
    self._rows += rows
    responses = [self.responses[row] for row in rows]
    self._pending.append(self._pool.submit(responses, size))

  def _complete(self, rows: list[int]) -> list[int]:
    """The rows of the groups that are complete with these rows."""
    complete, size = [], self._decode.group_size
    for row in rows:
      group = self._incomplete.setdefault(row // size, [])
      group.append(row)
      if len(group) == size:
        complete += sorted(self._incomplete.pop(row // size))
    return complete

  def rewards(self, like: jax.Array) -> PendingRewards:
    """The rewards of all responses; see `gathered`. All were added before."""
    size = self._decode.group_size
    return gathered(self._pending, self._rows, size, like)


def score_responses(
  pool: RewardPool,
  responses: Mapping[int, Response],
  group_size: int,
  like: jax.Array,
) -> PendingRewards:
  """Begins to score this host's responses, by row; see `gathered`.

  `responses` are whole groups, in ascending order of their rows.
  """
  pending = pool.submit(list(responses.values()), group_size)
  return gathered([pending], list(responses), group_size, like)


def gathered(
  pending: Sequence[PendingRewards],
  rows: Sequence[int],
  group_size: int,
  like: jax.Array,
) -> PendingRewards:
  """The rewards [P, G] of the responses of all hosts.

  Args:
    pending: of this host's responses, in parts.
    rows: the rows of these responses, 0 to P * G - 1.
    group_size: G.
    like: [P * G], any array with the sharding of the responses.
  """

  def compute() -> Rewards:
    parts = [each.result() for each in pending]

    def gather(values) -> np.ndarray:
      local = dict(zip(rows, itertools.chain(*values), strict=True))
      return multihost.allgather_rows(local, like).reshape(-1, group_size)

    total = gather(each.total for each in parts)
    failed = gather(each.failed for each in parts) > 0
    reasons = itertools.chain(*(each.reasons for each in parts))
    return Rewards(
      total=pay_failures_least(
        total.reshape(-1, 1), failed.ravel(), group_size
      ).reshape(total.shape),
      parts={
        name: gather(each.parts[name] for each in parts)
        for name in parts[0].parts
      },
      failed=failed,
      reasons=tuple(dict.fromkeys(reasons))[:MAX_REASONS],
    )

  calls = [row for each in pending for row in each.calls]
  return PendingRewards(like.size, calls, compute)


def wait_scored(
  pending: Sequence[PendingRewards],
  max_failed: float,
  *,
  label: str,
  size: int = 0,
) -> list[Rewards]:
  """Waits for rewards of all hosts; stops every process if too many failed.

  One host waits no longer once that is certain: a reward that always runs into
  its time limit would cost that limit for each response. Several hosts wait for
  all: each counts its own responses.

  Args:
    pending: from `gathered`.
    max_failed: `reward.max_failed`, the share that may fail.
    label: what was sampled, for the error.
    size: how many responses there can be in all; 0: those of `pending`.

  Raises:
    multihost.AgreedError: more than that share of them failed, or all.
  """
  size = size or sum(each.size for each in pending)
  alone = jax.process_count() == 1
  wrong = lambda count: (
    too_many(count, size, max_failed, label) if alone else ""
  )
  if error := wait_for_calls(pending, wrong, label=label):
    raise multihost.AgreedError(error)
  rewards = [each.result() for each in pending]
  # `failed` is the same on every process; each has its own reasons.
  count = sum(int(each.failed.sum()) for each in rewards)
  if error := too_many(count, size, max_failed, label):
    local = [reason for each in rewards for reason in each.reasons]
    reasons = multihost.allgather_text(local[0] if local else "")
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
  """Waits for the calls of this host, or until so many failed that it is wrong.

  Args:
    pending: rewards that are being computed.
    wrong: number of failed responses -> what is wrong with it; "": nothing.
    label: what was sampled, for the lines that say how far it is.
    file: for these lines; None is stdout.

  Returns:
    What is wrong, with a reason; "": nothing.
  """
  waiting = [row for each in pending for row in each.calls]
  size, failures = len(waiting), []

  def take_ended() -> int:
    """Takes out the responses whose calls have ended; how many they are."""
    nonlocal waiting
    has_ended = [all(call.future.done() for call in row) for row in waiting]
    ended = list(itertools.compress(waiting, has_ended))
    waiting = [
      row for row, out in zip(waiting, has_ended, strict=True) if not out
    ]
    for row in ended:
      failures.extend([x for call in row if (x := call.number().failure)][:1])
    return len(ended)

  done = take_ended()
  progress = Progress(
    f"scoring {label}", size, "responses", done=done, file=file
  )
  with progress:
    while waiting:
      futures.wait([call.future for row in waiting for call in row], _TICK)
      progress.advance(take_ended())
      if error := wrong(len(failures)):
        return f"{error}; the first reason: {failures[0]}"
  return ""


def pay_failures_least(
  rewards_BT: np.ndarray, failed_B: np.ndarray, G: int
) -> np.ndarray:
  """Rewards where a failure pays no better than a wrong response.

  A failed response gets at most 0 for a turn. Its reward-to-go at every turn is
  capped at the lowest of the responses in its group that did not fail, by
  lowering the reward of its last turn.

  Args:
    rewards_BT: of turns, of all hosts; NaN for turns that were not taken. One
      turn without an environment.
    failed_B: whether a response failed.
    G: responses of a group.
  """
  failed_B1, taken_BT = failed_B[:, None], ~np.isnan(rewards_BT)
  kept_BT = np.where(taken_BT & ~failed_B1, rewards_BT, 0)
  to_go_BT = np.cumsum(kept_BT[:, ::-1], axis=1)[:, ::-1]
  # At most 0 where one of the group failed.
  lowest_PT = to_go_BT.reshape(-1, G, rewards_BT.shape[1]).min(1)
  lowest_BT = np.repeat(np.minimum.accumulate(lowest_PT, axis=1), G, axis=0)
  last_B1 = taken_BT.sum(1, keepdims=True) - 1
  is_last_BT = np.arange(rewards_BT.shape[1]) == last_B1
  cap_BT = np.where(is_last_BT, lowest_BT, 0)
  return np.where(failed_B1, np.minimum(rewards_BT, cap_BT), rewards_BT)
