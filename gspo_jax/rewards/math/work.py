"""Whether a result leaves the work to whoever reads it."""

from gspo_jax.rewards.math.expression import nodes

_OPERATORS = frozenset(("factorial", "binomial", "floor", "ceil"))
_TEN = ("number", 10, 0)


def is_left(expected: tuple, result: tuple) -> bool:
  """Whether the result still has to be worked out.

  Operators are, unless the expected tree has them too. Where that is a number,
  all arithmetic is, but signs, quotients, roots, functions and powers of ten.
  """
  used, allowed = (
    {node[0] for node in nodes(tree)} & _OPERATORS
    for tree in (result, expected)
  )
  return not used <= allowed or (_is_number(expected) and not _is_done(result))


def is_applied(tree: tuple) -> bool:
  """Whether a tree has a function of an angle."""
  return any(node[0] in ("sin", "cos", "tan", "cis") for node in nodes(tree))


def _is_number(tree) -> bool:
  """Whether a tree is a number, a quotient of two, or a power of ten."""
  if tree[0] == "negative":
    return _is_number(tree[1])
  if tree[0] in ("divide", "mixed"):
    return all(part[0] == "number" for part in _unsigned(tree[1:]))
  return tree[0] == "number" or _is_scientific(tree)


def _unsigned(trees):
  return [tree[1] if tree[0] == "negative" else tree for tree in trees]


def _is_scientific(tree) -> bool:
  """Whether a tree is a power of ten, or a number times one."""
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
  if name in ("add", "subtract", "times", "absolute", "binomial", "factorial"):
    return False
  return all(map(_is_done, parts))
