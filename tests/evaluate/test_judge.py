"""Responses keep to their problems: on stubs, and on all of GSM8K."""

import itertools
import json
from decimal import Decimal

import numpy as np
import pytest
from repository import ROOT

from gspo_jax.evaluate import benchmarks
from gspo_jax.evaluate.judge import Responses, run_benchmark
from gspo_jax.evaluate.summary import shorten, summarize
from gspo_jax.rewards.pool import PendingRewards, RewardPool, Rewards

GSM8K = ROOT.parent / "shared/data/gsm8k/test.jsonl"


class ExactPool:
  """A reward pool: is the response the reference? Some rewards fail."""

  def __init__(self):
    self.responses, self.events, self.group_sizes = [], [], set()

  def submit(self, responses, group_size):
    self.responses += responses
    self.group_sizes.add(group_size)
    self.events.append("submit")
    right = np.float32([r.text == r.reference for r in responses])
    failed = np.array(["fail" in r.text for r in responses])
    reasons = ("why",) * int(failed.any())
    rewards = Rewards(right, {"exact": right}, failed, reasons)

    def compute():
      self.events.append("result")
      return rewards

    return PendingRewards(len(right), (), compute)


class Echo:
  """Responds "1", "2", ... to problems "1", "2", ..., but not each time."""

  def __init__(self):
    self.calls = []

  def __call__(self, problems, samples, batch):
    problems = [problem.text for problem in problems]
    self.calls.append((problems, samples, batch))
    texts = [
      problem if n % 2 == 0 else f"fail {n}"
      for problem in problems
      for n in range(samples)
    ]
    tokens = [10 * int(p) + n for p in problems for n in range(samples)]
    prompts = [f"{problem}<think>" for problem in problems]
    return Responses(prompts, texts, tokens, [t % 10 == 1 for t in tokens], 99)


@pytest.fixture
def five(tmp_path):
  """A benchmark of five problems, three responses each."""
  path = tmp_path / "five.jsonl"
  rows = [
    {"question": str(i), "answer": i, "id": f"no {i}", "level": -i}
    for i in range(1, 6)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  benchmark = benchmarks.read("mine", str(path), reward="exact")
  return benchmark._replace(samples=3)


def run(benchmark, sample=None, pool=None, **options):
  """The batches that a benchmark saves."""
  batches = []
  options = {
    "batch_size": 2,
    "reward_pool": pool or ExactPool(),
    "save": lambda records, _: batches.append(records),
  } | options
  run_benchmark(sample or Echo(), benchmark, **options)
  return batches


@pytest.mark.parametrize("batch_size", [1, 2, 5, 9])
def test_each_response_keeps_to_its_problem(five, batch_size):
  echo, pool = Echo(), ExactPool()
  batches = run(five, echo, pool, batch_size=batch_size)
  assert len(batches) == len(echo.calls) == -(-5 // batch_size)
  assert [batch for *_, batch in echo.calls] == list(range(len(batches)))
  records = list(itertools.chain(*batches))
  assert [(r["id"], r["sample"]) for r in records] == [
    (f"no {i}", n) for i in range(1, 6) for n in range(3)
  ]
  for r, text in zip(records, pool.responses, strict=True):
    number = int(r["id"][3:])
    assert r["problem"] == r["reference"] == str(number)
    assert r["response"] == text.text
    assert r["tokens"] == 10 * number + r["sample"]
    assert r["score"] == (r["sample"] != 1)
    assert r["failed"] == (r["sample"] == 1)
    assert r["finish"] == ("truncated" if r["sample"] == 1 else "stopped")
    assert r["set"] == "mine"
    assert text.columns["level"] == -number
  assert pool.group_sizes == {3}  # of a problem, side by side
  assert pool.responses[-1].limit == 99
  json.dumps(records)
  # The reward reads the whole prompt; the file has the problem.
  assert [r.prompt for r in pool.responses] == [
    f"{r['problem']}<think>" for r in records
  ]


def test_a_batch_is_scored_while_the_next_is_sampled(five):
  pool, echo = ExactPool(), Echo()
  events = pool.events

  def sample(*args):
    events.append("sample")
    return echo(*args)

  run(five, sample, pool, save=lambda *_: events.append("save"))
  first = ["sample", "submit"]
  later = ["sample", "result", "save", "submit"]
  assert events == [*first, *later, *later, "result", "save"]


def test_tests_of_programs_are_not_written_with_each_response(five):
  long = five.problems[1]._replace(reference="9" * 1_000_000)
  five.problems[1] = long
  pool = ExactPool()
  (records,) = run(five, pool=pool, batch_size=5)
  references = {r["id"]: r["reference"] for r in records}
  short = {f"no {i}": str(i) for i in (1, 3, 4, 5)}
  assert references == {"no 2": None} | short
  assert pool.responses[3].reference == long.reference  # the reward has it


def test_it_continues_from_a_batch(five):
  whole, echo = run(five), Echo()
  assert run(five, echo, first_batch=2) == whole[2:]
  assert echo.calls == [(["5"], 3, 2)]
  assert run(five, echo, first_batch=3) == []
  assert len(echo.calls) == 1


def test_a_process_without_a_reward_pool_saves_nothing(five):
  echo = Echo()
  run_benchmark(echo, five, batch_size=2, reward_pool=None, save=pytest.fail)
  assert len(echo.calls) == 3


def test_missing_responses_are_an_error(five):
  one = Responses(["1"], ["1"], [1], [False], 9)
  for short in (one, one._replace(prompts=["1", "2"])):
    with pytest.raises(ValueError, match="zip"):
      run(five, lambda *_, short=short: short)


@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not here")
@pytest.mark.parametrize("shift", [0, 1])
def test_gsm8k_with_the_references_as_responses(shift):
  benchmark = benchmarks.read("GSM8K", str(GSM8K))
  lines = [json.loads(line) for line in GSM8K.read_text().splitlines()]
  problems = [line["question"] for line in lines]
  shifted = np.roll([line["answer"] for line in lines], shift).tolist()
  response_to = dict(zip(problems, shifted, strict=True))

  def sample(problems, samples, batch):
    problems = [problem.text for problem in problems]
    texts = [response_to[problem] for problem in problems]
    count = len(texts)
    return Responses(problems, texts, [1] * count, [False] * count, 9)

  with RewardPool(("gsm8k",), (1.0,)) as pool:
    batches = run(benchmark, sample, pool, batch_size=256)
  records = list(itertools.chain(*batches))
  # References may be equal by chance.
  value = lambda line: Decimal(line["answer"].split("####")[1].replace(",", ""))
  values = [value(line) for line in lines]
  expected = sum(a == values[i - shift] for i, a in enumerate(values))
  assert expected == (1319 if shift == 0 else 15)
  assert sum(r["score"] for r in records) == expected
  found = summarize(benchmark, [shorten("gsm8k", r) for r in records], 0.5)
  assert found["avg"] == found["majority"]["1"] == expected / 1319
  assert found["failed"] == 0
