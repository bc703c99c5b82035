"""What a user did wrong, said in one line: value, expected, nearest choice."""

import re
from collections.abc import Iterable


class UserError(ValueError):
  """A mistake in a config, a flag or a file; `main` prints it and exits 2."""


def nearest(name: str, choices: Iterable[str]) -> str:
  """The hint that ends an error: the choice that was meant, else all of them.

  A choice was meant if `mistyped` says so; one that only looks alike was not.
  """
  choices = sorted(choices)
  close = mistyped(name, choices)
  if close:
    return f"did you mean {either(close)}?"
  return f"choose one of {', '.join(choices)}"


def either(names: Iterable[str]) -> str:
  """`'a', 'b' or 'c'`."""
  *rest, last = map(repr, names)
  return f"{', '.join(rest)} or {last}" if rest else last


def mistyped(name: str, choices: Iterable[str]) -> list[str]:
  """The choices that are one typo away from `name`, or two if it is long.

  A typo is a letter too many, too few, another, or two that are swapped; names
  of 1 or 2 letters have none, those of 3 to 5 have one. Upper and lower case
  are the same. A number is not mistyped: qwen3-14b does not mean qwen3-4b.

  Returns:
    Those with the fewest typos, in the order of `choices`.
  """
  found = {}
  for choice in choices:
    a, b = name.casefold(), choice.casefold()
    if re.findall(r"\d", a) == re.findall(r"\d", b):
      found[choice] = _typos(a, b)
  least = min(found.values(), default=0)
  if least > min(len(name) // 3, 2):
    return []
  return [choice for choice, typos in found.items() if typos == least]


def _typos(a: str, b: str) -> int:
  """The distance of Damerau and Levenshtein, of adjacent swaps alone."""
  before, last = [], list(range(len(b) + 1))
  for i, x in enumerate(a):
    row = [i + 1]
    for j, y in enumerate(b):
      least = min(last[j + 1] + 1, row[j] + 1, last[j] + (x != y))
      if i and j and (x, a[i - 1]) == (b[j - 1], y):
        least = min(least, before[j - 1] + 1)
      row.append(least)
    before, last = last, row
  return last[-1]
