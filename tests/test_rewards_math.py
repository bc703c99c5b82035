"""Equivalence: spelling first, then algebra, of the last result only."""

import time

import pytest

from gspo_jax import rewards
from gspo_jax.rewards import math


@pytest.mark.parametrize(
  ("one", "other"),
  [
    ("1,234", "1234"),
    ("1{,}234.50", "1234.5"),
    ("18.00", "18"),
    ("-0", "0"),
    ("007", "7"),
    ("\\frac12", "\\frac{1}{2}"),
    ("\\dfrac{1}{2}", "\\tfrac{1}{2}"),
    ("\\sqrt2", "\\sqrt{2}"),
    ("\\left( 1, 2 \\right)", "(1,2)"),
    ("90^\\circ", "90"),
    ("90^{\\circ}", "90"),
    ("\\$18", "18"),
    ("18\\%", "18"),
    ("$x$", "x"),
    ("\\text{Evelyn}", "Evelyn"),
    ("x + 1", "x+1"),
    ("5\\!", "5"),
    ("\N{MINUS SIGN}3", "-3"),
    ("3.", "3"),
  ],
)
def test_spellings_of_the_same(one, other):
  assert math.normalised(one) == math.normalised(other)


@pytest.mark.parametrize(
  ("one", "other"),
  [
    ("1 2", "12"),
    ("1,2", "12"),
    ("(1,234)", "1234"),
    ("x", "y"),
    ("\\leftarrow", "arrow"),
    ("0.1", "0.10000000000000000000000000000000001"),
    ("1" + "0" * 40, "1" + "0" * 39 + "1"),
    ("Evelyn", "evelyn"),
    ("-3", "3"),
  ],
)
def test_spellings_of_others(one, other):
  assert math.normalised(one) != math.normalised(other)


@pytest.fixture(scope="module")
def equivalent():
  pytest.importorskip("math_verify")
  return rewards.named("math")


@pytest.mark.parametrize(
  ("answer", "reference"),
  [
    ("\\boxed{18}", "18"),
    ("So $\\boxed{\\frac12}$.", "0.5"),
    ("\\boxed{(x+1)^2}", "x^2+2x+1"),
    ("\\boxed{2\\sqrt2}", "\\sqrt{8}"),
    ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}"),
    ("\\boxed{x = 3}", "3"),
    ("\\boxed{10\\text{ dollars}}", "10"),
    ("#### 18", "so $\\boxed{18}$"),
    ("\\boxed{5}, no: \\boxed{18}", "18"),
    ("\\boxed{\\frac{\\pi}{4}}", "\\pi/4"),
  ],
)
def test_right(equivalent, answer, reference):
  assert equivalent("", answer, reference) == 1.0


@pytest.mark.parametrize(
  ("answer", "reference"),
  [
    ("18", "18"),
    ("", ""),
    ("\\boxed{}", ""),
    ("\\boxed{18} \\boxed{5}", "18"),
    ("\\boxed{3 or 4}", "3"),
    ("\\boxed{3, 4}", "4"),
    ("\\boxed{(2, 1)}", "(1,2)"),
    ("\\boxed{[1,2]}", "(1,2)"),
    ("\\boxed{x+2}", "x+1"),
    ("\\boxed{0.333}", "\\frac13"),
  ],
)
def test_wrong(equivalent, answer, reference):
  assert equivalent("", answer, reference) == 0.0


def test_what_is_long_is_compared_as_text_only(equivalent):
  long = "x+" * 500_000 + "1"
  began = time.perf_counter()
  assert equivalent("", f"\\boxed{{{long}}}", "18") == 0.0
  assert equivalent("", f"\\boxed{{{long}}}", long) == 1.0
  assert time.perf_counter() - began < 2


def test_no_answer_is_evaluated_as_python(equivalent, tmp_path):
  path = tmp_path / "written"
  for text in (
    f"__import__('os').system('touch {path}')",
    f"\\text{{open('{path}', 'w')}}",
    f"open('{path}','w').close()",
  ):
    assert equivalent("", f"\\boxed{{{text}}}", "18") == 0.0
    assert equivalent("", f"#### {text}", "18") == 0.0
  assert not path.exists()
