"""An exam: a set's questions are put to somebody, and the answers judged."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from gspo_jax.evaluate.benchmarks import Benchmark
from gspo_jax.rewards.pool import Response, RewardPool

# Characters of a reference that are written beside each answer. The tests of a
# program may have millions: they stand in the file of the questions, by `id`.
_LONGEST = 2000


class Responses(NamedTuple):
  """Answers to some questions, n each, those to a question side by side.

  Attributes:
    prompts: what was read, of each question.
    texts: without stop tokens.
    tokens: how many each has, the stop token included.
    truncated: whether each was cut at `limit`.
    limit: tokens an answer may have.
  """

  prompts: list[str]
  texts: list[str]
  tokens: list[int]
  truncated: list[bool]
  limit: int


# (questions, answers to each, a number of this batch's own) -> Replies.
Respond = Callable[[list[str], int, int], Responses]


def evaluate_benchmark(
  respond: Respond,
  questions: Benchmark,
  *,
  at_once: int,
  scorer: RewardPool | None,
  keep: Callable[[list[dict], tuple[str, ...]], None],
  begin: int = 0,
  together: Callable[[Callable[[], None]], None] = lambda work: work(),
) -> None:
  """Puts a set's questions, `at_once` in a batch, and judges the answers.

  Those of a batch are judged while the next one is answered.

  Args:
    respond: answers.
    questions: of one set; each gets `questions.samples` answers.
    at_once: questions in a batch; the last one may have fewer.
    scorer: judges; None on processes that only help to draw.
    keep: is given each batch: rows for answers.jsonl, and why a few rewards
      failed.
    begin: batches that are done already.
    together: calls what keeps a batch, on every process: where there are
      several, `run_on_all`, so that all of them stop at an error of one.
  """
  count = len(questions.problems)
  judged = None

  def settle():
    if judged is not None:
      keep(*judged())

  for number in range(begin, -(-count // at_once)):
    index = range(number * at_once, min((number + 1) * at_once, count))
    asked = [questions.problems[i].text for i in index]
    replies = respond(asked, questions.samples, number)
    together(settle)
    if scorer is not None:
      judged = _judge(scorer, questions, index, replies)
  together(settle)


def _judge(scorer, questions, index, replies) -> Callable[[], tuple]:
  """Begins to judge; call the result for what `keep` is given."""
  read = dict(zip(index, replies.prompts, strict=True))
  whose = [(i, sample) for i in index for sample in range(questions.samples)]
  drawn = zip(whose, replies.texts, replies.tokens, strict=True)
  answers = [
    Response(
      read[i], text, questions.problems[i].reference, tokens, replies.limit
    )
    for (i, _), text, tokens in drawn
  ]
  pending = scorer.submit(answers)
  return functools.partial(
    _rows, pending, questions, whose, answers, replies.truncated
  )


def _rows(pending, questions, whose, answers, cut):
  scores = pending.result()
  rows = [
    {
      "set": questions.name,
      "id": questions.ids[i],
      "sample": sample,
      "question": questions.problems[i].text,
      "text": answer.text,
      "reference": _told(answer.reference),
      "score": float(score),
      "failed": bool(failed),
      "tokens": int(answer.tokens),
      "finish": "truncated" if truncated else "stopped",
    }
    for (i, sample), answer, score, failed, truncated in zip(
      whose, answers, scores.total, scores.failed, cut, strict=True
    )
  ]
  return rows, scores.reasons


def _told(reference: str) -> str | None:
  return reference if len(reference) <= _LONGEST else None
