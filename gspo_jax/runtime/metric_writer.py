"""How numbers leave the program: stdout, JSON lines, TensorBoard, samples.

Inside jit a metric is a sum and a count. `finish` fetches a step's worth of
them and divides; `Writer` puts the quotients where people and programs look:

  metrics.jsonl             {"step": 12, "reward/mean": 0.53, ...}
  distributions.jsonl       {"edges": [...]}, then as many counts less one, or
                            a number a layer where the name begins with
                            layer_: {"step": 12, "moe/layer_x": [...], ...}
  samples/step_000012.txt   what the policy was asked, answered, and earned
  tensorboard/              the same numbers and texts as events
"""

import collections
import contextlib
import math
import socket
import struct
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from tensorboardX import record_writer, summary
from tensorboardX.proto import event_pb2

from gspo_jax.losses import EDGES
from gspo_jax.runtime import run_files
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.run_files import (
  RunFile,
  counts_over_edges,
  line,
  open_run_files,
  short_number,
)

# The scalars of a stdout line: name, label, width and format.
_COLUMNS = (
  ("reward/mean", "reward", 6, ".3f"),
  ("eval/pass@1", "pass@1", 5, ".3f"),
  ("response/length", "len", 5, ".0f"),
  ("ratio/sequence_std", "ratio", 7, ".1e"),
  ("clip_frac/token", "clip", 7, ".2%"),
  ("time/iteration", "s/it", 6, ".1f"),
)


def to_scalars(
  *metrics: Mapping[str, Any],
) -> tuple[dict[str, float], dict[str, list[float]]]:
  """One transfer for all of a step's metrics, then each one's `.value()`.

  Those of one name are added up first.

  Returns:
    Scalars, and distributions: a histogram's counts, or a number a layer.
  """
  scalars, distributions = {}, {}
  sums = {}
  for part in jax.device_get([dict(m) for m in metrics]):
    for name, metric in part.items():
      known = sums.get(name)
      add = lambda: jax.tree.map(np.add, known, metric)  # noqa: B023
      sums[name] = metric if known is None else add()
  for name, metric in sums.items():
    value = np.asarray(metric.value())
    kind = distributions if value.ndim else scalars
    kind[name] = value.astype(float).tolist()
  return scalars, distributions


class MetricWriter:
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
    UserError: workdir cannot be written, or a row of a log but the last (a
      crash may have cut that one short: it is dropped) is not JSON.
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
    self._logs: list[RunFile] = []
    if not active:
      return
    workdir = epath.Path(workdir)
    self._samples = workdir / "samples"
    try:
      self._rows, self._distributions = open_run_files(workdir, resume_step)
      self._events = _open_events(workdir / "tensorboard", resume_step)
      self._logs = [self._rows, self._distributions, self._events]
    except UserError:
      raise
    except Exception as e:  # gcsfs has an HttpError that is no OSError
      cause = " ".join(f"{type(e).__name__}: {e}".split())
      raise UserError(f"cannot write to {str(workdir)!r}: {cause}") from e

  def __enter__(self) -> "MetricWriter":
    return self

  def __exit__(self, *exception) -> None:
    with contextlib.ExitStack() as closing:  # each, whatever another raises
      for log in self._logs:
        closing.callback(log.close)

  def write(
    self,
    step: int,
    scalars: Mapping[str, float],
    distributions: Mapping[str, Sequence[float]] | None = None,
  ) -> None:
    """JSON lines (NaN and infinities as null), an event, a stdout line."""
    if not self._active:
      return
    step, scalars = int(step), {k: float(v) for k, v in scalars.items()}
    row = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
    self._rows.append(line({"step": step, **row}))
    if distributions:
      row = {k: [short_number(v) for v in d] for k, d in distributions.items()}
      self._distributions.append(line({"step": step, **row}))
    value = [{"tag": k, "simple_value": v} for k, v in scalars.items()]
    value += [_histogram(k, d) for k, d in (distributions or {}).items()]
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

    What was written before comes to a bucket with them.
    """
    if not self._active:
      return
    for question, answer, reference, reward in rows[:3]:
      _say(
        f"  reward {reward:g} | {_short(question, 32)} -> "
        f"{_short(answer, 44)} | want {_short(reference, 12)}"
      )
    text = run_files.format_samples(step, rows)
    self._samples.mkdir(parents=True, exist_ok=True)
    (self._samples / f"step_{step:06d}.txt").write_bytes(text.encode())
    # TensorBoard reads Markdown: four spaces make it show the text as it is.
    code = summary.text("samples", textwrap.indent(text, "    "))
    self._events.append(_event(step=int(step), summary=code))
    for log in self._logs:
      log.send()


def _histogram(name: str, values: Sequence[float]) -> dict[str, Any]:
  """Counts over EDGES, or a profile: the number of layer l from l to l + 1."""
  edges = np.arange(len(values) + 1.0)
  if counts_over_edges(name, values, EDGES):
    edges = np.clip(EDGES, 2 * EDGES[1], 2 * EDGES[-2])
  counts = np.nan_to_num(np.asarray(values, float), posinf=0.0, neginf=0.0)
  # TensorBoard takes them for the outer edges of the outermost filled bins.
  filled = np.flatnonzero(counts) if counts.any() else np.arange(len(counts))
  middles = (edges[1:] + edges[:-1]) / 2
  histogram = {
    "min": edges[filled[0]],
    "max": edges[filled[-1] + 1],
    "num": counts.sum(),
    "sum": counts @ middles,
    "sum_squares": counts @ middles**2,
    "bucket_limit": edges[1:],
    "bucket": counts,
  }
  return {"tag": name, "histo": histogram}


def _open_events(folder: epath.Path, resume_step: int) -> RunFile:
  # Not tensorboardX.SummaryWriter: when its thread fails to write once, it dies
  # and a later add_scalar blocks forever; and it names files by the second, so
  # that a quick restart overwrites its predecessor's.
  folder.mkdir(parents=True, exist_ok=True)
  name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
  events = RunFile(folder / name, _event(file_version="brain.Event:2"))
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


def _short(text: str, width: int) -> str:
  text, half = run_files.printable(text), (width - 3) // 2
  return text if len(text) <= width else f"{text[:half]}...{text[-half:]}"


def _say(text: str) -> None:
  # On an ASCII stdout an answer in Chinese would end the run.
  encoding = sys.stdout.encoding or "utf-8"
  text = text.encode(encoding, "backslashreplace").decode(encoding)
  print(text, flush=True)
