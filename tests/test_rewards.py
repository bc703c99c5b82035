"""The verifier: what is the final answer, and what only looks like it."""

import time

import pytest

from gspo_jax.rewards import final_answer


@pytest.mark.parametrize(
  ("text", "reference"),
  [
    ("#5", "5"),
    ("# 5", "5"),
    ("a8+3=1;b1-5=6;#6", "6"),
    ("It is 2 + 3.\n#### 5", "5"),
    ("#### 5\n", "5"),
    ("#### 5 \t\r\n\n", "5"),
    ("####\t-5", "-5"),
    ("#4 no, #5", "5"),
    ("#4#5", "5"),
    ("## Working\n2 + 3\n## 5", "5"),
    ("#### 1,234,567", "1234567"),
    ("#### 1234567", "1,234,567"),
    ("#### 0.5", "0.5"),
    ("#### 5", " 5\n"),
    ("#### 10 apples", "10 apples"),
    ("####  10 apples ", " 10 apples"),
    ("#### é", "é"),
  ],
)
def test_right(text, reference):
  assert final_answer(text, reference) == 1.0


@pytest.mark.parametrize(
  ("text", "reference"),
  [
    ("", "5"),
    ("", ""),
    ("#", ""),
    ("#### \n", ""),
    ("####", "5"),
    ("5", "5"),
    ("the answer is 5", "5"),
    ("#5 #6", "5"),
    ("#5#6", "5"),
    ("#5#", "5"),
    ("#5 and so on", "5"),
    ("#5\nBut wait.", "5"),
    ("# 5 6", "5"),
    ("# 5 6", "6"),
    ("# 5 6", "56"),
    ("#15", "5"),
    ("#51", "5"),
    ("#-5", "5"),
    ("#5.", "5"),
    ("#10 apples", "10"),
    ("#\N{ARABIC-INDIC DIGIT FIVE}", "5"),
    ("#\N{FULLWIDTH DIGIT FIVE}", "5"),
    ("#\N{SUPERSCRIPT TWO}", "2"),
    ("\N{FULLWIDTH NUMBER SIGN}5", "5"),
    ("#5\0", "5"),
    ("#5\ufffd", "5"),
  ],
)
def test_wrong(text, reference):
  assert final_answer(text, reference) == 0.0


@pytest.mark.parametrize(
  "text",
  ["#" * 1000 + " x y", "# " * 1000 + "x y", "#a" + " " * 4000 + "b"],
)
def test_what_a_broken_policy_repeats_takes_no_time(text):
  began = time.perf_counter()
  assert final_answer(text, "5") == 0.0
  assert time.perf_counter() - began < 0.5
