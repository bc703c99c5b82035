"""Writes a run's metrics: stdout, JSON lines, TensorBoard, W&B and samples.

Inside jit a metric is a sum and a count. `to_scalars` fetches the metrics of a
step and divides; `MetricWriter` writes the results:

metrics.jsonl             {"step": 12, "reward/mean": 0.53, ...}
distributions.jsonl       first {"edges": [...]}, N + 1 histogram edges; then
                          a line for each step: {"step": 12, "ratio/x":
                          [...]}, N counts, or one number for each layer in
                          distributions named layer_*
samples/step_000012.jsonl one sample a line: {"step", "problem", "response",
                          "reference", "reward"}
tensorboard/              the same numbers and texts as events
wandb/, wandb_id          of W&B, if used; see `wandb_run`
"""

import collections
import contextlib
import dataclasses
import math
import re
import socket
import struct
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from gspo_jax.losses import EDGES, Metric
from gspo_jax.record import json_lines, run_files
from gspo_jax.record.progress import Progress
from gspo_jax.record.run_files import (
  RunFile,
  Sample,
  counts_over_edges,
  line,
  open_run_files,
  short_number,
)
from gspo_jax.record.wandb_run import WandbRun
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import with_reason
from gspo_jax.runtime.key import ZERO_OR_MORE, Range, key


@dataclasses.dataclass(frozen=True)
class LogConfig:
  instruments: bool = key(
    True,
    "how far the routing moved (not with model.exact, where this alone would "
    "take a scoring pass), and histograms of ratios; False saves memory",
  )
  samples: int = key(
    4,
    "responses to write, every 10 iterations and after the last",
    ZERO_OR_MORE,
  )
  wandb: str = key("", 'a project in Weights & Biases; "": none')
  profile: tuple[int, ...] = key(
    (),
    "(first, last) iteration of a trace in <workdir>/profile; (): none",
    Range(
      "() for none, or the first and the last iteration, such as (10, 12)",
      lambda x: (
        len(x) in (0, 2)
        and all(type(i) is int and i >= 1 for i in x)
        and list(x) == sorted(x)
      ),
    ),
  )


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
  """Makes `import torch` fail: tensorboardX would load 470 MiB."""
  hides = "torch" not in sys.modules
  if hides:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as import allows
  try:
    yield
  finally:
    if hides:
      del sys.modules["torch"]


with _without_torch():
  from tensorboardX import record_writer, summary
  from tensorboardX.proto import event_pb2

# The columns of a stdout line: metric, label, width and format.
_COLUMNS = (
  ("reward/mean", "reward", 6, ".3f"),
  ("eval/avg@n", "avg@n", 6, ".3f"),  # for any n
  ("response/length", "len", 5, ".0f"),
  ("ratio/sequence_std", "ratio", 7, ".1e"),
  ("clip_frac/token", "clip", 5, ".1%"),
  ("throughput/tokens_per_second", "tok/s", 6, ".0f"),
)


def to_scalars(
  *metrics: Mapping[str, Metric],
) -> tuple[dict[str, float], dict[str, list[float]]]:
  """Fetches the metrics of a step in one transfer, and returns their values.

  Metrics with the same name are added. Returns scalars and distributions: the
  counts of a histogram, or one number for each layer. A mean of nothing is left
  out, such as that of a teacher without a problem in the batch.
  """
  totals: dict[str, Metric] = {}
  for part in jax.device_get([dict(m) for m in metrics]):
    for name, metric in part.items():
      if name in totals:
        metric = jax.tree.map(np.add, totals[name], metric)
      totals[name] = metric
  scalars: dict[str, float] = {}
  distributions: dict[str, list[float]] = {}
  for name, metric in totals.items():
    value = np.asarray(metric.value(), float)
    if value.ndim:
      distributions[name] = value.tolist()
    elif not (np.isnan(value) and getattr(metric, "count", 1) == 0):
      scalars[name] = float(value)
  return scalars, distributions


class MetricWriter(contextlib.AbstractContextManager["MetricWriter"]):
  """A context manager that writes the metrics of a run under `workdir`.

  Only the first process writes.

  Args:
    workdir: a folder, created if missing, or a bucket (gs://..., with gcsfs).
    total_steps: of the whole run, for the ETA.
    resume_step: the restored step k, or 0 for a new run. Lines and samples
      after k are deleted, and TensorBoard hides their events.
    wandb: the project in W&B; "" for none.
    config: all keys of the run, for W&B.

  Raises UserError if workdir cannot be written, W&B cannot be reached, or a
  line of a JSON-lines file, except the last, is not JSON.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    total_steps: int,
    resume_step: int,
    wandb: str = "",
    config: Mapping[str, Any] | None = None,
  ):
    self._total_steps = total_steps
    start = Progress.clock(), resume_step
    self._recent = collections.deque([start], maxlen=20)
    self._files: list[RunFile] = []
    self._wandb, self._last_row = None, math.inf
    if not multihost.is_primary():
      return
    workdir = epath.Path(workdir)
    self._samples = workdir / "samples"
    with with_reason(f"cannot write to {str(workdir)!r}"):
      self._metrics, self._distributions = open_run_files(
        workdir, resume_step, EDGES
      )
      rows = [row.record for row in json_lines.read(workdir / "metrics.jsonl")]
      self._goodput = _Goodput(rows)
      self._last_row = max((row["step"] for row in rows), default=-1)
      first = resume_step + (not self.lacks(resume_step))
      self._events = _open_events(workdir / "tensorboard", first)
      # metrics.jsonl is last: it gets a step's row after the other files.
      self._files = [self._distributions, self._events, self._metrics]
      if wandb:
        self._wandb = WandbRun(
          wandb, workdir, config or {}, resumes=resume_step > 0
        )

  def __exit__(self, kind, error, traceback) -> None:
    with contextlib.ExitStack() as closing:  # close all, even if one fails
      for file in self._files:
        closing.callback(file.close)
      if self._wandb:
        closing.callback(self._wandb.close, failed=kind is not None)

  def lacks(self, step: int) -> bool:
    """Whether the row of a step, which is written last, is missing."""
    return self._last_row < step

  def flush(self) -> None:
    """Uploads what was written, if the workdir is in a bucket."""
    for file in self._files:
      file.flush_to_bucket()

  def write(
    self,
    step: int,
    scalars: Mapping[str, float],
    distributions: Mapping[str, Sequence[float]] | None = None,
    samples: Sequence[tuple[str, str, str, float]] = (),
  ) -> None:
    """Writes a step: JSON lines, TensorBoard, W&B, samples and a stdout line.

    In JSON, NaN and infinities are null. With `time/iteration`, the step also
    gets `throughput/goodput` and the two times it is made of. `samples` are
    (problem, response, reference, reward); three are printed. In a bucket,
    samples also upload everything written before.
    """
    if not multihost.is_primary():
      return
    step, scalars = int(step), {k: float(v) for k, v in scalars.items()}
    if "time/iteration" in scalars:
      scalars |= self._goodput.after(scalars["time/iteration"])
    records = [Sample(step, *row[:3], float(row[3])) for row in samples]
    self._write_distributions(step, scalars, distributions or {})
    if records:
      self._write_samples(records)
    finite = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
    # Written last, because the process may be killed at any time; see `lacks`.
    self._metrics.append(line({"step": step, **finite}))
    if records:
      self.flush()
    self._print(step, scalars, records)

  def _write_distributions(self, step, scalars, distributions) -> None:
    if distributions:
      short = {k: list(map(short_number, d)) for k, d in distributions.items()}
      self._distributions.append(line({"step": step, **short}))
    histograms = {k: _counts_and_edges(k, d) for k, d in distributions.items()}
    value = [{"tag": k, "simple_value": v} for k, v in scalars.items()]
    value += [_histogram(k, *bins) for k, bins in histograms.items()]
    self._events.append(_event(step=step, summary={"value": value}))
    if self._wandb:
      self._wandb.write(step, scalars, histograms)

  def _print(self, step, scalars, samples) -> None:
    if self._recent[-1][1] == step:  # an evaluation before the first step
      self._recent.pop()
    self._recent.append((Progress.clock(), step))
    total = self._total_steps
    _print_line(
      f"{step:{len(str(total))}}/{total} {_columns(scalars)} "
      f"eta {_eta(self._recent, total):>8}"
    )
    for sample in samples[:3]:
      _print_line(
        f"  reward {sample.reward:g} | {_short(sample.problem, 32)} -> "
        f"{_short(sample.response, 44)} | want {_short(sample.reference, 12)}"
      )

  def _write_samples(self, samples: Sequence[Sample]) -> None:
    step = samples[0].step
    run_files.write_samples(self._samples, step, samples)
    fields = [field for s in samples for field in s._asdict().items()]
    text = "\n".join(f"{name}: {value}" for name, value in fields)
    # Four spaces make Markdown show a text as it is.
    text = textwrap.indent(run_files.printable(text, keep="\n\t"), "    ")
    content = summary.text("samples", text)
    self._events.append(_event(step=step, summary=content))


class _Goodput:
  """The share of a run's wall time that its iterations take.

  The wall time begins when the first start has loaded and done the cold start.
  It includes restarts. An iteration that a restart repeats counts once. `rows`
  are the rows of metrics.jsonl up to the step where the run resumes.
  """

  def __init__(self, rows: Iterable[Mapping[str, Any]]):
    # Within a process the monotonic clock; between processes the wall clock,
    # which may have been set back.
    self._began, self._iterations = time.monotonic(), 0.0
    rows = [row for row in rows if "time/since_start" in row]
    if rows:
      since_row = max(time.time() - rows[-1]["time/unix"], 0.0)
      self._began -= rows[-1]["time/since_start"] + since_row
      self._iterations = sum(row["time/iteration"] for row in rows)

  def after(self, iteration: float) -> dict[str, float]:  # seconds
    self._iterations += iteration
    since_start = time.monotonic() - self._began
    return {
      "time/unix": time.time(),
      "time/since_start": since_start,
      "throughput/goodput": self._iterations / max(since_start, 1e-9),
    }


def _counts_and_edges(
  name: str, values: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
  """Histogram counts and edges; the bar of layer l is from l to l + 1."""
  edges = np.arange(len(values) + 1.0)
  if counts_over_edges(name, values, EDGES):
    edges = np.clip(EDGES, 2 * EDGES[1], 2 * EDGES[-2])
  counts = np.nan_to_num(np.asarray(values, float), posinf=0.0, neginf=0.0)
  return counts, edges


def _histogram(
  name: str, counts: np.ndarray, edges: np.ndarray
) -> dict[str, Any]:
  # TensorBoard takes min and max as the outer edges of the non-empty bins.
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


def _open_events(folder: epath.Path, first_step: int) -> RunFile:
  # tensorboardX.SummaryWriter is not used: after one failed write its thread
  # ends and a later add_scalar blocks forever, and it names files by the
  # second, so a quick restart overwrites the previous file.
  folder.mkdir(parents=True, exist_ok=True)
  name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
  events = RunFile(folder / name, _event(file_version="brain.Event:2"))
  # TensorBoard hides events of earlier files from the step of a START event on.
  events.append(_event(step=first_step, session_log={"status": "START"}))
  return events


def _event(**fields) -> bytes:
  """An event as a TFRecord: length, its CRC, data, the CRC of the data."""
  event = event_pb2.Event(wall_time=time.time(), **fields)
  data = event.SerializeToString()
  length = struct.pack("<Q", len(data))
  crcs = [record_writer.masked_crc32c(part) for part in (length, data)]
  return length + struct.pack("<I", crcs[0]) + data + struct.pack("<I", crcs[1])


def _columns(scalars: Mapping[str, float]) -> str:
  scalars = {
    re.sub(r"^eval/avg@\d+$", "eval/avg@n", k): x for k, x in scalars.items()
  }
  return " ".join(
    f"{label} {format(scalars[k], spec) if k in scalars else '-':>{width}}"
    for k, label, width, spec in _COLUMNS
  )


def _eta(recent: Sequence[tuple[float, int]], total: int) -> str:
  """The time to the end at the recent pace; "-" before a step."""
  (first_time, first_step), (last_time, last_step) = recent[0], recent[-1]
  if first_step == last_step:
    return "-"
  pace = (last_time - first_time) / (last_step - first_step)
  minutes, seconds = divmod(round((total - last_step) * pace), 60)
  hours = f"{minutes // 60}:" if minutes >= 60 else ""
  return f"{hours}{minutes % 60:02}:{seconds:02}"


def _short(text: str, width: int) -> str:
  text, half = run_files.printable(text), (width - 3) // 2
  return text if len(text) <= width else f"{text[:half]}...{text[-half:]}"


def _print_line(text: str) -> None:
  # On an ASCII stdout a response in Chinese would raise and end the run.
  encoding = sys.stdout.encoding or "utf-8"
  text = text.encode(encoding, "backslashreplace").decode(encoding)
  print(text, flush=True)
