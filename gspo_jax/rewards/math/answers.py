r"""Whether two results mean the same: by their kinds, then by their values."""

from gspo_jax.rewards.math import (
  equations,
  kinds,
  quantities,
  regions,
  splits,
  units,
)

# Items of a list are compared each with each.
MAX_ITEMS = 40
_ABOUT = ("about", "approximately", "roughly", "approx", "\\approx", "all")
_REGION = frozenset(
  (*equations.ORDERS, "\\ne", "\\cup", "\\cap", "\\in", "\\R", "\\setminus")
)
_TABLES = r"""
\begin{matrix} \begin{pmatrix} \begin{bmatrix} \begin{Bmatrix}
\begin{smallmatrix} \begin{array} \begin{cases}
""".split()
_SYSTEMS = ("\\begin{cases}", "\\begin{aligned}", "\\begin{array}")


def same(expected: list[str], result: list[str]) -> bool:
  expected, result = _bare(expected), _bare(result)
  if not (expected and result):
    return False
  if kinds.folded(expected) == kinds.folded(result):
    return True
  verdicts = (rule(expected, result) for rule in _RULES)
  return next((v for v in verdicts if v is not None), False)


def _bare(tokens):
  while tokens[:1] == ["{"] and splits.inside(tokens) is not None:
    tokens = tokens[1:-1]
  while tokens[-1:] in ([","], [";"], ["."]):
    tokens = tokens[:-1]
  words = kinds.plain(tokens)
  if " ".join(words).lower() in ("all real numbers", "all reals"):
    return ["\\R"]
  skipped = _introduction(words)
  if skipped:
    return _bare(tokens[skipped:])
  _, *rules = splits.at(tokens, (",", "for", "where"))
  is_integer = lambda rule: any("integer" in token for token in rule)
  if rules and (rules[-1][1:] == ["\\in", "\\Z"] or is_integer(rules[-1])):
    return _bare(tokens[: -len(rules[-1]) - 1])
  first, rest = "".join(words[:1]), tokens[1:]
  if first.lower() in kinds.NUMBERS and units.read(rest):
    return [str(kinds.NUMBERS.index(first.lower())), *rest]
  if len(first) == 1 and first.isupper() and splits.bracketed(rest):
    return rest  # a point
  return equations.exact(tokens)


def _introduction(words) -> int:
  """How many words introduce a result: `The sum is`, `Area:`, `about`."""
  for i, word in enumerate(words[:-1]):
    if word in ("is", "are") or (word == ":" and i and len(words[i - 1]) > 2):
      return i + 1
    if not word.isalpha():
      break
  return int(words[:1] != [] and words[0].lower() in _ABOUT)


def _by_choice(expected, result):
  """`(B) 12` is B, and it is 12."""
  sides = kinds.choice(expected), kinds.choice(result)
  if all(sides):
    (letter, rest), (other, more) = sides
    differ = rest and more and kinds.plain(rest) != kinds.plain(more)
    return letter == other and not differ
  if sides[0] and sides[0][1]:
    return same(sides[0][1], result)
  if sides[1] and sides[1][1]:
    return same(expected, sides[1][1])
  return None


def _by_modulus(expected, result):
  """`12 (mod 17)` is 12, if no other modulus is expected."""
  (gold, modulus), (answer, other) = map(kinds.congruence, (expected, result))
  if not (modulus or other):
    return None
  fits = not (modulus and other) or kinds.plain(modulus) == kinds.plain(other)
  return fits and same(gold, answer)


def _by_kind(expected, result):
  for read, compare in kinds.KINDS:
    sides = read(expected), read(result)
    if all(sides):
      return compare(*sides)
  return None


def _by_region(expected, result):
  if not any(t in _REGION for t in (*expected, *result)):
    return None
  sides = regions.read(expected), regions.read(result)
  return regions.equal(*sides) if all(sides) else None


def _by_list(expected, result):
  """Compares lists, sets and systems of equations, which have no order."""
  sides = _items(expected), _items(result)
  if all(sides):
    return _match(*sides)
  if not any(sides):
    return None
  items, other = (sides[0], result) if sides[0] else (sides[1], expected)
  if len(items) == 1 and kinds.phrase(items[0]) is not kinds.NOTHING:
    return same(items[0], other) if sides[0] else same(other, items[0])
  return _is_solution(items, other)


def _items(tokens):
  name, *sets = splits.at(tokens, ("\\in",))
  if len(sets) == 1 and equations.is_name(name):
    tokens = sets[0]
  inside = splits.inside(tokens)
  if inside is not None and tokens[0] == "\\{" and ":" not in inside:
    items = splits.listed(inside)
    return [item for i, item in enumerate(items) if item not in items[:i]]
  rest = tokens[tokens[:1] == ["\\{"] :]
  if rest[:1] and rest[0] in _SYSTEMS and "&" not in rest:
    tokens = ["," if token == "\\\\" else token for token in rest[1:-1]]
  items = splits.listed(tokens)
  return items if len(items) > 1 else None


def _match(expected, result) -> bool:
  if len(expected) != len(result) or len(expected) > MAX_ITEMS:
    return False
  left = list(result)
  for item in expected:
    place = next((i for i, other in enumerate(left) if same(item, other)), None)
    if place is None:
      return False
    del left[place]
  return True


def _is_solution(items, other) -> bool:
  """Whether a list such as x=3, y=4 is the tuple (3,4)."""
  *order, point = splits.at(other, ("=",))
  bracket, parts = splits.bracketed(point) or ("", [])
  pairs = [splits.at(item, ("=",)) for item in items]
  if bracket != "()" or any(
    len(pair) != 2 or not equations.is_name(pair[0]) for pair in pairs
  ):
    return False
  values = {"".join(kinds.plain(name)): value for name, value in pairs}
  names = _in_order(values, order)
  return (
    len(parts) == len(pairs) == len(names)
    and values.keys() == set(names)
    and all(same(part, values[n]) for part, n in zip(parts, names, strict=True))
  )


def _in_order(names, order) -> list[str]:
  """The names in the order of a tuple: as it says, by alphabet, or as given."""
  if order:
    _, named = splits.bracketed(order[0]) or ("", [])
    return ["".join(kinds.plain(name)) for name in named]
  is_known = names.keys() <= set("xyz") or names.keys() <= set("abc")
  return sorted(names) if is_known else list(names)


def _by_equation(expected, result):
  if any(len(splits.listed(side)) > 1 for side in (expected, result)):
    return None
  gold = equations.sides(expected)
  answer = equations.sides(result)
  if len(gold) == len(answer) == 1:
    return None
  if not equations.agree(answer):
    return False
  if len(gold) == 1:
    return _ends_in(expected, answer)
  if len(answer) == 1:
    return equations.is_name(gold[0]) and same(gold[-1], result)
  if equations.is_name(gold[0]):
    names = kinds.plain(gold[0]), kinds.plain(answer[0])
    is_same = names[0] == names[1] or (
      ["y"] in names and "(" in (*names[0], *names[1])
    )
    if is_same and same(gold[-1], answer[-1]):
      return True
    if quantities.constant(gold[-1]) is not None:
      return False
  return len(gold) == len(answer) == 2 and equations.proportional(gold, answer)


def _ends_in(expected, sides) -> bool:
  """Whether an equation's sides lead to the expected value."""
  leads = (
    equations.is_name(sides[0])
    or quantities.tree(sides[0]) is None  # such as an integral
    or (
      quantities.constant(quantities.number(expected)) is not None
      and equations.is_asked(sides[0])
    )
    or same(sides[-1], sides[0])
  )
  ends = sides[-2:] if equations.is_percentage(sides[-1]) else sides[-1:]
  return leads and any(same(expected, end) for end in ends)


def _by_inequality(expected, result):
  strict, gold = equations.falling(expected)
  others, answer = equations.falling(result)
  if len(gold) == len(answer) == 1:
    return None
  if strict != others or not strict:
    return False
  if len(strict) == 1:
    return equations.proportional(gold, answer, positive=True)
  return all(map(same, gold, answer))


def _by_table(expected, result):
  """Compares matrices and definitions by cases; a column is a tuple, too."""
  sides = _table(expected), _table(result)
  if not any(sides):
    return None
  gold, answer = sides[0] or _column(expected), sides[1] or _column(result)
  return [len(row) for row in gold] == [len(row) for row in answer] and all(
    same(a, b)
    for row, other in zip(gold, answer, strict=True)
    for a, b in zip(row, other, strict=True)
  )


def _table(tokens):
  bracket, rows = splits.bracketed(tokens) or ("", [])
  if bracket == "[]" and all(splits.inside(row) for row in rows):
    return [splits.at(row[1:-1], (",",)) for row in rows]
  inside = splits.inside(tokens)
  if inside is not None and tokens[0] in ("(", "["):
    tokens = inside
  begin = next((i for i, token in enumerate(tokens) if token in _TABLES), None)
  if begin is None or tokens[-1][:4] != "\\end":
    return None
  factor = tokens[:begin]
  rows = splits.rows(tokens[begin + 1 : -1])
  return [[[*factor, "{", *cell, "}"] for cell in row] for row in rows]


def _column(tokens):
  bracket, parts = splits.bracketed(tokens) or ("", [])
  return [[part] for part in parts if bracket == "()"]


def _by_brackets(expected, result):
  """Compares tuples, vectors, intervals: order and brackets count."""
  sides = splits.bracketed(expected), splits.bracketed(result)
  if not any(sides):
    return None
  if not all(sides):
    return False
  (bracket, parts), (other, more) = sides
  is_alike = bracket == other and len(parts) == len(more)
  return is_alike and all(map(same, parts, more))


_RULES = (
  _by_modulus,
  _by_choice,
  _by_kind,
  _by_region,
  _by_equation,
  _by_list,
  _by_inequality,
  _by_table,
  _by_brackets,
  quantities.same,
)
