"""Instructions that a program can check, in the kind of IFEval.

IFEval: arXiv 2311.07911. The rules here are our own. Each is a function of the
text of a response and of the rule's value, by its name in `RULES`.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from gspo_jax.runtime import errors

_WORD = re.compile(r"[^\W\d_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"[.!?]+(?=[\s\"\'\u2019\u201d)*\]]|$)")
_BULLET = re.compile(r"- +\S")
_NUMBERED = re.compile(r"([0-9]+)[.)] +\S")
_CLOSING = "*\"'\u2019\u201d"  # what may follow the end of a text
# Different words that a response needs beside those of its prompt.
NEW_WORDS = 6
# Words in a row that a response must not repeat.
_RUN = 5


def words(text: str) -> list[str]:
  """The words of a text in lower case, of letters alone; "don't" is one."""
  return [word.lower() for word in _WORD.findall(text)]


def _filled(parts) -> int:
  """The parts that have two words or more."""
  return sum(len(words(part)) > 1 for part in parts)


def _lines(text: str) -> list[str]:
  return [line.strip() for line in text.splitlines() if line.strip()]


def _bullets(text: str, count: int) -> bool:
  lines = _lines(text)
  return len(lines) == count and all(map(_BULLET.match, lines))


def _numbered(text: str, count: int) -> bool:
  found = [_NUMBERED.match(line) for line in _lines(text)]
  return all(found) and [int(m[1]) for m in found] == [*range(1, count + 1)]


def _has(text: str, phrase: str) -> bool:
  """Whether the words of `phrase` are in the text, one after the other."""
  return f" {' '.join(words(phrase))} " in f" {' '.join(words(text))} "


def _between(size: int, bounds: list[int]) -> bool:
  return bounds[0] <= size <= bounds[1]


RULES: dict[str, Callable[[str, Any], bool]] = {
  "avoid": lambda text, phrase: not _has(text, phrase),
  "bullets": _bullets,
  "characters_between": lambda text, n: _between(len(text), n),
  "end": lambda text, end: (
    text.endswith(end) or text.rstrip(_CLOSING).endswith(end)
  ),
  "include": _has,
  "lower_case": lambda text, _: text == text.lower(),
  "no_commas": lambda text, _: "," not in text,
  "no_digits": lambda text, _: not any(c.isdigit() for c in text),
  "no_first_person": lambda text, _: not {"i", "my", "me"} & {*words(text)},
  "no_questions": lambda text, _: "?" not in text,
  "numbered": _numbered,
  "paragraphs": lambda text, n: _filled(re.split(r"\n\s*\n", text)) == n,
  "sentences": lambda text, n: _filled(_SENTENCE_END.split(text)) == n,
  "start": lambda text, phrase: re.match(re.escape(phrase) + r"(?!\w)", text),
  "twice": lambda text, word: words(text).count(word) >= 2,
  "without_letter": lambda text, letter: letter not in text.lower(),
  "words_between": lambda text, n: _between(len(words(text)), n),
}


def follows(
  prompt: str, response: str, reference: str, *, tokens: int, limit: int
) -> float:
  """1.0 iff the response keeps all rules and is about its subject, else 0.0.

  White space around the response does not count. A text is about its subject if
  it names it, with or without a final "s", has `NEW_WORDS` different words that
  the prompt does not have, and no five words in a row twice: a policy soon
  learns to repeat the question, or itself. A response that was cut off at
  `limit` tokens keeps no rule. Nothing judges whether the text is true or well
  written.

  Args:
    prompt: what the policy read.
    response: what the policy wrote.
    reference: JSON: {"subject": text, "rules": {name: value}}, the names of
      `RULES`; the value is true for rules without a parameter.
    tokens: length of the response, its stop token included.
    limit: largest length.

  Raises:
    UserError: the reference is none of these.
  """
  target = _parse(reference)
  text = response.strip()
  if tokens >= limit or not _names(text, target["subject"]):
    return 0.0
  if len({*words(text)} - {*words(prompt)}) < NEW_WORDS or _repeats(text):
    return 0.0
  rules = target["rules"].items()
  return float(all(RULES[name](text, value) for name, value in rules))


def _names(text: str, subject: str) -> bool:
  stem = re.escape(subject.removesuffix("s"))
  return re.search(rf"\b{stem}s?\b", text, re.IGNORECASE) is not None


def _repeats(text: str) -> bool:
  """Whether `_RUN` words in a row occur twice."""
  found = words(text)
  runs = [tuple(found[i : i + _RUN]) for i in range(len(found) - _RUN + 1)]
  return len(runs) > len({*runs})


def _parse(reference: str) -> dict:
  try:
    target = json.loads(reference)
    names, _ = target["rules"].keys(), target["subject"].lower()
  except (ValueError, TypeError, KeyError, AttributeError):
    raise errors.UserError(
      f"reward 'instructions': reference {reference[:80]!r}: expected JSON "
      '{"subject": text, "rules": {name: value}}'
    ) from None
  for name in names:
    if name not in RULES:
      raise errors.UserError(
        f"reward 'instructions': unknown rule {name!r}: "
        f"{errors.nearest(name, RULES)}"
      )
  return target
