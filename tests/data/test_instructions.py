"""Problems of instructions: references that fit, and what is held out."""

import json

import pytest

from gspo_jax.data import instructions, sources
from gspo_jax.rewards.instructions import RULES

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
      if value is not True:
        assert str(value) in text


def test_every_rule_is_asked_for_in_its_own_words():
  rules = instructions.TRAINED_RULES | instructions.HELD_OUT_RULES
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
  assert rules["training"] == {*instructions.TRAINED_RULES}
  assert rules["new_rules"] == {*instructions.HELD_OUT_RULES}


def test_a_config_can_name_the_sets():
  spec = "gspo_jax.data.instructions.training"
  source = sources.load(spec, evaluation=None)
  assert len(source) == 4096
  assert source[0] == instructions.training()[0]
