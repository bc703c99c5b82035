"""Question sets by name: which columns a user's file has, and who judges.

  AIME24, AIME25  problem | Problem | question; answer | Answer
  AMC23           question | problem; answer
  MATH500         problem; answer
  Minerva         question | problem; answer
  OlympiadBench   question; final_answer (a text, or a list of texts)
  GSM8K           question; answer (the reference follows its last ####)
  LiveCodeBench   question_content; public_test_cases, private_test_cases
  CodeForces      description; rating (may be null); official_tests | tests |
                  test_cases, the first that has any; the question also tells
                  input_format, output_format, note and examples, where they
                  are there

The files are JSON lines, and `a | b` is one column under either name. Tests are
objects of `input` and `output`. The published private_test_cases are pickles in
disguise, which are never loaded here: they have to be made JSON first, where
that is safe. Rows that standard input and output cannot judge (functions to
call, checkers, interaction, files) are left out, and counted, as are those of
CodeForces that have no tests but the examples, which their question prints, or
only some of them (official_tests_complete is false).
"""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from gspo_jax.data.readers import json_lines
from gspo_jax.data.tasks import Problem
from gspo_jax.evaluate.benchmark_rows import Row, Skipped
from gspo_jax.runtime.errors import UserError, nearest

_IDS = ("id", "ID", "unique_id", "question_id", "url")


class Benchmark(NamedTuple):
  """A set, as read from a file.

  Attributes:
    name: of the set.
    reward: the name of the one that judges.
    samples: answers a question, where nothing else is asked for.
    problems: N of them.
    ids: N names; the line's number where a row has none.
    ratings: N difficulties; None where a row has none.
    skipped: {reason: rows left out}.
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
class _Set:
  """How the rows of a set become questions.

  Attributes:
    name: as the papers spell it.
    parse: row -> (question, reference).
    reward: a name in gspo_jax/rewards/.
    samples: 32 for AIME and 8 for LiveCodeBench as in GSPO, section 5.1; AMC is
      as small as AIME, CodeForces judged as LiveCodeBench; 1 for the others,
      which are large.
  """

  name: str
  parse: Callable[[Row], tuple[str, str]]
  reward: str = "math"
  samples: int = 1


def read(
  name: str, path: str, *, reward: str = "", limit: int | None = None
) -> Benchmark:
  """Reads a set of the user's.

  Args:
    name: one of those above, in any case; or any other for a file of `question`
      and `answer`, which then needs a reward.
    path: the file.
    reward: judges instead of the set's own.
    limit: the first so many questions, not all.

  Raises:
    UserError: no such set or file, or a row lacks what the set needs.
  """
  named = _SETS.get(name.lower())
  if named is None and not reward:
    names = [s.name for s in _SETS.values()]
    raise UserError(
      f"--set={name}: no such set; {nearest(name, names)} (one of another name "
      "has the columns 'question' and 'answer', and needs --reward)"
    )
  named = named or _Set(name, _plain("question"))
  found, skipped = [], Counter()
  for where, values in json_lines(path):
    if len(found) == limit:
      break
    row = Row(where, values)
    try:
      found.append((*named.parse(row), *_extras(named, row)))
    except Skipped as reason:
      skipped[str(reason)] += 1
  if not found:
    raise UserError(f"{path}: no usable row; left out: {dict(skipped) or 0}")
  with open(path, "rb") as file:
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
  return Benchmark(
    name=named.name,
    reward=reward or named.reward,
    samples=named.samples,
    problems=[Problem(question, answer, "") for question, answer, *_ in found],
    ids=[name for *_, name, _ in found],
    ratings=[rating for *_, rating in found],
    skipped=dict(skipped),
    sha256=sha256,
  )


def _extras(named: _Set, row: Row) -> tuple[str, float | None]:
  ids = [row.values[k] for k in _IDS if row.values.get(k) not in (None, "")]
  name = str(ids[0]) if ids else row.where.rpartition(":")[2]
  rating = row.column("rating")[1] if named.name == "CodeForces" else None
  number = type(rating) in (int, float) and math.isfinite(rating)
  if not (rating is None or number):
    row.refuse("rating", "a number", rating)
  return name, rating


def _plain(*question: str, answer: tuple[str, ...] = ("answer",)):
  return lambda row: (row.text(*question), row.text(*answer))


def _gsm8k(row: Row) -> tuple[str, str]:
  answer = row.text("answer").rpartition("####")[2].strip()
  return row.text("question"), answer


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
  found = filter(None, (row.tests(c) for c in columns if c in row.values))
  if tests := next(found, None):
    return tests
  row.column(*columns, "examples")  # one has to be there, if empty
  if row.values.get("examples"):
    raise Skipped("no tests but the examples")
  return []


def _reference(tests: list[dict[str, str]]) -> str:
  """As the reward `code` takes them."""
  if not tests:
    raise Skipped("no tests")
  return json.dumps(tests)


_AIME = _plain("problem", "Problem", "question", answer=("answer", "Answer"))
_SETS = {
  s.name.lower(): s
  for s in (
    _Set("AIME24", _AIME, samples=32),
    _Set("AIME25", _AIME, samples=32),
    _Set("AMC23", _plain("question", "problem"), samples=32),
    _Set("MATH500", _plain("problem")),
    _Set("Minerva", _plain("question", "problem")),
    _Set("OlympiadBench", _plain("question", answer=("final_answer",))),
    _Set("GSM8K", _gsm8k, "gsm8k"),
    _Set("LiveCodeBench", _livecodebench, "code", samples=8),
    _Set("CodeForces", _codeforces, "code", samples=8),
  )
}
