"""Answers survive a kill at any byte; another evaluation is refused."""

import json

import pytest

from gspo_jax.evaluate.answers_file import AnswersFile
from gspo_jax.runtime.errors import UserError

SETTINGS = {"seed": 0, "sets": {"A": {"steps": (1, 2)}}}
BATCHES = [("A", 2), ("A", 1), ("B", 2)]


def rows(number):
  name, size = BATCHES[number]
  return [{"set": name, "text": f"é\n{number}.{i}"} for i in range(size)]


def brief(row):
  return {"length": len(row["text"])}


def answers(folder, settings=SETTINGS):
  return AnswersFile(str(folder), settings, BATCHES, brief)


def write(folder, upto):
  with answers(folder) as file:
    begun = file.begun("A") + file.begun("B")
    for number in range(begun, upto):
      file.append(rows(number))
  return begun


def test_the_same_command_goes_on(tmp_path):
  write(tmp_path / "once", 3)
  whole = (tmp_path / "once/answers.jsonl").read_bytes()
  folder = tmp_path / "deep/again"
  for upto in range(4):
    assert write(folder, upto) == max(upto - 1, 0)
  assert (folder / "answers.jsonl").read_bytes() == whole
  with answers(folder) as file:
    assert (file.begun("A"), file.begun("B")) == (2, 1)
    assert file.rows == {"A": [*map(brief, rows(0) + rows(1))],
                         "B": [*map(brief, rows(2))]}  # fmt: skip


def test_texts_are_not_remembered(tmp_path):
  with answers(tmp_path) as file:
    file.append(rows(0))
    assert file.rows == {"A": [{"length": 5}] * 2, "B": []}
  lines = (tmp_path / "answers.jsonl").read_text().splitlines()
  assert [*map(json.loads, lines)] == rows(0)


def test_a_kill_at_any_byte_costs_its_batch(tmp_path):
  write(tmp_path, 3)
  path = tmp_path / "answers.jsonl"
  whole = path.read_bytes()
  ends = [0]
  for number in range(3):
    size = len("".join(json.dumps(r) + "\n" for r in rows(number)))
    ends.append(ends[-1] + size)
  for cut in range(len(whole)):
    path.write_bytes(whole[:cut])
    with answers(tmp_path):
      pass
    assert path.stat().st_size == max(end for end in ends if end <= cut)
    write(tmp_path, 3)
    assert path.read_bytes() == whole


def test_rows_lie_on_the_disk_before_the_end(tmp_path):
  with answers(tmp_path) as file:
    file.append(rows(0))
    assert (tmp_path / "answers.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("bad", [rows(0)[:1], rows(2), []])
def test_a_batch_is_the_next_one_whole(tmp_path, bad):
  with (
    answers(tmp_path) as file,
    pytest.raises(ValueError, match="expected 2 of A"),
  ):
    file.append(bad)


def test_other_settings_are_named(tmp_path):
  write(tmp_path, 1)
  other = SETTINGS | {"seed": 1}
  with pytest.raises(UserError, match=r"evaluation saved here.*seed=0.*seed=1"):
    answers(tmp_path, other)
  assert (tmp_path / "answers.jsonl").read_text().count("\n") == 2


def test_files_that_are_not_ours(tmp_path):
  write(tmp_path, 1)
  (tmp_path / "answers.jsonl").write_text("hello\nworld\n")
  with pytest.raises(UserError, match=r"expected a JSON object .*'hello'"):
    answers(tmp_path)
  (tmp_path / "answers.jsonl").write_text('{"set": "B"}\n' * 2)
  with pytest.raises(UserError, match="expected answers to A"):
    answers(tmp_path)
  (tmp_path / "settings.json").write_text("{")
  with pytest.raises(UserError, match=r"settings.json is not JSON"):
    answers(tmp_path)


def test_folders_that_cannot_be_written(tmp_path):
  with pytest.raises(UserError, match="--out=gs://b: expected a folder of"):
    answers("gs://b")
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"--out=.*file/x: Not a directory"):
    answers(tmp_path / "file/x")
