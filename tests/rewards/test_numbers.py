"""Numbers as results: what is the final one, and what only looks like it."""

import time
from decimal import Decimal

import pytest

from gspo_jax.rewards import numbers
from gspo_jax.rewards.numbers import final_answer, gsm8k


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
    ("#### 1,234 apples", "1234 apples"),
    ("#### $1,234.50", "$1234.50"),
    ("#### (3,4)", "(3,4)"),
  ],
)
def test_final_answer_right(text, reference):
  assert final_answer("", text, reference) == 1.0


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
    ("#### (3,4)", "(34)"),
    ("#### 1,2", "12"),
    ("#### 1,2345", "12345"),
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
def test_final_answer_wrong(text, reference):
  assert final_answer("", text, reference) == 0.0


@pytest.mark.parametrize(
  "text",
  ["#" * 1000 + " x y", "# " * 1000 + "x y", "#a" + " " * 4000 + "b"],
)
def test_final_answer_of_what_a_broken_policy_repeats_takes_no_time(text):
  began = time.perf_counter()
  assert final_answer("", text, "5") == 0.0
  assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize(
  ("response", "reference"),
  [
    ("so\n#### 18", "18"),
    ("#### 18\n", "18"),
    ("####18", "18"),
    ("#### 18.00", "18"),
    ("#### 18", "18.0"),
    ("#### 018", "18"),
    ("#### .5", "0.50"),
    ("#### 1,234", "1234"),
    ("#### 1234", "1,234"),
    ("#### 1,234,567.80", "1234567.8"),
    ("#### $18", "18"),
    ("#### \\$18", "18"),
    ("#### -$18", "-18"),
    ("#### $-18", "-18"),
    ("#### €1,234.50", "1234.5"),
    ("#### 18%", "18"),
    ("#### 18 \\%", "18"),
    ("#### 18.", "18"),
    ("#### $18.50.", "18.5"),
    ("#### +5", "5"),
    ("#### -0", "0"),
    ("#### \N{MINUS SIGN}3", "-3"),
    ("#### $18$", "18"),
    ("It is $\\boxed{18}$ dollars.", "18"),
    ("\\boxed{1{,}234}", "1234"),
    ("\\boxed{ 18 }", "18"),
    ("\\boxed {18}", "18"),
    ("\\boxed{\\boxed{18}}", "18"),
    ("#### 5\nNo: \\boxed{18}", "18"),
    ("\\boxed{5} no\n#### 18", "18"),
    ("#### 5\n#### 18", "18"),
    ("#### 5 #### 18", "18"),
    ("#### 18\nThat is all.", "18"),
    ("\\boxed{18}\n\n#### Verification\nIt fits.", "18"),
    ("\\boxed{18}\n#### 1. Check: 9 * 2", "18"),
    ("#### Step 1\n9 * 2\n#### Step 2\nSo \\boxed{18}\n##### Note", "18"),
    ("#### Step 1\n9 * 2\n#### 18", "18"),
    ("#### **18**", "18"),
    ("#### 18 ####", "18"),
    ("#### 18\n\n####", "18"),
    ("\\boxed{18}\n\n####", "18"),
    ("\\boxed{18}\n#### A note\nDone.", "18"),
    ("\\boxed{18}\n#### Q.E.D.", "18"),
    ("\\boxed{18}\n#### (a) check", "18"),
    ("\\boxed{18}\n#### 2+3", "18"),
    ("\\boxed{18}\n#### Verification ####", "18"),
    ("\\boxed{18}\n#### 1.1 Verify", "18"),
    ("\\boxed{18}\n#### 3rd check", "18"),
    ("\\boxed{18}\n#### x-intercept check", "18"),
    ("\\boxed{18}\n#### **1**. Check", "18"),
    ("\\boxed{18}\n#### Answer: see above", "18"),
    ("\\boxed{18}\n#### ---", "18"),
    ("#### 1\\,234", "1234"),
    ("\\fbox{18}", "18"),
    ("#### 18", "She sells 9 * 2 = <<9*2=18>>18\n#### 18"),
    ("#### " + "9" * 5000 + ".0", "9" * 5000),
  ],
)
def test_gsm8k_right(response, reference):
  assert gsm8k("", response, reference) == 1.0


@pytest.mark.parametrize(
  "response",
  [
    "",
    "18",
    "The answer is 18",
    "### 18",
    "##### 18",
    "\\boxed{18\\}",
    "# 18",
    "####",
    "#### \n18",
    "#### 18\n#### 5",
    "#### 18\n\\boxed{5}",
    "\\boxed{18} or \\boxed{5}",
    "#### 18 dollars",
    "#### 18 million",
    "#### 18 or 5",
    "#### 5 18",
    "#### 1 8",
    "#### x = 18",
    "#### 18x",
    "#### 17.999999999999999999999999999999999999",
    "#### 18e0",
    "#### 0x12",
    "#### 1_8",
    "#### 9*2",
    "#### 36/2",
    "#### --18",
    "#### -$-18",
    "#### $$18%%",
    "#### 18..",
    "#### 1,8",
    "#### ,18",
    "#### 18,",
    "#### (18)",
    "#### \N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT EIGHT}",
    "\\boxed{18",
    "\\boxed 18",
    "\\boxed{}",
    "\\boxed{18 dollars}",
    "\\boxed{18}}{" + "\\boxed{",
  ],
)
def test_gsm8k_wrong(response):
  assert gsm8k("", response, "18") == 0.0


def test_gsm8k_has_no_rounding():
  assert gsm8k("", "#### 0.1000000000000000000000000000000001", "0.1") == 0.0
  assert gsm8k("", f"#### {2**200}", str(2**200 + 1)) == 0.0


@pytest.mark.parametrize("reference", ["", "abc", "#### ", "NaN", "1/2"])
def test_gsm8k_reference_that_is_no_number_is_an_error(reference):
  with pytest.raises(ValueError, match="expected a number as reference"):
    gsm8k("", "#### 18", reference)


@pytest.mark.parametrize(
  "response",
  [
    "#" * 1_000_000,
    "#### " + "1," * 500_000,
    "#### " + "123," * 250_000 + "12",
    "\\boxed{" * 100_000,
    "\\boxed{" + "{" * 1_000_000,
    "{" * 100_000 + "}" * 100_000,
    "#### " + "9" * 1_000_000,
    "#### " + " " * 1_000_000 + "x",
    "#### " * 200_000,
    "#### My check\n" * 100_000,
  ],
)
def test_gsm8k_of_megabytes_takes_no_time(response):
  began = time.perf_counter()
  assert gsm8k("", response, "18") == 0.0
  assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize(
  ("text", "result"),
  [
    ("\\boxed{\\left\\{ a \\right.}", "\\left\\{ a \\right."),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("\\boxed{x \\\\ {y}}", "x \\\\ {y}"),
  ],
)
def test_escaped_braces_are_no_groups(text, result):
  assert numbers.result(text) == result


@pytest.mark.parametrize(
  ("text", "result"),
  [
    ("so 5\n#### 5", "5"),
    ("#### 5\n#### Check\nfine", "5"),
    ("#### Paris", "Paris"),
    ("#### Step 1\nso \\boxed{5}\n#### Check\nfine", None),
    ("##### Note", None),
    ("####### 5", None),
    ("\\boxed{5}\n#### Check", None),
    ("$\\boxed{5}$\n#### (b) Check\nfine", None),
    ("#### 3 facts\nThey do not help.", None),
    ("#### \\frac12\nDone.", "\\frac12"),
    ("", None),
  ],
)
def test_marked(text, result):
  assert numbers.marked(text) == result


def test_number_reads_what_decimal_writes():
  for text in ("0", "-1", "12345678901234567890.0625", "0.000001"):
    assert numbers.number(text) == Decimal(text)
