"""Material: stages, held-out questions and demonstrations, apart."""

import json
import re

import datasets as hf_datasets
import pyarrow
import pytest
from pyarrow import parquet

from gspo_jax.data import datasets
from gspo_jax.runtime.errors import UserError
from gspo_jax.tasks.chain import Chain


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


def load(config):
  return datasets.load(config.data, config.seed)


def questions(source):
  parts = getattr(source, "sources", (source,))
  return {part[i].text for part in parts for i in range(len(part))}


def test_a_later_stage_has_both(config):
  found = load(config)
  assert [stage.begin for stage in found.stages] == [1, 3]
  first, second = (questions(stage.source) for stage in found.stages)
  assert first < second
  assert any(q.startswith("1") and len(q) > 5 for q in second - first)


def test_nothing_held_out_is_learnt_in_any_stage(config):
  found = load(config)
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
    prints.add(datasets.fingerprint(load(config).stages))
  assert len(prints) == 4


def test_the_columns_that_were_found_are_said_once(config):
  first, second = config.data.source, config.data.curriculum[0][1].split(",")[1]
  said = "the problem is in 'question', the reference in 'answer'"
  assert load(config).notes == (f"{first}: {said}", f"{second}: {said}")
  config.data.problem_field, config.data.reference_field = "question", "answer"
  assert load(config).notes == ()


def test_equal_problems_are_said(config, tmp_path):
  config.data.problem_field, config.data.reference_field = "question", "answer"
  config.data.curriculum = ()
  first, held_out = tmp_path / "first.jsonl", tmp_path / "held_out.jsonl"
  lines = first.read_text().splitlines()
  held_out.write_text("\n".join(['{"question": "?", "answer": "1"}', *lines]))
  config.data.eval_source = f"jsonl:{held_out}"
  assert load(config).notes == (
    "data.eval_source: of the 41 problems read 40 are in data.source or "
    "data.curriculum, too: they are trained on",
  )
  held_out.write_text('{"question": "?", "answer": "1"}')
  assert load(config).notes == ()
  first.write_text("\n".join([*lines, *lines[:2], lines[0]]))
  said = "data.source and data.curriculum: of the {} problems read {} are equal"
  found = lambda: load(config).notes[0]
  assert found().startswith(said.format(43, 3))
  first.write_text("\n".join(lines))
  config.data.source += f",jsonl:{first}"
  assert found().startswith(said.format(80, 40))
  config.data.source = f"jsonl:{first}"
  config.data.curriculum = ((2, f"jsonl:{first}"),)
  assert load(config).notes == ()
  again = tmp_path / "again.jsonl"
  again.write_text(lines[0].replace('?"', '? "') + "\n" + lines[1])
  config.data.curriculum = ((2, f"jsonl:{first},jsonl:{again}"),)
  assert found().startswith(said.format(42, 2))


def test_a_bad_record_of_a_table_is_named_before_it_is_needed(
  config, tmp_path, monkeypatch
):
  monkeypatch.setattr(hf_datasets.config, "HF_DATASETS_CACHE", tmp_path / "c")
  rows = {"question": ["a", "b", "c"], "answer": ["1", "2", None]}
  parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
  config.data.source = f"parquet:{tmp_path}/a.parquet"
  config.data.eval_source = config.data.curriculum[0][1]
  with pytest.raises(UserError, match=r"a.parquet\[2\]: 'answer' .* null"):
    load(config)
  monkeypatch.setattr(datasets.sources, "_CHECKED", 2)
  load(config)


def test_the_embedded_task_has_one_stage(debug_config):
  debug_config.data.curriculum = ((3, "chain"),)
  with pytest.raises(UserError, match=r"data.curriculum=\(\(3, 'chain'\),\)"):
    load(debug_config)


def test_the_numbers_of_the_embedded_task(debug_config):
  debug_config.data.source = "chain:steps=2|4,demonstrated=3,noise=1.0"
  found, seed = load(debug_config), debug_config.seed
  (stage,) = found.stages
  assert stage.source == Chain((2, 4), seed=seed)
  assert found.held_out == Chain((2, 4), seed=seed, evaluation=True)
  assert found.demonstrations == Chain((3,), seed=seed, noise=1.0)
  debug_config.data.source = "chain"
  found = load(debug_config)
  assert found.stages[0].source.steps == (8,)
  assert found.demonstrations == Chain((2, 4, 6, 8), seed=seed, noise=0.12)


@pytest.mark.parametrize(
  ("source", "words"),
  [("chain:step=2", "'chain' has no argument 'step': did you mean 'steps'"),
   ("chain:steps=2-4", "chain:steps=2-4: expected lengths, such as 2|4|8"),
   ("chain:steps=99", "99"), ("chain:noise=2", "2: expected")],
)  # fmt: skip
def test_a_mistaken_chain(debug_config, source, words):
  debug_config.data.source = source
  with pytest.raises(UserError, match=re.escape(words)):
    load(debug_config)
