"""The descriptions of the keys: all of them, in order, from the comments."""

import dataclasses
import inspect

from gspo_jax.configs import common, tiny_cpu
from gspo_jax.program.config import Config, all_keys
from gspo_jax.program.config_reference import _comments, describe

ROWS = {row.key: row for row in describe()}


def test_every_key_and_section_is_described_in_the_order_of_the_file():
  sections = {
    f.name for f in dataclasses.fields(Config) if f.type not in (int,)
  }
  assert ROWS.keys() == {*all_keys()} | sections
  source = inspect.getsource(common.get_config)
  lines = [source.index(f"  c.{key} = ") for key in ROWS]
  assert lines == sorted(lines)


def test_every_key_has_a_comment():
  bare = [r.key for r in ROWS.values() if not r.comment.partition(" [")[0]]
  assert bare == []


def test_a_comment_stands_above_or_beside_its_key():
  assert _comments(
    "c.a = 1  # beside\n# above,\n# in two lines\nc.b.c = (\n"
    "  'no # comment',\n)  # and beside\nc.d = 2\nc.a = 3  # set again\n"
  ) == {
    "a": "beside",
    "b.c": "above, in two lines and beside",
    "d": "",
  }


def test_a_description_has_the_default_and_the_values_allowed():
  assert ROWS["cold_start.gate"][1:] == (
    0.9,
    "greedy accuracy that ends it; 0: run all steps [0 to 1]",
  )
  assert ROWS["objective.replay"].comment.endswith("[none | r2 | r3]")
  # The comment names them all.
  assert "[" not in ROWS["objective.name"].comment
  assert ROWS["optim"][1:] == (None, "the optimizer")


def test_defaults_are_those_of_the_config_that_is_given():
  config = tiny_cpu.get_config()
  config.model.num_layers = 3
  rows = {row.key: row for row in describe(config)}
  assert rows["optim.learning_rate"].default == 3e-4
  assert rows["model.num_layers"].default == 3
  names = list(rows)
  assert names.index("model.num_layers") == names.index("mesh") - 1
