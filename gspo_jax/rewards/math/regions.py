r"""Sets of real numbers: intervals, their unions, and inequalities of one name.

A region is compared with another at all its ends, and between them.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from gspo_jax.rewards.math import expression, kinds, splits, values

_RELATIONS = ("<", ">", "\\le", "\\ge", "\\ne", "=")
_REVERSED = (">", "<", "\\ge", "\\le", "\\ne", "=")
_TURNED = dict(zip(_RELATIONS, _REVERSED, strict=True))
_JOINS = (  # from the loosest
  (("or", "\\vee"), any),
  (("and", "\\wedge", ","), all),
  (("\\cup",), any),
  (("\\cap",), all),
)


class Region(NamedTuple):
  name: str  # of the number in an inequality; "" if it has none
  ends: tuple[float, ...]  # where it may begin or end
  has: Callable[[float], bool]  # whether it holds a number


def equal(expected: Region, result: Region) -> bool:
  """Whether two regions hold the same numbers, of the same name if any."""
  if expected.name and result.name and expected.name != result.name:
    return False
  ends = sorted({e for e in expected.ends + result.ends if math.isfinite(e)})
  tests = [ends[0] - 1, ends[-1] + 1] if ends else [0.0]
  for low, high in itertools.pairwise(ends):
    if not _same(low, high):
      tests.append((low + high) / 2)
  return all(expected.has(x) == result.has(x) for x in (*tests, *ends))


def read(tokens: list[str]) -> Region | None:
  """The region that the tokens write; else None."""
  try:
    return _region(tokens)
  except expression.Unreadable:
    return None


def _region(tokens) -> Region:
  name, *sets = splits.at(tokens, ("\\in",))
  if len(sets) == 1:
    return _region(sets[0])._replace(name=_name(name))
  for separators, join in _JOINS:
    parts = splits.at(tokens, separators)
    if len(parts) > 1:
      return _joined([_region(part) for part in parts], join)
  minus = "-" if tokens[:1] == ["\\R"] else "\\setminus"
  parts = splits.at(tokens, (minus, "\\setminus"))
  if len(parts) == 2:
    whole, without = map(_region, parts)
    return Region(
      "",
      whole.ends + without.ends,
      lambda x: whole.has(x) and not without.has(x),
    )
  if tokens == ["\\R"]:
    return Region("", (), lambda x: True)
  inside = splits.inside(tokens)
  if inside is not None and tokens[0] == "\\{":
    return _of_set(inside)
  bracket, ends = splits.bracketed(tokens) or ("", [])
  if bracket[:1] in ("(", "[") and len(ends) == 2:
    return _interval(*map(_end, ends), bracket[0] == "[", bracket[-1] == "]")
  return _inequality(tokens)


def _of_set(tokens) -> Region:
  for sign in (":", "|", "\\mid"):
    name, *rules = splits.at(tokens, (sign,))
    if len(rules) == 1:
      region = _region(rules[0])
      if region.name != _name(splits.at(name, ("\\in",))[0]):
        raise expression.Unreadable("a rule for another name")
      return region._replace(name="")
  points = tuple(_end(part) for part in splits.listed(tokens))
  return Region("", points, lambda x: any(_same(x, p) for p in points))


def _interval(low, high, has_low, has_high) -> Region:
  if not low < high:
    raise expression.Unreadable("no interval: its ends are out of order")

  def has(x):
    if _same(x, low) or _same(x, high):
      return (has_low and _same(x, low)) or (has_high and _same(x, high))
    return low < x < high

  return Region("", (low, high), has)


def _inequality(tokens) -> Region:
  signs = [t for t in tokens if t in _RELATIONS]
  parts = splits.at(tokens, _RELATIONS)
  if len(parts) not in (2, 3) or len(signs) != len(parts) - 1:
    raise expression.Unreadable("no inequality")
  first = values.constant(expression.read(parts[0]))
  middle = int(len(parts) == 3 or first is not None)
  is_absolute = parts[middle][:1] == ["|"] == parts[middle][-1:]
  name = _name(parts[middle][1:-1] if is_absolute else parts[middle])
  ends = [(_TURNED[signs[0]], parts[0])] if middle else []
  ends += zip(signs[middle:], parts[middle + 1 :], strict=True)
  sides = [region for end in ends for region in _side(*end)]
  region = _joined(sides, all)._replace(name=name)
  if not is_absolute:
    return region
  ends = region.ends + tuple(-end for end in region.ends)
  return Region(name, ends, lambda x: region.has(abs(x)))


def _side(sign, tokens) -> list[Region]:
  """The region on one side of an end; for `\\ne`, one without each end."""
  ends = [_end(part) for part in splits.listed(tokens)]
  if sign == "\\ne":
    return [Region("", (e,), lambda x, e=e: not _same(x, e)) for e in ends]
  if sign == "=":
    return [Region("", tuple(ends), lambda x: any(_same(x, e) for e in ends))]
  if len(ends) != 1:
    raise expression.Unreadable("no single end")
  end = ends[0]
  low, high = (end, math.inf) if sign in (">", "\\ge") else (-math.inf, end)
  closed = sign in ("\\ge", "\\le")
  return [_interval(low, high, closed, closed)]


def _joined(regions, join) -> Region:
  names = {region.name for region in regions}
  if len(names) != 1:
    raise expression.Unreadable("no inequalities of one name")
  return Region(
    names.pop(),
    tuple(end for region in regions for end in region.ends),
    lambda x: join(region.has(x) for region in regions),
  )


def _end(tokens) -> float:
  if tokens and (sign := kinds.infinite(tokens)):
    return float(f"{sign}inf")
  value = values.constant(expression.read(tokens))
  if value is None:
    raise expression.Unreadable("no number")
  return value


def _name(tokens) -> str:
  if len(tokens) == 4 and tokens[1] == "(":  # f(x)
    return "".join(tokens)
  tree = expression.read(tokens)
  if tree[0] != "name":
    raise expression.Unreadable("no name")
  return tree[1]


_same = functools.partial(math.isclose, rel_tol=values.DECIMAL)
