"""From drawn tokens to marks: texts of answers, and what the rewards say."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.rewards.pool import Response, RewardPool, too_many
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import STOPPED, FinishedResponse, Samples

_REASONS = 3  # that a host tells of


class Rewards(NamedTuple):
  """What answers to P problems, G each, earned.

  Attributes:
    total: [P, G] float32, the weighted sum of the parts; 0 where one failed.
    parts: {name of a reward: [P, G] float32}, unweighted.
    failed: [P, G] bool, a reward could not be computed.
    reasons: why not, of a few on this host.
  """

  total: np.ndarray
  parts: dict[str, np.ndarray]
  failed: np.ndarray
  reasons: tuple[str, ...]

  @property
  def correct(self) -> np.ndarray:
    """[P, G], the verdict of the first reward: what accuracy means."""
    return next(iter(self.parts.values()))


class ResponseDecoder:
  """From tokens to what rewards look at, for G answers to each of P prompts.

  Their prompts are what the policy read, a chat template with all its tokens.

  Args:
    batch: P prompts, of `data.prompts` or `data.take`.
    tokenizer: of the policy.
    group: G.
  """

  def __init__(self, batch: dict, tokenizer: Tokenizer, group: int):
    self._batch, self._tokenizer, self._group = batch, tokenizer, group
    self._prompts = {}

  def __call__(self, number: int, ended: FinishedResponse) -> Response:
    """Answer p * G + g, without its stop token."""
    p = number // self._group
    if p not in self._prompts:
      tokens, length = self._batch["tokens"][p], self._batch["length"][p]
      prompt = tokens[len(tokens) - length :].tolist()
      self._prompts[p] = self._tokenizer.decode(prompt)
    tokens = ended.tokens[: ended.length - ended.stopped].tolist()
    return Response(
      self._prompts[p],
      self._tokenizer.decode(tokens),
      self._batch["problems"][p].reference,
      ended.length,
      len(ended.tokens),
    )


def decode_responses(
  samples: Samples, batch: dict, tokenizer: Tokenizer
) -> dict[int, Response]:
  """The answers of this host's rows, by row; arguments as of `Reader`.

  Args:
    samples: P * G rows; the G answers to a prompt stand side by side.
    batch: P prompts.
    tokenizer: of the policy.
  """
  make = ResponseDecoder(
    batch, tokenizer, len(samples.tokens) // len(batch["problems"])
  )
  lengths, finish = (
    multihost.local_rows(samples.lengths),
    multihost.local_rows(samples.finish),
  )
  return {
    i: make(
      i, FinishedResponse(tokens, int(lengths[i]), bool(finish[i] == STOPPED))
    )
    for i, tokens in multihost.local_rows(samples.tokens).items()
  }


class StreamingScorer:
  """Scores the answers that a host is told of, while others are being drawn.

  Attributes:
    answers: by row of the batch, those it has been told of.

  Args:
    scorer: the pool of processes.
    make: a `Reader`.
  """

  def __init__(self, scorer: RewardPool, make: ResponseDecoder):
    self._scorer, self._make = scorer, make
    # An empty one, so that every host knows the names of the rewards.
    self.answers, self._pending = {}, [scorer.submit([])]

  def tell(self, ended: Mapping[int, FinishedResponse]) -> None:
    """Begins to score these answers, of rows that no one told of before."""
    new = {i: self._make(i, e) for i, e in ended.items()}
    self.answers |= new
    self._pending.append(self._scorer.submit(list(new.values())))

  def marks(self, group: int, rows: jax.Array) -> Callable[[], Rewards]:
    """As `mark`, once all answers were told of."""
    return _collector(list(self.answers), self._pending, group, rows)


def score_responses(
  scorer: RewardPool,
  answers: Mapping[int, Response],
  group: int,
  rows: jax.Array,
) -> Callable[[], Rewards]:
  """Begins to score this host's answers; call the result for all hosts' marks.

  Args:
    scorer: the pool of processes.
    answers: from `read`.
    group: G.
    rows: [P * G], any array that has a row for each answer.
  """
  pending = [scorer.submit(list(answers.values()))]
  return _collector(list(answers), pending, group, rows)


def _collector(numbers, pending, group, rows) -> Callable[[], Rewards]:
  """Waits for the scores of the answers of these numbers, and joins them."""

  def collect() -> Rewards:
    scores = [each.result() for each in pending]
    reasons = itertools.chain(*(each.reasons for each in scores))
    parts = {}
    for each in scores:
      for name, part in each.parts.items():
        parts.setdefault(name, []).append(part)

    def join(values):
      own = dict(zip(numbers, itertools.chain(*values), strict=True))
      return multihost.allgather_rows(own, rows).reshape(-1, group)

    return Rewards(
      total=join([each.total for each in scores]),
      parts={name: join(values) for name, values in parts.items()},
      failed=join([each.failed for each in scores]) > 0,
      reasons=tuple(dict.fromkeys(reasons))[:_REASONS],
    )

  return collect


def require_scored(marks: Sequence[Rewards], most: float, *, of: str) -> None:
  """Stops where too many answers could not be scored; for every process.

  Args:
    marks: of all answers.
    most: `reward.max_failed`.
    of: what the answers are of.

  Raises:
    AgreedError: more than that share of them failed, or all.
  """
  failed = np.concatenate([each.failed for each in marks])
  # The same on every process, as `failed` is; the reasons are each one's own.
  if wrong := too_many(failed, most, of=of):
    own = [reason for each in marks for reason in each.reasons]
    reason = next(filter(None, multihost.allgather_text(own[0] if own else "")))
    raise multihost.AgreedError(f"{wrong}; the first reason: {reason}")
