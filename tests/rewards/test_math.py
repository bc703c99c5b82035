"""Equivalence of the last results, on many pairs of results."""

import random
import re
import time

import pytest

from benchmarks import math_reward
from gspo_jax.rewards import math
from gspo_jax.rewards.math import equivalent


@pytest.mark.parametrize(
  ("one", "other"),
  [("1,234", "1234"), ("1{,}234.50", "1234.5"), ("18.00", "18"), ("-0", "0"),
   ("007", "7"), ("\\frac12", "\\frac{1}{2}"),
   ("\\dfrac{1}{2}", "\\tfrac{1}{2}"), ("\\left( 1, 2 \\right)", "(1,2)"),
   ("90^\\circ", "90"), ("\\$18", "18"), ("18\\%", "18"), ("$x$", "x"),
   ("\\text{Evelyn}", "Evelyn"), ("x + 1", "x+1"), ("5\\!", "5"),
   ("\N{MINUS SIGN}3", "-3"), ("3.", "3"), ("1\\,234", "1234")],
)  # fmt: skip
def test_spellings_of_the_same(one, other):
  assert math.normalised(one) == math.normalised(other)


@pytest.mark.parametrize(
  ("one", "other"),
  [("1 2", "12"), ("1\\ 2", "12"), ("1~2", "12"), ("1\\,2", "12"),
   ("1\\,23", "123"), ("1,2", "12"), ("(1,234)", "1234"),
   ("\\leftarrow", "arrow"), ("0.1", "0.10000000000000000000000000000000001"),
   ("1" + "0" * 40, "1" + "0" * 39 + "1"), ("Evelyn", "evelyn"), ("-3", "3")],
)  # fmt: skip
def test_spellings_of_others(one, other):
  assert math.normalised(one) != math.normalised(other)


@pytest.mark.parametrize(
  ("response", "reference"),
  [
    ("So $\\boxed{\\frac12}$.", "0.5"), ("#### 18", "so $\\boxed{18}$"),
    ("\\boxed{5}, no: \\boxed{18}", "18"),
    # Powers of ten, not Euler's number.
    ("\\boxed{500}", "5e2"), ("\\boxed{0.0001}", "1e-4"),
    ("\\boxed{3 \\cdot 10^8}", "300000000"), ("\\boxed{2e^3}", "2e^{3}"),
    ("\\boxed{100 \\cdot 10^{398}}", "10^{400}"),
    # Six digits.
    ("\\boxed{0.333333}", "\\frac13"), ("\\boxed{1.414214}", "\\sqrt{2}"),
    ("\\boxed{1.602177e-19}", "1.6021766e-19"),
  ],
)  # fmt: skip
def test_right(response, reference):
  assert equivalent("", response, reference) == 1.0


@pytest.mark.parametrize(
  ("response", "reference"),
  [
    ("", ""), ("\\boxed{}", ""), ("\\boxed{18} \\boxed{5}", "18"),
    # Small numbers are not all 0.
    ("\\boxed{9.1 \\times 10^{-31}}", "6.67 \\times 10^{-27}"),
    ("\\boxed{0.1000004}", "0.1"), ("\\boxed{0.0000001}", "0"),
    ("\\boxed{x = 0.0}", "x = 1.6 \\times 10^{-19}"),
    ("\\boxed{y = x = 0.0}", "1.6 \\times 10^{-19}"),
    ("\\boxed{y = 17 = 0.0}", "1.6 \\times 10^{-19}"),
    ("\\boxed{(0.0, 1)}", "(10^{-8}, 1)"),
    ("\\boxed{\\begin{pmatrix}0.0&1\\end{pmatrix}}",
     "\\begin{pmatrix}10^{-8}&1\\end{pmatrix}"),
    ("\\boxed{[0.0, 1]}", "[10^{-8}, 1]"),
    ("\\boxed{\\{0.0, 1\\}}", "\\{1, 0.0000001\\}"),
    ("\\boxed{2\\pi \\cdot 10^{-20}}", "e \\cdot 10^{-20}"),
    ("\\boxed{e-4}", "1e-4"), ("\\boxed{3e-8}", "3e8"),
    # Two numbers are not one.
    ("\\boxed{1 8}", "8"),
    # The problem again, not its result.
    ("\\boxed{\\prod_{i=1}^{5} i}", "120"), ("\\boxed{17^2 \\mod 7}", "2"),
    ("\\boxed{12345 \\times 6789}", "83810205"),
    ("\\boxed{(12345)(6789)}", "83810205"),
    ("\\boxed{\\frac{1}{3}+\\frac{1}{6}}", "\\frac{1}{2}"),
    # Of this size nothing is computed.
    ("\\boxed{9^{9^{9^{9}}}}", "\\sqrt{2}"),
    ("\\boxed{9^{9^{9^{9}}} = 18}", "18"),
    ("\\boxed{(a+b+c+d+e+f+g)^{400}}", "x+1"),
    ("\\boxed{\\int_0^{18} e^{x^{x^{x}}} dx}", "\\int_0^1 x dx"),
    ("\\boxed{(10^9)!}", "5!"),
  ],
)  # fmt: skip
def test_wrong(response, reference):
  assert equivalent("", response, reference) == 0.0


def test_what_is_long_is_compared_as_text_only():
  long = "x+" * 500_000 + "1"
  began = time.process_time()
  assert equivalent("", f"\\boxed{{{long}}}", "18") == 0.0
  assert equivalent("", f"\\boxed{{{long}}}", long) == 1.0
  assert math.normalised("." + "1" * 20_000) == "." + "1" * 20_000
  assert time.process_time() - began < 2


def test_no_response_is_evaluated_as_python(tmp_path):
  path = tmp_path / "written"
  for text in (
    f"__import__('os').system('touch {path}')",
    f"\\text{{open('{path}', 'w')}}", f"open('{path}','w').close()",
  ):  # fmt: skip
    assert equivalent("", f"\\boxed{{{text}}}", "18") == 0.0
    assert equivalent("", f"#### {text}", "18") == 0.0
  assert not path.exists()


PIECES = r"""
1 .5 x n i e \pi + - / ^ _ ! ( ) [ ] { } \{ \} , : = < \ge \ne \in \cup \R
\infty \pm \approx \sqrt{ \frac{ \log \ln \sin \cot \csc^{-1} \lfloor \rfloor
| \binom{ ° \% \text{cm} \text{or} \text{million} \text{base} \pmod A (A)
\begin{cases} & \\ am May .
"""


def test_nothing_that_is_written_raises():
  draw = random.Random(0)
  references = [pair.reference for pair in math_reward.pairs()]
  for reference in draw.sample(references, 500):
    parts = re.findall(r"\\[a-zA-Z]+|.", reference)
    for _ in range(3):
      at = draw.randint(0, len(parts))
      parts[at : at + draw.randint(0, 1)] = [draw.choice(PIECES.split()), " "]
    equivalent("", f"\\boxed{{{''.join(parts)}}}", reference)


@pytest.mark.parametrize(
  ("result", "reference"),
  [("\\ln^{-1}(x)", "e^x"), ("\\lfloor ix\\rfloor", "\\lfloor x\\rfloor"),
   ("x \\ne", "x>3"), ("6.02\\times10^{2310}", "6.02\\times10^{23}")],
)  # fmt: skip
def test_what_is_not_defined_is_wrong(result, reference):
  assert equivalent("", f"\\boxed{{{result}}}", reference) == 0.0


# Wrong verdicts on the pairs, all of them refusals of right results.
REFUSED = {
  ("-1 - 0i", "-1"), ("15\\text{ dollars and }50\\text{ cents}", "15.50"),
  ("20\\text{ N}", "20\\text{ kg}\\cdot\\text{m/s}^2"),
  ("3\\text{ out of }5", "\\frac35"),
  ("2\\text{ hours }30\\text{ minutes}", "150\\text{ minutes}"),
  ("\\binom{n}{2}", "\\frac{n(n-1)}{2}"), ("(0,\\infty)", "\\mathbb{R}^+"),
  ("xy=1", "y=\\frac1x"), ("xy", "yx"),
}  # fmt: skip


def test_pairs():
  rewarded, refused, slow = set(), set(), set()
  for pair in math_reward.pairs():
    began = time.process_time()
    verdict = equivalent("", pair.response, pair.reference) == 1.0
    if time.process_time() - began > 1:
      slow.add(pair)
    if verdict and not pair.right:
      rewarded.add((pair.result, pair.reference))
    if pair.right and not verdict:
      refused.add((pair.result, pair.reference))
  assert rewarded == set()
  assert refused <= REFUSED
  assert slow == set()
