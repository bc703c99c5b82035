"""Short texts about everyday subjects, written to rules that can be checked.

A problem names a subject and one or two rules, such as "Do not use commas.".
The reference is what the reward `instructions` reads: the subject and the rules
as JSON. Each of these functions is a source for `data.source`:

  training        trained subjects, trained rules
  new_subjects    held-out subjects, trained rules
  new_rules       held-out subjects, held-out rules
"""

import functools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gspo_jax.data.tasks import Problem

_SIZE = 4096  # problems to train on
_HELD_OUT = 256  # of each held-out source

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
salt sand schools science seasons
"""
_HELD_OUT_SUBJECTS = """
sharks ships shoes singing sleep snow soap soup spiders spring squirrels stars
storms sugar summer swimming tea teachers tennis theatres tigers towns toys
trains travel trees trucks turtles umbrellas vegetables villages violins
walking water whales wheat wind windows winter wood wool writing zebras zoos
"""
_REQUESTS = (
  "Tell me about {}.",
  "Write a short text about {}.",
  "Describe {} to a child.",
  "Why do people care about {}?",
  "What is special about {}?",
  "Say something interesting about {}.",
)
_WORDS = ("best", "every", "important", "life", "love", "many", "people")
_STARTS = ("I think", "In short", "Sure!", "The", "Well")
_COMMON = ("a", "and", "are", "is", "of", "the")
_one_of = lambda *values: lambda rng: rng.choice(values)
_always = lambda rng: True


class _Rule(NamedTuple):
  """A rule: how its value is drawn, and the sentence that asks for it."""

  draw: Callable[[random.Random], Any]
  ask: Callable[[Any], str]


TRAINED_RULES = {
  "words_at_most": _Rule(
    _one_of(15, 20, 25, 30), lambda n: f"Use at most {n} words."
  ),
  "words_at_least": _Rule(
    _one_of(20, 25, 30), lambda n: f"Use at least {n} words."
  ),
  "sentences": _Rule(
    _one_of(1, 2, 3),
    lambda n: f"Answer in exactly {n} sentence{'s' * (n > 1)}.",
  ),
  "include": _Rule(_one_of(*_WORDS), lambda word: f'Use the word "{word}".'),
  "avoid": _Rule(
    _one_of(*_COMMON), lambda word: f'Do not use the word "{word}".'
  ),
  "start": _Rule(
    _one_of(*_STARTS), lambda text: f'Begin your answer with "{text}".'
  ),
  "numbered": _Rule(
    _one_of(2, 3), lambda n: f"Give a numbered list of {n} short points."
  ),
  "no_commas": _Rule(_always, lambda _: "Do not use commas."),
  "no_digits": _Rule(_always, lambda _: "Do not use digits."),
  "lower_case": _Rule(
    _always, lambda _: "write in lower case, without any capital letters."
  ),
  "question": _Rule(_always, lambda _: "End your answer with a question."),
  "exclamation": _Rule(
    _always, lambda _: "End your answer with an exclamation mark!"
  ),
}
HELD_OUT_RULES = {
  "characters_at_most": _Rule(
    _one_of(80, 120, 160), lambda n: f"Use at most {n} characters."
  ),
  "without_letter": _Rule(
    _one_of("b", "k", "v", "w"), lambda c: f'Do not use the letter "{c}".'
  ),
  "twice": _Rule(
    _one_of(*_WORDS), lambda word: f'Use the word "{word}" at least twice.'
  ),
  "bullets": _Rule(
    _one_of(2, 3),
    lambda n: f'Answer with {n} lines, each of which begins with "- ".',
  ),
  "paragraphs": _Rule(
    _one_of(2),
    lambda n: f"Write {n} short paragraphs with an empty line between them.",
  ),
  "no_first_person": _Rule(
    _always, lambda _: 'Do not use the words "I", "my" and "me".'
  ),
}
# Rules that do not go together in one problem.
_CLASHES = (
  {"words_at_most", "words_at_least"},
  {"words_at_least", "sentences"},
  {"lower_case", "start"},
  {"question", "exclamation"},
  {"numbered", "no_digits"},
  {"numbered", "sentences"},
  {"numbered", "start"},
  {"numbered", "lower_case"},
  {"characters_at_most", "paragraphs"},
  {"characters_at_most", "bullets"},
  {"bullets", "paragraphs"},
)


@functools.cache
def training() -> Sequence[Problem]:
  """4,096 problems to train on."""
  return _problems("training", _SIZE, _SUBJECTS, TRAINED_RULES)


@functools.cache
def new_subjects() -> Sequence[Problem]:
  """256 problems about subjects that are not trained on."""
  return _problems("new_subjects", _HELD_OUT, _HELD_OUT_SUBJECTS, TRAINED_RULES)


@functools.cache
def new_rules() -> Sequence[Problem]:
  """256 problems about such subjects, with rules that are not trained on."""
  return _problems("new_rules", _HELD_OUT, _HELD_OUT_SUBJECTS, HELD_OUT_RULES)


def _problems(name, count, subjects, rules) -> list[Problem]:
  rng, subjects = random.Random(name), subjects.split()
  return [_problem(rng, subjects, rules) for _ in range(count)]


def _problem(rng: random.Random, subjects, rules) -> Problem:
  subject = rng.choice(subjects)
  names = rng.sample(sorted(rules), rng.choice((1, 1, 2)))
  if any(clash <= {*names} for clash in _CLASHES):
    names = names[:1]
  values = {name: rules[name].draw(rng) for name in names}
  asked = [rules[name].ask(value) for name, value in values.items()]
  text = " ".join([rng.choice(_REQUESTS).format(subject), *asked])
  reference = json.dumps({"subject": subject, "rules": values})
  return Problem(text, reference, "")
