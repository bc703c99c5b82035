"""The JSON-lines and sample files of a run, and how a start treats them.

A run that resumes after step k keeps the lines and samples up to k. A new run
moves the files of an earlier run to NAME.N, where N is the next number that is
free for all of them.
"""

import io
import itertools
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from gspo_jax.runtime.errors import UserError

UPLOAD_SECONDS = 30.0  # between two uploads of a file to a bucket


class RunFile:
  """A file that grows by whole lines or events.

  In a folder, each append is on disk at once. In a bucket, gcsfs opens "ab" as
  "wb" (fsspec/gcsfs#533), so the whole content (MBs late in a run) is kept in
  memory and uploaded again: by the first append at least `UPLOAD_SECONDS` after
  the last upload, by `flush_to_bucket` and by `close`. Exceptions and SIGTERM
  end in `close` and lose nothing; a SIGKILL or a lost host loses the data since
  the last upload.
  """

  def __init__(self, path: epath.Path, content: bytes):
    self._bucket = path if "://" in str(path) else None
    if self._bucket:
      self._file = io.BytesIO()
      self._file.write(content)
      self._pending = True
      self.flush_to_bucket()
    else:
      temporary = path.with_name(path.name + ".tmp")
      temporary.write_bytes(content)
      self._file = temporary.replace(path).open("ab")

  def append(self, data: bytes) -> None:
    self._file.write(data)
    self._file.flush()
    if self._bucket:
      self._pending = True
      if time.monotonic() - self._uploaded_at >= UPLOAD_SECONDS:
        self.flush_to_bucket()

  def flush_to_bucket(self) -> None:
    """Uploads appended data to the bucket; does nothing for a local file."""
    if self._bucket and self._pending:
      self._bucket.write_bytes(self._file.getvalue())
      self._uploaded_at, self._pending = time.monotonic(), False

  def close(self) -> None:
    self.flush_to_bucket()
    self._file.close()


class RunFiles(NamedTuple):
  """The JSON-lines files of a run."""

  metrics: RunFile
  distributions: RunFile


def open_run_files(
  workdir: epath.Path, resume_step: int, edges: Sequence[float]
) -> RunFiles:
  """Opens the JSON-lines files, without what the run will write again.

  Args:
    workdir: a folder or bucket; created if missing.
    resume_step: the last step to keep; 0 moves the old files aside.
    edges: of all histograms; the first line of distributions.jsonl.

  Raises:
    UserError: a line is not JSON, or the file has other histogram edges.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  first_line = line({"edges": [short_number(float(edge)) for edge in edges]})
  headers = {"metrics.jsonl": b"", "distributions.jsonl": first_line}
  paths = {name: workdir / name for name in headers}
  samples = workdir / "samples"
  contents = {
    name: path.read_bytes() if path.exists() else headers[name]
    for name, path in paths.items()
  }
  if resume_step:
    contents = {
      name: _lines_until(resume_step, contents[name], paths[name], header)
      for name, header in headers.items()
    }
    _drop_samples_after(resume_step, samples)
  else:
    old = [paths[name] for name in headers if contents[name] != headers[name]]
    _move_aside(old + ([samples] if samples.exists() else []))
    contents = headers
  return RunFiles(*(RunFile(paths[name], contents[name]) for name in paths))


def _drop_samples_after(step: int, folder: epath.Path) -> None:
  for file in folder.iterdir() if folder.exists() else ():
    name = re.fullmatch(r"step_(\d+)\.txt", file.name)
    if name and int(name[1]) > step:
      file.unlink()


def _move_aside(paths: Sequence[epath.Path]) -> None:
  for n in itertools.count(1):
    targets = [p.with_name(f"{p.name}.{n}") for p in paths]
    if not any(target.exists() for target in targets):
      break
  for path, target in zip(paths, targets, strict=True):
    path.rename(target)


def _lines_until(
  step: int, content: bytes, path: epath.Path, header: bytes
) -> bytes:
  """`header` and the lines up to `step` of a file that began with `header`."""
  if content and not content.startswith(header):
    raise UserError(
      f"{path}, line 1: {content[:60]=}, expected the histogram edges of this "
      "version; move the file away"
    )
  lines, kept = content.removeprefix(header).splitlines(), [header]
  for n, text in enumerate(lines, 1):
    try:
      if json.loads(text)["step"] <= step:
        kept.append(text + b"\n")
    except (ValueError, KeyError, TypeError) as e:
      if n < len(lines):
        raise UserError(
          f"{path}, line {n + bool(header)}: {text[:60]=}, expected a JSON "
          "object with a step; correct the line or move the file away"
        ) from e
  return b"".join(kept)


def counts_over_edges(name: str, values: Sequence, edges: Sequence) -> bool:
  """Whether a distribution is histogram counts, not one number for each layer.

  The name decides, too: a model may have as many layers as there are bins.
  """
  by_layer = name.rpartition("/")[2].startswith("layer_")
  return len(values) == len(edges) - 1 and not by_layer


def line(record: Mapping[str, Any]) -> bytes:
  """One line of a JSON-lines file."""
  return json.dumps(record).encode() + b"\n"


def short_number(value: float) -> float | None:
  """An integer as it is, else 6 digits to save space. None if not finite."""
  if not math.isfinite(value):
    return None
  return int(value) if value == int(value) else float(f"{value:.6g}")


_MARK = "(?=---- |question:|answer:|reference:)"


_LIKE_A_MARK = re.compile(f"^(?= *{_MARK})", re.M)


_INDENTED = re.compile(f"^ (?= *{_MARK})", re.M)


_HEAD = re.compile(r"^---- \d+ of \d+, step \d+, reward (\S+)\n", re.M)


_BODY = re.compile(r"question:\n(.*?)\nanswer:\n(.*)\nreference: (.*)", re.S)


class Sample(NamedTuple):
  """An answer as a file shows it: control characters are escaped."""

  question: str
  answer: str
  reference: str
  reward: str


def format_samples(
  step: int, rows: Sequence[tuple[str, str, str, float]]
) -> str:
  """A file's text, of rows of question, answer, reference, reward."""
  text = ""
  for i, (question, answer, reference, reward) in enumerate(rows, 1):
    text += f"---- {i} of {len(rows)}, step {step}, reward {reward:g}\n"
    for label, part in (("question", question), ("answer", answer)):
      part = _LIKE_A_MARK.sub(" ", printable(part, keep="\n\t"))
      text += f"{label}:\n{part}\n"
    text += f"reference: {printable(reference)}\n\n"
  return text


def parse_samples(text: str) -> list[Sample]:
  """What `write` wrote; [] of other text. What is cut short is an answer."""
  pieces, found = _HEAD.split(text)[1:], []
  for reward, body in zip(pieces[::2], pieces[1::2], strict=True):
    whole = _BODY.match(body)
    *parts, reference = whole.groups() if whole else ("", body, "")
    parts = (_INDENTED.sub("", part).strip("\n") for part in parts)
    found.append(Sample(*parts, reference.strip("\n"), reward))
  return found


def printable(text: str, keep: str = "") -> str:
  """The text with escapes for what a terminal would act upon."""
  return "".join(
    c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text
  )
