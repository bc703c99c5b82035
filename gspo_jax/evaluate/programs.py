"""Problems that a program solves, as LiveCodeBench and CodeForces publish them.

  LiveCodeBench   question_content; public_test_cases, private_test_cases
  CodeForces      description; official_tests | tests | test_cases, the first
                  that has any; input_format, output_format, note and examples
                  are added to the problem where the record has them

Tests are objects of `input` and `output`, in a list or in its JSON. The
published private_test_cases are pickles, which are never loaded here: convert
them to JSON where that is safe.
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
  """A record whose programs cannot be tested here; the text is the reason."""


def livecodebench(record: Mapping, where: str) -> Problem:
  """The problem of a record.

  Args:
    record: of values that JSON has.
    where: its name, for errors.

  Raises:
    UserError: a column is missing, or of another form.
    Skipped: its tests call a function, or there are none.
  """
  columns = ("public_test_cases", "private_test_cases")
  found = [test for name in columns for test in tests(record, name, where)]
  text = _text(record, "question_content", where)
  return _problem(text, found, record, (*columns, "question_content"))


def codeforces(record: Mapping, where: str) -> Problem:
  """The problem of a record; see `livecodebench`.

  Left out are those that a checker, an interaction or a file decides, and those
  whose tests are not all there, or are only the examples that the problem
  shows.
  """
  for column, good, reason in (
    ("generated_checker", None, "needs a checker"),
    ("interaction_format", None, "interactive"),
    ("input_mode", "stdio", "reads a file"),
    ("official_tests_complete", True, "incomplete tests"),
  ):
    if record.get(column) not in (None, "", good):
      raise Skipped(reason)
  parts = [_text(record, "description", where)]
  for column in _STATEMENT[1:]:
    if record.get(column):
      title = column.removesuffix("_format").capitalize()
      parts.append(f"{title}\n{_text(record, column, where)}")
  for test in tests(record, "examples", where) if "examples" in record else ():
    parts.append(f"Example input\n{test['input'].strip()}")
    parts.append(f"Example output\n{test['output'].strip()}")
  found = _codeforces_tests(record, where)
  read = (*_STATEMENT, *_TESTS, "examples")
  return _problem("\n\n".join(parts), found, record, read)


def _codeforces_tests(record, where) -> list[dict[str, str]]:
  for column in _TESTS:
    if column in record and (found := tests(record, column, where)):
      return found
  if not {*_TESTS, "examples"} & record.keys():
    readers.field(record, _TESTS[0], where)  # raises: there is none
  if record.get("examples"):
    raise Skipped("no tests but the examples")
  return []


def _problem(text: str, found: list[dict], record, read) -> Problem:
  """The problem, with tests as the reward `code` reads them."""
  if not found:
    raise Skipped("no tests")
  columns = {k: v for k, v in record.items() if k not in read}
  return Problem(text, json.dumps(found), "", columns)


def _text(record, name: str, where: str) -> str:
  value = readers.field(record, name, where)
  return (
    value
    if value and isinstance(value, str)
    else _fail(where, name, "text", value)
  )


def tests(record: Mapping, name: str, where: str) -> list[dict[str, str]]:
  """Tests of a program, {"input", "output"} each; also of JSON text.

  Raises:
    UserError: the column is missing, or has another form.
    Skipped: the tests call a function, and have no standard input.
  """
  value = readers.field(record, name, where)
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except ValueError as error:
      raise UserError(
        f"{where}: column {name!r} is not JSON. LiveCodeBench publishes a "
        "pickle there (base64, zlib). To load it can run any program, so it is "
        "not loaded: convert the file where you trust it"
      ) from error
  value, expected = value or [], "a list of {'input', 'output'}"
  if not isinstance(value, list):
    _fail(where, name, expected, value)
  for test in value:
    if not (isinstance(test, dict) and {"input", "output"} <= test.keys()):
      _fail(where, name, expected, value)
    if test.get("testtype", "stdin") != "stdin":
      raise Skipped(f"{test['testtype']} tests")
    if not all(isinstance(test[k], str) for k in ("input", "output")):
      _fail(where, name, "text as 'input' and 'output'", test)
  return [{k: test[k] for k in ("input", "output")} for test in value]


def _fail(where: str, column: str, expected: str, value) -> NoReturn:
  """UserError about a value."""
  raise UserError(
    f"{where}: column {column!r}: expected {expected}, got "
    f"{json.dumps(value)[:60]}"
  )
