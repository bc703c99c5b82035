"""An exam: a set's questions are put to somebody, and the answers judged."""

from collections.abc import Callable
from typing import NamedTuple

from absl import logging

from gspo_jax.question_sets import Questions
from gspo_jax.rewards.pool import Answer, Scorer


class Replies(NamedTuple):
  """Answers to some questions, n each, those to a question side by side.

  Attributes:
    texts: without stop tokens.
    tokens: how many each has, the stop token included.
    truncated: whether each was cut at `limit`.
    limit: tokens an answer may have.
  """

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

  Args:
    respond: answers.
    questions: of one set; each gets `questions.samples` answers.
    at_once: questions in a batch; the last one may have fewer.
    scorer: judges; None on processes that only help to draw.
    keep: is given each batch as rows for answers.jsonl.
    begin: batches that are done already.
  """
  count = len(questions.problems)
  for number in range(begin, -(-count // at_once)):
    index = range(number * at_once, min((number + 1) * at_once, count))
    asked = [questions.problems[i].question for i in index]
    replies = respond(asked, questions.samples, number)
    if scorer is not None:
      keep(_judge(scorer, questions, index, replies))


def _judge(scorer, questions, index, replies) -> list[dict]:
  whose = [(i, sample) for i in index for sample in range(questions.samples)]
  problems = [questions.problems[i] for i, _ in whose]
  drawn = zip(problems, replies.texts, replies.tokens, strict=True)
  answers = [
    Answer(p.question, text, p.answer, tokens, replies.limit)
    for p, text, tokens in drawn
  ]
  scores = scorer.submit(answers).result()
  for reason in scores.reasons:
    logging.warning("%s: a reward failed: %s", questions.name, reason)
  return [
    {
      "set": questions.name,
      "id": questions.ids[i],
      "sample": sample,
      "question": answer.prompt,
      "text": answer.text,
      "reference": answer.reference,
      "score": float(score),
      "failed": bool(failed),
      "tokens": int(answer.tokens),
      "finish": "truncated" if truncated else "stopped",
    }
    for (i, sample), answer, score, failed, truncated in zip(
      whose,
      answers,
      scores.total,
      scores.failed,
      replies.truncated,
      strict=True,
    )
  ]
