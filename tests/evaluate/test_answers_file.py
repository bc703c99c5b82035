"""Responses survive a kill at any byte; other settings are an error."""

import json
import sys

import pytest

from gspo_jax.evaluate.answers_file import AnswersFile
from gspo_jax.runtime.errors import UserError

SETTINGS = {"seed": 0, "sets": {"A": {"steps": (1, 2)}}}
SIZES = [2, 1, 2]


def records(number):
  return [{"response": f"é\n{number}.{i}"} for i in range(SIZES[number])]


def shorten(record):
  return {"length": len(record["response"])}


def open_file(folder, settings=SETTINGS):
  return AnswersFile(str(folder), settings, SIZES, shorten)


def write(folder, upto):
  """Writes the missing batches up to `upto`: how many there were before."""
  with open_file(folder) as file:
    done = file.batches_done
    for number in range(done, upto):
      file.append(records(number))
  return done


def test_the_same_command_continues(tmp_path):
  write(tmp_path / "once", 3)
  whole = (tmp_path / "once/answers.jsonl").read_bytes()
  folder = tmp_path / "deep/again"
  for upto in range(4):
    assert write(folder, upto) == max(upto - 1, 0)
  assert (folder / "answers.jsonl").read_bytes() == whole
  with open_file(folder) as file:
    assert file.batches_done == 3
    every = records(0) + records(1) + records(2)
    assert file.records == [*map(shorten, every)]


def test_texts_are_on_disk_at_once_and_not_kept_in_memory(tmp_path):
  with open_file(tmp_path) as file:
    file.append(records(0))
    assert file.records == [{"length": 5}] * 2
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [*map(json.loads, lines)] == records(0)


def test_a_kill_at_any_byte_costs_its_batch(tmp_path):
  write(tmp_path, 3)
  path = tmp_path / "answers.jsonl"
  whole = path.read_bytes()
  ends = [0]
  for number in range(3):
    size = len("".join(json.dumps(r) + "\n" for r in records(number)))
    ends.append(ends[-1] + size)
  for cut in range(len(whole)):
    path.write_bytes(whole[:cut])
    with open_file(tmp_path):
      pass
    assert path.stat().st_size == max(end for end in ends if end <= cut)
    write(tmp_path, 3)
    assert path.read_bytes() == whole


def test_other_settings_are_named(tmp_path):
  write(tmp_path, 1)
  other = SETTINGS | {"seed": 1}
  with pytest.raises(
    UserError,
    match=rf"evaluation in '{tmp_path}' .*seed=0.*seed=1; use .*--out",
  ):
    open_file(tmp_path, other)
  assert (tmp_path / "answers.jsonl").read_text().count("\n") == 2


def test_files_that_are_not_ours(tmp_path):
  write(tmp_path, 1)
  (tmp_path / "answers.jsonl").write_text("hello\nworld\n")
  with pytest.raises(UserError, match=r"expected a JSON object .*'hello'"):
    open_file(tmp_path)
  (tmp_path / "settings.json").write_text("{")
  with pytest.raises(UserError, match=r"settings.json is not JSON"):
    open_file(tmp_path)


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "gcsfs", None)
  with pytest.raises(UserError, match=r"--out=gs://b: .*gcsfs"):
    open_file("gs://b")
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"--out=.*file/x: Not a directory"):
    open_file(tmp_path / "file/x")
