"""All keys of a config with their meanings; writes configs/common.py.

python -m gspo_jax.program.config_reference > configs/common.py
"""

import dataclasses
import json
import re
import textwrap
from typing import NamedTuple

from gspo_jax.program.config import Config, ConfigDict
from gspo_jax.record.identity import flatten
from gspo_jax.runtime.key import Choice, Range, keys

_HEAD = '''\
"""Every key of a config with its default; see tiny_cpu.py for one.

Change a key on the command line with `--config.optim.learning_rate=2e-4`.

`python -m gspo_jax.program.config_reference` writes this file: a key is
declared in the wing that reads it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The defaults that all configs start from."""
  c = ConfigDict()
'''


class Description(NamedTuple):
  key: str  # or a section, as it is typed, with dots between its parts
  default: object  # None for a section
  meaning: str  # with its unit, and the values it may have in brackets


def describe(config: ConfigDict | None = None) -> list[Description]:
  """All keys, each section before its keys; `config` may set the defaults."""
  values = {} if config is None else flatten(config)
  rows = [
    row._replace(default=values.pop(row.key, row.default))
    for row in _describe(Config(), "")
  ]
  sizes = [
    Description(key, value, "Sets a field of gspo_jax.model.ModelConfig.")
    for key, value in values.items()
  ]
  end = next(i for i, row in enumerate(rows) if row.key == "mesh")
  return [*rows[:end], *sizes, *rows[end:]]


def _describe(section, prefix: str) -> list[Description]:
  rows = []
  for name, field in keys(section).items():
    key, value = f"{prefix}{name}", getattr(section, name)
    if dataclasses.is_dataclass(value):
      rows.append(Description(key, None, field.metadata["meaning"]))
      rows += _describe(value, f"{key}.")
    else:
      rows.append(Description(key, value, _meaning(**field.metadata)))
  return rows


def _meaning(meaning: str, rule: Range | Choice | None) -> str:
  """The meaning of a key, and the values it may have in brackets."""
  if isinstance(rule, Range):
    return f"{meaning} [{rule.expected}]"
  if rule is None or all(name in meaning for name in rule.names):
    return meaning  # which says more about each
  return f"{meaning} [{' | '.join(rule.names)}]"


def common() -> str:
  lines = []
  for key, default, meaning in describe():
    if default is None:
      lines.append("")
    line = f"  c.{key} = {_literal(default)}"
    if len(line) + len(meaning) + 4 <= 80:
      lines.append(f"{line}  # {meaning}")
    else:
      lines += textwrap.wrap(
        meaning[0].upper() + meaning[1:],
        80,
        initial_indent="  # ",
        subsequent_indent="  # ",
        break_long_words=False,
        break_on_hyphens=False,
      )
      lines.append(line)
  return _HEAD + "\n".join(lines) + "\n  return c\n"


def _literal(value) -> str:
  """Python's notation as ruff formats it; None is a section."""
  if value is None:
    return "ConfigDict()"
  if isinstance(value, tuple):
    comma = "," if len(value) == 1 else ""
    return f"({', '.join(map(_literal, value))}{comma})"
  if isinstance(value, str):
    return json.dumps(value)
  return re.sub(r"e-0", "e-", repr(value))


if __name__ == "__main__":
  print(common(), end="")
