"""JSON-lines files: lines by number, and the errors of lines that are bad."""

import pytest

from gspo_jax.record import json_lines
from gspo_jax.runtime.errors import UserError


def test_lines_carry_their_number_and_blank_lines_are_skipped(tmp_path):
  path = tmp_path / "a"
  path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xc3\xa9"}')
  assert list(json_lines.read(path)) == [
    (f"{path}:1", {"a": 1}),
    (f"{path}:4", {"a": "é"}),
  ]


@pytest.mark.parametrize(
  "bad", [b"garbage", b"[1]", b'{"a": 1', b'{"a": "\xe9"}', b"[" * 99999]
)
def test_a_line_that_is_no_object_is_an_error_with_its_number(bad):
  lines = [b'{"a": 1}\n', b"\n", bad + b"\n", b"{}\n"]
  for drop_partial in (False, True):
    with pytest.raises(UserError, match=r"^file:3: expected a JSON object"):
      list(json_lines.parse(lines, "file", drop_partial=drop_partial))


def test_a_partial_last_line_is_dropped_on_request():
  lines = [b'{"a": 1}\n', b'{"a"']
  (line,) = json_lines.parse(lines, "file", drop_partial=True)
  assert line.record == {"a": 1}
  with pytest.raises(UserError, match=r"^file:2: "):
    list(json_lines.parse(lines, "file"))
  # A whole object without its newline is kept.
  lines[1] = b'{"a": 2}'
  records = [r for _, r in json_lines.parse(lines, "file", drop_partial=True)]
  assert records == [{"a": 1}, {"a": 2}]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r"cannot read .*missing.*No such file"):
    list(json_lines.read(tmp_path / "missing"))
  with pytest.raises(UserError, match="directory"):
    list(json_lines.read(tmp_path))
