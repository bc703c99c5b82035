"""Tests of programs: lists, their JSON, and what is never loaded."""

import base64
import json
import pickle
import zlib

import pytest

from gspo_jax.evaluate import programs
from gspo_jax.runtime.errors import UserError


def parsed(value):
  return programs.tests({"t": value}, "t", "file:7")


def test_tests_are_a_list_or_its_json():
  tests = [{"input": "1\n", "output": "2\n"}]
  more = [tests[0] | {"testtype": "stdin"}]
  for value in (tests, json.dumps(tests), more, json.dumps(more)):
    assert parsed(value) == tests
  assert parsed(None) == parsed([]) == []


def test_functions_to_call_are_skipped():
  test = {"input": "1", "output": "2", "testtype": "functional"}
  with pytest.raises(programs.Skipped, match="functional tests"):
    parsed([test])


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
    parsed(value)


class Bomb:
  def __reduce__(self):
    return pytest.fail, ("unpickled",)


def test_a_pickle_is_never_loaded():
  for secret in (Bomb(), json.dumps([{"input": "", "output": ""}])):
    text = base64.b64encode(zlib.compress(pickle.dumps(secret))).decode()
    with pytest.raises(UserError, match=r"publishes a pickle there .* convert"):
      parsed(text)
