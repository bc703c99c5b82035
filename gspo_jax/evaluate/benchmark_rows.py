"""A row of a benchmark's file, checked column by column."""

import dataclasses
import json
from typing import Any, NoReturn

from gspo_jax.runtime.errors import UserError, nearest


class Skipped(Exception):
  """A row whose responses cannot be scored here; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a file; the methods raise UserError for a mistaken column.

  Attributes:
    where: "FILE:LINE", for errors.
    values: by column.
    read: the columns that were asked for.
  """

  where: str
  values: dict[str, Any]
  read: set[str] = dataclasses.field(default_factory=set)

  def column(self, *names: str) -> tuple[str, Any]:
    """The first of `names` that the row has, and its value."""
    for name in names:
      if name in self.values:
        self.read.add(name)
        return name, self.values[name]
    columns = ", ".join(map(repr, self.values)) or "an empty object"
    hint = nearest(names[0], self.values) if self.values else ""
    raise UserError(
      f"{self.where}: expected a column {' or '.join(map(repr, names))}, got "
      f"{columns}; {hint}".removesuffix("; ")
    )

  def text(self, *names: str) -> str:
    """A value as text; the items of a list are joined with commas."""
    name, value = self.column(*names)
    parts = value if isinstance(value, list) else [value]
    text = ", ".join(map(_as_text, parts)) if all(map(_is_plain, parts)) else ""
    return text or self.fail(name, "text", value)

  def tests(self, name: str) -> list[dict[str, str]]:
    """Tests of a program, {"input", "output"} each; also as JSON text.

    Raises:
      Skipped: the tests call a function, and have no standard input.
    """
    _, value = self.column(name)
    if isinstance(value, str):
      try:
        value = json.loads(value)
      except ValueError as error:
        raise UserError(
          f"{self.where}: column {name!r} is not JSON. LiveCodeBench publishes "
          "a pickle there (base64, zlib). To load it can run any program, so "
          "it is not loaded: convert the file where you trust it"
        ) from error
    value, expected = value or [], "a list of {'input', 'output'}"
    if not isinstance(value, list):
      self.fail(name, expected, value)
    for test in value:
      if not (isinstance(test, dict) and {"input", "output"} <= test.keys()):
        self.fail(name, expected, value)
      if test.get("testtype", "stdin") != "stdin":
        raise Skipped(f"{test['testtype']} tests")
      if not all(isinstance(test[k], str) for k in ("input", "output")):
        self.fail(name, "text as 'input' and 'output'", test)
    return [{k: test[k] for k in ("input", "output")} for test in value]

  def fail(self, column: str, expected: str, value: Any) -> NoReturn:
    """UserError about a value."""
    raise UserError(
      f"{self.where}: column {column!r}: expected {expected}, got "
      f"{json.dumps(value)[:60]}"
    )


def _is_plain(value) -> bool:
  """Whether it is text or a number."""
  return type(value) in (str, int, float)


def _as_text(value) -> str:
  """Text of a value; some files write the integer 142 as 142.0."""
  whole = isinstance(value, float) and value.is_integer()
  return str(int(value) if whole else value).strip()
