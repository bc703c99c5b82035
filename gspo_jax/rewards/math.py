r"""Equivalence of mathematical results, MATH style: text first, then algebra.

Algebra may take forever or all memory: run it in `rewards.pool`, which ends
what does.
"""

import logging
import re

from gspo_jax.rewards import numbers
from gspo_jax.runtime import errors

# Longer results are compared as text only. References of MATH stay below 200.
LONGEST = 500
# Relative. math-verify rounds to 6 decimals, which makes all small numbers 0;
# 0.333333 remains 1/3.
NEAR = 1.01e-6

_DROPPED = re.compile(
  r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:> ]|\\displaystyle|\\\(|\\\)"
  r"|\\\[|\\\]|\^\{?\\circ\}?|\\?[$%]|~"
)
# Not between digits: "1 2" is not 12.
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])")
_ROOT = re.compile(r"\\sqrt([0-9a-zA-Z])")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_THIN = re.compile(r"[+-]?[0-9]{1,3}(?:\\,[0-9]{3})+(?:\.[0-9]+)?")
# What may stand between two numbers without making them one.
_GAP = re.compile(r"(?<=[0-9])(?:\s|~|\\[!,;:> ])+(?=[0-9])")
# 6e13. math-verify reads the e as Euler's.
_EXPONENT = re.compile(
  r"(?<![\w\\.])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?[0-9]{1,3})(?!\w|\.[0-9])"
)
_PERCENT = re.compile(r"\\?%")
# What math-verify would do for the answer: the question may hold it.
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


def equivalent(prompt: str, answer: str, reference: str) -> float:
  r"""1.0 iff the answer's last result means the same as the reference.

  The result is what stands in the last `\boxed{}` or behind the last `####`,
  whichever comes later. Both are normalised and compared as text, then given
  to math-verify as LaTeX. A percent sign is a unit and dropped: `50\%` is 50,
  not 0.5. `6e13` is a power of ten. Numbers agree if six digits do; decimals in
  what has letters, if six places do.

  What the verifier would have to work out is refused: sums, integrals and other
  operators that the reference does not show; and, where the reference is a
  number, all arithmetic but a quotient, a root and a power of ten. What is left
  are other forms of the same, `x^2-1` for `(x-1)(x+1)`, in either direction.

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
  given, expected = _plain(given), _plain(expected)
  return float(
    _balanced(given)
    and not _GAP.search(given)
    and not _GAP.search(expected)
    and not _unfinished(given, expected)
    and _verified(given, expected)
  )


def normalised(text: str) -> str:
  """One spelling for what means the same in every reading."""
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
  """Without what math-verify reads in another way."""
  text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
  if _THIN.fullmatch(text.strip()):
    text = text.replace("\\,", "")
  text = _FRACTION.sub(r"\\frac{\1}{\2}", _PERCENT.sub("", text))
  return _EXPONENT.sub(r"\1 \\cdot 10^{\2}", text)


def _balanced(text: str) -> bool:
  """Whether braces end nothing that is around the text."""
  depth = 0
  for brace in re.findall(r"[{}]", text):
    depth += 1 if brace == "{" else -1
    if depth < 0:
      return False
  return not depth


def _unfinished(given: str, expected: str) -> bool:
  """Whether the result leaves the work to who compares it."""
  sides = (given, expected)
  used, shown = (set(_OPERATOR.findall(_NAMED.sub(r"\\\1", s))) for s in sides)
  if not used <= shown:
    return True
  text = normalised(expected)
  if numbers.number(text) is None and not _QUOTIENT.fullmatch(text):
    return False
  # Of an equation the last side counts.
  last = _UNIT.sub("", given.rpartition("=")[2])
  return bool(_WORK.search(_SCALE.sub("", last)))


def _verified(given: str, expected: str) -> bool:
  import math_verify

  # Only LaTeX: the reader of plain expressions evaluates them as Python. No
  # time limits of its own: they are alarms, which C code does not hear.
  latex = [math_verify.LatexExtractionConfig()]
  parsed = [
    math_verify.parse(f"\\boxed{{{s}}}", latex, parsing_timeout=None)
    for s in (expected, given)
  ]
  if not math_verify.verify(*parsed, timeout_seconds=None):
    return False
  return _near(*(_values(sides[0]) for sides in parsed))


def _near(expected: list, given: list) -> bool:
  """Whether numbers agree in six digits, as far as they can be told apart."""
  close = lambda a, b: a == b or abs(a - b) <= NEAR * max(abs(a), abs(b))
  if len(expected) == len(given):
    return all(map(close, expected, given))
  # A chain of equations is told in no order: one of its sides.
  one = len(expected) == 1 and given
  return not one or any(close(expected[0], value) for value in given)


def _values(parsed) -> list:
  """The numbers that a result consists of, in order; none if it has letters."""
  import sympy

  if isinstance(parsed, sympy.Equality):
    parsed = parsed.rhs
  chain = isinstance(parsed, sympy.And)
  if isinstance(parsed, str) or (parsed.free_symbols and not chain):
    return []
  matrix = isinstance(parsed, sympy.MatrixBase)
  if not matrix and parsed.is_number:
    return [sympy.N(parsed.doit())]  # nested as it stands, N takes forever
  parts = parsed if matrix else parsed.args
  values = [value for part in parts for value in _values(part)]
  return sorted(values, key=lambda v: tuple(map(float, v.as_real_imag())))


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
