"""Each benchmark reads rows as published, and counts those it leaves out."""

import base64
import hashlib
import json
import pickle
import zlib

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from gspo_jax.data.problem import Problem
from gspo_jax.data.sources import Fields
from gspo_jax.evaluate import benchmarks, programs
from gspo_jax.runtime.errors import UserError

TEST = {"input": "1 2\n", "output": "3\n"}
PUBLIC = json.dumps([TEST | {"testtype": "stdin"}])
CODE = {
  "question_content": "Add.", "starter_code": "", "public_test_cases": PUBLIC,
  "private_test_cases": "[]", "question_id": "abc_a",
}  # fmt: skip
CODEFORCES = {
  "id": "1/A", "description": "Add two numbers.", "input_format": "Two.",
  "output_format": "One.", "note": None, "examples": [TEST],
  "official_tests": [TEST, {"input": "5 5", "output": "10"}], "rating": 800.0,
  "input_mode": "stdio",
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
  def call(name, *rows, **options):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return benchmarks.read(name, str(path), **options)

  return call


@pytest.mark.parametrize(
  ("name", "row", "reward", "samples", "identity"),
  [
    ("AIME24", {"problem": "q", "answer": 7, "id": 60}, "math", 32, "60"),
    ("aime24", {"Problem": "q", "Answer": "7", "ID": "2024-I-1"}, "math", 32,
     "2024-I-1"),
    ("Aime25", {"question": "q", "answer": "7"}, "math", 32, "1"),
    ("AMC23", {"problem": "q", "answer": "7", "url": "u"}, "math", 32, "u"),
    ("MATH500", {"problem": "q", "answer": "7", "unique_id": "test/a.json"},
     "math", 1, "test/a.json"),
    ("minerva", {"question": "q", "answer": "7"}, "math", 1, "1"),
    ("OlympiadBench", {"question": "q", "final_answer": ["7"], "id": 0},
     "math", 1, "0"),
    ("gsm8k", {"question": "q", "answer": "3 + 4 #### 7"}, "gsm8k", 1, "1"),
  ],
)  # fmt: skip
def test_benchmarks_with_a_short_reference(
  read, name, row, reward, samples, identity
):
  found = read(name, row)
  assert found.name.lower() == name.lower()
  assert [p[:2] for p in found.problems] == [("q", "7")]
  assert found.problems[0].columns == {}
  assert (found.reward, found.samples) == (reward, samples)
  assert found.ids == [identity]
  assert found.ratings == [None]
  assert found.skipped == {}


def test_formats_and_columns_are_those_of_training(tmp_path, monkeypatch):
  """A test.parquet of verl, which is data.eval_source as it is."""
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
  rows = [
    {"prompt": chat, "reward_model": {"ground_truth": n}} for n in ("1", "2")
  ]
  file = tmp_path / "test.parquet"
  parquet.write_table(pyarrow.Table.from_pylist(rows), file)
  csv = tmp_path / "a.csv"
  csv.write_text("question,answer,gold\nq,1,\nq,2,x\n")
  for read_file in (str(file), f"parquet:{file}"):
    found = benchmarks.read("mine", read_file, reward="gsm8k")
    assert [p.reference for p in found.problems] == ["1", "2"]
    assert found.problems[0].history == (chat[0],)
    assert found.ids == ["1", "2"]
    assert found.content == hashlib.sha256(file.read_bytes()).hexdigest()
  found = benchmarks.read("mine", str(csv), reward="gsm8k")
  assert found.note == (
    f"hf:{csv}: the problem is in 'question', the reference in 'answer'"
  )
  fields = Fields(problem="nowhere", reference="question")
  found = benchmarks.read("GSM8K", str(csv), fields=fields)
  assert found.problems[0][:2] == ("q", "q")
  assert "the reference in 'question'" in found.note


def test_every_row_of_a_table_counts(tmp_path, monkeypatch):
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  csv, found = tmp_path / "a.csv", []
  for answer in (1, 2, 1):
    rows = [f"q{i},{answer if i == 7 else 0}\n" for i in range(3000)]
    csv.write_text("question,answer\n" + "".join(rows))
    found.append(benchmarks.read("GSM8K", str(csv)).content)
  assert found[0] == found[2] != found[1]


def test_livecodebench_has_all_tests(read):
  private = json.dumps([{"input": "5 5", "output": "10", "testtype": "stdin"}])
  found = read("LiveCodeBench", CODE | {"private_test_cases": private})
  assert (found.reward, found.samples, found.ids) == ("code", 8, ["abc_a"])
  assert found.problems[0].text == "Add."
  assert json.loads(found.problems[0].reference) == [
    TEST,
    {"input": "5 5", "output": "10"},
  ]


def test_rows_that_cannot_be_scored_are_counted(read):
  functional = json.dumps([TEST | {"testtype": "functional"}])
  found = read(
    "livecodebench",
    CODE,
    CODE | {"public_test_cases": functional},
    CODE | {"private_test_cases": functional},
    CODE | {"public_test_cases": "[]"},
  )
  assert len(found.problems) == 1
  assert found.skipped == {"functional tests": 2, "no tests": 1}
  with pytest.raises(UserError, match=r"no usable row; left out: .*functional"):
    read("livecodebench", CODE | {"public_test_cases": functional})


def test_codeforces_has_formats_and_a_rating(read):
  found = read("CodeForces", CODEFORCES, CODEFORCES | {"rating": None})
  assert found.ratings == [800.0, None]
  assert found.ids == ["1/A", "1/A"]
  assert json.loads(found.problems[0].reference) == CODEFORCES["official_tests"]
  assert found.problems[0].text == (
    "Add two numbers.\n\nInput\nTwo.\n\nOutput\nOne.\n\nExample input\n1 2\n\n"
    "Example output\n3"
  )


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"generated_checker": "import sys"}, "needs a checker"),
    ({"interaction_format": "ask"}, "interactive"),
    ({"input_mode": "file"}, "reads a file"),
    ({"official_tests_complete": False}, "incomplete tests"),
    ({"official_tests": []}, "no tests but the examples"),
    ({"official_tests": None, "tests": []}, "no tests but the examples"),
    ({"official_tests": [], "examples": None}, "no tests"),
    (["official_tests"], "no tests but the examples"),  # it is not there
  ],
)
def test_codeforces_rows_that_tests_cannot_score(read, change, reason):
  row = {k: v for k, v in CODEFORCES.items() if k not in change}
  row |= change if isinstance(change, dict) else {}
  found = read("codeforces", CODEFORCES, row)
  assert len(found.problems) == 1
  assert found.skipped == {reason: 1}


def test_codeforces_takes_the_first_column_that_has_tests(read):
  more = CODEFORCES["official_tests"]
  whole = {"official_tests_complete": True, "tests": [TEST]}
  for empty in ([], None):
    row = CODEFORCES | {"official_tests": empty, "tests": more}
    found = read("codeforces", row, row | {"tests": empty, "test_cases": more})
    assert [json.loads(p.reference) for p in found.problems] == [more, more]
    assert found.skipped == {}
  found = read("codeforces", CODEFORCES | whole)
  assert json.loads(found.problems[0].reference) == more


def test_codeforces_by_its_other_columns(read):
  for column in ("tests", "test_cases"):
    row = {"description": "d", "rating": 1500, column: [TEST]}
    found = read("codeforces", row)
    assert found.problems == [Problem("d", json.dumps([TEST]), "")]
    assert found.ratings == [1500]
  for rating in ("hard", True, float("nan")):
    with pytest.raises(UserError, match=r":1: 'rating': expected a number"):
      read("codeforces", CODEFORCES | {"rating": rating})
  with pytest.raises(UserError, match="no field 'rating'"):
    read("codeforces", {"description": "d", "tests": [TEST]})
  with pytest.raises(UserError, match=r"no field 'official_tests'; choose"):
    read("codeforces", {"description": "d", "rating": 800})


def test_a_benchmark_of_another_name(read):
  row = {"question": "q", "answer": "a #### b", "level": 2}
  found = read("mine", row, reward="package.module.reward")
  assert (found.name, found.reward, found.samples) == (
    "mine", "package.module.reward", 1
  )  # fmt: skip
  assert found.problems == [Problem("q", "b", "a #### b", {"level": 2})]
  assert read("AIME24", row, reward="gsm8k").reward == "gsm8k"


def test_mistakes(read, tmp_path):
  with pytest.raises(UserError, match=r"--set=AMIE24: .*mean 'AIME24'.*--rew"):
    read("AMIE24", {})
  with pytest.raises(UserError, match=r"cannot read .*nope.*: No such file"):
    benchmarks.read("AIME24", str(tmp_path / "nope"))
  with pytest.raises(UserError, match="no problem in it"):
    read("AIME24")
  good = {"problem": "q", "answer": 7}
  with pytest.raises(
    UserError,
    match=r"set.jsonl:2: no field 'answer' \(data.reference_field\); did you "
    r"mean 'ansewr'\? It has ansewr, problem$",
  ):
    read("AIME24", good, {"problem": "q", "ansewr": 7})


def test_limit_counts_usable_rows_and_reads_no_further(read):
  rows = [{"problem": str(i), "answer": i} for i in range(5)]
  found = read("MATH500", *rows, limit=3)
  assert [p.text for p in found.problems] == ["0", "1", "2"]
  assert len(read("MATH500", *rows, limit=9).problems) == 5
  assert len(read("MATH500", *rows, {}, limit=5).problems) == 5
  skipped = CODE | {"public_test_cases": "[]"}
  found = read("LiveCodeBench", skipped, CODE, CODE, limit=1)
  assert (len(found.problems), found.skipped) == (1, {"no tests": 1})


# Tests of programs: lists, their JSON, and what is never loaded.


def parsed(value):
  return programs.tests({"t": value}, "t", "file:7")


def test_tests_are_a_list_or_its_json():
  tests = [{"input": "1\n", "output": "2\n"}]
  more = [tests[0] | {"testtype": "stdin"}]
  for value in (tests, json.dumps(tests), more, json.dumps(more)):
    assert parsed(value) == tests
  assert parsed(None) == parsed([]) == []


@pytest.mark.parametrize(
  ("value", "words"),
  [([{"input": "1"}], "expected a list of {'input', 'output'}, got"),
   ({"input": "1", "output": "2"}, "expected a list of {'input', 'output'}"),
   (["1"], "expected a list of {'input', 'output'}"),
   ("3", "expected a list of {'input', 'output'}, got 3"),
   ([{"input": 1, "output": "2"}], "expected text as 'input' and 'output'")],
)  # fmt: skip
def test_other_tests_are_an_error(value, words):
  with pytest.raises(UserError, match=f"file:7: column 't': {words}"):
    parsed(value)


class Bomb:
  def __reduce__(self):
    return pytest.fail, ("unpickled",)


def test_a_pickle_is_never_loaded():
  for secret in (Bomb(), json.dumps([{"input": "", "output": ""}])):
    text = base64.b64encode(zlib.compress(pickle.dumps(secret))).decode()
    with pytest.raises(UserError, match=r"publishes a pickle there .* convert"):
      parsed(text)
