"""Reads JSON-lines files: one JSON object a line, in UTF-8."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from etils import epath

from gspo_jax.runtime.errors import UserError, with_reason


class Line(NamedTuple):
  where: str  # "FILE:NUMBER" for errors; the first line has number 1
  record: dict[str, Any]


def read(path: epath.PathLike, *, drop_partial: bool = False) -> Iterator[Line]:
  with (
    with_reason(f"cannot read {str(path)!r}"),
    epath.Path(path).open("rb") as file,
  ):
    yield from parse(file, path, drop_partial=drop_partial)


def parse(
  lines: Iterable[bytes], path: epath.PathLike, *, drop_partial: bool = False
) -> Iterator[Line]:
  """Parses the lines of a file; blank lines are skipped.

  `drop_partial` also skips a last line that is not JSON: its writer has not
  finished it, or was stopped.
  """
  lines = iter(lines)
  for number, text in enumerate(lines, 1):
    if not text.strip():
      continue
    try:
      record = json.loads(text)
    except (ValueError, RecursionError):
      if drop_partial and next(lines, None) is None:
        return
      record = None
    if not isinstance(record, dict):
      start = text.decode(errors="replace").strip()[:60]
      raise UserError(
        f"{path}:{number}: expected a JSON object in UTF-8, got {start!r}"
      )
    yield Line(f"{path}:{number}", record)
