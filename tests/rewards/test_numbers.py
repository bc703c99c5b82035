"""Numbers as results: what is the final one, and what only looks like it."""

import time
from decimal import Decimal

import pytest

from gspo_jax.rewards import numbers
from gspo_jax.rewards.numbers import final_answer, gsm8k


@pytest.mark.parametrize(
  ("text", "reference"),
  [("#5", "5"), ("# 5", "5"), ("a8+3=1;b1-5=6;#6", "6"),
   ("It is 2 + 3.\n#### 5", "5"), ("#### 5 \t\r\n\n", "5"), ("####\t-5", "-5"),
   ("#4#5", "5"), ("## Working\n2 + 3\n## 5", "5"),
   ("#### 1,234,567", "1234567"), ("#### 1234567", "1,234,567"),
   ("####  10 apples ", " 10 apples"), ("#### é", "é"),
   ("#### 1,234 apples", "1234 apples"), ("#### $1,234.50", "$1234.50"),
   ("#### (3,4)", "(3,4)")],
)  # fmt: skip
def test_final_answer_right(text, reference):
  assert final_answer("", text, reference) == 1.0


NOT_5 = (
  *("", "####", "5", "the answer is 5", "#5#6", "#5#", "#5 and so on"),
  *("#5\nBut wait.", "# 5 6", "#15", "#-5", "#5."),
  *("#\N{ARABIC-INDIC DIGIT FIVE}", "#\N{FULLWIDTH DIGIT FIVE}"),
  *("\N{FULLWIDTH NUMBER SIGN}5", "#5\0"),
)


@pytest.mark.parametrize(
  ("text", "reference"),
  [*((text, "5") for text in NOT_5), ("", ""), ("#", ""), ("#### \n", ""),
   ("#### (3,4)", "(34)"), ("#### 1,2", "12"), ("#### 1,2345", "12345"),
   ("# 5 6", "56"), ("#10 apples", "10")],
)  # fmt: skip
def test_final_answer_wrong(text, reference):
  assert final_answer("", text, reference) == 0.0


def test_final_answer_of_what_a_broken_policy_repeats_takes_no_time():
  began = time.process_time()
  for text in ("#" * 1000 + " x y", "# " * 1000 + "x", "#a" + " " * 4000 + "b"):
    assert final_answer("", text, "5") == 0.0
  assert time.process_time() - began < 0.5


OF_18 = (
  *("so\n#### 18", "####18", "#### 18.00", "#### 018", "#### $18"),
  *("#### \\$18", "#### 18%", "#### 18.", "#### $18$"),
  *("It is $\\boxed{18}$ dollars.", "\\boxed {18}", "\\boxed{\\boxed{18}}"),
  *("#### 5\nNo: \\boxed{18}", "\\boxed{5} no\n#### 18", "#### 5 #### 18"),
  *("#### 18\nThat is all.", "\\boxed{18}\n\n#### Verification\nIt fits."),
  "\\boxed{18}\n#### 1. Check: 9 * 2",
  "#### Step 1\n9 * 2\n#### Step 2\nSo \\boxed{18}\n##### Note",
  *("#### Step 1\n9 * 2\n#### 18", "#### **18**", "#### 18 ####"),
  *("#### 18\n\n####", "\\boxed{18}\n\n####"),
  *("\\boxed{18}\n#### A note\nDone.", "\\boxed{18}\n#### Q.E.D."),
  *("\\boxed{18}\n#### 2+3", "\\boxed{18}\n#### Verification ####"),
  *("\\boxed{18}\n#### x-intercept check", "\\boxed{18}\n#### **1**. Check"),
  *("\\boxed{18}\n#### Answer: see above", "\\boxed{18}\n#### ---"),
  *("\\fbox{18}", "\ud800\udfff#### 18", "\\boxed{18}}"),
)


@pytest.mark.parametrize(
  ("response", "reference"),
  [*((text, "18") for text in OF_18), ("#### 18", "18.0"), ("#### .5", "0.50"),
   ("#### 1,234", "1234"), ("#### 1,234,567.80", "1234567.8"),
   ("#### -$18", "-18"), ("#### $-18", "-18"), ("#### €1,234.50", "1234.5"),
   ("#### $18.50.", "18.5"), ("#### +5", "5"), ("#### -0", "0"),
   ("#### \N{MINUS SIGN}3", "-3"), ("\\boxed{1{,}234}", "1234"),
   ("#### 1\\,234", "1234"),
   ("#### 18", "She sells 9 * 2 = <<9*2=18>>18\n#### 18"),
   ("#### " + "9" * 5000 + ".0", "9" * 5000), ("\0" * 1000 + "#### 18", "18")],
)  # fmt: skip
def test_gsm8k_right(response, reference):
  assert gsm8k("", response, reference) == 1.0


@pytest.mark.parametrize(
  "response",
  [*("", "18", "The answer is 18", "### 18", "##### 18", "\\boxed{18\\}"),
   *("####", "#### \n18", "#### 18\n#### 5", "#### 18\n\\boxed{5}"),
   *("\\boxed{18} or \\boxed{5}", "#### 18 dollars", "#### 18 or 5"),
   *("#### 1 8", "#### x = 18", "#### 18x"),
   *("#### 17.999999999999999999999999999999999999", "#### 0x12", "#### 1_8"),
   *("#### 9*2", "#### --18", "#### -$-18", "#### $$18%%", "#### 18.."),
   *("#### 1,8", "#### ,18", "#### 18,", "#### (18)"),
   *("#### \N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT EIGHT}", "#### 18\u00b9"),
   *("#### 1\u200b8", "#### \u202e81", "#### 1\udc008", "#### 18\0"),
   *("#### NaN", "#### 1e999999999", "\\boxed{18", "\\boxed 18", "\\boxed{}"),
   *("\\boxed{18}}{" + "\\boxed{", "\\boxed{#### 18}"),
   "\n".join(f"#### {i}" for i in range(100))],
)  # fmt: skip
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
  ["#" * 1_000_000, "#### " + "1," * 500_000,
   "#### " + "123," * 250_000 + "12", "\\boxed{" * 100_000,
   "\\boxed{" + "{" * 1_000_000, "{" * 100_000 + "}" * 100_000,
   "#### " + "9" * 1_000_000, "#### " + " " * 1_000_000 + "x",
   "#### " * 200_000, "#### My check\n" * 100_000, "#### 1" + ",000" * 250_000,
   "\\boxed{" + "{" * 100_000 + "18" + "}" * 100_000],
)  # fmt: skip
def test_gsm8k_of_megabytes_takes_no_time(response):
  began = time.process_time()
  assert gsm8k("", response, "18") == 0.0
  assert time.process_time() - began < 3.0


def test_gsm8k_reads_a_result_in_megabytes():
  for response in (
    "#### " + "0" * 1_000_000 + "18", "#### 18" + " " * 1_000_000,
    "\\boxed{" * 10_000 + "18" + "}" * 10_000,
  ):  # fmt: skip
    assert gsm8k("", response, "18") == 1.0


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
  [("so 5\n#### 5", "5"), ("#### 5\n#### Check\nfine", "5"),
   ("#### Paris", "Paris"),
   ("#### Step 1\nso \\boxed{5}\n#### Check\nfine", None),
   ("##### Note", None), ("####### 5", None), ("\\boxed{5}\n#### Check", None),
   ("$\\boxed{5}$\n#### (b) Check\nfine", None),
   ("#### 3 facts\nThey do not help.", None),
   ("#### \\frac12\nDone.", "\\frac12"), ("", None)],
)  # fmt: skip
def test_marked(text, result):
  assert numbers.marked(text) == result


def test_number_reads_what_decimal_writes():
  for text in ("0", "-1", "12345678901234567890.0625", "0.000001"):
    assert numbers.number(text) == Decimal(text)
