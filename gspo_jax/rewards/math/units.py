"""Units, currencies and scale words: what follows or precedes a number."""

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

# Words that change the number before them.
_SCALES = {
  "hundred": 100,
  "thousand": 10**3,
  "million": 10**6,
  "billion": 10**9,
  "trillion": 10**12,
  "quadrillion": 10**15,
  "lakh": 10**5,
  "crore": 10**7,
  "k": 10**3,
  "M": 10**6,
  "bn": 10**9,
  "dozen": 12,
}
# Each line: a dimension (or powers of others), then units of it with factors.
# In a group the first name is the symbol; names are in the singular.
_TABLE = """
length: m=metre=meter 1, km=kilometer=kilometre 1000, cm=centimeter=centimetre
  1/100, mm=millimeter=millimetre 1/1000, in=inch 127/5000,
  ft=foot=feet 381/1250, yd=yard 1143/1250, mi=mile 201168/125
time: s=second=sec 1, ms=millisecond 1/1000, min=minute 60, h=hour=hr 3600,
  day 86400, week 604800
years: year=yr 12, month 1
mass: g=gram 1, kg=kilogram=kilo 1000, mg=milligram 1/1000
weight: lb=pound 16, oz=ounce 1
volume: L=l=liter=litre 1, mL=ml=milliliter=millilitre 1/1000
money: $=dollar=USD=buck 1, cent=¢ 1/100
euros: €=euro=EUR 1
pounds: £=GBP 1
angle: °=degree=deg 1
turn: rad=radian 1
units: unit 1
share: %=percent=pct 1
force: N=newton 1, kN 1000
energy: J=joule 1, kJ 1000
power: W=watt 1, kW 1000
voltage: V=volt 1
resistance: Ω=ohm 1
frequency: Hz=hertz 1
pressure: Pa=pascal 1, kPa 1000
kelvins: K=kelvin 1
celsius: C=celsius 1
fahrenheit: F=fahrenheit 1
"""
# Words after a number that are part of the result or make it another one.
_REFUSED = frozenset(
  """
or and not but if maybe perhaps to than less more least most minus plus over by
below above half halves third quarter double doubled triple tripled twice
factorial squared cubed root power inverse reciprocal negative opposite
mod base with only except between any either neither nor x y z yes no true false
wrong pair score gross ten twenty is are was possible answer unknown undefined
about approximately roughly all when per ago too many few case step
incorrect invalid
""".split()
)
# Twentieths, say, but neither months nor lengths.
_PARTS = re.compile(r".*(?:ur|f|x|ven|eigh|nin|te?en|ie|red|sand|lion)ths?")
_FILLERS = r"a an the of for each \cdot \times * . ( ) - \frac".split()
_SIGNS = {"\\%": "%", "\\$": "$", "\\Omega": "Ω", "\\mu": "micro"}
_SHORT = {"mph": "mile per h", "kph": "km per h", "kmh": "km per h"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_TERM = re.compile(
  r"(?:(per|/) )?(?:(square|sq|cubic|cu) )?(\S+)"
  r"(?: (?:\^ (- )?([1-9])|(squared|cubed)))?(?: |$)"
)


def _read_table():
  table = {}
  for line in re.split(r"\n(?! )", _TABLE.strip()):
    dimension, _, units = line.partition(": ")
    for unit in re.split(r",\s+", units):
      names, factor = unit.split()
      for name in names.split("="):
        table[name] = dimension, Fraction(factor)
  return table


_UNITS = _read_table()
_KNOWN = {dimension for dimension, _ in _UNITS.values()}
LONGEST = 25  # tokens


class Unit(NamedTuple):
  scale: Fraction  # by which scale words multiply it
  factor: Fraction  # the unit in units of its dimensions
  dimensions: tuple  # sorted, with powers; words that no table has, too


def fit(expected: Unit, result: Unit) -> bool:
  """Whether both measure the same dimension, or one unit is missing."""
  sides = [dict(side.dimensions) for side in (expected, result)]
  generic = [set(side) == {"units"} for side in sides]
  if not all(sides) or generic[0] != generic[1]:
    return True
  known = [{k: n for k, n in side.items() if k in _KNOWN} for side in sides]
  others = [set(side) - _KNOWN for side in sides]
  return known[0] == known[1] and (
    others[0] <= others[1] or others[1] <= others[0]
  )


def ratio(expected: Unit, result: Unit) -> Fraction:
  """The factor from the expected number to the result's number."""
  ratio = expected.scale / result.scale
  if expected.dimensions and result.dimensions:
    ratio *= expected.factor / result.factor
  return ratio


def starts(tokens: list[str], i: int) -> bool:
  token = tokens[i]
  if token == "(":
    return tokens[i + 1 : i + 2] != [] and len(tokens[i + 1].strip('"')) > 2
  if token[0] == '"' or token in ("\\%", "\\$", "\\mu", "\\Omega"):
    return True
  following = "".join(tokens[i + 1 : i + 3])
  if token == "\\frac":
    return following.startswith('{"')
  if token == "/":
    return following[:1] == '"' or following[:3].isalpha()
  # 5m may be 5 times m.
  is_known = token in _UNITS or token in _POWERS or _singular(token) in _UNITS
  return is_known and (len(token) > 1 or not token.isalpha())


def read(tokens: list[str]) -> Unit | None:
  """The unit that all the tokens name; else None."""
  terms = _terms(tokens)
  if terms is None:
    return None
  scale, factor, dimensions = Fraction(1), Fraction(1), Counter()
  for word, power in terms:
    single = _singular(word)
    times = _SCALES.get(word) or _SCALES.get(single)
    if times:
      scale *= times
      continue
    unit = _UNITS.get(word) or _UNITS.get(single)
    if not unit and not _is_noun(word, single):
      return None
    name, one = unit or (single, Fraction(1))
    dimensions[name] += power
    factor *= one**power
  kept = sorted((name, n) for name, n in dimensions.items() if n)
  return Unit(scale, factor, tuple(kept))


def _is_noun(word, single) -> bool:
  """Whether a word may be something counted, such as apples."""
  is_word = word.isalpha() and word.islower() and len(word) > 2
  return is_word and not ({word, single} & _REFUSED or _PARTS.fullmatch(word))


def _terms(tokens) -> list[tuple[str, int]] | None:
  words = [_SIGNS.get(t.strip('"'), t.strip('"')) for t in tokens]
  text = " ".join(words).replace("} {", " / ").replace("per cent", "%")
  words = [w for w in re.sub("[{}]", "", text).split() if w not in _FILLERS]
  text = " ".join(_SHORT.get(word, word) for word in words)
  terms, sign, at = [], 1, 0
  while at < len(text):
    match = _TERM.match(text, at)
    if not match:
      return None
    per, square, word, minus, exponent, after = match.groups()
    sign = -1 if per else sign
    power = int(exponent or _POWERS.get(square or after, 1))
    terms.append((word, -sign * power if minus else sign * power))
    at = match.end()
  return terms


def _singular(word: str) -> str:
  lower = word if word in _UNITS else word.lower()
  for ending, single in (("inches", "inch"), ("ies", "y"), ("s", "")):
    if lower.endswith(ending) and len(lower) > 2:
      return lower.removesuffix(ending) + single
  return lower
