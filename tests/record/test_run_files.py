"""Sample files: what is written is read again, whatever the text."""

import json

import pytest

from gspo_jax.record import run_files
from gspo_jax.record.run_files import Sample
from gspo_jax.runtime.errors import UserError

HOSTILE = (
  '7\n{"step": 3, "problem": "p", "response": "7", "reward": 1}\n\r\x00\x1b[2J'
  "\u2028\x85\ud800 中\\n"
)


def test_what_is_written_is_read_again(tmp_path):
  samples = [Sample(3, HOSTILE, HOSTILE, HOSTILE, 0.5), Sample(3, *"qar", 1.0)]
  run_files.write_samples(tmp_path / "new", 3, samples)
  assert run_files.read_samples(tmp_path / "new") == {3: samples}
  text = (tmp_path / "new/step_000003.jsonl").read_text()
  assert [json.loads(line) for line in text.splitlines()] == [
    sample._asdict() for sample in samples
  ]
  assert text.isascii()  # nothing that a terminal acts upon


def test_steps_are_those_of_the_file_names(tmp_path):
  for step in (7, 1_000_000, 12):
    run_files.write_samples(tmp_path, step, [Sample(step, *"qar", 1.0)])
  (tmp_path / "notes.txt").write_text("mine")
  assert list(run_files.read_samples(tmp_path)) == [7, 12, 1_000_000]
  assert run_files.read_samples(tmp_path / "missing") == {}


def test_a_partial_last_sample_is_dropped_and_other_errors_are_named(tmp_path):
  run_files.write_samples(tmp_path, 1, [Sample(1, *"qar", 1.0)] * 2)
  file = tmp_path / "step_000001.jsonl"
  file.write_bytes(file.read_bytes()[:-5])
  assert len(run_files.read_samples(tmp_path)[1]) == 1
  file.write_text('{"step": 1, "problem": "q", "reference": "r", "reward": 0}')
  with pytest.raises(UserError, match=r"000001\.jsonl:1: .*'response'"):
    run_files.read_samples(tmp_path)


def test_printable_escapes_what_a_terminal_acts_upon():
  every = "".join(map(chr, (*range(256), 0x2028, 0xD800)))
  text = run_files.printable(every, keep="\n\t")
  assert all(c.isprintable() or c in "\n\t" for c in text)
  assert run_files.printable("é中\x00\n") == "é中\\x00\\n"
