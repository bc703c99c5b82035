"""Rules of the reward `instructions`: what keeps each, what breaks it."""

import json

import pytest

from gspo_jax.rewards.instructions import RULES, follows
from gspo_jax.runtime.errors import UserError

# By rule: (value, a response that keeps it, responses that break it), all of
# them about dogs.
CASES = {
  "avoid": ("the", "Dogs love them all.", ["Dogs like the man."]),
  "bullets": (
    2,
    "- Dogs bark.\n- Dogs run fast.",
    [
      "- Dogs bark a lot.",
      "Dogs do:\n- They bark.",
      "- Dogs\n- bark\n- or run",
    ],
  ),
  "characters_at_most": (20, "Dogs are very loyal.", ["Dogs are very loyal!!"]),
  "exclamation": (True, "Dogs are great pets!", ["Dogs! They are great."]),
  "include": (
    "love",
    "People LOVE their dogs.",
    ["Dogs are lovely pets.", "Dogs wear gloves here."],
  ),
  "lower_case": (True, "dogs are my friends.", ["Dogs are my friends."]),
  "no_commas": (True, "Dogs bark and run.", ["Dogs bark, and run."]),
  "no_digits": (True, "Dogs have four legs.", ["Dogs have 4 short legs."]),
  "no_first_person": (
    True,
    "Mimes meet island dogs.",
    ["My dogs are great.", "Dogs bark at ME.", "Dogs are what I love."],
  ),
  "numbered": (
    2,
    "1. Dogs bark.\n2. Dogs run fast.",
    [
      "1. Dogs bark a lot.",
      "2. Dogs bark.\n1. They run.",
      "Dogs do:\n1. a\n2. b",
    ],
  ),
  "paragraphs": (
    2,
    "Dogs bark.\n\nDogs run fast.",
    ["Dogs bark.\nDogs run fast.", "Dogs bark.\n\nThey run.\n\nThey eat."],
  ),
  "question": (True, "Do dogs like people?", ["Do dogs? They like people."]),
  "sentences": (
    2,
    "Dogs bark... Do they sleep?!",
    ["Dogs bark at 3.14 cats.", "Dogs bark. They run. They sleep."],
  ),
  "start": ("Well", "Well, dogs are great.", ["Wellness dogs are great."]),
  "twice": ("life", "Life! Dogs are full of life.", ["Dogs are full of life."]),
  "without_letter": ("k", "Dogs run very fast.", ["Dogs bark at people."]),
  "words_at_least": (
    5,
    "Dogs don't like well-known cats.",
    ["Dogs don't like well-known."],
  ),
  "words_at_most": (4, "Dogs don't like cats.", ["Dogs do not like cats."]),
}


def score(response, rules, prompt="", tokens=9):
  reference = json.dumps({"subject": "dogs", "rules": rules})
  return follows(prompt, response, reference, tokens=tokens, limit=10)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_each_rule_is_kept_and_broken(rule):
  value, kept, broken = CASES[rule]
  assert score(f" {kept}\n", {rule: value}) == 1.0
  for response in broken:
    assert score(response, {}) == 1.0, response  # all else is right
    assert score(response, {rule: value}) == 0.0, response


def test_every_rule_must_be_kept():
  rules = {"no_commas": True, "question": True}
  assert score("Do dogs like people?", rules) == 1.0
  assert score("Dogs, do they bark?", rules) == 0.0
  assert score("Dogs like people.", rules) == 0.0


@pytest.mark.parametrize(
  "response",
  ["", "Dogs bark loudly.", "Cats are very fast.", "The dogma is a belief."],
)
def test_a_response_that_says_nothing_of_its_subject_is_wrong(response):
  assert score(response, {"no_commas": True}) == 0.0


def test_a_response_that_repeats_the_question_or_itself_is_wrong():
  rules, prompt = {"no_commas": True}, "What is special about dogs?"
  right = "Dogs are loyal friends of people."
  assert score(right, rules, prompt) == 1.0
  echo = "What is special about dogs is special about dogs too."
  assert score(echo, rules) == 0.0  # "special about dogs" twice
  assert score("Special dogs are what is special.", rules, prompt) == 0.0
  assert score(f"{right} Loyal friends of people!", rules, prompt) == 0.0


def test_the_singular_names_the_subject():
  assert score("A dog's life is short.", {"no_commas": True}) == 1.0


def test_a_response_that_was_cut_off_is_wrong():
  assert score("Dogs are very loyal.", {"no_commas": True}, tokens=10) == 0.0


@pytest.mark.parametrize(
  ("reference", "named"),
  [
    ("5", "'5'"),
    ('{"subject": "dogs"}', "rules"),
    ('{"subject": "dogs", "rules": {"no_comma": true}}', "'no_commas'"),
  ],
)
def test_a_bad_reference_is_an_error_that_names_it(reference, named):
  with pytest.raises(UserError, match=named):
    follows("", "Dogs are great pets.", reference, tokens=1, limit=2)
