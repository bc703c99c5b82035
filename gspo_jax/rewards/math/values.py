"""Values of expressions, and whether two expressions are equal.

Rational numbers are exact, others are floats. Expressions with names are equal
if they agree at all of some values of the names where both are defined. Numbers
with more bits than the limits below are refused, so that no step takes long.
"""

import cmath
import math
import operator
import random
from fractions import Fraction

from gspo_jax.rewards.math.expression import RECIPROCALS, nodes

# For a number without names, and for one value of a tree with names.
MAX_BITS, MAX_BITS_OF_NAMES = 10_000, 2_000
# Relative tolerances of decimals (0.333333 equals 1/3) and of floats.
DECIMAL, FLOAT = 1.01e-6, 1e-10
# Equal values that are enough, the fewest equal values, and the most trials.
ENOUGH, FEWEST, TRIALS = 8, 3, 60
_ARITHMETIC = {
  "negative": operator.neg,
  "times": operator.mul,
  "product": operator.mul,
  "divide": operator.truediv,
  "mixed": operator.add,
  "absolute": abs,
  "degrees": lambda a: a * math.pi / 180,
  "floor": lambda a: Fraction(math.floor(a)),
  "ceil": lambda a: Fraction(math.ceil(a)),
  "cis": lambda a: cmath.exp(1j * a),
}
_ERRORS = (ArithmeticError, ValueError, RecursionError, TypeError)


def equal(expected: tuple, result: tuple) -> bool:
  """Whether two trees of `expression.read` have the same values."""
  places = _places(expected), _places(result)
  if all(places):  # as many digits as the shorter one has
    half = Fraction(1, 2 * 10 ** min(places))
    a, b = (_Evaluation({}, False).value(t) for t in (expected, result))
    if abs(a - b) > half:
      return False
  tolerance = _tolerance(expected, result)
  pairs = _common(expected, result)
  if not any(_names(tree) for tree in (expected, result)):
    whole = [v for v in pairs[0][:2] if _is_whole(v)] if pairs else []
    tolerance = 0.0 if len(whole) == 1 and tolerance == DECIMAL else tolerance
  return bool(pairs) and all(_close(*pair, tolerance) for pair in pairs)


def proportional(expected: tuple, result: tuple, positive: bool) -> bool:
  """Whether one tree is a multiple of the other, as in equivalent equations."""
  pairs = _common(expected, result)
  tolerance = _tolerance(expected, result)
  a, b, _ = next((pair for pair in pairs if all(pair[:2])), (0, 0, 0))
  if not (a and b):
    return False
  if positive and (isinstance(a / b, complex) or a / b <= 0):
    return False
  try:
    scale = float(max(abs(a), abs(b)))
  except OverflowError:
    return False
  return all(_close(c * b, d * a, s * scale, tolerance) for c, d, s in pairs)


def constant(tree: tuple) -> float | None:
  if _names(tree):
    return None
  try:
    return float(_Evaluation({}, False).value(tree))
  except _ERRORS:
    return None


def _names(tree) -> set:
  return {node[1] for node in nodes(tree) if node[0] == "name"}


def _tolerance(*trees) -> float:
  numbers = (n for tree in trees for n in nodes(tree) if n[0] == "number")
  return DECIMAL if any(decimals for _, _, decimals in numbers) else FLOAT


def _places(tree) -> int:
  tree = tree[1] if tree[0] == "negative" else tree
  return tree[2] if tree[0] == "number" else 0


def _is_whole(value) -> bool:
  return isinstance(value, Fraction) and value.denominator == 1


def _close(a, b, size, tolerance) -> bool:
  """Whether two values agree; `size` is the largest term's absolute value."""
  if a == b:
    return True
  exact = isinstance(a, Fraction) and isinstance(b, Fraction)
  if exact and tolerance != DECIMAL:
    return False
  slack = 0.0 if exact else 1e-13 * size
  try:
    return abs(a - b) <= max(tolerance * max(abs(a), abs(b)), slack)
  except OverflowError:  # too large for a float
    return False


def _common(expected, result) -> list:
  """Pairs of values and their size where both trees are defined."""
  trees = expected, result
  names = sorted(_names(expected) | _names(result))
  imaginary = any(
    node[0] == "cis" or node == ("constant", "i")
    for tree in trees
    for node in nodes(tree)
  )
  # Roots and logarithms of negative values count only if no others are found.
  for is_complex in (True,) if imaginary else (False, True):
    pairs, draw = [], random.Random(0)
    for trial in range(TRIALS if names else 1):
      at = _Evaluation({n: _drawn(draw, trial) for n in names}, is_complex)
      try:
        pair = [at.value(tree) for tree in trees]
        if not all(isinstance(value, Fraction) for value in pair):
          pair = [complex(v) if v.imag else float(v.real) for v in pair]
      except _ERRORS:
        continue
      pairs.append((*pair, at.size))
      if len(pairs) == ENOUGH:
        return pairs
    if len(pairs) >= (FEWEST if names else 1):
      return pairs
  return []


def _drawn(draw: random.Random, trial: int) -> Fraction:
  """A name's value: to 1, 4, 13, or whole; every other one is positive."""
  ranges = (1, 12, 13), (5, 40, 11), (20, 90, 7), (2, 9, 1)
  low, high, denominator = ranges[trial // 2 % len(ranges)]
  value = Fraction(draw.randint(low, high), denominator)
  return value if trial % 2 else value * draw.choice((-1, 1))


class _Evaluation:
  def __init__(self, names, is_complex):
    self.size = 0.0  # absolute value of the largest float in a sum
    self._names = names
    self._is_complex = is_complex
    self._bits = MAX_BITS_OF_NAMES if names else MAX_BITS

  def value(self, tree):
    name, *parts = tree
    if name == "number":
      return parts[0]
    if name == "name":
      return self._names[parts[0]]
    if name == "constant":
      return {"pi": math.pi, "e": math.e, "i": 1j}[parts[0]]
    values = [self.value(part) for part in parts]
    rule = _ARITHMETIC.get(name) or getattr(self, f"_{name}", None)
    value = rule(*values) if rule else self._function(name, *values)
    if _bits(value) > self._bits:
      raise OverflowError("a number of too many digits")
    return value

  def _add(self, a, b):
    if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
      self.size = max(self.size, float(abs(a)), float(abs(b)))
    return a + b

  def _factorial(self, n):
    if not _is_whole(n) or not 0 <= n <= 1000:
      raise ValueError("a factorial of no small number")
    return Fraction(math.factorial(int(n)))

  def _binomial(self, n, k):
    if _is_whole(n) and _is_whole(k) and 0 <= k <= n <= 1000:
      return Fraction(math.comb(int(n), int(k)))
    if not _is_whole(k) or not 0 <= k <= 9:
      raise ValueError("a binomial of no small number")
    return math.prod(n - i for i in range(int(k))) / math.factorial(int(k))

  def _power(self, a, b):
    if _is_whole(b):
      return self._whole_power(a, int(b))
    real = not isinstance(a, complex) and not isinstance(b, complex)
    if real and a < 0 and isinstance(b, Fraction) and b.denominator % 2:
      sign = -1 if b.numerator % 2 else 1
      return sign * self._power(-a, b)
    if real and a >= 0:
      return float(a) ** float(b)
    if not self._is_complex:
      raise ValueError("the power of a negative number")
    return complex(a) ** complex(b)

  def _whole_power(self, a, n):
    if abs(a) != 1 and (_bits(a) - 1) * abs(n) > self._bits:
      raise OverflowError("a number of too many digits")
    value = a**n
    if a and not value:
      raise ArithmeticError("a power too small for a float")
    return value

  def _logarithm(self, base, a):
    return self._function("log", a) / self._function("log", base)

  def _function(self, name, a):
    if name in RECIPROCALS:
      return 1 / self._function(RECIPROCALS[name], a)
    name = "log" if name == "ln" else name.replace("arc", "a")
    is_complex = self._is_complex or isinstance(a, complex)
    if not is_complex and name in ("sin", "cos", "tan") and abs(a) > 1e6:
      raise ValueError("an angle too large for its digits")
    self.size = max(self.size, 1.0)
    return getattr(cmath if is_complex else math, name)(a)


def _bits(value) -> float:
  if isinstance(value, Fraction):
    return max(value.numerator.bit_length(), value.denominator.bit_length())
  return 0 if cmath.isfinite(value) else math.inf
