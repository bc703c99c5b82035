"""An error about a row names the file, line, column and value."""

import base64
import json
import pickle
import zlib

import pytest

from gspo_jax.evaluate.benchmark_rows import Row, Skipped
from gspo_jax.runtime.errors import UserError


def row(**values):
  return Row("file:7", values)


def test_an_error_about_a_missing_column_lists_the_others():
  with pytest.raises(UserError) as error:
    row(Problems="x", answer=1).column("Problem", "problem")
  assert str(error.value) == (
    "file:7: expected a column 'Problem' or 'problem', got 'Problems', "
    "'answer'; did you mean 'Problems'?"
  )
  with pytest.raises(UserError, match=r"got an empty object$"):
    row().column("a")


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (" a ", "a"),
    (204, "204"),
    (142.0, "142"),
    (0.5, "0.5"),
    (["1", 2], "1, 2"),
  ],
)
def test_text_of_numbers_and_lists(value, text):
  assert row(a=value).text("b", "a") == text


@pytest.mark.parametrize("value", ["", None, True, {}, [], [None], " ", [[1]]])
def test_text_of_anything_else_is_an_error(value):
  with pytest.raises(UserError, match="file:7: column 'a': expected text"):
    row(a=value).text("a")


def test_tests_are_a_list_or_its_json():
  tests = [{"input": "1\n", "output": "2\n"}]
  more = [tests[0] | {"testtype": "stdin"}]
  for value in (tests, json.dumps(tests), more, json.dumps(more)):
    assert row(t=value).tests("t") == tests
  assert row(t=None).tests("t") == row(t=[]).tests("t") == []


def test_functions_to_call_are_skipped():
  test = {"input": "1", "output": "2", "testtype": "functional"}
  with pytest.raises(Skipped, match="functional tests"):
    row(t=[test]).tests("t")


@pytest.mark.parametrize(
  ("value", "words"),
  [
    ([{"input": "1"}], "expected a list of {'input', 'output'}, got"),
    ({"input": "1", "output": "2"}, "expected a list of {'input', 'output'}"),
    (["1"], "expected a list of {'input', 'output'}"),
    ("3", "expected a list of {'input', 'output'}, got 3"),
    ([{"input": 1, "output": "2"}], "expected text as 'input' and 'output'"),
  ],
)
def test_other_tests_are_an_error(value, words):
  with pytest.raises(UserError, match=f"file:7: column 't': {words}"):
    row(t=value).tests("t")


class Bomb:
  def __reduce__(self):
    return pytest.fail, ("unpickled",)


def test_a_pickle_is_never_loaded():
  for secret in (Bomb(), json.dumps([{"input": "", "output": ""}])):
    text = base64.b64encode(zlib.compress(pickle.dumps(secret))).decode()
    with pytest.raises(UserError, match=r"publishes a pickle there .* convert"):
      row(t=text).tests("t")
