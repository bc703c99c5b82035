"""Instructions: references that fit, what is held out, what keeps a rule."""

import json
from collections import Counter

import pytest

from gspo_jax.data import sources
from gspo_jax.runtime.errors import UserError
from gspo_jax.tasks import instructions
from gspo_jax.tasks.instructions import RULES, follows

SETS = ("training", "new_subjects", "new_rules")


def targets(name):
  problems = getattr(instructions, name)()
  return [(p.text, json.loads(p.reference)) for p in problems]


@pytest.mark.parametrize("name", SETS)
def test_references_name_the_subject_and_rules_of_the_text(name):
  for text, target in targets(name):
    assert target["subject"] in text
    assert 1 <= len(target["rules"]) <= 2
    for rule, value in target["rules"].items():
      assert rule in RULES
      if rule == "end":
        value = {"!": "exclamation", "?": "question"}[value]
      for part in value if isinstance(value, list) else [value]:
        assert part is True or str(part) in text


def test_every_rule_is_asked_for_in_its_own_words():
  kinds = (*instructions.TRAINED_RULES, *instructions.HELD_OUT_RULES)
  assert {name for kind in kinds for name in kind} == RULES.keys()
  for problems in map(targets, SETS):
    for text, target in problems:
      asked = [RULES[k].ask(value) for k, value in target["rules"].items()]
      assert text.endswith(" ".join(asked))


def test_held_out_subjects_and_rules_are_not_trained_on():
  subjects, rules = {}, {}
  for name in SETS:
    every = targets(name)
    subjects[name] = {target["subject"] for _, target in every}
    rules[name] = {rule for _, target in every for rule in target["rules"]}
  assert subjects["training"].isdisjoint(subjects["new_subjects"])
  assert subjects["training"].isdisjoint(subjects["new_rules"])
  assert rules["training"].isdisjoint(rules["new_rules"])
  first, second = instructions.TRAINED_RULES
  asked = {*first, *second}
  assert rules["training"] == rules["new_subjects"] == asked


def test_a_config_can_name_the_sets():
  spec = "gspo_jax.tasks.instructions.training"
  source = sources.load(spec)
  assert len(source) == 4096
  assert source[0] == instructions.training()[0]


@pytest.mark.parametrize("name", SETS)
def test_what_a_problem_demands_breaks_none_of_its_rules(name):
  forbidding = ("avoid", "lower_case", "no_digits", "no_first_person")
  forbidding += ("no_questions", "without_letter")
  for text, target in targets(name):
    rules = target["rules"]
    demanded = [target["subject"], "1." * ("numbered" in rules)]
    for rule in ("include", "twice", "start", "end"):
      demanded.append(rules.get(rule, ""))
    for rule in rules.keys() & {*forbidding}:
      assert RULES[rule].keeps(" ".join(demanded), rules[rule]), text


# Texts that keep as many rules as they can, whatever was asked.
_SENTENCES = (
  "{} bring love life joy to many people and children every day!",
  "{} bring special love and joy to all young people every day\n\n"
  "they do amaze us with such great fun?",
  "1. {} are fun for everyone we know\n2. they bring so much joy to families",
  "{} are always good friends at home. many families enjoy these great animals"
  " in this world because it is fun for people!",
)


def most_asked_words(count):
  """The words that most of the training problems ask for."""
  rules = [target["rules"] for _, target in targets("training")]
  words = Counter(r["include"] for r in rules if "include" in r)
  return " ".join(word for word, _ in words.most_common(count))


# The best texts that were found: 40 words are still between 25 and 40.
_WORDS = tuple(f"{{}} {most_asked_words(39)}{end}" for end in "!?")
# The largest share of a set's problems that they keep.
FIXED = dict.fromkeys(_SENTENCES, 0.25) | dict.fromkeys(_WORDS, 0.35)


def kept(text, problems):
  """The share of the problems whose rules this text keeps."""
  score = lambda asked, target: follows(
    asked, text.format(target["subject"]), json.dumps(target), tokens=1, limit=2
  )
  scores = [score(*problem) for problem in problems]
  return sum(scores) / len(scores)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("text", FIXED)
def test_a_text_that_reads_no_rule_gets_little(name, text):
  assert kept(text, targets(name)) < FIXED[text]


def test_the_best_fixed_text_keeps_the_share_that_docs_results_states():
  """Of the problems that benchmarks/smollm2.py evaluates."""
  found = {text: kept(text, targets("new_subjects")[:64]) for text in FIXED}
  assert round(max(found.values()), 2) == 0.41


# Rule, its value, and a response about dogs that keeps it or does not.
CASES = [
  ("avoid", "the", True, "Dogs love them all very much."),
  ("avoid", "the", False, "Dogs like the old man best."),
  ("avoid", "the", False, "Dogs are the-best-friends you get."),
  ("bullets", 2, True, "- Dogs bark at cats.\n- They run fast."),
  ("bullets", 2, False, "- Dogs bark at cats and run."),
  ("bullets", 2, False, "Dogs:\n- They bark.\n- They run very fast."),
  ("bullets", 2, False, "* Dogs bark at cats.\n* They run fast."),
  ("characters_between", [20, 30], True, "Dogs are my very best pals."),
  ("characters_between", [20, 30], False, "Dogs are my very best pals ever!"),
  ("characters_between", [20, 30], False, "Dog a b c d e f."),
  ("end", "!", True, 'They said "dogs are great pets!"'),
  ("end", "!", False, "Dogs are great! They are my pets."),
  ("end", "!", False, "Dogs are great pets to us !?"),
  ("include", "love", True, "People LOVE their old dogs too."),
  ("include", "love", False, "Dogs are lovely pets to have."),
  ("include", "love", False, "Dogs wear warm gloves here too."),
  ("lower_case", True, True, "dogs are my very best friends."),
  ("lower_case", True, False, "Dogs are my very best friends."),
  ("no_commas", True, True, "Dogs bark and run and eat meat."),
  ("no_commas", True, False, "Dogs bark, run and eat old meat."),
  ("no_digits", True, True, "Dogs have four legs like cats."),
  ("no_digits", True, False, "Dogs have 4 short legs like cats."),
  ("no_first_person", True, True, "Mimes meet island dogs with us."),
  ("no_first_person", True, False, "My dogs are great and loyal."),
  ("no_first_person", True, False, "Dogs bark loudly at all of ME."),
  ("no_questions", True, True, "Dogs like most people and other dogs."),
  ("no_questions", True, False, "Do dogs like people? They do, really."),
  ("numbered", 2, True, "1. Dogs bark at cats.\n2. They run fast."),
  ("numbered", 2, False, "1. Dogs bark a lot at cats."),
  ("numbered", 2, False, "2. Dogs bark at cats.\n1. They run fast."),
  ("numbered", 2, False, "Dogs:\n1. They bark.\n2. They run very fast."),
  ("paragraphs", 2, True, "Dogs bark at cats.\n\nThey run fast."),
  ("paragraphs", 2, False, "Dogs bark at cats.\nThey run fast."),
  ("paragraphs", 2, False, "Dogs bark.\n\nThey run.\n\nThey eat meat."),
  ("paragraphs", 2, False, "Dogs bark and run very fast\n\n."),
  ("sentences", 2, True,
   'Dr. Smith\'s dogs "bark at cats." Do they ever sleep'),
  ("sentences", 2, False, "Dogs bark at 3.14 cats a day."),
  ("sentences", 2, False, "Dogs bark. They run. They eat some meat."),
  ("sentences", 2, False, "Dogs bark loudly near my cats. . ."),
  ("start", "Well", True, "Well, dogs are great and loyal."),
  ("start", "Well", False, "Wellness dogs are great and loyal."),
  ("start", "Well", False, "Oh, well, dogs are so great."),
  ("twice", "life", True, "Life! Dogs are full of good life."),
  ("twice", "life", False, "Dogs are full of life and lifelike."),
  ("without_letter", "k", True, "Dogs run very fast and far."),
  ("without_letter", "k", False, "Dogs bark at people and cats."),
  ("words_between", [7, 8], True, "Dogs don't like well-known cats at all."),
  ("words_between", [7, 8], False, "Dogs don't like cats at all."),
  ("words_between", [7, 8], False, "Dogs do-not-like-the cats of old men."),
  ("words_between", [7, 8], False, "dogs a b c d e 7 8"),
]  # fmt: skip


def score(response, rules, prompt="", tokens=9):
  reference = json.dumps({"subject": "dogs", "rules": rules})
  return follows(prompt, response, reference, tokens=tokens, limit=10)


@pytest.mark.parametrize(("rule", "value", "kept", "response"), CASES)
def test_each_rule_is_kept_and_broken(rule, value, kept, response):
  assert score(response, {}) == 1.0  # all else is right
  assert score(f" {response}\n", {rule: value}) == kept


def test_every_rule_has_both_cases():
  for kept in (True, False):
    assert {case[0] for case in CASES if case[2] == kept} == RULES.keys()


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
  ["A dog's life is short but happy.",
   "Dogs are one of the oldest pets and one of the best friends we have.",
   "Some dogs are small. Some dogs are very large. They bark."],
)  # fmt: skip
def test_plain_english_is_right(response):
  assert score(response, {}) == 1.0


def test_a_response_that_was_cut_off_is_wrong():
  right = "Dogs are very loyal friends of ours."
  assert score(right, {}, tokens=9) == 1.0
  assert score(right, {}, tokens=10) == 0.0


@pytest.mark.parametrize(
  ("reference", "named"),
  [("5", "'5'"), ('{"subject": "dogs"}', "rules"),
   ('{"subject": "dogs", "rules": {"no_comma": true}}', "'no_commas'")],
)  # fmt: skip
def test_a_bad_reference_is_an_error_that_names_it(reference, named):
  with pytest.raises(UserError, match=named):
    follows("", "Dogs are great pets.", reference, tokens=1, limit=2)
