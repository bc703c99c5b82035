"""Short texts about everyday subjects, written to rules that can be checked.

A problem names a subject and one or two rules, such as "Do not use commas.".
The reference is what the reward `instructions` reads: the subject and the rules
as JSON. The first rule is one that few texts keep by chance; rules that most
short texts keep come beside one only. Each of these functions is a source for
`data.source`:

  training        trained subjects, requests and rules
  new_subjects    held-out subjects and requests, trained rules
  new_rules       held-out subjects, requests and rules
"""

import functools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gspo_jax.data import tasks
from gspo_jax.data.tasks import Problem

_SIZE = 4096  # problems to train on
_HELD_OUT = 256  # of each held-out source

# One in eight is held out, by its hash.
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
_one_of = lambda *values: lambda rng: rng.choice(values)
_always = lambda rng: True


class _Rule(NamedTuple):
  """A rule: how its value is drawn, and the sentence that asks for it."""

  draw: Callable[[random.Random], Any]
  ask: Callable[[Any], str]


class _Rules(NamedTuple):
  """Rules by name: first ones, and those that come beside a first one."""

  first: dict[str, _Rule]
  second: dict[str, _Rule]


TRAINED_RULES = _Rules(
  {
    "words_between": _Rule(
      _one_of([5, 12], [13, 24], [25, 40]),
      lambda n: f"Use between {n[0]} and {n[1]} words.",
    ),
    "sentences": _Rule(
      _one_of(1, 2, 3),
      lambda n: f"Answer in exactly {n} sentence{'s' * (n > 1)}.",
    ),
    "include": _Rule(
      _one_of(*_WORDS.split()), lambda word: f'Use the word "{word}".'
    ),
    "start": _Rule(
      _one_of(*_STARTS), lambda text: f'Begin your answer with "{text}".'
    ),
    "end": _Rule(_one_of(*_ENDS), lambda text: f"End with {_ENDS[text]}."),
    "numbered": _Rule(
      _one_of(2, 3, 4),
      lambda n: f"Answer only with a numbered list of {n} short points.",
    ),
  },
  {
    "no_commas": _Rule(_always, lambda _: "Do not use commas."),
    "no_digits": _Rule(_always, lambda _: "Do not use digits."),
    "avoid": _Rule(
      _one_of(*_COMMON), lambda word: f'Do not use the word "{word}".'
    ),
    "lower_case": _Rule(
      _always, lambda _: "write in lower case, without any capital letters."
    ),
    "no_first_person": _Rule(
      _always, lambda _: 'Do not use the words "I", "my" and "me".'
    ),
  },
)
HELD_OUT_RULES = _Rules(
  {
    "characters_between": _Rule(
      _one_of([30, 80], [81, 140], [141, 220]),
      lambda n: f"Use between {n[0]} and {n[1]} characters.",
    ),
    "twice": _Rule(
      _one_of(*_WORDS.split()),
      lambda word: f'Use the word "{word}" at least twice.',
    ),
    "bullets": _Rule(
      _one_of(2, 3, 4),
      lambda n: f'Answer only with {n} lines that begin with "- ".',
    ),
    "paragraphs": _Rule(
      _one_of(2, 3),
      lambda n: f"Write {n} short paragraphs with an empty line between them.",
    ),
  },
  {
    "without_letter": _Rule(
      _one_of("b", "k", "v", "w"), lambda c: f'Do not use the letter "{c}".'
    ),
    "no_questions": _Rule(_always, lambda _: "Do not ask any questions."),
  },
)


@functools.cache
def training() -> Sequence[Problem]:
  """4,096 problems to train on."""
  return _problems("training", _SIZE, _REQUESTS, TRAINED_RULES)


@functools.cache
def new_subjects() -> Sequence[Problem]:
  """256 problems about other subjects, asked in other words."""
  return _problems("new_subjects", _HELD_OUT, _HELD_OUT_REQUESTS, TRAINED_RULES)


@functools.cache
def new_rules() -> Sequence[Problem]:
  """256 such problems with other rules, too."""
  return _problems("new_rules", _HELD_OUT, _HELD_OUT_REQUESTS, HELD_OUT_RULES)


def _problems(name, count, requests, rules) -> list[Problem]:
  rng, evaluation = random.Random(name), name != "training"
  subjects = [s for s in _SUBJECTS.split() if tasks.held_out(s) == evaluation]
  return [_problem(rng, subjects, requests, rules) for _ in range(count)]


def _problem(rng: random.Random, subjects, requests, rules) -> Problem:
  subject = rng.choice(subjects)
  while True:
    first = rng.choice(sorted(rules.first))
    values = {first: rules.first[first].draw(rng)}
    if rng.random() < 0.3:
      second = rng.choice(sorted(rules.second))
      values[second] = rules.second[second].draw(rng)
    if _possible(subject, values):
      break
  every = rules.first | rules.second
  asked = [every[name].ask(value) for name, value in values.items()]
  text = " ".join([rng.choice(requests).format(subject), *asked])
  reference = json.dumps({"subject": subject, "rules": values})
  return Problem(text, reference, "")


def _possible(subject: str, values: dict) -> bool:
  """Whether the second rule allows the text that the first one demands."""
  demanded = [subject]
  for name in ("include", "twice", "start", "end"):
    demanded.append(values.get(name, ""))
  if "numbered" in values:
    demanded.append("1.")
  text = " ".join(demanded)
  words = text.lower().replace(".", "").split()
  return not (
    values.get("avoid") in words
    or ("lower_case" in values and text != text.lower())
    or ("no_digits" in values and "1" in text)
    or ("no_first_person" in values and {"i", "me", "my"} & {*words})
    or ("no_questions" in values and "?" in text)
    or values.get("without_letter", "?!") in text.lower()
  )
