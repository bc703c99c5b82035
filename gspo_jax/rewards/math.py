r"""Equivalence of mathematical results, MATH style: text first, then algebra.

Algebra may take forever or all memory: run it in `rewards.pool`, which ends
what does.
"""

import logging
import re

from gspo_jax import errors
from gspo_jax.rewards import numbers

# Longer results are compared as text only. References of MATH stay below 200.
LONGEST = 500

_DROPPED = re.compile(
  r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:> ]|\\displaystyle|\\\(|\\\)"
  r"|\\\[|\\\]|\^\{?\\circ\}?|\\?[$%]|~"
)
# Not between digits: "1 2" is not 12.
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_FRACTION = re.compile(r"\\frac([0-9])([0-9])")
_ROOT = re.compile(r"\\sqrt([0-9a-zA-Z])")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def equivalent(prompt: str, answer: str, reference: str) -> float:
  r"""1.0 iff the answer's last result means the same as the reference.

  The result is what stands in the last `\boxed{}` or behind the last `####`,
  whichever comes later. Both are normalised and compared as text, then given
  to math-verify as LaTeX.

  Args:
    prompt: not used.
    answer: what the policy wrote.
    reference: a result, or a solution with one in the same places.
  """
  given = numbers.result(answer)
  expected = numbers.result(reference) or reference
  if not given or not expected.strip():
    return 0.0
  if normalised(given) == normalised(expected):
    return 1.0
  if max(len(given), len(expected)) > LONGEST:
    return 0.0
  return float(_verified(given, expected))


def normalised(text: str) -> str:
  """One spelling for what means the same in every reading."""
  text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
  text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
  text = _TEXT.sub(r"\1", text)
  text = _SPACE.sub("", _DROPPED.sub("", text))
  text = _FRACTION.sub(r"\\frac{\1}{\2}", text)
  text = _ROOT.sub(r"\\sqrt{\1}", text).removesuffix(".")
  if _GROUPED.fullmatch(text):
    text = text.replace(",", "")
  value = numbers.number(text)
  if value is None:
    return text
  digits = f"{value or abs(value):f}"
  return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _verified(given: str, expected: str) -> bool:
  import math_verify

  # Only LaTeX: the reader of plain expressions evaluates them as Python. No
  # time limits of its own: they are alarms, which C code does not hear.
  latex = [math_verify.LatexExtractionConfig()]
  parsed = [
    math_verify.parse(f"\\boxed{{{s}}}", latex, parsing_timeout=None)
    for s in (expected, given)
  ]
  return math_verify.verify(*parsed, timeout_seconds=None)


def _prepare() -> None:
  try:
    import math_verify  # noqa: F401
  except ImportError as e:
    raise errors.UserError(
      f"reward 'math' needs math-verify ({e}): pip install 'gspo_jax[math]', "
      "or name another reward"
    ) from e
  # It warns that its time limits are off.
  logging.getLogger("math_verify").setLevel(logging.ERROR)


equivalent.prepare = _prepare
