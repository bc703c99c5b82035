"""Answers of an evaluation, kept as they come, so that it can be gone on with.

settings.json   what was evaluated, and how
answers.jsonl   an object for each answer, batch after batch
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo_jax.runtime import json_lines
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.identity import match


class AnswersFile:
  """The answers of one evaluation, in a folder: a context manager.

  What an interruption left of a batch is removed: the batch is drawn again, and
  the file ends as if nothing had happened.

  Args:
    folder: made if missing; on this machine, for buckets cannot append.
    settings: JSON; a folder with other ones is not gone on with.
    batches: the set and the number of answers of each batch, in order.
    brief: what to remember of an answer; the texts of all may fill the memory.

  Attributes:
    rows: answers by set, in brief, those of earlier calls first.

  Raises:
    UserError: the folder cannot be written, or is of other settings.
  """

  def __init__(
    self,
    folder: str,
    settings: dict[str, Any],
    batches: Sequence[tuple[str, int]],
    brief: Callable[[dict], dict],
  ):
    if "://" in folder:
      raise UserError(f"--out={folder}: expected a folder of this machine")
    path = Path(folder)
    self._path = path / "answers.jsonl"
    self._batches, self._brief, self._done = batches, brief, 0
    self.rows: dict[str, list[dict]] = {name: [] for name, _ in batches}
    try:
      path.mkdir(parents=True, exist_ok=True)
      _require_same(path / "settings.json", settings)
      self._file = self._path.open("ab+")
    except OSError as error:
      raise UserError(f"--out={folder}: {error.strerror}") from error
    self._keep_whole_batches()

  def __enter__(self) -> "AnswersFile":
    return self

  def __exit__(self, *_) -> None:
    self._file.close()

  def begun(self, name: str) -> int:
    """How many batches of a set are here."""
    return sum(batch == name for batch, _ in self._batches[: self._done])

  def append(self, rows: Sequence[dict]) -> None:
    """Writes the next batch."""
    name, size = self._batches[self._done]
    if {row["set"] for row in rows} != {name} or len(rows) != size:
      raise ValueError(f"{len(rows)=}, expected {size} of {name}")
    self._file.write("".join(json.dumps(r) + "\n" for r in rows).encode())
    self._file.flush()
    self._take(rows)

  def _take(self, rows):
    self.rows[self._batches[self._done][0]] += map(self._brief, rows)
    self._done += 1

  def _keep_whole_batches(self):
    self._file.seek(0)
    # The last line may be cut short.
    whole = (line for line in self._file if line.endswith(b"\n"))
    lines, end = json_lines.parse(whole, self._path), 0
    for name, size in self._batches:
      rows = [line.record for line in itertools.islice(lines, size)]
      if len(rows) < size:
        break
      if any(row.get("set") != name for row in rows):
        raise UserError(f"{self._path}: expected answers to {name}")
      self._take(rows)
      end = self._file.tell()
    self._file.truncate(end)


def _require_same(path: Path, settings: dict[str, Any]) -> None:
  """Writes the settings, or compares them with what stands there."""
  settings = json.loads(json.dumps(settings))  # tuples are lists there
  if path.exists():
    try:
      saved = {"identity": json.loads(path.read_text())}
    except ValueError as error:
      raise UserError(f"{path} is not JSON; move it away") from error
    return match(settings, saved, "evaluation")
  temporary = path.with_suffix(".tmp")
  temporary.write_text(json.dumps(settings, indent=1))
  temporary.replace(path)
