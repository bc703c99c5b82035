"""A key of a config: its default, its meaning and its range, declared once.

A section of the config is a frozen dataclass of the wing that reads it:

  @dataclasses.dataclass(frozen=True)
  class OptimConfig:
    learning_rate: float = key(1e-6, "its peak", ZERO_OR_MORE)

configs/common.py, `--help` and docs/config.md are made from these fields. The
whole config checks the ranges. The program fills in fields without `key`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from gspo_jax.runtime.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Range:
  expected: str  # the range in words
  holds: Callable[[Any], bool]  # whether a value lies in it

  def check(self, name: str, value) -> None:
    if not self.holds(value):
      raise UserError(f"{name}={value}: expected {self.expected}")


@dataclasses.dataclass(frozen=True)
class Choice:
  names: tuple[str, ...]

  def check(self, name: str, value) -> None:
    if value not in self.names:
      raise UserError(f"{name}={value!r}: {nearest(value, self.names)}")


AT_LEAST_1 = Range("at least 1", lambda x: x >= 1)
ZERO_OR_MORE = Range("0 or more", lambda x: 0 <= x < math.inf)
FINITE = Range("a finite number", math.isfinite)
POSITIVE = Range("more than 0", lambda x: 0 < x < math.inf)
SHARE = Range("0 to 1", lambda x: 0 <= x <= 1)
UNDER_1 = Range("0 or more, under 1", lambda x: 0 <= x < 1)


def key(default, meaning: str, rule: Range | Choice | None = None) -> Any:
  """The field of a section for one key; `check` applies the `rule`."""
  metadata = {"meaning": meaning, "rule": rule}
  return dataclasses.field(default=default, metadata=metadata)


def keys(section) -> dict[str, dataclasses.Field]:
  """The fields of a section, or of its class, that are keys of a config."""
  fields = dataclasses.fields(section)
  return {field.name: field for field in fields if "meaning" in field.metadata}


def as_dict(section) -> dict[str, Any]:
  """The keys of a section with their values; inner sections are dicts."""
  values = {name: getattr(section, name) for name in keys(section)}
  return {
    name: as_dict(value) if dataclasses.is_dataclass(value) else value
    for name, value in values.items()
  }


def check(section, name: str) -> None:
  """UserError where a key is outside its range; inner sections too.

  `name` is the section's name, "" for the whole config.
  """
  for key, field in keys(section).items():
    typed, value = f"{name}.{key}".lstrip("."), getattr(section, key)
    if dataclasses.is_dataclass(value):
      check(value, typed)
    elif rule := field.metadata["rule"]:
      rule.check(typed, value)
