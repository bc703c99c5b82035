"""Problems that a program solves, as LiveCodeBench and CodeForces publish them.

LiveCodeBench   question_content; public_test_cases, private_test_cases
CodeForces      description; the first of official_tests, tests, test_cases
                that has any; input_format, output_format, note and examples,
                if present, are added to the problem

Tests are objects of `input` and `output`, as a list or as its JSON. The
published private_test_cases are pickles, which are never loaded here; convert
them to JSON in a safe place.
"""

import json
from collections.abc import Mapping
from typing import NoReturn

from gspo_jax.data import readers
from gspo_jax.data.problem import Problem
from gspo_jax.runtime.errors import UserError

_STATEMENT = ("description", "input_format", "output_format", "note")
_TESTS = ("official_tests", "tests", "test_cases")


class Skipped(Exception):
  """A record whose programs cannot be tested; the text is the reason."""


def livecodebench(record: Mapping, place: str) -> Problem:
  """The problem of a record; `place` names the record in errors.

  Skipped if its tests call a function, or it has no tests.
  """
  columns = ("public_test_cases", "private_test_cases")
  all_tests = [test for name in columns for test in tests(record, name, place)]
  text = _text(record, "question_content", place)
  return _problem(text, all_tests, record, (*columns, "question_content"))


def codeforces(record: Mapping, place: str) -> Problem:
  """The problem of a record; see `livecodebench`.

  Skipped if a checker, an interaction or a file decides, or if tests are
  missing or are only the examples in the problem.
  """
  for column, good, reason in (
    ("generated_checker", None, "needs a checker"),
    ("interaction_format", None, "interactive"),
    ("input_mode", "stdio", "reads a file"),
    ("official_tests_complete", True, "incomplete tests"),
  ):
    if record.get(column) not in (None, "", good):
      raise Skipped(reason)
  parts = [_text(record, "description", place)]
  for column in _STATEMENT[1:]:
    if record.get(column):
      title = column.removesuffix("_format").capitalize()
      parts.append(f"{title}\n{_text(record, column, place)}")
  for test in tests(record, "examples", place) if "examples" in record else ():
    parts.append(f"Example input\n{test['input'].strip()}")
    parts.append(f"Example output\n{test['output'].strip()}")
  if not {*_TESTS, "examples"} & record.keys():
    readers.field(record, _TESTS[0], place)  # raises: no column has tests
  columns = (tests(record, c, place) for c in _TESTS if c in record)
  official = next(filter(None, columns), [])
  if not official and record.get("examples"):
    raise Skipped("no tests but the examples")
  read = (*_STATEMENT, *_TESTS, "examples")
  return _problem("\n\n".join(parts), official, record, read)


def _problem(text: str, all_tests: list[dict], record, read) -> Problem:
  if not all_tests:
    raise Skipped("no tests")
  columns = {k: v for k, v in record.items() if k not in read}
  return Problem(text, json.dumps(all_tests), "", columns)


def _text(record, name: str, place: str) -> str:
  value = readers.field(record, name, place)
  if not (value and isinstance(value, str)):
    _fail(place, name, "text", value)
  return value


def tests(record: Mapping, name: str, place: str) -> list[dict[str, str]]:
  """Tests of a program, {"input", "output"} each, from a list or JSON text.

  Skipped if the tests call a function instead of using standard input.
  """
  value = readers.field(record, name, place)
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except ValueError as error:
      raise UserError(
        f"{place}: column {name!r} is not JSON. LiveCodeBench publishes a "
        "pickle there (base64, zlib). To load it can run any program, so it is "
        "not loaded: convert the file where you trust it"
      ) from error
  value, expected = value or [], "a list of {'input', 'output'}"
  if not isinstance(value, list):
    _fail(place, name, expected, value)
  for test in value:
    if not (isinstance(test, dict) and {"input", "output"} <= test.keys()):
      _fail(place, name, expected, value)
    if test.get("testtype", "stdin") != "stdin":
      raise Skipped(f"{test['testtype']} tests")
    if not all(isinstance(test[k], str) for k in ("input", "output")):
      _fail(place, name, "text as 'input' and 'output'", test)
  return [{k: test[k] for k in ("input", "output")} for test in value]


def _fail(place: str, column: str, expected: str, value) -> NoReturn:
  raise UserError(
    f"{place}: column {column!r}: expected {expected}, got "
    f"{json.dumps(value)[:60]}"
  )
