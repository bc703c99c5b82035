"""Rules of the reward `instructions`: what keeps each, what breaks it."""

import json

import pytest

from gspo_jax.rewards.instructions import RULES, follows
from gspo_jax.runtime.errors import UserError

# By rule: (value, a response that keeps it, responses that break it), all of
# them about dogs.
CASES = {
  "avoid": (
    "the",
    "Dogs love them all very much.",
    ["Dogs like the old man best.", "Dogs are the-best-friends you get."],
  ),
  "bullets": (
    2,
    "- Dogs bark at cats.\n- They run fast.",
    [
      "- Dogs bark at cats and run.",
      "Dogs:\n- They bark.\n- They run very fast.",
      "* Dogs bark at cats.\n* They run fast.",
    ],
  ),
  "characters_between": (
    [20, 30],
    "Dogs are my very best pals.",
    ["Dogs are my very best pals ever!", "Dog a b c d e f."],
  ),
  "end": (
    "!",
    'They said "dogs are great pets!"',
    ["Dogs are great! They are my pets.", "Dogs are great pets to us !?"],
  ),
  "include": (
    "love",
    "People LOVE their old dogs too.",
    ["Dogs are lovely pets to have.", "Dogs wear warm gloves here too."],
  ),
  "lower_case": (
    True,
    "dogs are my very best friends.",
    ["Dogs are my very best friends."],
  ),
  "no_commas": (
    True,
    "Dogs bark and run and eat meat.",
    ["Dogs bark, run and eat old meat."],
  ),
  "no_digits": (
    True,
    "Dogs have four legs like cats.",
    ["Dogs have 4 short legs like cats."],
  ),
  "no_first_person": (
    True,
    "Mimes meet island dogs with us.",
    ["My dogs are great and loyal.", "Dogs bark loudly at all of ME."],
  ),
  "no_questions": (
    True,
    "Dogs like most people and other dogs.",
    ["Do dogs like people? They do, really."],
  ),
  "numbered": (
    2,
    "1. Dogs bark at cats.\n2. They run fast.",
    [
      "1. Dogs bark a lot at cats.",
      "2. Dogs bark at cats.\n1. They run fast.",
      "Dogs:\n1. They bark.\n2. They run very fast.",
    ],
  ),
  "paragraphs": (
    2,
    "Dogs bark at cats.\n\nThey run fast.",
    [
      "Dogs bark at cats.\nThey run fast.",
      "Dogs bark.\n\nThey run.\n\nThey eat meat.",
      "Dogs bark and run very fast\n\n.",
    ],
  ),
  "sentences": (
    2,
    'Dr. Smith\'s dogs "bark at cats." Do they ever sleep',
    [
      "Dogs bark at 3.14 cats a day.",
      "Dogs bark. They run. They eat some meat.",
      "Dogs bark loudly near my cats. . .",
    ],
  ),
  "start": (
    "Well",
    "Well, dogs are great and loyal.",
    ["Wellness dogs are great and loyal.", "Oh, well, dogs are so great."],
  ),
  "twice": (
    "life",
    "Life! Dogs are full of good life.",
    ["Dogs are full of life and lifelike."],
  ),
  "without_letter": (
    "k",
    "Dogs run very fast and far.",
    ["Dogs bark at people and cats."],
  ),
  "words_between": (
    [7, 8],
    "Dogs don't like well-known cats at all.",
    [
      "Dogs don't like cats at all.",
      "Dogs do-not-like-the cats of old men.",
      "dogs a b c d e 7 8",
    ],
  ),
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
  rules = {"no_commas": True, "end": "?"}
  assert score("Do dogs like all other people?", rules) == 1.0
  assert score("Dogs, do they like all other people?", rules) == 0.0
  assert score("Dogs like all other people.", rules) == 0.0


@pytest.mark.parametrize(
  "response",
  ["", "Dogs bark very very loudly.", "The dogma is not my own belief."],
)
def test_a_response_that_says_nothing_of_its_subject_is_wrong(response):
  assert score(response, {}) == 0.0


def test_a_response_that_repeats_the_question_or_itself_is_wrong():
  prompt = "What is special about dogs?"
  right = "Dogs are loyal friends of people who love them."
  assert score(right, {}, prompt) == 1.0
  assert score("What is special about dogs: what is special.", {}, prompt) == 0
  assert score(f"{right} Loyal friends of people who!", {}, prompt) == 0.0


@pytest.mark.parametrize(
  "response",
  [
    "A dog's life is short but happy.",
    "Dogs are one of the oldest pets and one of the best friends we have.",
    "Some dogs are small. Some dogs are very large. They bark.",
  ],
)
def test_plain_english_is_right(response):
  assert score(response, {}) == 1.0


def test_a_response_that_was_cut_off_is_wrong():
  right = "Dogs are very loyal friends of ours."
  assert score(right, {}, tokens=9) == 1.0
  assert score(right, {}, tokens=10) == 0.0


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
