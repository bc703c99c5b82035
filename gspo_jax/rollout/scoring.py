"""Samples become responses, and responses get rewards."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple, TextIO

import jax
import numpy as np

from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.pool import Response, RewardPool, Submission, too_many
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import STOPPED, FinishedResponse, Samples
from gspo_jax.sampler.stop_strings import StopStrings, response_text

_MAX_REASONS = 3  # for failures, of this host
_TICK = 0.25  # seconds between two looks at how many failed


class Rewards(NamedTuple):
  """The rewards of P * G responses.

  Attributes:
    total: [P, G] float32, the weighted sum of the parts; see
      `pay_failures_least` where one failed.
    parts: {name of a reward: [P, G] float32}, unweighted.
    failed: [P, G] bool, whether a reward could not be computed.
    reasons: why, for a few responses of this host.
  """

  total: np.ndarray
  parts: dict[str, np.ndarray]
  failed: np.ndarray
  reasons: tuple[str, ...]

  @property
  def first(self) -> np.ndarray:
    """[P, G], the first reward, of which evaluation reports."""
    return next(iter(self.parts.values()))

  @property
  def mixed_groups(self) -> np.ndarray:
    """[P] bool, whether the rewards of a group differ."""
    return np.ptp(self.total, axis=1) > 0


class PendingRewards:
  """Rewards that the reward pools of all hosts are computing.

  Args:
    rows: this host's rows, in the order of the scores.
    scores: `rewards.pool.Pending`, the scores of these rows in parts.
    group_size: G.
    like: [P * G], any array with the sharding of the responses.

  Attributes:
    size: P * G.
    scores: of this host.
  """

  def __init__(self, rows, scores, group_size: int, like: jax.Array):
    self._rows, self.scores = rows, scores
    self._group_size, self._like = group_size, like
    self.size = like.size
    self._rewards: Rewards | None = None

  def result(self) -> Rewards:
    """Waits for the rewards of all hosts; call it on every host."""
    if self._rewards is None:
      self._rewards = self._compute()
    return self._rewards

  def _compute(self) -> Rewards:
    scores = [each.result() for each in self.scores]
    reasons = itertools.chain(*(each.reasons for each in scores))
    parts = {}
    for each in scores:
      for name, part in each.parts.items():
        parts.setdefault(name, []).append(part)
    total = self._gather([each.total for each in scores])
    failed = self._gather([each.failed for each in scores]) > 0
    paid = pay_failures_least(
      total.reshape(-1, 1), failed.ravel(), self._group_size
    )
    return Rewards(
      total=paid.reshape(total.shape),
      parts={name: self._gather(part) for name, part in parts.items()},
      failed=failed,
      reasons=tuple(dict.fromkeys(reasons))[:_MAX_REASONS],
    )

  def _gather(self, values) -> np.ndarray:
    """[P, G], the values of all hosts."""
    local = dict(zip(self._rows, itertools.chain(*values), strict=True))
    every = multihost.allgather_rows(local, self._like)
    return every.reshape(-1, self._group_size)


class ComputedRewards(NamedTuple):
  """Computed rewards, with the interface of `PendingRewards`."""

  rewards: Rewards

  @property
  def size(self) -> int:
    """P * G."""
    return self.rewards.total.size

  def result(self) -> Rewards:
    """The rewards."""
    return self.rewards


class ResponseDecoder:
  """Decodes responses and their prompts into the text that rewards read.

  A prompt is decoded as the policy reads it, with its chat template.

  Attributes:
    group_size: G.

  Args:
    batch: P prompts, of a `Curriculum` or of `pipeline.take`.
    tokenizer: of the policy.
    group_size: G.
    stop: the stop strings of the sampler; None: there are none.
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
  """The responses of this host's rows, by row.

  Args:
    samples: P * G rows, a group side by side.
    batch: P prompts, as for `ResponseDecoder`.
    tokenizer: of the policy.
    stop: the stop strings of the sampler; None: there are none.
  """
  group_size = len(samples.tokens) // len(batch)
  decode = ResponseDecoder(batch, tokenizer, group_size, stop)
  lengths = multihost.local_rows(samples.lengths)
  finish = multihost.local_rows(samples.finish)
  return {
    row: decode(
      row,
      FinishedResponse(tokens, int(lengths[row]), bool(finish[row] == STOPPED)),
    )
    for row, tokens in multihost.local_rows(samples.tokens).items()
  }


class StreamingScorer:
  """Scores responses as they finish, while others are being sampled.

  With a reward that takes groups, a response waits for the rest of its group.

  Attributes:
    responses: those that were added, by row.

  Args:
    pool: computes rewards.
    decode: decodes the tokens of a response.
  """

  def __init__(self, pool: RewardPool, decode: ResponseDecoder):
    self._pool, self._decode = pool, decode
    # A host without responses must have the names of the rewards, too.
    self.responses, self._scores = {}, [pool.submit([])]
    self._rows, self._incomplete = [], {}

  def add(self, finished: Mapping[int, FinishedResponse]) -> None:
    """Begins to score these responses, by row; adds each row once."""
    self.responses |= {row: self._decode(row, x) for row, x in finished.items()}
    rows, size = list(finished), self._decode.group_size
    if self._pool.takes_groups:
      rows = self._complete(rows)
    self._rows += rows
    responses = [self.responses[row] for row in rows]
    self._scores.append(self._pool.submit(responses, size))

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
    """The rewards of all responses; call it when all were added."""
    size = self._decode.group_size
    return PendingRewards(self._rows, self._scores, size, like)


def score_responses(
  pool: RewardPool,
  responses: Mapping[int, Response],
  group_size: int,
  like: jax.Array,
) -> PendingRewards:
  """Begins to score this host's responses, by row; see `PendingRewards`.

  Args:
    pool: computes rewards.
    responses: whole groups, in ascending order of their rows.
    group_size: G.
    like: [P * G], any array with the sharding of the responses.
  """
  scores = [pool.submit(list(responses.values()), group_size)]
  return PendingRewards(list(responses), scores, group_size, like)


def wait_scored(
  pending: Sequence[PendingRewards | ComputedRewards],
  most: float,
  *,
  of: str,
  size: int = 0,
) -> list[Rewards]:
  """Waits for rewards; stops every process if too many of them failed.

  One host waits no longer once that is certain: a reward that always runs into
  its time limit would cost that limit for each response. Several hosts wait for
  all: each counts its own responses.

  Args:
    pending: rewards of responses.
    most: `reward.max_failed`, the share that may fail.
    of: what was sampled, for the error.
    size: how many responses there can be in all; 0: those of `pending`.

  Raises:
    multihost.AgreedError: more than that share of them failed, or all.
  """
  size = size or sum(each.size for each in pending)
  started = [each for each in pending if isinstance(each, PendingRewards)]
  alone = jax.process_count() == 1
  stop = lambda count: too_many(count, size, most, of=of) if alone else ""
  submissions = [x.submission for each in started for x in each.scores]
  if wrong := wait_for_scores(submissions, stop, of=of):
    raise multihost.AgreedError(wrong)
  rewards = [each.result() for each in pending]
  # `failed` is the same on every process; each has its own reasons.
  count = sum(int(each.failed.sum()) for each in rewards)
  if wrong := too_many(count, size, most, of=of):
    local = [reason for each in rewards for reason in each.reasons]
    every = multihost.allgather_text(local[0] if local else "")
    reason = next(filter(None, every))
    raise multihost.AgreedError(f"{wrong}; the first reason: {reason}")
  return rewards


def wait_for_scores(
  submissions: Sequence[Submission],
  wrong: Callable[[int], str],
  *,
  of: str,
  file: TextIO | None = None,
) -> str:
  """Waits until all is scored on this host, or so many failed that it is wrong.

  Args:
    submissions: responses of this host.
    wrong: number of failed responses -> what is wrong with it; "": nothing.
    of: what was sampled, for the lines that say how far it is.
    file: for these lines; None is stdout.

  Returns:
    What is wrong, with a reason; "": nothing.
  """
  count = lambda: sum(each.scored for each in submissions)
  done, size = count(), sum(each.size for each in submissions)
  progress = Progress(f"scoring {of}", size, "responses", done=done, file=file)
  with progress:
    while waiting := [x.future for x in submissions if not x.future.done()]:
      futures.wait(waiting, _TICK)
      before, done = done, count()
      progress.advance(done - before)
      failures = [why for each in submissions for why in each.failures]
      if found := wrong(len(failures)):
        return f"{found}; the first reason: {failures[0]}"
  return ""


def pay_failures_least(
  rewards_BT: np.ndarray, failed_B: np.ndarray, G: int
) -> np.ndarray:
  """Rewards where a failure pays no better than a wrong response.

  A failed response gets at most 0 for a turn. From each of its turns on it gets
  no more than any response of its group that did not fail: the reward of its
  last turn is lowered.

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
  least_PT = to_go_BT.reshape(-1, G, rewards_BT.shape[1]).min(1)
  least_BT = np.repeat(np.minimum.accumulate(least_PT, axis=1), G, axis=0)
  last_B1 = taken_BT.sum(1, keepdims=True) - 1
  is_last_BT = np.arange(rewards_BT.shape[1]) == last_B1
  most_BT = np.where(is_last_BT, least_BT, 0)
  return np.where(failed_B1, np.minimum(rewards_BT, most_BT), rewards_BT)
