"""An exam: a set's questions are put to somebody, and the answers judged."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from absl import logging

from gspo_jax.question_sets import Questions
from gspo_jax.rewards.pool import Answer, Scorer

# Characters of a reference that are written beside each answer. The tests of a
# program may have millions: they stand in the file of the questions, by `id`.
_LONGEST = 2000


class Replies(NamedTuple):
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
Respond = Callable[[list[str], int, int], Replies]


def evaluate_set(
  respond: Respond,
  questions: Questions,
  *,
  at_once: int,
  scorer: Scorer | None,
  keep: Callable[[list[dict]], None],
  begin: int = 0,
) -> None:
  """Puts a set's questions, `at_once` in a batch, and judges the answers.

  Those of a batch are judged while the next one is answered.

  Args:
    respond: answers.
    questions: of one set; each gets `questions.samples` answers.
    at_once: questions in a batch; the last one may have fewer.
    scorer: judges; None on processes that only help to draw.
    keep: is given each batch as rows for answers.jsonl.
    begin: batches that are done already.
  """
  count = len(questions.problems)
  judged = None
  for number in range(begin, -(-count // at_once)):
    index = range(number * at_once, min((number + 1) * at_once, count))
    asked = [questions.problems[i].question for i in index]
    replies = respond(asked, questions.samples, number)
    if judged is not None:
      keep(judged())
    if scorer is not None:
      judged = _judge(scorer, questions, index, replies)
  if judged is not None:
    keep(judged())


def _judge(scorer, questions, index, replies) -> Callable[[], list[dict]]:
  """Begins to judge; call the result for the rows."""
  read = dict(zip(index, replies.prompts, strict=True))
  whose = [(i, sample) for i in index for sample in range(questions.samples)]
  drawn = zip(whose, replies.texts, replies.tokens, strict=True)
  answers = [
    Answer(read[i], text, questions.problems[i].answer, tokens, replies.limit)
    for (i, _), text, tokens in drawn
  ]
  pending = scorer.submit(answers)
  return functools.partial(
    _rows, pending, questions, whose, answers, replies.truncated
  )


def _rows(pending, questions, whose, answers, cut) -> list[dict]:
  scores = pending.result()
  for reason in scores.reasons:
    logging.warning("%s: a reward failed: %s", questions.name, reason)
  return [
    {
      "set": questions.name,
      "id": questions.ids[i],
      "sample": sample,
      "question": questions.problems[i].question,
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


def _told(reference: str) -> str | None:
  return reference if len(reference) <= _LONGEST else None
