"""Sources, the byte tokenizer, and batches that a resumed run repeats."""

import dataclasses
import itertools
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gspo_jax import data
from gspo_jax.errors import UserError
from gspo_jax.rewards import final_answer
from gspo_jax.tasks import Chain

GSM8K = Path(__file__).parent.parent.parent / "shared/data/gsm8k"
needs_gsm8k = pytest.mark.skipif(
  not GSM8K.is_dir(), reason=f"{GSM8K} is not here"
)
SMALL = Chain((6,), size=12)


def characters():
  """All that UTF-8 can hold, one in seven."""
  points = itertools.chain(range(0xD800), range(0xE000, sys.maxunicode + 1))
  return "".join(chr(p) for p in itertools.islice(points, 0, None, 7))


def batches(source=SMALL, batch=4, width=32, seed=0):
  return data.prompts(source, batch=batch, width=width, seed=seed)


def questions(iterator, count):
  drawn = [next(iterator)["problems"] for _ in range(count)]
  return [[p.question for p in problems] for problems in drawn]


def write(path, *rows):
  lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return str(path)


def row(i, answer="x #### 7"):
  return {"question": f"question {i}?", "answer": answer}


# The tokenizer.


def test_text_survives_the_tokenizer():
  text = characters()
  assert data.decode(data.encode(text)) == text


def test_no_text_holds_padding_or_a_stop():
  ids = set(data.encode(characters()))
  assert ids <= set(range(256))
  assert {data.PAD, data.EOS}.isdisjoint(range(256))
  assert max(data.PAD, data.EOS) < data.VOCAB_SIZE


def test_what_is_no_text_decodes_all_the_same():
  assert data.decode([104, data.PAD, 105, data.EOS]) == "h\ufffdi\ufffd"
  assert data.decode(np.array([0xC3], np.int32)) == "\N{REPLACEMENT CHARACTER}"
  assert data.decode([]) == ""


# The pipeline.


def test_a_prompt_is_its_question_padded_on_the_left():
  batch = next(batches(Chain((1, 5, 9)), batch=8))
  assert batch["tokens"].shape == (8, 32)
  assert batch["length"].shape == (8,)
  assert batch["tokens"].dtype == batch["length"].dtype == np.int32
  assert len(set(batch["length"].tolist())) > 1
  for problem, tokens, n in zip(
    batch["problems"], batch["tokens"], batch["length"], strict=True
  ):
    assert (tokens[:-n] == data.PAD).all()
    assert data.decode(tokens[-n:]) == problem.question
    assert n == len(problem.question)


def test_a_demonstration_ends_in_a_stop():
  batch = next(
    data.demonstrations(
      Chain((1, 3)), batch=8, prompt_width=16, width=24, seed=0
    )
  )
  for problem, tokens, response, n in zip(
    batch["problems"],
    batch["tokens"],
    batch["response"],
    batch["response_length"],
    strict=True,
  ):
    assert data.decode(tokens).lstrip("\ufffd") == problem.question
    assert data.decode(response[: n - 1]) == problem.demonstration
    assert response[n - 1] == data.EOS
    assert (response[n:] == data.PAD).all()


def test_the_same_seed_gives_the_same_batches():
  assert questions(batches(), 7) == questions(batches(), 7)


def test_other_seeds_give_other_batches():
  assert questions(batches(seed=1), 3) != questions(batches(), 3)


def test_an_epoch_is_a_permutation_and_no_two_are_the_same():
  everything = Counter(SMALL[i].question for i in range(len(SMALL)))
  iterator = batches()
  epochs = [list(itertools.chain(*questions(iterator, 3))) for _ in range(4)]
  assert all(Counter(epoch) == everything for epoch in epochs)
  assert len(set(map(tuple, epochs))) == 4


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5])
def test_resumed_is_uninterrupted(stop):
  whole = questions(batches(batch=5), 9)  # 5 of 12: batches span epochs
  iterator = batches(batch=5)
  assert questions(iterator, stop) == whole[:stop]
  state = json.loads(json.dumps(iterator.get_state()))
  questions(iterator, 2)  # what comes after the save is forgotten
  resumed = batches(batch=5)
  questions(resumed, 1)
  resumed.set_state(state)
  assert questions(resumed, 9 - stop) == whole[stop:]


def test_the_state_stays_small():
  iterator = batches()
  questions(iterator, 50)
  assert len(json.dumps(iterator.get_state())) < 100


def test_a_question_that_is_too_long(tmp_path):
  source = Chain((8,))
  tokens = len(source[0].question)
  assert next(batches(source, width=tokens))["length"].max() == tokens
  words = f"has {tokens} tokens, more than data.max_prompt_length={tokens - 1}"
  with pytest.raises(UserError, match=words):
    next(batches(source, width=tokens - 1))


def test_a_file_is_searched_for_long_questions_at_once(tmp_path):
  path = write(tmp_path / "a", *map(row, range(500)), row("long" * 9))
  with pytest.raises(UserError, match="has 46 tokens"):
    batches(data.JsonLines(path))


def test_a_demonstration_that_is_too_long():
  with pytest.raises(UserError, match=r"more than sampler.max_new_tokens=20"):
    next(
      data.demonstrations(
        Chain((8,)), batch=2, prompt_width=32, width=20, seed=0
      )
    )


def test_fewer_questions_than_a_batch():
  assert next(batches(batch=12))["tokens"].shape == (12, 32)
  with pytest.raises(UserError, match=r"12 questions.* batch of 13"):
    batches(batch=13)


def test_take_is_the_first_few_in_order():
  taken = data.take(SMALL, 5, 32)
  assert taken["problems"] == [SMALL[i] for i in range(5)]
  assert taken["tokens"].shape == (5, 32)
  with pytest.raises(UserError, match=r"eval.prompts=13, but only 12"):
    data.take(SMALL, 13, 32)


# JSON lines.


def test_the_reference_follows_the_last_mark(tmp_path):
  path = write(
    tmp_path / "a.jsonl",
    row(1, "#### 3, no\n####  1,000 "),
    "",
    row(2, "Paris"),
    "  ",
    row("é中", "\N{LINE SEPARATOR} #### ü"),
  )
  source = data.JsonLines(path)
  assert len(source) == 3
  assert [p.answer for p in map(source.__getitem__, range(3))] == [
    "1,000",
    "Paris",
    "ü",
  ]
  assert source[0].demonstration == "#### 3, no\n####  1,000 "
  assert source[1].demonstration == "#### Paris"
  for problem in source:  # what is imitated is what is rewarded
    assert final_answer(problem.demonstration, problem.answer) == 1
  assert source[2].question == "question é中?"


def test_windows_files(tmp_path):
  path = tmp_path / "a"
  text = f"{json.dumps(row(1))}\r\n{json.dumps(row(2))}\r\n"
  path.write_bytes(b"\xef\xbb\xbf" + text.encode())
  assert [p.answer for p in data.JsonLines(str(path))] == ["7", "7"]


@pytest.mark.parametrize(
  "bad",
  [
    "{",
    "[1, 2]",
    "3",
    '"question answer"',
    "null",
    {"question": "only"},
    {"answer": "only"},
    {"question": 3, "answer": "3"},
    {"question": "a", "answer": None},
    {"question": "a", "answer": ["3"]},
    {"question": "", "answer": "3"},
    {"question": "a", "answer": ""},
    {"question": "a", "answer": "thinking #### "},
    {"question": "a", "answer": "#### C#"},
    {"question": "half a pair \ud83d", "answer": "3"},
  ],
)
def test_a_bad_line_is_named(tmp_path, bad):
  path = write(tmp_path / "a.jsonl", row(1), "", bad, row(2))
  with pytest.raises(UserError, match=r"a\.jsonl:3: ") as error:
    len(data.JsonLines(path))
  assert "\n" not in str(error.value)
  assert len(str(error.value)) < 300


def test_a_line_in_another_encoding_is_named(tmp_path):
  path = tmp_path / "a.jsonl"
  line = json.dumps(row("é"), ensure_ascii=False)
  path.write_bytes(f"{line}\n".encode() + f"{line}\n".encode("latin-1"))
  with pytest.raises(UserError, match=r"a\.jsonl:2: .*UTF-8"):
    len(data.JsonLines(str(path)))


@pytest.mark.parametrize("read", [len, data.fingerprint])
def test_files_that_cannot_be_read(tmp_path, read):
  with pytest.raises(UserError, match=r"missing.*No such file"):
    read(data.JsonLines(str(tmp_path / "missing")))
  with pytest.raises(UserError, match="directory"):
    read(data.JsonLines(str(tmp_path)))


def test_a_file_without_a_question(tmp_path):
  with pytest.raises(UserError, match="no usable line"):
    len(data.JsonLines(write(tmp_path / "a", "", " ")))


def test_the_held_out_split_is_disjoint_and_complete(tmp_path):
  path = write(tmp_path / "a", *map(row, range(800)))
  kept, tested, everything = (
    [p.question for p in data.JsonLines(path, evaluation)]
    for evaluation in (False, True, None)
  )
  assert not set(kept) & set(tested)
  assert sorted(kept + tested) == sorted(everything)
  assert everything == [f"question {i}?" for i in range(800)]
  assert 50 < len(tested) < 150


def test_the_split_of_a_question_does_not_depend_on_the_others(tmp_path):
  whole = data.JsonLines(write(tmp_path / "a", *map(row, range(800))), True)
  half = data.JsonLines(write(tmp_path / "b", *map(row, range(400))), True)
  assert list(half) == list(whole)[: len(half)]


@needs_gsm8k
@pytest.mark.parametrize(("part", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k(part, count):
  source = data.JsonLines(str(GSM8K / f"{part}.jsonl"))
  assert len(source) == count
  for problem in source:
    assert problem.answer.replace(",", "").lstrip("-").isdecimal()
    assert final_answer(problem.demonstration, problem.answer) == 1


# Fingerprints.


def test_the_same_file_elsewhere_is_the_same_data(tmp_path):
  first = write(tmp_path / "a.jsonl", row(1))
  (tmp_path / "copy").mkdir()
  second = shutil.copy(first, tmp_path / "copy/b.jsonl")
  prints = {data.fingerprint(data.JsonLines(p)) for p in (first, str(second))}
  assert len(prints) == 1


@pytest.mark.parametrize("i", [0, 1, 2000, 2999])
def test_every_row_of_a_file_counts(tmp_path, i):
  rows = [row(i) for i in range(3000)]
  path = write(tmp_path / "a.jsonl", *rows)
  before = data.fingerprint(data.JsonLines(path))
  rows[i]["answer"] += "0"
  assert data.fingerprint(data.JsonLines(write(Path(path), *rows))) != before


def test_every_option_counts(tmp_path):
  path = write(tmp_path / "a.jsonl", row(1))
  chain = Chain((2, 4))
  changes = ({"steps": (4, 2)}, {"noise": 0.1}, {"evaluation": True})
  sources = [
    *(data.JsonLines(path, evaluation) for evaluation in (None, True, False)),
    chain,
    *(
      dataclasses.replace(chain, **change)
      for change in (*changes, {"size": 5}, {"seed": 1})
    ),
  ]
  assert len({data.fingerprint(s) for s in sources}) == len(sources)
  assert data.fingerprint(Chain((2, 4))) == data.fingerprint(chain)
