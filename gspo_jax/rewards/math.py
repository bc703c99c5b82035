r"""Equivalence of mathematical results, MATH style: text first, then algebra.

Algebra may take unbounded time and memory: call it through `rewards.pool`,
whose worker processes have limits of both.
"""

import logging
import re

from gspo_jax.rewards import numbers
from gspo_jax.runtime import errors

# Characters. Longer results are compared as text only; the references of MATH
# have fewer than 200.
MAX_LENGTH = 500
# Relative tolerance of numbers. math-verify rounds to 6 decimals, which makes
# all small numbers equal to 0; with this one 0.333333 still equals 1/3.
TOLERANCE = 1.01e-6

_DROPPED = re.compile(
  r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:> ]|\\displaystyle|\\\(|\\\)"
  r"|\\\[|\\\]|\^\{?\\circ\}?|\\?[$%]|~"
)
# White space, but not between digits: "1 2" is not 12.
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])")
_ROOT = re.compile(r"\\sqrt([0-9a-zA-Z])")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_THIN = re.compile(r"[+-]?[0-9]{1,3}(?:\\,[0-9]{3})+(?:\.[0-9]+)?")
# Separators that keep two numbers apart.
_GAP = re.compile(r"(?<=[0-9])(?:\s|~|\\[!,;:> ])+(?=[0-9])")
# As in 6e13. math-verify reads the e as Euler's number.
_EXPONENT = re.compile(
  r"(?<![\w\\.])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?[0-9]{1,3})(?!\w|\.[0-9])"
)
_PERCENT = re.compile(r"\\?%")
# Operators that math-verify would evaluate: the response may then repeat the
# problem instead of solving it.
_OPERATOR = re.compile(
  r"\\(?:sum|prod|i*int|oint|lim|gcd|lcm|[bp]?mod|max|min|[lr]?floor|[lr]?ceil"
  r"|[dt]?binom|choose|det)(?![a-zA-Z])|(?<!\\)!"
)
_NAMED = re.compile(r"\\(?:operatorname\*?|mathrm|text)\s*\{\s*(\w+)\s*\}")
_UNIT = re.compile(
  r"\\(?:text|mathrm)\{[^{}]*\}(?:\^\{?[0-9]\}?)?|\^\{?\\circ\}?"
)
_SCALE = re.compile(
  r"(?:\\(?:times|cdot)\s*)?(?<![0-9.])10\s*\^\s*(?:\{\s*[+-]?[0-9]+\s*\}|[0-9])"
)
_WORK = re.compile(
  r"[+*^]|\\(?:times|cdot|div|pm|mp)(?![a-zA-Z])|\)\s*\(|(?<=[0-9)}])\s*-"
)
_QUOTIENT = re.compile(r"[+-]?(?:\\frac\{-?[0-9]+\}\{-?[0-9]+\}|[0-9]+/[0-9]+)")


def equivalent(prompt: str, response: str, reference: str) -> float:
  r"""1.0 iff the last result of the response means the same as the reference.

  The result is the content of the last `\boxed{}` or the rest of the line after
  the last `####`, whichever comes later. Both sides are normalised and compared
  as text, then compared as LaTeX by math-verify. A percent sign is a unit and
  dropped: `50\%` is 50, not 0.5. `6e13` is a power of ten. Numbers are equal if
  they agree in six digits, decimals in expressions with letters in six places.

  The response must do the work itself. Sums, integrals and other operators are
  wrong unless the reference has them too. Where the reference is a number, all
  arithmetic is wrong but a quotient, a root and a power of ten. Other forms of
  the same expression are correct, such as `x^2-1` for `(x-1)(x+1)` and the
  reverse.

  Args:
    prompt: not used.
    response: what the policy wrote.
    reference: a result, or a solution with a result in the same places.
  """
  result = numbers.result(response)
  expected = numbers.result(reference) or reference
  if not result or not expected.strip():
    return 0.0
  if normalised(result) == normalised(expected):
    return 1.0
  if max(len(result), len(expected)) > MAX_LENGTH:
    return 0.0
  result, expected = _plain(result), _plain(expected)
  return float(
    _balanced(result)
    and not _GAP.search(result)
    and not _GAP.search(expected)
    and not _leaves_work(result, expected)
    and _verified(result, expected)
  )


def normalised(text: str) -> str:
  """The text in a normal form, which never changes its meaning."""
  text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
  text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
  text = _FRACTION.sub(r"\\frac{\1}{\2}", _TEXT.sub(r"\1", text))
  if _THIN.fullmatch(text.strip()):
    text = text.replace("\\,", "")
  text = _SPACE.sub("", _DROPPED.sub("", _GAP.sub(" ", text)))
  text = _ROOT.sub(r"\\sqrt{\1}", text).removesuffix(".")
  if _GROUPED.fullmatch(text):
    text = text.replace(",", "")
  value = numbers.number(text)
  if value is None:
    return text
  digits = f"{value or abs(value):f}"
  return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _plain(text: str) -> str:
  """The text without the notations that math-verify misreads."""
  text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
  if _THIN.fullmatch(text.strip()):
    text = text.replace("\\,", "")
  text = _FRACTION.sub(r"\\frac{\1}{\2}", _PERCENT.sub("", text))
  return _EXPONENT.sub(r"\1 \\cdot 10^{\2}", text)


def _balanced(text: str) -> bool:
  """Whether no brace of the text closes one around it, and none stays open."""
  depth = 0
  for brace in re.findall(r"[{}]", text):
    depth += 1 if brace == "{" else -1
    if depth < 0:
      return False
  return not depth


def _leaves_work(result: str, expected: str) -> bool:
  """Whether the verifier would have to evaluate the result (`equivalent`)."""
  used, allowed = (
    set(_OPERATOR.findall(_NAMED.sub(r"\\\1", side)))
    for side in (result, expected)
  )
  if not used <= allowed:
    return True
  text = normalised(expected)
  if numbers.number(text) is None and not _QUOTIENT.fullmatch(text):
    return False
  # The result of an equation is its last side.
  last = _UNIT.sub("", result.rpartition("=")[2])
  return bool(_WORK.search(_SCALE.sub("", last)))


def _verified(result: str, expected: str) -> bool:
  import math_verify

  # Only LaTeX: the parser of plain expressions evaluates them as Python. No
  # time limits of math-verify: they are alarms, which do not interrupt C.
  latex = [math_verify.LatexExtractionConfig()]
  parsed = [
    math_verify.parse(f"\\boxed{{{s}}}", latex, parsing_timeout=None)
    for s in (expected, result)
  ]
  if not math_verify.verify(*parsed, timeout_seconds=None):
    return False
  return _near(*(_values(sides[0]) for sides in parsed))


def _near(expected: list, result: list) -> bool:
  """Whether two lists of numbers agree in six digits, pair by pair."""
  close = lambda a, b: a == b or abs(a - b) <= TOLERANCE * max(abs(a), abs(b))
  if len(expected) == len(result):
    return all(map(close, expected, result))
  # The sides of a chain of equations come in no order: one of them must agree.
  one = len(expected) == 1 and result
  return not one or any(close(expected[0], value) for value in result)


def _values(parsed) -> list:
  """The numbers of a parsed result, sorted; [] if it has letters."""
  import sympy

  if isinstance(parsed, sympy.Equality):
    parsed = parsed.rhs
  chain = isinstance(parsed, sympy.And)
  if isinstance(parsed, str) or (parsed.free_symbols and not chain):
    return []
  matrix = isinstance(parsed, sympy.MatrixBase)
  if not matrix and parsed.is_number:
    # Without doit, N of a nested expression may never end.
    return [sympy.N(parsed.doit())]
  parts = parsed if matrix else parsed.args
  values = [value for part in parts for value in _values(part)]
  return sorted(values, key=lambda v: tuple(map(float, v.as_real_imag())))


def _prepare() -> None:
  try:
    import math_verify  # noqa: F401
  except ImportError as e:
    raise errors.missing_package(e, "math", "reward 'math'") from e
  # math-verify warns that its time limits are off.
  logging.getLogger("math_verify").setLevel(logging.ERROR)


equivalent.prepare = _prepare
