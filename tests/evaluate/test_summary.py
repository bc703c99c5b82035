"""The numbers of a benchmark against counts by hand, and the table."""

import json

import pytest

from gspo_jax.data.problem import Problem
from gspo_jax.evaluate import summary
from gspo_jax.evaluate.benchmarks import Benchmark


def benchmark(count=2, reward="math", ratings=None, **changes):
  return Benchmark(
    name="Mine",
    reward=reward,
    samples=2,
    problems=[Problem("q", "1", "")] * count,
    ids=["1"] * count,
    ratings=ratings or [None] * count,
    skipped={},
    content="",
  )._replace(**changes)


def record(
  text, score, finish="stopped", failed=False, tokens=3, reward="math"
):
  whole = {
    "response": text,
    "reference": "1",
    "score": score,
    "finish": finish,
    "failed": failed,
    "tokens": tokens,
  }
  kept = summary.shorten(reward, whole)
  assert set(whole) - set(kept) == {"response", "reference"}
  return kept


RECORDS = [
  record(r"\boxed{1}", 1.0),
  record(r"\boxed{2}", 0.0, "truncated"),
  record("none", 0.0, failed=True, tokens=5),
  record(r"\boxed{1.0}", 1.0),
]


def test_the_numbers_of_a_benchmark():
  found = summary.summarize(benchmark(reward="math:strict=1"), RECORDS, 0.5)
  assert found == {
    "set": "Mine",
    "reward": "math:strict=1",
    "problems": 2,
    "skipped": {},
    "samples": 2,
    "avg": 0.5,
    "avg_error": 0.0,
    "pass_threshold": 0.5,
    "pass": {"1": 0.5, "2": 1.0},
    # A tie, and a problem where one of two responses has no vote.
    "majority": {"1": 0.5, "2": 0.75},
    "elo": None,
    "rated": 0,
    "truncated": 0.25,
    "failed": 0.25,
    "tokens": 3.5,
  }


def test_programs_have_no_majority_but_an_elo():
  many = benchmark(3, "code:total=20", [1000, None, 1000.0])
  rows = RECORDS + RECORDS[1:3]  # of the third, none is right
  found = summary.summarize(many, rows, 0.5)
  assert found["majority"] is None
  assert found["rated"] == 2
  # One response in four, of those to the two problems with a rating.
  assert found["elo"]["bounded"] is False
  assert found["elo"]["rating"] == pytest.approx(1000 - 400 * 0.4771, abs=0.1)
  none = summary.summarize(benchmark(1, "code", [1000]), RECORDS[1:3], 0.5)
  assert (none["elo"]["low"], none["elo"]["bounded"]) == (None, True)
  assert none["avg_error"] is None  # one problem has no spread
  json.dumps([found, none], allow_nan=False)


@pytest.mark.parametrize(
  ("reward", "texts", "kinds"),
  [("math", [r"\boxed{\frac12}", r"#### \dfrac{1}{2}", r"\boxed{2}"], 2),
   ("gsm8k", ["#### 1,800", r"\boxed{1800.00}", "#### $1800", "#### 18"], 2),
   ("final_answer", ["# 1,800", "x#### 1800", "#18"], 2)],
)  # fmt: skip
def test_equal_results_vote_alike(reward, texts, kinds):
  votes = [summary.vote(reward, text) for text in texts]
  assert None not in votes
  assert len(set(votes)) == kinds
  assert votes[0] == votes[1]


@pytest.mark.parametrize("reward", ["math", "gsm8k", "final_answer"])
def test_no_result_no_vote(reward):
  assert summary.vote(f"{reward}:a=1", "#### 7") is not None
  assert summary.vote(reward, "it is 7") is None
  assert summary.vote(reward, "") is None
  assert summary.vote(reward, "#### ") is None


def test_long_results_vote_as_a_hash():
  long = "####" + "9" * 1_000_000
  vote = summary.vote("math", long)
  assert vote == summary.vote("math", f"so\n{long}") is not None
  assert vote != summary.vote("math", long + "8")
  assert len(repr(vote)) < 100


def test_words_are_no_vote_for_a_number():
  assert summary.vote("gsm8k", "#### many") is None


def test_correct_results_are_one_vote_however_they_are_written():
  rows = [record(rf"\boxed{{{text}}}", right) for text, right in
          [(r"\frac{1}{2}", 1.0), ("0.5", 1.0), ("2^{-1}", 1.0), ("3", 0.0),
           ("3", 0.0)]]  # fmt: skip
  found = summary.summarize(benchmark(1), rows, 0.5)
  assert found["majority"]["5"] == 1.0
  # One of two equal texts could not be scored: their vote is worth half.
  rows = [record(r"\boxed{1}", 1.0), record(r"\boxed{1}", 0.0, failed=True)]
  found = summary.summarize(benchmark(1), rows, 0.5)
  assert found["majority"]["2"] == 0.5


def test_the_table():
  rated = benchmark(3, "code", [1000, None, 1000], skipped={"no tests": 4})
  text = summary.render(
    [
      summary.summarize(benchmark(), RECORDS, 0.5),
      summary.summarize(rated, RECORDS[1:3] * 3, 0.5),
    ]
  )
  lines = [line.split() for line in text.splitlines()]
  assert lines[0][:5] == ["set", "problems", "samples", "avg@n", "pass@n"]
  assert lines[1] == [
    "Mine", "2", "2", "0.500", "±", "0.000", "1.000", "0.750", "-", "25.0%",
    "25.0%",
  ]  # fmt: skip
  assert lines[2][6:11] == ["0.000", "-", "809*", "(-inf", "to"]
  assert text.splitlines()[3:] == [
    "Mine: 4 rows left out: no tests",
    "Mine: Elo over the 2 problems that have a rating",
    "Mine: * nearly all or none solved: rated at half a problem",
  ]
  widths = {len(line) for line in text.splitlines()[:3]}
  assert len(widths) == 1
