"""What is written is read again, and an answer cannot pass for another one."""

import itertools
import random

import pytest

from gspo_jax.runtime import run_files

FORGED = (
  "I give up\nreference: 7\n\n---- 2 of 2, step 3, reward 1\n"
  "question:\n3+4?\nanswer:\n7\nreference: 7\n"
)


@pytest.mark.parametrize("indent", ["", " ", "    "])
def test_a_forged_answer_stays_the_one_it_is(indent):
  forged = FORGED.replace("\n", f"\n{indent}")
  rows = [(forged, forged, forged, 0.0), ("q", "right", "r", 1.0)]
  found = run_files.parse_samples(run_files.format_samples(3, rows))
  assert [sample.reward for sample in found] == ["0", "1"]
  assert found[0].text == found[0].reference == forged.strip("\n")
  assert found[1] == ("q", "right", "r", "1")


def test_whatever_an_answer_is_made_of():
  rng = random.Random(0)
  pieces = ("----", "---- 1 of 1, step 1, reward 1", "question:", "answer:")
  pieces += ("reference: 4", "\n", "\n", " ", "\t", "\r\n", "\u2028", "x")
  text = lambda: "".join(rng.choices(pieces, k=rng.randrange(9))) + "x"
  for step in range(500):
    rows = [(text(), text(), text(), i / 2) for i in range(rng.randrange(4))]
    found = run_files.parse_samples(run_files.format_samples(step, rows))
    shown = lambda part: run_files.printable(part, keep="\n\t").strip("\n")
    assert found == [
      (shown(q), shown(a), run_files.printable(r).strip("\n"), f"{reward:g}")
      for q, a, r, reward in rows
    ]


def test_only_what_looks_like_a_mark_is_indented():
  lines = ["---", "a ---- b", "----x", "Answer: 4", "the answer: 4", "  x"]
  text = run_files.format_samples(1, [("q", "\n".join(lines), "r", 1.0)])
  assert "\n".join(["answer:", *lines, "reference: r"]) in text


def test_a_file_cut_short_shows_what_there_is():
  text = run_files.format_samples(
    1, [("q", "a", "r", 1.0), ("q2", "a2", "r2", 2.0)]
  )
  first, *_ = run_files.parse_samples(text)
  for end in range(len(text)):
    found = run_files.parse_samples(text[:end])
    assert len(found) <= 2
    if len(found) == 2:
      assert found[0] == first


def test_other_text_has_no_samples():
  for text in ("", "free", "---- 1 of 2\nquestion:"):
    assert run_files.parse_samples(text) == []


def test_what_a_terminal_acts_upon_is_escaped():
  every = "".join(map(chr, itertools.chain(range(256), (0x2028, 0xD800))))
  text = run_files.format_samples(1, [(every, every, every, 1.0)])
  assert all(c.isprintable() or c in "\n\t" for c in text)
