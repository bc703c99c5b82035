"""Answers meet the questions they were given to: on stubs, and all of GSM8K."""

import itertools
import json
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pytest
from repository import ROOT

from gspo_jax.evaluate import benchmarks
from gspo_jax.evaluate.judge import Responses, evaluate_benchmark
from gspo_jax.evaluate.summary import brief, summarize
from gspo_jax.rewards.pool import RewardPool, Scores

GSM8K = ROOT.parent / "shared/data/gsm8k/test.jsonl"


class Exact:
  """A scorer: is the answer the reference? And some fail."""

  def __init__(self):
    self.answers, self.told = [], []

  def submit(self, answers):
    self.answers += answers
    self.told.append("submit")
    right = np.float32([a.text == a.reference for a in answers])
    failed = np.array(["fail" in a.text for a in answers])
    reasons = ("why",) * int(failed.any())
    return Late(self.told, Scores(right, {"exact": right}, failed, reasons))


class Late(NamedTuple):
  told: list
  scores: Scores

  def result(self):
    self.told.append("result")
    return self.scores


class Parrot:
  """Answers "1", "2", ... to the questions "1", "2", ..., but not each time."""

  def __init__(self):
    self.asked = []

  def __call__(self, questions, samples, number):
    self.asked.append((questions, samples, number))
    texts = [
      question if sample % 2 == 0 else f"fail {sample}"
      for question in questions
      for sample in range(samples)
    ]
    tokens = [10 * int(q) + s for q in questions for s in range(samples)]
    read = [f"{question}<think>" for question in questions]
    return Responses(read, texts, tokens, [t % 10 == 1 for t in tokens], 99)


@pytest.fixture
def five(tmp_path):
  path = tmp_path / "five.jsonl"
  rows = [{"question": i, "answer": i, "id": f"no {i}"} for i in range(1, 6)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  found = benchmarks.read("mine", str(path), reward="exact")
  return found._replace(samples=3)


@pytest.mark.parametrize("at_once", [1, 2, 5, 9])
def test_each_answer_keeps_to_its_question(five, at_once):
  parrot, scorer, batches = Parrot(), Exact(), []
  evaluate_benchmark(
    parrot,
    five,
    at_once=at_once,
    scorer=scorer,
    keep=lambda rows, _: batches.append(rows),
  )
  assert len(batches) == len(parrot.asked) == -(-5 // at_once)
  assert [number for *_, number in parrot.asked] == list(range(len(batches)))
  rows = list(itertools.chain(*batches))
  assert [(r["id"], r["sample"]) for r in rows] == [
    (f"no {i}", s) for i in range(1, 6) for s in range(3)
  ]
  for r in rows:
    number = int(r["id"][3:])
    assert r["question"] == r["reference"] == str(number)
    assert r["tokens"] == 10 * number + r["sample"]
    assert r["score"] == (r["sample"] != 1)
    assert r["failed"] == (r["sample"] == 1)
    assert r["finish"] == ("truncated" if r["sample"] == 1 else "stopped")
    assert r["set"] == "mine"
  assert scorer.answers[-1].limit == 99
  json.dumps(rows)
  # The judge sees what the policy read; the file tells the question.
  assert [a.prompt for a in scorer.answers] == [
    f"{r['question']}<think>" for r in rows
  ]


def test_a_batch_is_judged_while_the_next_is_answered(five):
  scorer, parrot = Exact(), Parrot()
  told = scorer.told

  def respond(*asked):
    told.append("respond")
    return parrot(*asked)

  evaluate_benchmark(
    respond, five, at_once=2, scorer=scorer, keep=lambda *_: told.append(5)
  )
  first, later = ["respond", "submit"], ["respond", "result", 5, "submit"]
  assert told == [*first, *later, *later, "result", 5]


def test_tests_of_programs_are_not_written_with_each_answer(five):
  long = five.problems[1]._replace(reference="9" * 1_000_000)
  five.problems[1] = long
  rows, scorer = [], Exact()
  evaluate_benchmark(
    Parrot(),
    five,
    at_once=5,
    scorer=scorer,
    keep=lambda new, _: rows.extend(new),
  )
  told = {r["id"]: r["reference"] for r in rows}
  assert told == {"no 2": None} | {f"no {i}": str(i) for i in (1, 3, 4, 5)}
  assert scorer.answers[3].reference == long.reference  # the judge has it


def test_it_goes_on_from_a_batch(five):
  whole, rest = [], []
  evaluate_benchmark(
    Parrot(),
    five,
    at_once=2,
    scorer=Exact(),
    keep=lambda rows, _: whole.append(rows),
  )
  parrot = Parrot()
  evaluate_benchmark(
    parrot,
    five,
    at_once=2,
    scorer=Exact(),
    keep=lambda rows, _: rest.append(rows),
    begin=2,
  )
  assert rest == whole[2:]
  assert parrot.asked == [(["5"], 3, 2)]
  evaluate_benchmark(
    parrot, five, at_once=2, scorer=Exact(), keep=pytest.fail, begin=3
  )


def test_a_process_that_only_draws_keeps_nothing(five):
  parrot = Parrot()
  evaluate_benchmark(parrot, five, at_once=2, scorer=None, keep=pytest.fail)
  assert len(parrot.asked) == 3


def test_answers_that_are_missing_are_no_silent_loss(five):
  one = Responses(["1"], ["1"], [1], [False], 9)
  for short in (one, one._replace(prompts=["1", "2"])):
    with pytest.raises(ValueError, match="zip"):
      evaluate_benchmark(
        lambda *_, short=short: short,
        five,
        at_once=2,
        scorer=Exact(),
        keep=pytest.fail,
      )


@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not here")
@pytest.mark.parametrize("shift", [0, 1])
def test_gsm8k_answered_from_the_references(shift):
  questions = benchmarks.read("GSM8K", str(GSM8K))
  lines = [json.loads(line) for line in GSM8K.read_text().splitlines()]
  said = dict(
    zip(
      (line["question"] for line in lines),
      np.roll([line["answer"] for line in lines], shift).tolist(),
      strict=True,
    )
  )

  def respond(asked, samples, number):
    texts = [said[question] for question in asked]
    return Responses(asked, texts, [1] * len(texts), [False] * len(texts), 9)

  rows = []
  with RewardPool(("gsm8k",), (1.0,)) as scorer:
    evaluate_benchmark(
      respond,
      questions,
      at_once=256,
      scorer=scorer,
      keep=lambda new, _: rows.extend(new),
    )
  # References may be equal by chance.
  value = lambda line: Decimal(line["answer"].split("####")[1].replace(",", ""))
  values = [value(line) for line in lines]
  expected = sum(a == values[i - shift] for i, a in enumerate(values))
  assert expected == (1319 if shift == 0 else 15)
  assert sum(row["score"] for row in rows) == expected
  found = summarize(questions, [brief("gsm8k", row) for row in rows])
  assert found["avg"] == found["majority"]["1"] == expected / 1319
  assert found["failed"] == 0
