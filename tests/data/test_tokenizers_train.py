"""Training a tokenizer: the same text, the same file, and nothing is lost."""

import json

import pytest
from processes import mistake, python

from gspo_jax.data import tokenizers
from gspo_jax.data.tokenizers import train
from gspo_jax.runtime.errors import UserError

TEXTS = [
  "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
  "How many clips are there altogether?  Two  spaces.",
] * 20


@pytest.fixture
def tokenizer(tmp_path):
  out = tmp_path / "a.model"
  train.write(train.train(iter(TEXTS), 320), out)
  return tokenizers.load(str(out))


def test_the_same_text_gives_the_same_model():
  first = train.train(iter(TEXTS), 320)
  assert train.train(iter(TEXTS), 320) == first
  assert train.train(iter(TEXTS[:-1]), 320) != first


def test_digits_and_new_lines_stand_alone(tokenizer):
  facts = tokenizer.pad_id, tokenizer.stop_ids, tokenizer.vocab_size
  assert facts == (0, (1,), 320)
  for text in ("48", "\n\n"):
    assert len(tokenizer.encode(text)) == 2
  assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) * 0.8


def test_a_folder_has_the_model_beside_it(tmp_path, tokenizer):
  out = tmp_path / "folder"
  train.write(train.train(iter(TEXTS), 320), out)
  again = tokenizers.load(str(out))
  assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS[:2])
  same = tokenizers.load(str(out / "tokenizer.model"))
  assert same.fingerprint == tokenizer.fingerprint


def test_sizes_that_do_not_suit():
  with pytest.raises(UserError, match="expected at least 260"):
    train.train(iter(TEXTS), 259)
  with pytest.raises(UserError, match=r"vocab_size=4000 .*too high"):
    train.train(iter(TEXTS), 4000)
  with pytest.raises(UserError, match="vocab_size=300"):
    train.train(iter([]), 300)


def write(path, *rows):
  path.write_text("\n".join(map(json.dumps, rows)))
  return str(path)


def test_the_fields_of_all_files(tmp_path):
  first = write(
    tmp_path / "a", {"q": "1", "a": "2", "n": 3}, {"q": "4", "a": ""}
  )
  second = write(tmp_path / "b", {"q": "5", "a": "6"})
  found = train.read_texts([first, second], ["a", "q"])
  assert list(found) == ["2", "1", "", "4", "6", "5"]
  with pytest.raises(UserError, match="a:1: 'n' is not text"):
    list(train.read_texts([first], ["n"]))
  with pytest.raises(UserError, match="a:1: no field 'question'"):
    list(train.read_texts([first], ["question"]))


def test_the_command(tmp_path):
  path = write(tmp_path / "a", *({"q": text} for text in TEXTS))
  out = tmp_path / "new/a.model"
  flags = (f"--input={path}", "--fields=q", f"--output={out}")
  module = "gspo_jax.data.tokenizers.train"
  done = python("-m", module, *flags, "--vocab_size=320")
  assert (done.returncode, done.stderr) == (0, "")
  assert out.read_bytes() == train.train(iter(TEXTS), 320)
  error = mistake(train.main, *flags, "--vocab_size=9999")
  assert "does not suit" in error
