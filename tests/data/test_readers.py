"""Records of files and data sets, and their fields."""

import decimal
import json
import pickle
import re

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from gspo_jax.data import readers, sources
from gspo_jax.runtime.errors import UserError

RECORD = {"reward_model": {"ground_truth": 7}, "a.b": 1, "a": {"b": 2}}


def test_a_field_may_be_inside_another_one():
  assert readers.field(RECORD, "reward_model.ground_truth", "") == 7
  assert readers.field(RECORD, "a.b", "") == 1


@pytest.mark.parametrize(
  ("record", "name", "words"),
  [
    (3, "question", "expected an object, got '3'"),
    ({"gold": 1, "level": 2}, "glod",
     r"no field 'glod'; did you mean 'gold'\? It has gold, level$"),
    (RECORD, "reward_model.truth",
     "no field 'reward_model.truth'; choose one of a, a.b, reward_model, "
     "reward_model.ground_truth"),
  ],
)  # fmt: skip
def test_a_field_that_is_not_there(record, name, words):
  with pytest.raises(UserError, match=f"^a:1: {words}"):
    readers.field(record, name, "a:1")


def test_columns_are_what_json_holds():
  record = {
    "level": np.int64(3),
    "tags": np.array([b"a", b"b"], object),
    "info": {"scores": (np.float32(0.1), None)},
    "day": np.datetime64("2025-01-02").item(),
    "image": b"\xff\xd8",
    "object": object(),
    "answer": "7",
  }
  columns = readers.plain_columns(record, without=["answer"])
  assert columns == {
    "level": 3,
    "tags": ["a", "b"],
    "info": {"scores": [0.1, None]},
    "day": "2025-01-02",
  }
  assert json.loads(json.dumps(columns)) == columns


# The package `datasets`.


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder of Parquet files; the package writes its cache beside it."""
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  monkeypatch.chdir(tmp_path)
  (tmp_path / "sums").mkdir()
  for name, first in (("train-0", 0), ("train-1", 3), ("test", 10)):
    rows = [
      {"question": f"{n}+1?", "answer": str(n + 1)}
      for n in range(first, first + 3)
    ]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / f"sums/{name}.parquet")
  return tmp_path / "sums"


def answers(spec):
  rows, _ = readers.read(spec)
  return [int(rows[i]["answer"]) for i in range(len(rows))]


def test_the_fingerprint_of_parquet_is_of_all_bytes(folder):
  prints = []
  for answer in (1, 2):
    rows = {"question": ["a", "b"], "answer": ["1", "1"], "hint": [0, answer]}
    parquet.write_table(pyarrow.table(rows), folder / "hints.parquet")
    source = sources.load(f"parquet:{folder}/hints.parquet")
    prints.append(sources.fingerprint(source))
  assert prints[0] != prints[1]


def test_parquet_files(folder):
  assert answers(f"parquet:{folder}/test.parquet") == [11, 12, 13]
  assert answers("parquet:sums/train-*.parquet") == [1, 2, 3, 4, 5, 6]
  records = readers.read("parquet:sums/test.parquet")
  assert records.place(2) == "parquet:sums/test.parquet[2]"
  again = pickle.loads(pickle.dumps(records))
  assert (
    again.rows[2] == records.rows[2] == {"question": "12+1?", "answer": "13"}
  )
  assert again.place(2) == records.place(2)


def test_the_commands_read_files_and_sources(folder, tmp_path):
  path = str(tmp_path / "a.jsonl")
  (tmp_path / "a.jsonl").write_text('{"answer": 1}\n')
  assert list(readers.lines(path)) == [(f"{path}:1", {"answer": 1})]
  assert list(readers.lines("parquet:sums/test.parquet"))[1] == (
    "parquet:sums/test.parquet[1]",
    {"question": "11+1?", "answer": "12"},
  )


@pytest.mark.parametrize(
  ("file", "spec", "path"),
  [
    ("a", "jsonl:a", "a"),
    ("a.JSONL", "jsonl:a.JSONL", "a.JSONL"),
    ("a.csv", "hf:a.csv", "a.csv"),
    ("a.tsv:train[:1]", "hf:a.tsv:train[:1]", "a.tsv"),
    ("a.parquet:train", "hf:a.parquet:train", "a.parquet"),
    ("a.jsonl.gz", "hf:a.jsonl.gz", "a.jsonl.gz"),
    ("gs://b/a.json", "hf:gs://b/a.json", "gs://b/a.json"),
    ("hf:/b/a.csv:train", "hf:/b/a.csv:train", "/b/a.csv"),
    ("tfds:a:test", "tfds:a:test", ""),
    ("csv:a.csv", "csv:a.csv", ""),  # `read` refuses it
  ],
)
def test_the_spec_of_a_file_and_its_path(file, spec, path):
  assert readers.spec_of(file) == spec
  assert readers.path_of(spec) == path


def test_folders_and_files_of_datasets(folder, tmp_path):
  assert answers(f"hf:{folder}") == [1, 2, 3, 4, 5, 6]
  assert answers("hf:sums:test") == [11, 12, 13]
  assert answers("hf:sums:train[1:3]") == [2, 3]
  assert answers("hf:sums/test.parquet") == [11, 12, 13]
  (tmp_path / "a.csv").write_text("question,answer\n0+1?,1\n")
  assert answers("hf:a.csv") == [1]
  rows = datasets.Dataset.from_dict({"answer": [*range(8)]})
  datasets.DatasetDict(dev=rows, test=rows.select([7])).save_to_disk("saved")
  assert answers("hf:saved:test") == [7]
  assert answers("hf:saved:dev[:2]+test") == [0, 1, 7]
  rows.save_to_disk("one")
  assert answers("hf:one") == [*range(8)]
  assert answers("hf:one:train[75%:]") == [6, 7]
  with pytest.raises(UserError, match=r'hf:saved: Unknown split "train".*test'):
    readers.read("hf:saved")


def test_numbers_of_tables(tmp_path, folder):
  """A missing value turns integers into floats; Parquet has exact decimals."""
  file = tmp_path / "a.csv"
  file.write_text("question,answer\na,1\nb,2.5\n")
  assert [p.reference for p in sources.load("hf:a.csv")] == ["1", "2.5"]
  file.write_text("question,answer\na,1\nb,2\nc,\n")
  with pytest.raises(
    UserError, match=r"hf:a.csv\[2\]: 'answer' .* null or NaN"
  ):
    sources.load("hf:a.csv")
  values = [decimal.Decimal("12.50"), decimal.Decimal("42.00")]
  table = pyarrow.table({"question": ["a", "b"], "answer": values})
  parquet.write_table(table, folder / "decimals.parquet")
  source = sources.load(f"parquet:{folder}/decimals.parquet")
  assert [p.reference for p in source] == ["12.5", "42"]
  for bits in (16, 32):
    values = np.array([0.1, 3], f"float{bits}")
    rows = {
      "question": ["a", "b"],
      "answer": values,
      "all": [[*values], [None]],
    }
    parquet.write_table(pyarrow.table(rows), folder / "narrow.parquet")
    source = sources.load(f"parquet:{folder}/narrow.parquet")
    assert [p.reference for p in source] == ["0.1", "3"]
    assert source[0].columns == {"all": [0.1, 3]}
    assert pickle.loads(pickle.dumps(source))[1] == source[1]


def test_a_file_that_is_written_again_is_read_again(folder):
  before = answers("parquet:sums/test.parquet")
  rows = [{"question": "?", "answer": "7"}]
  parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "test.parquet")
  assert before != answers("parquet:sums/test.parquet") == [7]


def test_images_are_left_out(tmp_path, folder):
  rows = {"answer": ["1"], "image": [b"no image"], "images": [[b"none"]]}
  image = datasets.Image()
  features = datasets.Features(
    {
      "answer": datasets.Value("string"),
      "image": image,
      "images": datasets.List(image),
    }
  )
  made = datasets.Dataset.from_dict(rows, features=features)
  made.to_parquet(tmp_path / "a.parquet")
  assert readers.read("parquet:a.parquet").rows[0] == {"answer": "1"}


@pytest.mark.parametrize(
  ("spec", "words"),
  [("parquet:", "expected parquet:FILE"),
   ("hf:", r"expected hf:NAME\[:SPLIT\]"),
   ("parquet:none.parquet", "parquet:none.parquet: Unable to find .*none"),
   ("parquet:text.parquet", "parquet:text.parquet: Parquet file size is 4"),
   ("hf:sums:tset", "hf:sums:tset: Unknown split .tset.*'train', 'test'"),
   ("hf:empty", "hf:empty: .*empty doesn't contain any data files"),
   ("hf:./none", "hf:./none: no such file or folder"),
   ("hf:a/b/c/d", "hf:a/b/c/d: no such file or folder")],
)  # fmt: skip
def test_data_sets_that_cannot_be_read(folder, tmp_path, spec, words):
  (tmp_path / "text.parquet").write_text("text")
  (tmp_path / "empty").mkdir()
  with pytest.raises(UserError, match=words) as error:
    readers.read(spec)
  assert "\n" not in str(error.value)


def test_a_set_of_the_hub_by_its_name(folder, monkeypatch):
  given = []

  def load(*names, **options):
    given.append((*names, *options.values()))
    raise ConnectionError("a long story\nof retries")

  monkeypatch.setattr(datasets, "load_dataset", load)
  for spec, name in (
    ("openai/gsm8k/main:test", "openai/gsm8k"), ("squad", "squad"),
    ("a/b:train[:5%]", "a/b"),
  ):  # fmt: skip
    with pytest.raises(
      UserError,
      match=rf"hf:{re.escape(spec)}: .* Hub cannot be reached; .* `hf download "
      rf"{name} --repo-type=dataset --local-dir=DIR`",
    ) as error:
      readers.read(f"hf:{spec}")
    assert "\n" not in str(error.value)
  assert given == [
    ("openai/gsm8k", "test", "main"),
    ("squad", "train", None),
    ("a/b", "train[:5%]", None),
  ]
