"""TFDS sets from local files, by name, without TensorFlow or a network."""

import json
import sys

import datasets
import pytest
import tensorflow_datasets as tfds
from processes import mistake, python

from gspo_jax.data import prepare_tfds, sources
from gspo_jax.runtime.errors import UserError


def write(path, count, **more):
  rows = [
    {"question": f"é {i}?", "answer": f"so\n#### {i}", **more}
    for i in range(count)
  ]
  path.write_text("\n".join(map(json.dumps, rows)))
  return str(path)


def test_a_set_is_read_by_name_and_in_order(tmp_path, monkeypatch):
  files = {"train": write(tmp_path / "a", 9), "test": write(tmp_path / "b", 3)}
  assert prepare_tfds.prepare("gsm8k", files, str(tmp_path / "sets")) == {
    "train": 9,
    "test": 3,
  }
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
  read = lambda spec: list(sources.load(spec))
  for split, path in files.items():
    problems = read(f"tfds:gsm8k:{split}")
    assert problems[2].columns == {"annotation": "so\n", "short_answer": "2"}
    without = [problem._replace(columns={}) for problem in problems]
    assert without == list(sources.load(f"jsonl:{path}"))
  assert read("tfds:gsm8k:1.0.0:train[3:5]") == read("tfds:gsm8k")[3:5]
  rows = tfds.data_source("gsm8k", split="test", data_dir=tmp_path / "sets")
  assert rows[2] == {
    "question": "é 2?".encode(),
    "answer": b"so\n#### 2",
    "annotation": b"so\n",
    "short_answer": b"2",
  }
  assert "tensorflow" not in sys.modules


def test_a_set_with_another_name(tmp_path, monkeypatch):
  tests = [{"input": "1\n", "output": "2\n"}]
  path = write(tmp_path / "a", 4, tests=tests)
  folder = str(tmp_path / "sets")
  assert prepare_tfds.prepare("my_set", {"train": path}, folder) == {"train": 4}
  fields = sources.Fields(reference="tests", demonstration="answer")
  monkeypatch.setenv("TFDS_DATA_DIR", folder)
  source = sources.load("tfds:my_set", fields=fields)
  assert json.loads(source[3].reference) == tests
  assert source[3].demonstration == "so\n#### 3"


def test_a_set_of_a_parquet_file(tmp_path, monkeypatch):
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  rows = {"question": ["1+1?"], "answer": ["so #### 2"], "info": [{"n": 1}]}
  file, folder = tmp_path / "a.parquet", str(tmp_path / "sets")
  datasets.Dataset.from_dict(rows).to_parquet(file)
  files = {"train": f"parquet:{file}"}
  assert prepare_tfds.prepare("sums", files, folder) == {"train": 1}
  monkeypatch.setenv("TFDS_DATA_DIR", folder)
  problem = sources.load("tfds:sums")[0]
  assert problem == ("1+1?", "2", "so #### 2", {"info": '{"n": 1}'}, (), ())


def test_a_set_that_is_not_prepared_names_the_command(tmp_path, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  words = f"prepare_tfds --name=gsm8k --train=FILE --data_dir={tmp_path}"
  with pytest.raises(UserError, match=words):
    sources.load("tfds:gsm8k")


def test_mistakes(tmp_path):
  good, folder = write(tmp_path / "a", 2), str(tmp_path / "sets")
  prepare_tfds.prepare("there", {"train": good}, folder)
  (tmp_path / "empty").write_text("\n")
  (tmp_path / "uneven").write_text('{"a": "1"}\n{"b": "1"}')
  for name, path, words in (
    ("My Set", good, "--name=My Set: expected letters"),
    ("there", good, "holds 'there' already"),
    ("new", str(tmp_path / "none"), "No such file"),
    ("new", str(tmp_path / "empty"), "no record in it"),
    ("new", str(tmp_path / "uneven"), "uneven:2: no field 'a'"),
    ("gsm8k", str(tmp_path / "uneven"), "uneven:1: no field 'question'"),
  ):
    with pytest.raises(UserError, match=words):
      prepare_tfds.prepare(name, {"train": path}, folder)
  names = {p.name for p in (tmp_path / "sets").iterdir()} - {"downloads"}
  assert names == {"there"}


def test_the_command(tmp_path):
  done = python(
    *("-m", "gspo_jax.data.prepare_tfds", "--name=my_set"),
    f"--train={write(tmp_path / 'a', 5)}",
    f"--data_dir={tmp_path}/sets",
  )
  assert done.returncode == 0, done.stderr
  assert "'train': 5" in done.stdout
  error = mistake(prepare_tfds.main, "--name=my_set")
  assert error.startswith("error: --train is missing")
