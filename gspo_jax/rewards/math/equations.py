r"""The sides of equations, of inequalities and of `\approx`."""

import math
import re

from gspo_jax.rewards.math import expression, quantities, splits, values

# The relative error that `\approx` allows.
ROUNDED = 0.01
ORDERS = ("<", ">", "\\le", "\\ge")
# dy/dx, and the inverse of a function.
_DERIVED = re.compile(
  r"\\frac\{d[a-zA-Z]*\}\{d[a-zA-Z]+\}|[a-zA-Z]\^\{-1\}\([a-zA-Z]\)"
)
_NAMING = frozenset("()_{},':") | {"\\angle", "\\vec", "\\triangle", "\\hat"}


def exact(tokens: list[str]) -> list[str]:
  r"""What stands before an `\approx`; nothing if its value is another one."""
  first, *rounded = splits.at(tokens, ("\\approx",))
  if not rounded:
    return tokens
  value = quantities.constant(splits.at(first, ("=",))[-1])
  if value is None and is_name(first) and len(rounded) == 1:
    return [*first, "=", *rounded[0]]
  others = list(map(quantities.constant, rounded))
  if value is None or None in others:
    return []
  close = all(abs(value - x) <= ROUNDED * abs(value) for x in others)
  return first if close else []


def sides(tokens: list[str]) -> list[list[str]]:
  """The sides of a chain of equations; of a single one, its name first."""
  parts = splits.at(tokens, ("=",))
  if len(parts) == 2 and is_name(parts[1]) and not is_name(parts[0]):
    return parts[::-1]
  return parts


def agree(parts: list[list[str]]) -> bool:
  """Whether every side that is a number equals the last side."""
  numbers = [_value(part) for part in parts]
  return numbers[-1] is None or all(
    math.isclose(number, numbers[-1], rel_tol=values.DECIMAL)
    for number in numbers
    if number is not None
  )


def _value(tokens) -> float | None:
  """The value of a number without its unit; a percentage as a share."""
  value = quantities.constant(quantities.number(tokens))
  is_share = value is not None and is_percentage(tokens)
  return value / 100 if is_share else value


def is_percentage(tokens: list[str]) -> bool:
  return tokens[-1:] in (["\\%"], ["%"])


def is_name(tokens: list[str]) -> bool:
  """Whether the tokens name something: x, f(x), (x,y), or a word."""
  if _DERIVED.fullmatch("".join(tokens)):
    return True
  return bool(tokens) and all(
    token in _NAMING
    or token.strip('"').isalpha()
    or (token[0] == "\\" and token[1:] in expression.GREEK)
    or tokens[i - 1 : i] == ["_"]
    or tokens[i - 2 : i] == ["_", "{"]
    for i, token in enumerate(tokens)
  )


def is_asked(tokens: list[str]) -> bool:
  r"""Whether a problem may ask for the value of an expression.

  Yes for m+n, `|AB|^2`, `\sin 2t` or f(3). No for 2x or x^2+y, which make an
  equation that has to be solved.
  """
  tree = quantities.tree(tokens)
  if tree is None or values.constant(tree) is not None:
    return True
  if splits.inside(tokens[1:]) and quantities.constant(tokens[1:]) is not None:
    return True  # f(3)
  names = [n[1] for n in expression.nodes(tree) if n[0] == "name"]
  has_number = any(n[0] == "number" for n in expression.nodes(tree))
  is_function = tree[0] in ("sin", "cos", "tan")
  return not has_number or is_function or any(n[0].isupper() for n in names)


def proportional(expected, result, positive=False) -> bool:
  """Whether two equations of two sides each are multiples."""
  trees = [quantities.tree(side) for side in (*expected, *result)]
  if None in trees:
    return False
  a, b, c, d = trees
  gold, answer = ("add", a, ("negative", b)), ("add", c, ("negative", d))
  return values.proportional(gold, answer, positive)


def falling(tokens: list[str]):
  """Whether each relation of a chain is strict, and its sides, large first."""
  signs = [t in ("<", ">") for t in tokens if t in ORDERS]
  sides = splits.at(tokens, ORDERS)
  is_rising = any(t in ("<", "\\le") for t in tokens)
  if is_rising and any(t in (">", "\\ge") for t in tokens):
    return [], sides
  return (signs[::-1], sides[::-1]) if is_rising else (signs, sides)
