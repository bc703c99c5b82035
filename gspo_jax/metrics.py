"""How numbers leave the program: stdout, JSON lines, TensorBoard, samples.

Inside jit a metric is a sum and a count. `finish` fetches a step's worth of
them and divides; `Writer` puts the quotients where people and programs look:

  metrics.jsonl             {"step": 12, "reward/mean": 0.53, ...}
  samples/step_000012.txt   what the policy was asked, answered, and earned
  tensorboard/              the same numbers and texts as events
"""

import collections
import io
import itertools
import json
import math
import re
import socket
import struct
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath
from tensorboardX import record_writer, summary
from tensorboardX.proto import event_pb2

from gspo_jax.errors import UserError

# The scalars of a stdout line: name, label, width and format.
_COLUMNS = (
  ("reward/mean", "reward", 6, ".3f"),
  ("eval/pass@1", "pass@1", 5, ".3f"),
  ("response/length", "len", 5, ".0f"),
  ("ratio/sequence_std", "ratio", 7, ".1e"),
  ("clip_frac/token", "clip", 7, ".2%"),
  ("time/iteration", "s/it", 6, ".1f"),
)


def finish(metrics: Mapping[str, Any]) -> dict[str, float]:
  """One transfer for all of a step's metrics, then each one's `.value()`."""
  fetched = jax.device_get(dict(metrics))
  return {name: float(metric.value()) for name, metric in fetched.items()}


class Writer:
  """Writes a run's numbers under `workdir`; a context manager.

  Args:
    workdir: a folder, made if missing, or a bucket (gs://..., with gcsfs).
    total_steps: steps of the whole run, for the progress bar and the ETA.
    resume_step: the restored step k, or 0 for a fresh start. A resumed run
      writes its steps k+1, k+2, ... again, so their rows and samples go, and
      TensorBoard hides their events. A fresh start moves an earlier run's rows
      and samples to metrics.jsonl.N and samples.N, N the next free number.
    active: False makes every method a no-op: `jax.process_index() == 0`.

  Raises:
    UserError: workdir cannot be written, or a row of metrics.jsonl but the last
      (a crash may have cut that one short: it is dropped) is not JSON.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    total_steps: int,
    resume_step: int,
    active: bool = True,
  ):
    self._active, self._total_steps = active, total_steps
    self._began, self._recent = time.monotonic(), collections.deque(maxlen=20)
    if not active:
      return
    workdir = epath.Path(workdir)
    self._samples = workdir / "samples"
    try:
      kept = _earlier_run(workdir, resume_step)
      self._rows = _Log(workdir / "metrics.jsonl", kept)
      self._events = _open_events(workdir / "tensorboard", resume_step)
    except UserError:
      raise
    except Exception as e:  # gcsfs has an HttpError that is no OSError
      cause = " ".join(f"{type(e).__name__}: {e}".split())
      raise UserError(f"cannot write to {str(workdir)!r}: {cause}") from e

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *exception) -> None:
    if self._active:
      self._rows.close()
      self._events.close()

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """A JSON line (NaN and infinities as null), an event, a stdout line."""
    if not self._active:
      return
    step, scalars = int(step), {k: float(v) for k, v in scalars.items()}
    row = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
    self._rows.append(json.dumps({"step": step, **row}).encode() + b"\n")
    value = [{"tag": k, "simple_value": v} for k, v in scalars.items()]
    self._events.append(_event(step=step, summary={"value": value}))
    self._recent.append((time.monotonic(), step))
    elapsed = self._recent[-1][0] - self._began
    left = _seconds_left(self._recent, self._total_steps)
    _say(
      f"{_progress(step, self._total_steps)} {_columns(scalars)} "
      f"{_clock(elapsed):>7} eta {_clock(left):>8}"
    )

  def samples(
    self, step: int, rows: Sequence[tuple[str, str, str, float]]
  ) -> None:
    """Rows of question, answer, reference, reward: a file, 3 of them to stdout.

    Control characters are escaped: an answer is what a policy made up.
    """
    if not self._active:
      return
    text = ""
    for i, (question, answer, reference, reward) in enumerate(rows, 1):
      text += f"---- {i} of {len(rows)}, step {step}, reward {reward:g}\n"
      for label, part in (("question", question), ("answer", answer)):
        text += f"{label}:\n" + _printable(part, keep="\n\t") + "\n"
      text += f"reference: {_printable(reference)}\n\n"
      if i <= 3:
        _say(
          f"  reward {reward:g} | {_short(question, 32)} -> "
          f"{_short(answer, 44)} | want {_short(reference, 12)}"
        )
    self._samples.mkdir(parents=True, exist_ok=True)
    (self._samples / f"step_{step:06d}.txt").write_bytes(text.encode())
    # TensorBoard reads Markdown: four spaces make it show the text as it is.
    code = summary.text("samples", textwrap.indent(text, "    "))
    self._events.append(_event(step=int(step), summary=code))


class _Log:
  """A file that grows, whole lines (or events) at a time."""

  def __init__(self, path: epath.Path, kept: bytes):
    # gcsfs opens "ab" as "wb" (fsspec/gcsfs#533): in a bucket the whole object
    # is held here and put again at each append.
    self._bucket = path if "://" in str(path) else None
    if self._bucket:
      self._file = io.BytesIO()
      self.append(kept)
    else:
      temporary = path.with_name(path.name + ".tmp")
      temporary.write_bytes(kept)
      self._file = temporary.replace(path).open("ab")

  def append(self, data: bytes) -> None:
    self._file.write(data)
    self._file.flush()
    if self._bucket:
      self._bucket.write_bytes(self._file.getvalue())

  def close(self) -> None:
    self._file.close()


def _earlier_run(workdir: epath.Path, resume_step: int) -> bytes:
  """Clears what the run will write again; the rows of metrics.jsonl to keep."""
  workdir.mkdir(parents=True, exist_ok=True)
  path, samples = workdir / "metrics.jsonl", workdir / "samples"
  rows = path.read_bytes() if path.exists() else b""
  if not resume_step:
    _set_aside(([path] if rows else []) + [p for p in [samples] if p.exists()])
    return b""
  kept = _rows_until(resume_step, rows, path)
  for file in samples.iterdir() if samples.exists() else ():
    name = re.fullmatch(r"step_(\d+)\.txt", file.name)
    if name and int(name[1]) > resume_step:
      file.unlink()
  return kept


def _set_aside(paths: Sequence[epath.Path]) -> None:
  for n in itertools.count(1):
    targets = [p.with_name(f"{p.name}.{n}") for p in paths]
    if not any(target.exists() for target in targets):
      break
  for path, target in zip(paths, targets, strict=True):
    path.rename(target)


def _rows_until(step: int, rows: bytes, path: epath.Path) -> bytes:
  lines, kept = rows.splitlines(), []
  for n, line in enumerate(lines, 1):
    try:
      if json.loads(line)["step"] <= step:
        kept.append(line + b"\n")
    except (ValueError, KeyError, TypeError) as e:
      if n < len(lines):
        raise UserError(
          f"{path}, line {n}: {line[:60]=}, expected a JSON object with a "
          "step; mend the line or move the file away"
        ) from e
  return b"".join(kept)


def _open_events(folder: epath.Path, resume_step: int) -> _Log:
  # Not tensorboardX.SummaryWriter: when its thread fails to write once, it dies
  # and a later add_scalar blocks forever; and it names files by the second, so
  # that a quick restart overwrites its predecessor's.
  folder.mkdir(parents=True, exist_ok=True)
  name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
  events = _Log(folder / name, _event(file_version="brain.Event:2"))
  # TensorBoard hides earlier files' events from the step of a START on.
  step = resume_step + 1 if resume_step else 0
  events.append(_event(step=step, session_log={"status": "START"}))
  return events


def _event(**fields) -> bytes:
  """An event as a TFRecord: length, its CRC, data, its CRC."""
  event = event_pb2.Event(wall_time=time.time(), **fields)
  data = event.SerializeToString()
  length = struct.pack("<Q", len(data))
  crcs = [record_writer.masked_crc32c(part) for part in (length, data)]
  return length + struct.pack("<I", crcs[0]) + data + struct.pack("<I", crcs[1])


def _progress(step: int, total: int) -> str:
  done = min(8 * step // max(total, 1), 8)
  return f"{step:{len(str(total))}}/{total} {'#' * done:.<8}"


def _columns(scalars: Mapping[str, float]) -> str:
  return " ".join(
    f"{label} {format(scalars[k], spec) if k in scalars else '-':>{width}}"
    for k, label, width, spec in _COLUMNS
  )


def _seconds_left(recent: Sequence[tuple[float, int]], total: int) -> float:
  """Seconds to the end at the pace of the recent steps; NaN before any."""
  (then, first), (now, last) = recent[0], recent[-1]
  if first == last:
    return math.nan
  return (total - last) * (now - then) / (last - first)


def _clock(seconds: float) -> str:
  if math.isnan(seconds):
    return "-"
  minutes, seconds = divmod(round(seconds), 60)
  hours = f"{minutes // 60}:" if minutes >= 60 else ""
  return f"{hours}{minutes % 60:02}:{seconds:02}"


def _printable(text: str, keep: str = "") -> str:
  return "".join(
    c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text
  )


def _short(text: str, width: int) -> str:
  text, half = _printable(text), (width - 3) // 2
  return text if len(text) <= width else f"{text[:half]}...{text[-half:]}"


def _say(line: str) -> None:
  # On an ASCII stdout an answer in Chinese would end the run.
  encoding = sys.stdout.encoding or "utf-8"
  line = line.encode(encoding, "backslashreplace").decode(encoding)
  print(line, flush=True)
