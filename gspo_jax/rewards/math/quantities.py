"""Numbers with or without units, and expressions.

A result that still has to be worked out is not equal.
"""

from gspo_jax.rewards.math import expression, units, values

_CURRENCIES = ("\\$", "€", "£", "¢", "USD", "EUR")
_OPERATORS = frozenset(("factorial", "binomial", "floor", "ceil"))
_OF_ANGLES = frozenset(("sin", "cos", "tan", "cis"))
_TEN = ("number", 10, 0)


def tree(tokens: list[str]) -> tuple | None:
  try:
    return expression.read(tokens)
  except expression.Unreadable:
    return None


def constant(tokens: list[str]) -> float | None:
  parsed = tree(tokens)
  return parsed and values.constant(parsed)


def number(tokens: list[str]) -> list[str]:
  quantity = _quantity(tokens)
  return quantity[2] if quantity else tokens


def same(expected: list[str], result: list[str]) -> bool:
  gold, answer = tree(expected), tree(result)
  is_done = gold and answer and not _is_left(gold, answer)
  if is_done and values.equal(gold, answer):
    return True
  sides = _quantity(expected), _quantity(result)
  if not all(sides):
    return False
  (gold, unit, _), (answer, other, _) = sides
  if not units.fit(unit, other) or _is_left(gold, answer):
    return False
  ratio = units.ratio(unit, other)
  if ratio != 1:
    gold = ("product", gold, ("number", ratio, 0))
  return values.equal(gold, answer)


def _quantity(tokens):
  """The tree of a number, its unit, and its tokens; else None."""
  sign = tokens[:1] if tokens[:1] == ["-"] else []
  rest = tokens[len(sign) :]
  before = [token for token in rest[:1] if token in _CURRENCIES]
  rest = sign + rest[len(before) :]
  for i in range(max(1, len(rest) - units.LONGEST), len(rest) + 1):
    if i < len(rest) and not units.starts(rest, i):
      continue
    unit, parsed = units.read(before + rest[i:]), tree(rest[:i])
    if unit and parsed:
      names = {node[0] for node in expression.nodes(parsed)}
      if rest[i:] != ["°"] or not names & _OF_ANGLES:
        return parsed, unit, rest[:i]
  return None


def _is_left(expected: tuple, result: tuple) -> bool:
  """Whether the result still has to be worked out.

  Yes if it has operators that the expected tree lacks. If the expected tree is
  a number, yes for any arithmetic but signs, quotients, roots, functions and
  powers of ten.
  """
  used, allowed = (
    {node[0] for node in expression.nodes(tree)} & _OPERATORS
    for tree in (result, expected)
  )
  return not used <= allowed or (_is_number(expected) and not _is_done(result))


def _is_number(tree) -> bool:
  if tree[0] == "negative":
    return _is_number(tree[1])
  if tree[0] in ("divide", "mixed"):
    return all(part[0] == "number" for part in _unsigned(tree[1:]))
  return tree[0] == "number" or _is_scientific(tree)


def _unsigned(trees):
  return [tree[1] if tree[0] == "negative" else tree for tree in trees]


def _is_scientific(tree) -> bool:
  if tree[0] == "times":
    return _unsigned(tree[1:2])[0][0] == "number" and _is_scientific(tree[2])
  exponent = tree[0] == "power" and tree[1] == _TEN and _unsigned(tree[2:])[0]
  return bool(exponent) and exponent[0] == "number"


def _is_done(tree) -> bool:
  name, *parts = tree
  if name in ("number", "name", "constant", "mixed") or _is_scientific(tree):
    return True
  if name == "power":  # a root
    return parts[1][0] == "divide" and _is_done(parts[0])
  if name in ("add", "times", "absolute", "binomial", "factorial"):
    return False
  return all(map(_is_done, parts))
