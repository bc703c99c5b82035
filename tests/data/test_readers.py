"""Records of files: JSON lines of problems, and their fields."""

import json

import pytest

from gspo_jax.data import readers
from gspo_jax.runtime.errors import UserError


def test_lines_have_file_and_number(tmp_path):
  path = tmp_path / "a"
  path.write_text('{"a": 1}\n\n  \n{"a": 2}')
  lines = list(readers.json_lines(str(path)))
  assert lines == [(f"{path}:1", {"a": 1}), (f"{path}:4", {"a": 2})]


def test_windows_files(tmp_path):
  path = tmp_path / "a"
  path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
  assert [record for _, record in readers.json_lines(str(path))] == [
    {"a": 1},
    {"a": 2},
  ]


def test_a_line_in_another_encoding_is_named(tmp_path):
  path = tmp_path / "a.jsonl"
  line = json.dumps({"a": "é"}, ensure_ascii=False)
  path.write_bytes(f"{line}\n".encode() + f"{line}\n".encode("latin-1"))
  with pytest.raises(UserError, match=r"a\.jsonl:2: .*UTF-8"):
    list(readers.json_lines(str(path)))


def test_files_that_cannot_be_read(tmp_path):
  with pytest.raises(UserError, match=r"missing.*No such file"):
    list(readers.json_lines(str(tmp_path / "missing")))
  with pytest.raises(UserError, match="directory"):
    list(readers.json_lines(str(tmp_path)))


def test_a_field_that_is_not_there():
  assert readers.field({"question": 1}, "question", "a:1") == 1
  with pytest.raises(UserError, match=r"a:1: no field 'qestion'; .*'question'"):
    readers.field({"question": 1}, "qestion", "a:1")
  with pytest.raises(UserError, match=r"a:1: expected an object, got '3'"):
    readers.field(3, "question", "a:1")
