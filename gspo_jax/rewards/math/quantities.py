"""Numbers with or without units, and expressions."""

from gspo_jax.rewards.math import expression, units, values, work

_CURRENCIES = ("\\$", "€", "£", "¢", "USD", "EUR")


def tree(tokens: list[str]) -> tuple | None:
  """The tree of an expression; None for other tokens."""
  try:
    return expression.read(tokens)
  except expression.Unreadable:
    return None


def constant(tokens: list[str]) -> float | None:
  """The value of a real expression without names; None for others."""
  found = tree(tokens)
  return found and values.constant(found)


def number(tokens: list[str]) -> list[str]:
  """The tokens without a unit."""
  quantity = _quantity(tokens)
  return quantity[2] if quantity else tokens


def same(expected: list[str], result: list[str]) -> bool:
  """Whether two expressions are equal, or two numbers with their units."""
  gold, found = tree(expected), tree(result)
  is_done = gold and found and not work.is_left(gold, found)
  if is_done and values.equal(gold, found):
    return True
  sides = _quantity(expected), _quantity(result)
  if not all(sides):
    return False
  (gold, unit, _), (found, other, _) = sides
  if not units.fit(unit, other) or work.is_left(gold, found):
    return False
  ratio = units.ratio(unit, other)
  if ratio != 1:
    gold = ("product", gold, ("number", ratio, 0))
  return values.equal(gold, found)


def _quantity(tokens):
  """The tree of a number, its unit, and its tokens; None for what has none."""
  sign = tokens[:1] if tokens[:1] == ["-"] else []
  rest = tokens[len(sign) :]
  before = [token for token in rest[:1] if token in _CURRENCIES]
  rest = sign + rest[len(before) :]
  for i in range(max(1, len(rest) - units.LONGEST), len(rest) + 1):
    if i < len(rest) and not units.starts(rest, i):
      continue
    unit, found = units.read(before + rest[i:]), tree(rest[:i])
    if unit and found and not (rest[i:] == ["°"] and work.is_applied(found)):
      return found, unit, rest[:i]
  return None
