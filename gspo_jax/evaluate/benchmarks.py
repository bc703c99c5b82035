"""Benchmarks by name: the columns of their files, and who scores responses.

  AIME24, AIME25  problem | Problem | question; answer | Answer
  AMC23           question | problem; answer
  MATH500         problem; answer
  Minerva         question | problem; answer
  OlympiadBench   question; final_answer (text, or a list of texts)
  GSM8K           question; answer (the reference follows its last ####)
  LiveCodeBench   question_content; public_test_cases, private_test_cases
  CodeForces      description; rating (may be null); official_tests | tests |
                  test_cases, the first that has any; input_format,
                  output_format, note and examples are added to the problem
                  where the row has them

The files are JSON lines; `a | b` is one column that has either name. Tests are
objects of `input` and `output`. The published private_test_cases are pickles,
which are never loaded here: convert them to JSON where that is safe.

Rows that tests of standard input and output cannot score are left out and
counted: functions to call, checkers, interaction, files. So are rows of
CodeForces whose only tests are the examples, which the problem shows, or whose
tests are not all there (official_tests_complete is false).
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from gspo_jax.data.readers import json_lines, sha256
from gspo_jax.data.tasks import Problem
from gspo_jax.evaluate.benchmark_rows import Row, Skipped
from gspo_jax.runtime.errors import UserError, nearest

_IDS = ("id", "ID", "unique_id", "question_id", "url")


class Benchmark(NamedTuple):
  """A benchmark, as read from a file.

  Attributes:
    name: as the papers spell it.
    reward: the name of the reward that scores responses.
    samples: responses to each problem, by default.
    problems: N problems.
    ids: N names of problems; the number of the line where a row has no id.
    ratings: N difficulties; None where a row has none.
    skipped: rows that are left out, by reason.
    sha256: of the file.
  """

  name: str
  reward: str
  samples: int
  problems: list[Problem]
  ids: list[str]
  ratings: list[float | None]
  skipped: dict[str, int]
  sha256: str


@dataclasses.dataclass(frozen=True)
class _Format:
  """How the rows of a benchmark become problems.

  Attributes:
    name: as the papers spell it.
    parse: row -> (text of the problem, reference).
    reward: a name in gspo_jax/rewards/.
    samples: 32 for AIME and 8 for LiveCodeBench as in GSPO, section 5.1; also
      32 for AMC, which is as small as AIME, and 8 for CodeForces; 1 for the
      others, which are large.
  """

  name: str
  parse: Callable[[Row], tuple[str, str]]
  reward: str = "math"
  samples: int = 1


def read(
  name: str, path: str, *, reward: str = "", limit: int | None = None
) -> Benchmark:
  """Reads the file of a benchmark.

  Args:
    name: one of those above, in any case; or another one for a file with the
      columns `question` and `answer`, which then needs a reward.
    path: the file.
    reward: the name of a reward, in place of the benchmark's.
    limit: only so many problems from the start of the file.

  Raises:
    UserError: no such benchmark or file, or a row lacks a column.
  """
  known = _FORMATS.get(name.lower())
  if known is None and not reward:
    names = [f.name for f in _FORMATS.values()]
    raise UserError(
      f"--set={name}: no such benchmark; {nearest(name, names)} (another name "
      "needs --reward, and a file with the columns 'question' and 'answer')"
    )
  form = known or _Format(name, _columns("question"))
  rows, skipped = [], Counter()
  for where, values in json_lines(path):
    if len(rows) == limit:
      break
    row = Row(where, values)
    try:
      problem, reference = form.parse(row)
      # Only a reward of the user's reads columns, and tests can be large.
      others = values.keys() - row.read if reward else ()
      columns = {name: values[name] for name in others}
      problem = Problem(problem, reference, "", columns)
      rows.append((problem, _id(row), _rating(row, form)))
    except Skipped as reason:
      skipped[str(reason)] += 1
  if not rows:
    raise UserError(f"{path}: no usable row; left out: {dict(skipped) or 0}")
  problems, ids, ratings = map(list, zip(*rows, strict=True))
  return Benchmark(
    name=form.name,
    reward=reward or form.reward,
    samples=form.samples,
    problems=problems,
    ids=ids,
    ratings=ratings,
    skipped=dict(skipped),
    sha256=sha256(path),
  )


def _id(row: Row) -> str:
  ids = [row.values[k] for k in _IDS if row.values.get(k) not in (None, "")]
  return str(ids[0]) if ids else row.where.rpartition(":")[2]


def _rating(row: Row, form: _Format) -> float | None:
  rating = row.column("rating")[1] if form.name == "CodeForces" else None
  number = type(rating) in (int, float) and math.isfinite(rating)
  if not (rating is None or number):
    row.fail("rating", "a number", rating)
  return rating


def _columns(*problem: str, reference: tuple[str, ...] = ("answer",)):
  """A parser of two columns, each under the first of its names."""
  return lambda row: (row.text(*problem), row.text(*reference))


def _gsm8k(row: Row) -> tuple[str, str]:
  reference = row.text("answer").rpartition("####")[2].strip()
  return row.text("question"), reference


def _livecodebench(row: Row) -> tuple[str, str]:
  public = row.tests("public_test_cases")
  return row.text("question_content"), _reference(
    public + row.tests("private_test_cases")
  )


def _codeforces(row: Row) -> tuple[str, str]:
  for column, good, reason in (
    ("generated_checker", None, "needs a checker"),
    ("interaction_format", None, "interactive"),
    ("input_mode", "stdio", "reads a file"),
    ("official_tests_complete", True, "incomplete tests"),
  ):
    if row.values.get(column) not in (None, "", good):
      raise Skipped(reason)
  parts = [row.text("description")]
  for column in ("input_format", "output_format", "note"):
    if row.values.get(column):
      title = column.removesuffix("_format").capitalize()
      parts.append(f"{title}\n{row.text(column)}")
  for test in row.tests("examples") if "examples" in row.values else ():
    parts.append(f"Example input\n{test['input'].strip()}")
    parts.append(f"Example output\n{test['output'].strip()}")
  return "\n\n".join(parts), _reference(_codeforces_tests(row))


def _codeforces_tests(row: Row) -> list[dict[str, str]]:
  columns = ("official_tests", "tests", "test_cases")
  for column in columns:
    if column in row.values and (tests := row.tests(column)):
      return tests
  row.column(*columns, "examples")  # one of them must exist, even if empty
  if row.values.get("examples"):
    raise Skipped("no tests but the examples")
  return []


def _reference(tests: list[dict[str, str]]) -> str:
  """Tests as the reward `code` reads them."""
  if not tests:
    raise Skipped("no tests")
  return json.dumps(tests)


_AIME = _columns(
  "problem", "Problem", "question", reference=("answer", "Answer")
)
_FORMATS = {
  f.name.lower(): f
  for f in (
    _Format("AIME24", _AIME, samples=32),
    _Format("AIME25", _AIME, samples=32),
    _Format("AMC23", _columns("question", "problem"), samples=32),
    _Format("MATH500", _columns("problem")),
    _Format("Minerva", _columns("question", "problem")),
    _Format("OlympiadBench", _columns("question", reference=("final_answer",))),
    _Format("GSM8K", _gsm8k, "gsm8k"),
    _Format("LiveCodeBench", _livecodebench, "code", samples=8),
    _Format("CodeForces", _codeforces, "code", samples=8),
  )
}
