"""Problems of instructions: references that fit, and what is held out."""

import json
from collections import Counter

import pytest

from gspo_jax.data import instructions, sources
from gspo_jax.rewards.instructions import RULES, follows

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
  every = (*instructions.TRAINED_RULES, *instructions.HELD_OUT_RULES)
  rules = dict(item for rules in every for item in rules.items())
  assert rules.keys() == RULES.keys()
  for problems in map(targets, SETS):
    for text, target in problems:
      asked = [rules[k].ask(value) for k, value in target["rules"].items()]
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
  asked = {
    *instructions.TRAINED_RULES.first,
    *instructions.TRAINED_RULES.second,
  }
  assert rules["training"] == rules["new_subjects"] == asked


def test_a_config_can_name_the_sets():
  spec = "gspo_jax.data.instructions.training"
  source = sources.load(spec, evaluation=None)
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
      assert RULES[rule](" ".join(demanded), rules[rule]), text


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
  scores = [
    follows(
      asked,
      text.format(target["subject"]),
      json.dumps(target),
      tokens=1,
      limit=2,
    )
    for asked, target in problems
  ]
  return sum(scores) / len(scores)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("text", FIXED)
def test_a_text_that_reads_no_rule_gets_little(name, text):
  assert kept(text, targets(name)) < FIXED[text]


def test_the_best_fixed_text_keeps_the_share_that_docs_results_states():
  """Of the problems that benchmarks/smollm2.py evaluates."""
  found = {text: kept(text, targets("new_subjects")[:64]) for text in FIXED}
  assert round(max(found.values()), 2) == 0.41
