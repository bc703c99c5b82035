"""The lock, JSON-lines and sample files of a run, and how a start treats them.

A run that resumes after step k keeps the lines and samples up to k. A new run
moves the files of an earlier run to NAME.N; N is the next number that is free
for all of them.
"""

import contextlib
import fcntl
import io
import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from absl import logging
from etils import epath

from gspo_jax.record import json_lines
from gspo_jax.runtime.errors import UserError, with_reason

UPLOAD_SECONDS = 30.0  # between two uploads of a file to a bucket


def in_bucket(path: epath.PathLike) -> bool:
  return "://" in str(path)


@contextlib.contextmanager
def locked(workdir: str) -> Iterator[None]:
  """Keeps other runs out of `workdir`, by a lock on its file `lock`.

  The kernel frees this POSIX lock when the process ends, even by SIGKILL. NFS
  passes it to other hosts, and child processes do not inherit it. A bucket has
  no lock; see docs/fault_tolerance.md.
  """
  if in_bucket(workdir):
    yield
    return
  with contextlib.ExitStack() as stack:
    with with_reason(f"--workdir={str(workdir)!r} cannot be written"):
      os.makedirs(workdir, exist_ok=True)
      file = stack.enter_context(open(os.path.join(workdir, "lock"), "a+"))
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
      file.seek(0)
      raise UserError(
        f"--workdir={str(workdir)!r}: another run writes to it "
        f"({file.read()}); wait for its end, or give another --workdir"
      ) from error
    except OSError as error:  # a network disk without locks
      logging.warning("%s cannot be locked: %s", workdir, error.strerror)
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, process {os.getpid()}")
    file.flush()
    yield


def is_file(path: epath.PathLike) -> bool:
  """Whether it is a file, not a pipe: opening a pipe waits for a writer."""
  path = epath.Path(path)
  return path.is_file() if in_bucket(path) else os.path.isfile(path)


class RunFile:
  """A file that grows by whole lines or events.

  In a folder, each append is on disk at once. In a bucket, gcsfs opens "ab" as
  "wb" (fsspec/gcsfs#533), so the whole content (MBs late in a run) is kept in
  memory and uploaded again: at most every `UPLOAD_SECONDS`, and at
  `flush_to_bucket` and `close`. Exceptions and SIGTERM reach `close` and lose
  nothing. A SIGKILL or a lost host loses the data since the last upload; a run
  uploads before each checkpoint.
  """

  def __init__(self, path: epath.Path, content: bytes):
    self._bucket = path if in_bucket(path) else None
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


def open_run_files(
  workdir: epath.Path, resume_step: int, edges: Iterable[float]
) -> list[RunFile]:
  """Opens metrics.jsonl and distributions.jsonl, to continue after a step.

  If metrics.jsonl has the row of `resume_step`, the steps up to it are kept.
  With 0 the old files are moved aside.
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
    step = resume_step
    for name, header in headers.items():  # metrics.jsonl is the first
      contents[name] = _lines_until(step, contents[name], paths[name], header)
      if name == "metrics.jsonl":
        last_line = contents[name].splitlines()[-1:]
        if not last_line or json.loads(last_line[0])["step"] != step:
          step -= 1  # the run writes all of this step again
    for file in samples.iterdir() if samples.exists() else ():
      match = _SAMPLE_FILE.fullmatch(file.name)
      if match and int(match[1]) > step:
        file.unlink()
  else:
    old = [paths[name] for name in headers if contents[name] != headers[name]]
    old += [samples] if samples.exists() else []
    for n in itertools.count(1):
      targets = [p.with_name(f"{p.name}.{n}") for p in old]
      if not any(target.exists() for target in targets):
        break
    for path, target in zip(old, targets, strict=True):
      path.rename(target)
    contents = headers
  return [RunFile(paths[name], contents[name]) for name in paths]


def _lines_until(
  step: int, content: bytes, path: epath.Path, header: bytes
) -> bytes:
  """`header` and the lines up to `step` of a file that began with it."""
  if content and not content.startswith(header):
    raise UserError(
      f"{path}, line 1: {content[:60]=}, expected the histogram edges of this "
      "version; move the file away"
    )
  lines = json_lines.parse(content.splitlines(), path, drop_partial=True)
  kept = [header]
  for where, record in itertools.islice(lines, bool(header), None):
    if step_of(record, where) <= step:
      kept.append(line(record))
  return b"".join(kept)


def step_of(record: Mapping[str, Any], place: str) -> int:
  step = record.get("step")
  if not (type(step) is int and 0 <= step < 2**53):  # exact as a float
    raise UserError(
      f"{place}: {str(record)[:60]}: expected a step; correct the line or move "
      "the file away"
    )
  return step


def counts_over_edges(name: str, values: Sized, edges: Sized) -> bool:
  """Whether it is a histogram: a model may have as many layers as bins."""
  by_layer = name.rpartition("/")[2].startswith("layer_")
  return len(values) == len(edges) - 1 and not by_layer


def line(record: Mapping[str, Any]) -> bytes:
  return json.dumps(record).encode() + b"\n"


def short_number(value: float) -> float | None:
  """An integer unchanged, else 6 digits; None if not finite."""
  if not math.isfinite(value):
    return None
  return int(value) if value == int(value) else float(f"{value:.6g}")


class Sample(NamedTuple):
  """One line of a sample file: a response and its reward."""

  step: int
  problem: str
  response: str
  reference: str
  reward: float


_SAMPLE_FILE = re.compile(r"step_(\d+)\.jsonl")


def write_samples(
  folder: epath.Path, step: int, samples: Sequence[Sample]
) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  lines = b"".join(line(sample._asdict()) for sample in samples)
  (folder / f"step_{step:06d}.jsonl").write_bytes(lines)


def read_samples(folder: epath.Path) -> dict[int, list[Sample]]:
  """The samples of a run by step; {} if the folder does not exist."""
  samples = {}
  for file in sorted(folder.iterdir()) if folder.exists() else ():
    if name := _SAMPLE_FILE.fullmatch(file.name):
      lines = json_lines.read(file, drop_partial=True)
      samples[int(name[1])] = [_sample(*line) for line in lines]
  return samples


def _sample(place: str, record: Mapping[str, Any]) -> Sample:
  try:
    sample = Sample(**record)
    return sample._replace(reward=float(sample.reward))
  except (TypeError, ValueError, OverflowError) as error:
    raise UserError(
      f"{place}: expected a sample with {', '.join(Sample._fields)}: {error}"
    ) from error


def printable(text: str, keep: str = "") -> str:
  """The text with escapes for characters that control a terminal."""
  return "".join(
    c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text
  )
