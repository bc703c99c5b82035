"""Short texts about everyday subjects, written to rules that can be checked.

A problem names a subject and one or two rules, such as "Do not use commas.", in
the style of IFEval (arXiv 2311.07911) with our own rules. The reference is the
subject and the rules as JSON, which the reward `instructions` reads. Few texts
keep the first rule by chance; a rule that most short texts keep can only be the
second. Each of these functions is a source for `data.source`:

  training        trained subjects, requests and rules
  new_subjects    held-out subjects and requests, trained rules
  new_rules       held-out subjects, requests and rules
"""

import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gspo_jax.data.problem import Problem, held_out
from gspo_jax.rewards import thinking
from gspo_jax.runtime import errors

_SIZE = 4096  # problems to train on
_HELD_OUT = 256  # of each held-out source

# One subject in eight is held out, by its hash.
_SUBJECTS = """
apples ants bananas bees bicycles birds boats books bread breakfast bridges
butter cakes cameras camping candles carrots cars castles cats cheese chickens
chocolate clocks clouds coffee computers cooking corn cotton cows dancing
deserts dogs dolphins doors dreams drums eggs elephants engines farms fire
fishing flags flowers football forests friends frogs gardens gold grapes
guitars hats history holidays honey horses hospitals houses insects islands
jam jokes kings kitchens kites lakes lamps languages lemons letters lions maps
markets medicine milk mirrors money monkeys mountains movies museums music
newspapers night numbers oceans onions oranges owls painting paper parents
parks pencils penguins phones photos pianos pigs pizza planes planets plants
poems ponds rabbits radios rain rice rivers roads robots roses running salads
salt sand schools science seasons sharks ships shoes singing sleep snow soap
soup spiders spring squirrels stars storms sugar summer swimming tea teachers
tennis theatres tigers towns toys trains travel trees trucks turtles umbrellas
vegetables villages violins walking water whales wheat wind windows winter
wood wool writing zebras zoos
"""
_REQUESTS = (
  "Tell me about {}.",
  "Write a short text about {}.",
  "Why do people care about {}?",
  "What is special about {}?",
)
_HELD_OUT_REQUESTS = (
  "Describe {} to a child.",
  "Say something interesting about {}.",
)
_WORDS = """
always animal beautiful because believe best better big children color day
different easy enjoy every family famous favorite feel find friend fun good
great happy health help history home idea important joy learn life love many
nature never often people place reason small special story strong time together
useful world year young
"""
_STARTS = (
  *("Did you know", "For me", "Here is why", "I think", "In short"),
  *("Let me explain", "Look", "Most people", "Sure", "Well"),
)
_ENDS = {"!": "an exclamation mark", "?": "a question"}
_COMMON = ("a", "and", "are", "in", "is", "of", "the", "to")
_WORD = re.compile(r"[^\W\d_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"[.!?]+(?=[\s\"\'\u2019\u201d)*\]]|$)")
_BULLET = re.compile(r"- +\S")
_NUMBERED = re.compile(r"([0-9]+)[.)] +\S")
_CLOSING = "*\"'\u2019\u201d"  # what may follow the end of a text
NEW_WORDS = 6  # needed in a response, not in its prompt
_RUN = 5  # words in a row that a response must not repeat


def words(text: str) -> list[str]:
  """The words in lower case, letters alone; "don't" is one word."""
  return [word.lower() for word in _WORD.findall(text)]


def _num_filled(parts) -> int:
  return sum(len(words(part)) > 1 for part in parts)


def _lines(text: str) -> list[str]:
  return [line.strip() for line in text.splitlines() if line.strip()]


def _bullets(text: str, count: int) -> bool:
  lines = _lines(text)
  return len(lines) == count and all(map(_BULLET.match, lines))


def _numbered(text: str, count: int) -> bool:
  matches = [_NUMBERED.match(line) for line in _lines(text)]
  numbers = [*range(1, count + 1)]
  return all(matches) and [int(m[1]) for m in matches] == numbers


def _has(text: str, phrase: str) -> bool:
  return f" {' '.join(words(phrase))} " in f" {' '.join(words(text))} "


def _between(size: int, bounds: list[int]) -> bool:
  return bounds[0] <= size <= bounds[1]


_one_of = lambda *values: lambda rng: rng.choice(values)


class Rule(NamedTuple):
  """A rule about a text, with a value; True if it needs none."""

  keeps: Callable[[str, Any], bool]  # (text, value) -> whether it is kept
  ask: Callable[[Any], str]  # value -> the sentence in the problem
  draw: Callable[[random.Random], Any] = lambda rng: True  # a random value


RULES = {
  "avoid": Rule(
    lambda text, phrase: not _has(text, phrase),
    lambda word: f'Do not use the word "{word}".',
    _one_of(*_COMMON),
  ),
  "bullets": Rule(
    _bullets,
    lambda n: f'Answer only with {n} lines that begin with "- ".',
    _one_of(2, 3, 4),
  ),
  "characters_between": Rule(
    lambda text, n: _between(len(text), n),
    lambda n: f"Use between {n[0]} and {n[1]} characters.",
    _one_of([30, 80], [81, 140], [141, 220]),
  ),
  "end": Rule(
    lambda text, end: text.endswith(end) or text.rstrip(_CLOSING).endswith(end),
    lambda text: f"End with {_ENDS[text]}.",
    _one_of(*_ENDS),
  ),
  "include": Rule(
    _has, lambda word: f'Use the word "{word}".', _one_of(*_WORDS.split())
  ),
  "lower_case": Rule(
    lambda text, _: text == text.lower(),
    lambda _: "write in lower case, without any capital letters.",
  ),
  "no_commas": Rule(
    lambda text, _: "," not in text, lambda _: "Do not use commas."
  ),
  "no_digits": Rule(
    lambda text, _: not any(c.isdigit() for c in text),
    lambda _: "Do not use digits.",
  ),
  "no_first_person": Rule(
    lambda text, _: not {"i", "my", "me"} & {*words(text)},
    lambda _: 'Do not use the words "I", "my" and "me".',
  ),
  "no_questions": Rule(
    lambda text, _: "?" not in text, lambda _: "Do not ask any questions."
  ),
  "numbered": Rule(
    _numbered,
    lambda n: f"Answer only with a numbered list of {n} short points.",
    _one_of(2, 3, 4),
  ),
  "paragraphs": Rule(
    lambda text, n: _num_filled(re.split(r"\n\s*\n", text)) == n,
    lambda n: f"Write {n} short paragraphs with an empty line between them.",
    _one_of(2, 3),
  ),
  "sentences": Rule(
    lambda text, n: _num_filled(_SENTENCE_END.split(text)) == n,
    lambda n: f"Answer in exactly {n} sentence{'s' * (n > 1)}.",
    _one_of(1, 2, 3),
  ),
  "start": Rule(
    lambda text, phrase: re.match(re.escape(phrase) + r"(?!\w)", text),
    lambda text: f'Begin your answer with "{text}".',
    _one_of(*_STARTS),
  ),
  "twice": Rule(
    lambda text, word: words(text).count(word) >= 2,
    lambda word: f'Use the word "{word}" at least twice.',
    _one_of(*_WORDS.split()),
  ),
  "without_letter": Rule(
    lambda text, letter: letter not in text.lower(),
    lambda letter: f'Do not use the letter "{letter}".',
    _one_of("b", "k", "v", "w"),
  ),
  "words_between": Rule(
    lambda text, n: _between(len(words(text)), n),
    lambda n: f"Use between {n[0]} and {n[1]} words.",
    _one_of([5, 12], [13, 24], [25, 40]),
  ),
}


# Names of rules, sorted: for the first place and for the second.
TRAINED_RULES = (
  ("end", "include", "numbered", "sentences", "start", "words_between"),
  ("avoid", "lower_case", "no_commas", "no_digits", "no_first_person"),
)
HELD_OUT_RULES = (
  ("bullets", "characters_between", "paragraphs", "twice"),
  ("no_questions", "without_letter"),
)


@functools.cache
def training() -> Sequence[Problem]:
  return _problems("training", _SIZE, _REQUESTS, TRAINED_RULES)


@functools.cache
def new_subjects() -> Sequence[Problem]:
  """256 problems about other subjects, asked in other words."""
  return _problems("new_subjects", _HELD_OUT, _HELD_OUT_REQUESTS, TRAINED_RULES)


@functools.cache
def new_rules() -> Sequence[Problem]:
  """256 problems about other subjects, with other words and rules."""
  return _problems("new_rules", _HELD_OUT, _HELD_OUT_REQUESTS, HELD_OUT_RULES)


def _problems(name, count, requests, names) -> list[Problem]:
  rng, evaluation = random.Random(name), name != "training"
  subjects = [s for s in _SUBJECTS.split() if held_out(s) == evaluation]
  return [_problem(rng, subjects, requests, names) for _ in range(count)]


def _problem(rng: random.Random, subjects, requests, names) -> Problem:
  subject = rng.choice(subjects)
  while True:
    first = rng.choice(names[0])
    values = {first: RULES[first].draw(rng)}
    if rng.random() < 0.3:
      second = rng.choice(names[1])
      values[second] = RULES[second].draw(rng)
    if _is_possible(subject, values):
      break
  sentences = [RULES[name].ask(value) for name, value in values.items()]
  text = " ".join([rng.choice(requests).format(subject), *sentences])
  reference = json.dumps({"subject": subject, "rules": values})
  return Problem(text, reference, "")


def _is_possible(subject: str, values: dict) -> bool:
  """Whether what the first rule demands keeps the second rule."""
  demanded = [subject, "1." * ("numbered" in values)]
  demanded += (values.get(n, "") for n in ("include", "twice", "start", "end"))
  second = values.keys() & {*TRAINED_RULES[1], *HELD_OUT_RULES[1]}
  return all(RULES[n].keeps(" ".join(demanded), values[n]) for n in second)


def follows(
  prompt: str, response: str, reference: str, *, tokens: int, limit: int
) -> float:
  """1.0 iff the response keeps all rules and is about its subject, else 0.0.

  White space around the response does not count. A text is about its subject if
  it names it, with or without a final "s", has `NEW_WORDS` different words that
  are not in the prompt, and repeats no five words in a row: a policy soon
  learns to repeat the question or itself. A response that was cut at `limit`
  tokens scores 0. Nobody judges whether the text is true or well written.

  `reference` is JSON, {"subject": text, "rules": {name: value}} with names of
  `RULES`, else UserError. `tokens` includes the stop token.
  """
  target = _parse(reference)
  text = thinking.behind(prompt, response).strip()
  if tokens >= limit or not _names(text, target["subject"]):
    return 0.0
  if len({*words(text)} - {*words(prompt)}) < NEW_WORDS or _repeats(text):
    return 0.0
  rules = target["rules"].items()
  return float(all(RULES[name].keeps(text, value) for name, value in rules))


def _names(text: str, subject: str) -> bool:
  stem = re.escape(subject.removesuffix("s"))
  return re.search(rf"\b{stem}s?\b", text, re.IGNORECASE) is not None


def _repeats(text: str) -> bool:
  sequence = words(text)
  count = len(sequence) - _RUN + 1
  runs = [tuple(sequence[i : i + _RUN]) for i in range(count)]
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
