"""The responses to a benchmark, written batch by batch.

settings.json says what is evaluated and how; answers.jsonl has an object for
each response. An interrupted evaluation continues after the last whole batch.
If a host is lost, a bucket lacks the batches of the last 30 seconds.
"""

import io
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from etils import epath

from gspo_jax.record import json_lines
from gspo_jax.record.identity import match
from gspo_jax.record.run_files import RunFile
from gspo_jax.runtime.errors import UserError, with_reason


class AnswersFile(AbstractContextManager["AnswersFile"]):
  """The files of one benchmark in a folder; a context manager.

  Opening it removes an incomplete batch, which is then sampled again.

  Args:
    folder: local or in a bucket; created if missing.
    settings: JSON; UserError if the folder has other settings.
    sizes: responses in each batch, in order.
    shorten: record -> what is kept in memory, which may not hold all texts.

  Attributes:
    records: shortened records, in the order of the batches.
    batches_done: batches in the file.
  """

  def __init__(
    self,
    folder: str,
    settings: dict[str, Any],
    sizes: Sequence[int],
    shorten: Callable[[dict], dict],
  ):
    path = epath.Path(folder)
    self._path = path / "answers.jsonl"
    self._shorten, self.batches_done = shorten, 0
    self.records: list[dict] = []
    with with_reason(f"--out={folder}"):
      path.mkdir(parents=True, exist_ok=True)
      _require_same(path / "settings.json", settings)
      self._file = RunFile(self._path, self._whole_batches(sizes))

  def __exit__(self, *_) -> None:
    self._file.close()

  def append(self, records: Sequence[dict]) -> None:
    """Writes the next batch."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    self._file.append(lines.encode())
    self._add(records)

  def _add(self, records) -> None:
    self.records += map(self._shorten, records)
    self.batches_done += 1

  def _whole_batches(self, sizes: Sequence[int]) -> bytes:
    content = self._path.read_bytes() if self._path.exists() else b""
    file = io.BytesIO(content)
    # The last line may be incomplete.
    whole = (line for line in file if line.endswith(b"\n"))
    lines, end = json_lines.parse(whole, self._path), 0
    for size in sizes:
      records = [line.record for line in itertools.islice(lines, size)]
      if len(records) < size:
        break
      self._add(records)
      end = file.tell()
    return content[:end]


def _require_same(path: epath.Path, settings: dict[str, Any]) -> None:
  settings = json.loads(json.dumps(settings))  # tuples become lists
  if path.exists():
    try:
      saved = {"identity": json.loads(path.read_text())}
    except ValueError as error:
      raise UserError(f"{path} is not JSON; move it away") from error
    return match(
      settings,
      saved,
      f"evaluation in {str(path.parent)!r}",
      "use another --out, or move that folder away",
    )
  RunFile(path, json.dumps(settings, indent=1).encode()).close()
