"""Problems of any source: fields, references, splits and fingerprints."""

import dataclasses
import json
import pickle
import sys

import pytest

from gspo_jax.data import sources
from gspo_jax.data.problem import Problem
from gspo_jax.data.sources import Fields
from gspo_jax.runtime.errors import UserError
from gspo_jax.tasks.chain import Chain


def write(path, *rows):
  lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return f"jsonl:{path}"


def row(i, answer="x #### 7"):
  return {"question": f"question {i}?", "answer": answer}


def side(source, evaluation):
  return dataclasses.replace(source, evaluation=evaluation)


def one(tmp_path, values, **options):
  return sources.load(write(tmp_path / "a.jsonl", values), **options)[0]


def test_the_reference_follows_the_last_hashes(tmp_path):
  """A heading is none."""
  heading = "#### Step 1\nSo $\\boxed{5}$.\n#### Check\nfine\n##### Note"
  spec = write(
    tmp_path / "a.jsonl",
    row(1, "#### 3, no\n####  1,000 "),
    "",
    row(2, " Paris "),
    "  ",
    row("é中", "\N{LINE SEPARATOR} #### ü"),
    row(3, "#### C#"),
    row(4, heading),
  )
  source = sources.load(spec)
  references = [p.reference for p in source]
  assert references == ["1,000", "Paris", "ü", "C#", heading]
  assert source[0].demonstration == "#### 3, no\n####  1,000 "
  assert source[1].demonstration == "#### Paris"
  assert source[2].text == "question é中?"


@pytest.mark.parametrize(
  ("answer", "reference", "demonstration"),
  [
    (73, "73", "#### 73"),
    (0, "0", "#### 0"),
    (1.0, "1", "#### 1"),  # an integer beside an empty cell of a table
    (1e-05, "0.00001", "#### 0.00001"),
    (-2.5e15, "-2500000000000000", "#### -2500000000000000"),
    (-0.0, "0", "#### 0"),
    (12345678901234567, "12345678901234567", "#### 12345678901234567"),
    (True, "true", "#### true"),
    (["1", 2.0, 0.5], "1, 2, 0.5", "#### 1, 2, 0.5"),
    ([{"input": "1 ####\n", "output": "#2"}], None, ""),
    ([[1, 2.0]], None, ""),
    ({"tests": [["", "3"]], "names": None}, None, ""),
  ],
)
def test_references_that_are_no_text(
  tmp_path, answer, reference, demonstration
):
  source = one(tmp_path, row(1, answer))
  assert source.reference == (reference or json.dumps(answer))
  assert source.demonstration == demonstration


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
  ("column", "key", "value"),
  [*(("question", "problem", value) for value in (None, NAN, " ")),
   *(("answer", "reference", value) for value in (None, NAN, INFINITE, " ")),
   *(("answer", "reference", value) for value in ([], ["1", None], [NAN])),
   *(("answer", "reference", value) for value in ([[1, NAN]], {"a": NAN}, {})),
   *(("answer", "reference", value) for value in ({"a": None}, "nan", "NaN"))],
)  # fmt: skip
def test_a_missing_value_is_named_with_its_row_and_key(
  tmp_path, column, key, value
):
  spec = write(tmp_path / "a.jsonl", row(1), row(2) | {column: value})
  words = rf"a.jsonl:2: '{column}' \(data.{key}_field\) is empty, null or NaN"
  with pytest.raises(UserError, match=words):
    sources.load(spec)


@pytest.mark.parametrize(
  ("answer", "words"),
  [("5 ####", "has nothing after its last ####"),
   (1.2345678901234567e16, r"is 1.23.*e\+16, a float, .*: write the numb"),
   ([1, 2e30], "is 2e\\+30, a float, .*: write the number as text")],
)  # fmt: skip
def test_a_reference_that_has_lost_something(tmp_path, answer, words):
  name = r"a.jsonl:1: 'answer' \(data.reference_field\)"
  with pytest.raises(UserError, match=f"{name} {words}"):
    one(tmp_path, row(1, answer))


def test_fields_by_name(tmp_path):
  values = {"problem": "1+1?", "solution": "so \\boxed{2}", "gold": 2}
  fields = Fields("problem", "gold", "solution")
  wanted = Problem("1+1?", "2", "so \\boxed{2}")
  assert one(tmp_path, values, fields=fields) == wanted
  with pytest.raises(
    UserError,
    match=r":1: no field 'probelm' \(data.problem_field\); .*'problem'",
  ):
    one(tmp_path, values, fields=Fields("probelm", "gold"))
  with pytest.raises(
    UserError, match=r":1: 'gold' .data.demonst.* must be text"
  ):
    one(tmp_path, values, fields=Fields("problem", "gold", "gold"))


@pytest.mark.parametrize(
  "bad",
  ["{", {"question": "only"}, {"answer": "only"},
   {"question": 3, "answer": "3"},
   {"question": "half a pair \ud83d", "answer": "3"}],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, bad):
  spec = write(tmp_path / "a.jsonl", row(1), "", bad, row(2))
  with pytest.raises(UserError, match=r"a\.jsonl:3: ") as error:
    sources.load(spec)
  assert "\n" not in str(error.value)
  assert len(str(error.value)) < 300


ASK = [{"role": "user", "content": "1+1?"}]
PARTS = [{"type": "text", "text": text} for text in ("1+", "1?")]
ANSWER = [{"role": "assistant", "content": "so #### 2"}]
BRIEF = [{"role": "system", "content": "Be brief."}]


def said(content=None, arguments='{"a": 7}', **fields):
  """A message of the assistant with a call, as OpenAI's API has it."""
  function = {"name": "calc", "arguments": arguments}
  call = {"id": "call00001", "type": "function", "function": function}
  fields |= {"tool_calls": [call]}
  return {"role": "assistant", "content": content, **fields}


VERL = {
  "data_source": "sums",
  "reward_model": {"style": "rule", "ground_truth": "2"},
  "extra_info": {"index": 0},
}


@pytest.mark.parametrize(
  ("record", "problem", "names"),
  [
    # GSM8K, MATH
    ({"question": "1+1?", "answer": "so #### 2"},
     Problem("1+1?", "2", "so #### 2"), ("question", "answer")),
    ({"problem": "1+1?", "solution": "so", "answer": "2", "level": "1"},
     Problem("1+1?", "2", "so", {"level": "1"}),
     ("problem", "answer", "solution")),
    ({"prompt": [{"role": "user", "content": PARTS}], "answer": "2"},
     Problem("1+1?", "2", "#### 2"), ("prompt", "answer")),
    # TRL
    ({"prompt": BRIEF + ASK, "solution": "2"},
     Problem("1+1?", "2", "#### 2", {}, tuple(BRIEF)),
     ("prompt", "solution")),
    # verl
    (VERL | {"prompt": ASK}, Problem("1+1?", "2", "#### 2", VERL),
     ("prompt", "reward_model.ground_truth")),
    # Supervised fine-tuning
    ({"messages": ASK + ANSWER, "prompt_id": "x"},
     Problem("1+1?", "2", "so #### 2", {"prompt_id": "x"}), ("messages", "")),
    ({"messages": BRIEF + ASK + ANSWER + ASK + ANSWER, "answer": 3},
     Problem("1+1?", "3", "so #### 2", {}, tuple(BRIEF + ASK + ANSWER)),
     ("messages", "answer")),
  ],
)  # fmt: skip
def test_columns_of_other_trainers(tmp_path, record, problem, names):
  source = sources.load(write(tmp_path / "a.jsonl", record))
  assert list(source) == [problem]
  assert source.fields == Fields(*names)
  assert f"the problem is in {names[0]!r}" in source.note
  assert (names[1] or "the last message of the assistant") in source.note
  given = one(tmp_path, record, fields=Fields(*names))
  assert given == problem


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_calls_results_and_thinking_arrive(tmp_path, suffix, monkeypatch):
  result = {"role": "tool", "content": "7", "tool_call_id": "call00001"}
  prompt = [
    BRIEF[0] | {"role": "developer", "tool_calls": None},
    *ASK,
    said(reasoning_content="Hm."),
    result | {"name": "calc"},
    said(arguments='{"a": null}', content=""),
    result,
    *ASK,
  ]
  record, file = {"prompt": prompt, "answer": "2"}, tmp_path / f"a.{suffix}"
  if suffix == "jsonl":
    write(file, record)
  else:
    datasets = pytest.importorskip("datasets")
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.Dataset.from_list([record]).to_parquet(str(file))
  (problem,) = sources.load(f"{suffix}:{file}")
  first = said("", {"a": 7}, reasoning_content="Hm.")
  second = said("", {"a": None})
  assert problem.history == (
    *(*BRIEF, *ASK, first),
    *(result | {"name": "calc"}, second, result),
  )
  assert problem.text == "1+1?"


@pytest.mark.parametrize(
  "answer",
  [said("Let me see."), ANSWER[0] | {"reasoning_content": "Hm."}],
)
def test_what_is_more_than_a_text_is_no_demonstration(tmp_path, answer):
  problem = one(tmp_path, {"messages": [*ASK, answer], "answer": "2"})
  assert (problem.reference, problem.demonstration) == ("2", "")


def test_a_name_that_is_given_is_not_looked_for(tmp_path):
  record = {"question": "a?", "other": "b?", "answer": "1", "gold": "2"}
  fields = Fields("other", "gold")
  source = sources.load(write(tmp_path / "a.jsonl", record), fields=fields)
  assert list(source) == [
    Problem("b?", "2", "#### 2", {"question": "a?", "answer": "1"})
  ]
  assert not source.note
  capitals = {"QUESTION": "A?", "Answer": "3"}
  assert one(tmp_path, capitals)[:2] == ("A?", "3")
  assert one(tmp_path, capitals | {"answer": "4"}).reference == "4"
  half = one(tmp_path, record, fields=Fields("other"))
  assert (half.text, half.reference) == ("b?", "1")


@pytest.mark.parametrize(
  ("record", "words"),
  [
    ({"query": "a?", "info": {"gold": 1}},
     "no column for the problem: none of question, problem, prompt, "
     "messages; set data.problem_field to one of info, info.gold, query$"),
    ({"prompt": ASK, "gold": "2"},
     "no column for the reference: none of answer, .*; set "
     "data.reference_field to one of gold, prompt$"),
    ({"prompt": [], "answer": "2"}, r"'prompt' must end .*, got roles \[\]"),
    ({"prompt": BRIEF, "answer": "2"},
     r"must end with a message of the user, .* got roles \['system'\]"),
    ({"prompt": [{"role": "user", "content": [1]}], "answer": "2"},
     r"prompt\[0\].content=\[1\]: expected text, or parts of text"),
    ({"prompt": [*ASK, {"content": "a"}], "answer": "2"},
     r"prompt\[1\].role=null: expected a text"),
    ({"prompt": ["Hi"], "answer": "2"},
     r'prompt\[0\]="Hi": expected an object with role and content'),
    ({"prompt": [{"role": "assistant", "content": None}], "answer": "2"},
     r"prompt\[0\].content=null: expected text"),
    ({"prompt": [ASK[0] | {"tool_calls": [1]}], "answer": "2"},
     r"prompt\[0\].tool_calls=\[1\]: expected a list, of the assistant"),
    ({"prompt": [said(arguments="{")], "answer": "2"},
     r'tool_calls\[0\].function.arguments="{": expected an object, or one as'),
    ({"prompt": {"a": 1}, "answer": "2"}, "must be text or a list of messages"),
  ],
)  # fmt: skip
def test_columns_that_hold_no_problem(tmp_path, record, words):
  with pytest.raises(UserError, match=rf"a.jsonl:1: .*{words}"):
    one(tmp_path, record)


def test_the_held_out_split_is_disjoint_and_complete(tmp_path):
  """And a problem's side does not depend on the others."""
  rows = [*map(row, range(800))]
  spec, half = write(tmp_path / "a", *rows), write(tmp_path / "b", *rows[:400])
  kept, tested, everything = (
    [p.text for p in side(sources.load(spec), evaluation)]
    for evaluation in (False, True, None)
  )
  assert not set(kept) & set(tested)
  assert sorted(kept + tested) == sorted(everything)
  assert everything == [row["question"] for row in rows]
  assert 50 < len(tested) < 150
  of_half = [p.text for p in side(sources.load(half), True)]
  assert of_half == tested[: len(of_half)]


def test_a_file_without_a_problem(tmp_path):
  with pytest.raises(UserError, match="no problem"):
    sources.load(write(tmp_path / "a", "", " "))


def test_conversations_that_end_alike_are_on_both_sides(tmp_path):
  last = [{"role": "user", "content": "Double it."}]
  turns = [[{"role": "user", "content": f"{i}?"}, *last] for i in range(60)]
  rows = [{"messages": each, "answer": 1} for each in turns]
  spec = write(tmp_path / "a.jsonl", *rows)
  held_out = len(side(sources.load(spec), True))
  assert 2 <= held_out <= 20
  assert len(side(sources.load(spec), False)) == 60 - held_out


# By dotted name.


@pytest.fixture
def module(tmp_path, monkeypatch):
  """A module of the user's, and its name."""
  name = f"mine_{tmp_path.name.replace('-', '_')}"
  (tmp_path / f"{name}.py").write_text(
    "import numpy as np\n"
    "from gspo_jax.data.problem import Problem\n"
    "def dicts():\n"
    "  return [{'question': f'q{i}'.encode(), 'answer': np.int64(i),"
    " 'tests': np.array([[i, 2]])} for i in range(9)]\n"
    "def problems(): return [Problem('a', 'b', 'c')] * 3\n"
    "def endless(): return iter([])\n"
    "def odd(): return [{'question': b'\\xff', 'answer': 1}, 3]\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  yield name
  sys.modules.pop(name, None)


def test_any_source_by_dotted_name(module):
  source = sources.load(f"{module}.dicts")
  assert source[1][:3] == ("q1", "1", "#### 1")
  fields = Fields(reference="tests")
  with_tests = sources.load(f"{module}:dicts", fields=fields)
  assert with_tests[3].reference == "[[3, 2]]"
  assert source[3].columns == {"tests": [[3, 2]]}
  problems = sources.load(f"{module}.problems")
  assert problems[1] == Problem("a", "b", "c")
  assert not problems.note
  halves = [list(side(source, e)) for e in (True, False)]
  assert sorted([*halves[0], *halves[1]]) == sorted(source)


def test_mistakes_in_a_dotted_name(module):
  for spec, words in (
    (f"{module}.dict", "has no function 'dict': did you mean 'dicts'"),
    (f"{module}.endless", "list_iterator; expected something with a length"),
    ("no_package.rows.factory", r"No module named 'no_package' \(expected"),
    ("data/train.jsonl", "expected chain, jsonl:FILE"),
    ("chains", "expected chain, jsonl:FILE"), ("tfds:", "expected tfds:NAME"),
    ("data/train.csv", "did you mean 'hf:data/train.csv'"),
    ("csv:data/train.csv", "did you mean 'hf:data/train.csv'"),
    ("json:s3://b/train.jsonl", "did you mean 'jsonl:s3://b/train.jsonl'"),
    ("x.TSV:train", "did you mean 'hf:x.TSV:train'"),
    ("x.jsonl.gz", "did you mean 'hf:x.jsonl.gz'"),
    ("hf:csv", "hf:csv: 'csv' is a format, .*; expected hf:FILE or hf:FOLDER"),
    ("hf:csv:x.csv", "'csv' is a format, no data set; expected hf:x.csv"),
    ("gs://b/train.parquet", "did you mean 'parquet:gs://b/train.parquet'"),
  ):  # fmt: skip
    with pytest.raises(UserError, match=words):
      sources.load(spec)
  source = sources.load(f"{module}.odd")
  for i in range(2):
    with pytest.raises(UserError, match=rf"{module}.odd\[{i}\]: "):
      source[i]


def test_a_module_that_misses_another_is_named(module, tmp_path):
  (tmp_path / f"{module}.py").write_text("import nowhere_to_be_found")
  with pytest.raises(UserError, match=f"{module}.*nowhere_to_be_found"):
    sources.load(f"{module}.dicts")


# Mixtures.


def test_a_mixture_and_its_weights():
  chains = [Chain((n,)) for n in (1, 2)]
  assert sources.mix(chains[:1]) is chains[0]
  assert sources.mix(chains).weights == (1.0, 1.0)
  assert sources.mix(chains, (3, 1)).sources == tuple(chains)
  for weights in ((1,), (1, 0), (1, float("nan")), (1, -1)):
    with pytest.raises(UserError, match=r"data\.weights="):
      sources.mix(chains, weights)


# Fingerprints.


def test_the_fingerprint_of_a_chain_stays_what_it_was():
  """Checkpoints carry it."""
  assert sources.fingerprint(Chain((2, 4))) == "41392e4845c6e58e"


def test_a_fingerprint_holds_the_names_of_the_columns_that_were_found(tmp_path):
  spec = write(tmp_path / "a.jsonl", row(1))
  fields = Fields(), Fields("question", "answer")
  prints = [sources.fingerprint(sources.load(spec, fields=f)) for f in fields]
  assert prints[0] == prints[1]


def test_a_fingerprint_is_of_conversations_and_not_of_other_columns(tmp_path):
  record = {"prompt": BRIEF + ASK, "answer": "2", "level": 1}
  make = lambda record: sources.fingerprint(
    sources.ProblemSource([record], str, Fields("prompt", "answer"))
  )
  assert make(record | {"level": 2}) == make(record)
  assert make(record | {"prompt": ASK}) != make(record)


def test_a_source_can_be_pickled(tmp_path):
  source = sources.load(write(tmp_path / "a.jsonl", row(1), row(2)))
  again = pickle.loads(pickle.dumps(source))
  assert list(again) == list(source)
  assert again.place(1) == source.place(1)


def test_the_same_rows_elsewhere_are_the_same_data_and_every_row_counts(
  tmp_path,
):
  rows = [row(i) for i in range(3000)]
  changed = [*rows[:2000], row(2000, "0"), *rows[2001:]]
  first, again, other = (
    sources.fingerprint(sources.load(write(tmp_path / name, *these)))
    for name, these in (("a", rows), ("b", rows), ("c", changed))
  )
  assert first == again != other


@pytest.mark.parametrize("size", [1, 2, 999, 1000, 1001, 5000])
def test_other_sources_are_sampled_evenly(size):
  class Counted(list):
    reads = 0

    def __getitem__(self, i):
      self.reads += 1
      return super().__getitem__(i)

  def make(changed=None, size=size):
    records = [{"question": f"q{i}", "answer": "1"} for i in range(size)]
    if changed is not None:
      records[changed]["answer"] = "2"
    return sources.ProblemSource(Counted(records), str)

  source = make()
  before = sources.fingerprint(source)
  assert source.records.reads <= 1000
  assert sources.fingerprint(make()) == before
  assert sources.fingerprint(make(size=size + 1)) != before
  for i in range(size) if size <= 1000 else (0, size - 1):
    if size < 999 or i % 100 in (0, 99):
      assert sources.fingerprint(make(i)) != before


def test_every_option_counts(tmp_path):
  spec = write(tmp_path / "a.jsonl", *map(row, range(30)))
  chain = Chain((2, 4))
  changes = ({"steps": (4, 2)}, {"noise": 0.1}, {"evaluation": True})
  different = [
    *(side(sources.load(spec), e) for e in (None, True, False)),
    sources.load(spec, fields=Fields(demonstration="answer")),
    chain,
    *(
      dataclasses.replace(chain, **change)
      for change in (*changes, {"size": 5}, {"seed": 1})
    ),
  ]
  different += [
    sources.mix(different[:2]),
    sources.mix(different[:2], (1, 2)),
    sources.mix(different[1::-1]),
    sources.mix(different[:3]),
  ]
  assert len({sources.fingerprint(s) for s in different}) == len(different)
  assert sources.fingerprint(Chain((2, 4))) == sources.fingerprint(chain)
