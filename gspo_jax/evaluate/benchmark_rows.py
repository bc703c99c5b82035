"""A row of a question file, and what may be wrong with it."""

import json
from typing import Any, NamedTuple, NoReturn

from gspo_jax.runtime.errors import UserError, nearest


class Skipped(Exception):
  """A row that cannot be judged here; the text says why."""


class Row(NamedTuple):
  """An object of a file, and FILE:LINE.

  The methods raise UserError for a column that is missing or not as expected.
  """

  where: str
  values: dict[str, Any]

  def column(self, *names: str) -> tuple[str, Any]:
    """The first of `names` that is there, and its value."""
    for name in names:
      if name in self.values:
        return name, self.values[name]
    found = ", ".join(map(repr, self.values)) or "an empty object"
    hint = nearest(names[0], self.values) if self.values else ""
    raise UserError(
      f"{self.where}: expected a column {' or '.join(map(repr, names))}, found "
      f"{found}; {hint}".removesuffix("; ")
    )

  def text(self, *names: str) -> str:
    """A value as text: numbers spelled out, a list joined with commas."""
    name, value = self.column(*names)
    parts = value if isinstance(value, list) else [value]
    text = ", ".join(map(_spell, parts)) if all(map(_plain, parts)) else ""
    return text or self.refuse(name, "a text", value)

  def tests(self, name: str) -> list[dict[str, str]]:
    """Pairs of standard input and output: a list, or the JSON text of one.

    Raises:
      Skipped: they call a function instead.
    """
    _, value = self.column(name)
    if isinstance(value, str):
      try:
        value = json.loads(value)
      except ValueError as error:
        raise UserError(
          f"{self.where}: column {name!r} is not JSON. LiveCodeBench publishes "
          "a pickle there (base64, zlib), which can run any program as it is "
          "loaded, so it is not: convert the file where you trust it"
        ) from error
    value, expected = value or [], "a list of {'input', 'output'}"
    if not isinstance(value, list):
      self.refuse(name, expected, value)
    for test in value:
      if not (isinstance(test, dict) and {"input", "output"} <= test.keys()):
        self.refuse(name, expected, value)
      if test.get("testtype", "stdin") != "stdin":
        raise Skipped(f"{test['testtype']} tests")
      if not all(isinstance(test[k], str) for k in ("input", "output")):
        self.refuse(name, "texts as 'input' and 'output'", test)
    return [{k: test[k] for k in ("input", "output")} for test in value]

  def refuse(self, column: str, expected: str, value: Any) -> NoReturn:
    """UserError about a value."""
    raise UserError(
      f"{self.where}: column {column!r}: expected {expected}, got "
      f"{json.dumps(value)[:60]}"
    )


def _plain(value) -> bool:
  return type(value) in (str, int, float)


def _spell(value) -> str:
  """142.0 is how some files write the integer 142."""
  whole = isinstance(value, float) and value.is_integer()
  return str(int(value) if whole else value).strip()
