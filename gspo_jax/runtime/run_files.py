"""The files of rows that a run writes, and what of them a start keeps.

A start after step k keeps the rows up to k; a fresh one moves an earlier run's
files to NAME.N, N the next number that is free for all of them.
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

from gspo_jax.losses import EDGES
from gspo_jax.runtime.errors import UserError

SEND_EVERY = 30.0  # seconds


class RunFile:
  """A file that grows, whole lines (or events) at a time.

  In a folder each of them is there at once. gcsfs opens "ab" as "wb"
  (fsspec/gcsfs#533), so for a bucket the whole is held here and put again, MBs
  late in a run: at an append `SEND_EVERY` after the last time, by `send` and by
  `close`. A SIGKILL, or a host that vanishes, loses what came since; an
  exception and a SIGTERM, which end in `close`, lose nothing.
  """

  def __init__(self, path: epath.Path, kept: bytes):
    self._bucket = path if "://" in str(path) else None
    if self._bucket:
      self._file = io.BytesIO()
      self._file.write(kept)
      self._waits = True
      self.send()
    else:
      temporary = path.with_name(path.name + ".tmp")
      temporary.write_bytes(kept)
      self._file = temporary.replace(path).open("ab")

  def append(self, data: bytes) -> None:
    self._file.write(data)
    self._file.flush()
    if self._bucket:
      self._waits = True
      if time.monotonic() - self._sent >= SEND_EVERY:
        self.send()

  def send(self) -> None:
    """Puts what waits into the bucket."""
    if self._bucket and self._waits:
      self._bucket.write_bytes(self._file.getvalue())
      self._sent, self._waits = time.monotonic(), False

  def close(self) -> None:
    self.send()
    self._file.close()


def open_run_files(workdir: epath.Path, resume_step: int) -> list[RunFile]:
  """Clears what the run will write again, and opens what it writes rows to."""
  workdir.mkdir(parents=True, exist_ok=True)
  edges = line({"edges": [short_number(edge) for edge in EDGES.tolist()]})
  heads = {"metrics.jsonl": b"", "distributions.jsonl": edges}
  paths = {name: workdir / name for name in heads}
  samples = workdir / "samples"
  texts = {
    name: path.read_bytes() if path.exists() else heads[name]
    for name, path in paths.items()
  }
  if resume_step:
    texts = {
      name: _rows_until(resume_step, texts[name], paths[name], head)
      for name, head in heads.items()
    }
    _drop_samples_after(resume_step, samples)
  else:
    written = [paths[name] for name in heads if texts[name] != heads[name]]
    _set_aside(written + ([samples] if samples.exists() else []))
    texts = heads
  return [RunFile(path, texts[name]) for name, path in paths.items()]


def _drop_samples_after(step: int, folder: epath.Path) -> None:
  for file in folder.iterdir() if folder.exists() else ():
    name = re.fullmatch(r"step_(\d+)\.txt", file.name)
    if name and int(name[1]) > step:
      file.unlink()


def _set_aside(paths: Sequence[epath.Path]) -> None:
  for n in itertools.count(1):
    targets = [p.with_name(f"{p.name}.{n}") for p in paths]
    if not any(target.exists() for target in targets):
      break
  for path, target in zip(paths, targets, strict=True):
    path.rename(target)


def _rows_until(step: int, text: bytes, path: epath.Path, head: bytes) -> bytes:
  """`head`, and the rows up to `step` of a log that began with it."""
  if text and not text.startswith(head):
    raise UserError(
      f"{path}, line 1: {text[:60]=}, expected the edges that gspo_jax.losses "
      "has now; move the file away"
    )
  lines, kept = text.removeprefix(head).splitlines(), [head]
  for n, row in enumerate(lines, 1):
    try:
      if json.loads(row)["step"] <= step:
        kept.append(row + b"\n")
    except (ValueError, KeyError, TypeError) as e:
      if n < len(lines):
        raise UserError(
          f"{path}, line {n + bool(head)}: {row[:60]=}, expected a JSON "
          "object with a step; mend the line or move the file away"
        ) from e
  return b"".join(kept)


def counts_over_edges(name: str, values: Sequence, edges: Sequence) -> bool:
  """Whether it is a histogram's counts; else `layer_*`, a number a layer.

  A model may have as many layers as a histogram has bins.
  """
  profile = name.rpartition("/")[2].startswith("layer_")
  return len(values) == len(edges) - 1 and not profile


def line(row: Mapping[str, Any]) -> bytes:
  return json.dumps(row).encode() + b"\n"


def short_number(value: float) -> float | None:
  """Counts as they are, else 6 digits: a line has hundreds of them."""
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
