"""The descriptions of the keys, and configs/common.py, made of them."""

import dataclasses

from repository import ROOT

from gspo_jax.configs import common, tiny_cpu
from gspo_jax.program.config import Config, all_keys, parse
from gspo_jax.program.config_reference import common as text_of_common
from gspo_jax.program.config_reference import describe

ROWS = {row.key: row for row in describe()}


def test_common_is_what_the_command_writes():
  command = "python -m gspo_jax.program.config_reference > configs/common.py"
  assert (ROOT / "configs/common.py").read_text() == text_of_common(), command


def test_common_has_the_defaults():
  assert parse(common.get_config()) == Config()


def test_every_key_and_section_is_described():
  sections = {f.name for f in dataclasses.fields(Config)} - {"seed"}
  sections -= {"num_steps"}
  assert ROWS.keys() == {*all_keys()} | sections | {
    "model.lora",
    "objective.distillation",
  }
  assert all(row.meaning.partition(" [")[0] for row in ROWS.values())


def test_a_description_has_the_default_and_the_values_allowed():
  assert ROWS["cold_start.gate"][1:] == (
    0.9,
    "greedy accuracy that ends it; 0: run all steps [0 to 1]",
  )
  assert ROWS["model.dtype"].meaning.endswith("[float32 | bfloat16]")
  # The meaning names them all.
  assert "[" not in ROWS["data.too_long"].meaning
  assert ROWS["optim"][1:] == (None, "the optimizer")


def test_defaults_are_those_of_the_config_that_is_given():
  config = tiny_cpu.get_config()
  config.model.num_layers = 3
  rows = {row.key: row for row in describe(config)}
  assert rows["optim.learning_rate"].default == 3e-4
  assert rows["model.num_layers"].default == 3
  names = list(rows)
  assert names.index("model.num_layers") == names.index("mesh") - 1
