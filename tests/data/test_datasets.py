"""Material: stages, held-out questions and demonstrations, apart."""

import json

import pytest

from gspo_jax.data import datasets
from gspo_jax.runtime.errors import UserError


@pytest.fixture
def config(debug_config, tmp_path):
  """Two files of sums, the second of larger ones."""
  for name, base in (("first", 0), ("second", 100)):
    rows = [
      {"question": f"{base + a}+1?", "answer": f"#### {base + a + 1}"}
      for a in range(40)
    ]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / f"{name}.jsonl").write_text(text)
  first, second = (f"jsonl:{tmp_path}/{n}.jsonl" for n in ("first", "second"))
  debug_config.data.source = first
  debug_config.data.curriculum = ((3, f"{first},{second}"),)
  return debug_config


def questions(source):
  parts = getattr(source, "sources", (source,))
  return {part[i].text for part in parts for i in range(len(part))}


def test_a_later_stage_has_both(config):
  found = datasets.load(config)
  assert [stage.begin for stage in found.stages] == [1, 3]
  first, second = (questions(stage.source) for stage in found.stages)
  assert first < second
  assert any(q.startswith("1") and len(q) > 5 for q in second - first)


def test_nothing_held_out_is_learnt_in_any_stage(config):
  found = datasets.load(config)
  held_out = questions(found.held_out)
  assert held_out
  for stage in found.stages:
    assert not held_out & questions(stage.source)
  assert not held_out & questions(found.demonstrations)


def test_a_fingerprint_is_of_beginnings_and_questions(config):
  prints = set()
  for stages in (
    (),
    config.data.curriculum,
    ((4, config.data.curriculum[0][1]),),
    ((3, config.data.source),),
  ):
    config.data.curriculum = stages
    prints.add(datasets.fingerprint(datasets.load(config).stages))
  assert len(prints) == 4


def test_the_embedded_task_has_one_stage(debug_config):
  debug_config.data.curriculum = ((3, "chain"),)
  with pytest.raises(UserError, match=r"data.curriculum=\(\(3, 'chain'\),\)"):
    datasets.load(debug_config)
