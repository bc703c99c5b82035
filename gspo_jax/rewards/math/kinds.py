"""Results that are not algebra: words, choices, dates, bases and so on.

Each kind has a reader, which returns None for other kinds, and a comparison of
two results of the reader.
"""

import itertools
import operator
import re

from gspo_jax.rewards.math import quantities, splits, values

NOTHING = re.compile(
  r"\\emptyset|\\\{\\\}|(thereare)?no(real)?solutions?|emptyset"
)
_PHRASES = NOTHING, re.compile(r"doesnotexist|dne")
_ARTICLES = frozenset(("the", "a", "an"))
_PUNCTUATION = frozenset(".'-")
_BASE = re.compile(
  r"\(?([0-9]+|[0-9A-Z]+(?=\)?(?:_|base)))\)?(?:(?:_|base)\{?\(?([0-9a-z]+)\)?\}?)?"
)
NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen
""".split()
_CLOCK = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?(am|pm)?")
_MONTHS = """
january february march april may june july august september october november
december
""".split()
_NOT_OF_DATES = frozenset(("st", "nd", "rd", "th", "of", "the", ","))
_ENDS_CHOICE = (")", ".", ":")
_GOES_ON = frozenset(("+", "-", "*", "/", "=", ",", ";", "(", "^", "or", "and"))


def plain(tokens: list[str]) -> list[str]:
  return [token.strip('"') for token in tokens]


def folded(tokens: list[str]) -> list[str]:
  """The tokens without the marks of text; text in lower case."""
  is_word = lambda token: token[0] == '"' and len(token) > 2
  return plain([t.lower() if is_word(t) else t for t in tokens])


def phrase(tokens) -> re.Pattern | None:
  """Which meaning the tokens spell: that nothing is, or that it is missing."""
  text = "".join(plain(tokens)).lower()
  return next((p for p in _PHRASES if p.fullmatch(text)), None)


def words(tokens) -> list[str] | None:
  """The words of a text without numbers; in lower case if not one letter."""
  is_text = all(len(t) > 1 or t in _PUNCTUATION for t in plain(tokens))
  texts = [t for t in plain(tokens) if not (is_text and t in _PUNCTUATION)]
  if not texts or not all(t.isalpha() for t in texts):
    return None
  if len(splits.at(tokens, ("and", "or"))) > 1:
    return None
  if len(texts) == 1 and len(texts[0]) == 1:
    return texts
  return [t.lower() for t in texts if t.lower() not in _ARTICLES]


def date(tokens) -> list[str] | None:
  """A date's parts in a fixed order; it must name the month."""
  texts = [t.lower() for t in plain(tokens)]
  if not any(text in _MONTHS for text in texts):
    return None
  return sorted(t for t in texts if t not in _NOT_OF_DATES)


def choice(tokens) -> tuple[str, list[str]] | None:
  """The letter of a choice, and what follows it: `(B) 12`, `B. 12`, `B`."""
  texts = plain(tokens)
  if texts[0].lower() in ("option", "choice", "answer"):
    texts = texts[1:]
  opened = texts[:1] == ["("]
  letter, rest = "".join(texts[opened : opened + 1]), texts[opened + 1 :]
  if not re.fullmatch("[A-H]" if not opened else "[A-Ha-h]", letter):
    return None
  if rest and rest[0] in _ENDS_CHOICE and (rest[0] == ")" or not opened):
    rest = rest[1:]
  elif rest or opened:
    return None
  if (rest and rest[0] in _GOES_ON) or _names_another(rest):
    return None
  return letter.upper(), tokens[len(tokens) - len(rest) :]


def _names_another(texts) -> bool:
  return "or" in texts or any(
    re.fullmatch("[A-H]", token) and after in ("", *_ENDS_CHOICE)
    for token, after in itertools.zip_longest(texts, texts[1:], fillvalue="")
  )


def based(tokens) -> tuple[str, str] | None:
  """The digits of a number and its base, "" if it names none."""
  texts = plain(tokens)
  match = _BASE.fullmatch("".join(texts))
  is_digit = [token.isdigit() for token in texts]
  if not match or (True, True) in itertools.pairwise(is_digit):
    return None
  base = match[2] or ""
  digits = match[1].lstrip("0") or "0"
  return digits, str(NUMBERS.index(base)) if base in NUMBERS else base


def congruence(tokens) -> tuple[list[str], list[str]]:
  """A number, and the tokens of its modulus, if any: `12 (mod 17)`."""
  texts = plain(tokens)
  for i, token in enumerate(texts):
    if token == "\\pmod" or (token == "mod" and texts[i - 1 : i] == ["("]):
      return tokens[: i - (token == "mod")], tokens[i + 1 :]
  return tokens, []


def clock(tokens) -> tuple[int, str] | None:
  """The minutes since midnight or noon, and "am", "pm", "24h" or ""."""
  text = "".join(plain(tokens)).lower().replace(".", "")
  match = _CLOCK.fullmatch(text)
  if not match or not (match[2] or match[3]):
    return None
  hours, half = int(match[1]), match[3] or ""
  if hours > 24 or int(match[2] or 0) > 59:
    return None
  if hours > 12:
    half = half or "24h"
  return hours % 12 * 60 + int(match[2] or 0), half


def ratio(tokens) -> list[tuple] | None:
  """The parts of `2 : 3` or `2 to 3`."""
  parts = splits.at(tokens, (":", "to"))
  if len(parts) < 2 or "=" in tokens:
    return None
  trees = [quantities.tree(part) for part in parts]
  is_read = None not in trees and 0 not in map(values.constant, trees)
  return trees if is_read else None


def share(tokens) -> list[tuple] | None:
  """The parts of a ratio that is no time, or of a fraction of two numbers."""
  if ":" in plain(tokens):
    return None if clock(tokens) else ratio(tokens)
  name, *parts = quantities.tree(tokens) or ("",)
  is_fraction = name == "divide" and all(p[0] == "number" for p in parts)
  return parts if is_fraction and parts[1][1] else None


def infinite(tokens) -> str | None:
  sign = tokens[0] if tokens[0] in ("+", "-") else "+"
  rest = plain(tokens[tokens[0] in ("+", "-") :])
  return sign if rest in (["\\infty"], ["infinity"], ["infty"]) else None


def _same_base(expected, result) -> bool:
  (digits, base), (others, other) = expected, result
  return digits == others and (base == other or not other)


def _same_time(expected, result) -> bool:
  (minutes, half), (others, other) = expected, result
  return minutes == others and (
    half == other or {half, other} in ({"", "am"}, {"", "pm"}, {"24h", "pm"})
  )


def _same_ratio(expected, result) -> bool:
  if len(expected) != len(result):
    return False
  return all(
    values.equal(("times", expected[0], b), ("times", result[0], a))
    for a, b in zip(expected, result, strict=True)
  )


# In the order in which they are tried.
KINDS = (
  (based, _same_base),
  (phrase, operator.eq),
  (infinite, operator.eq),
  (words, operator.eq),
  (date, operator.eq),
  (clock, _same_time),
  (ratio, _same_ratio),
  (share, _same_ratio),
)
