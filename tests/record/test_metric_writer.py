"""Files of metrics are complete and readable, also after a crash."""

import contextlib
import json
import math
import os
import re
import struct
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from processes import python
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from gspo_jax.losses import EDGES, Histogram
from gspo_jax.record import metric_writer, run_files
from gspo_jax.record.progress import Progress
from gspo_jax.runtime.errors import UserError

SCALARS = {
  "reward/mean": -0.5312, "eval/avg@8": 0.412, "response/length": 12345.6,
  "ratio/sequence_std": 2.14e-4, "clip_frac/token": 0.0013,
  "throughput/tokens_per_second": 123456.7, "grad/norm": 3.0,
}  # fmt: skip


def open_writer(folder, *, resume=0, total=100):
  return metric_writer.MetricWriter(
    folder, total_steps=total, resume_step=resume
  )


def run_steps(folder, steps, *, resume=0, tag="x"):
  with open_writer(folder, resume=resume) as writer:
    for step in steps:
      counts = [0.0] * 8 + [step + 1.0] + [0.0] * (len(EDGES) - 10)
      spread = {"ratio/x": counts, "moe/x": [step / 7, math.nan]}
      samples = [("q", f"{tag}{step}", "r", 1.0)]
      writer.write(step, {tag: step / 10}, spread, samples)


def records_of(folder, name="metrics.jsonl"):
  text = (folder / name).read_text()
  assert text == "" or text.endswith("\n")
  return [json.loads(line) for line in text.splitlines()]


def steps_of(folder, name):
  return [row["step"] for row in records_of(folder, name) if "step" in row]


def events_of(data):
  """Parses TFRecords by the definition of the format, with checksums."""
  events = []
  while data:
    length, length_crc = struct.unpack("<QI", data[:12])
    assert length_crc == masked_crc32c(data[:8])
    body, data = data[12 : 12 + length], data[12 + length :]
    (body_crc,) = struct.unpack("<I", data[:4])
    assert body_crc == masked_crc32c(body)
    events.append(event_pb2.Event.FromString(body))
    data = data[4:]
  return events


def tensorboard_values(folder):
  """(tag, step) -> value, without events that a later START hides."""
  shown = {}
  for file in sorted((folder / "tensorboard").iterdir()):
    assert "tfevents" in file.name
    first, *events = events_of(file.read_bytes())
    assert first.file_version == "brain.Event:2"
    for event in events:
      if event.session_log.status == event_pb2.SessionLog.START:
        shown = {k: v for k, v in shown.items() if k[1] < event.step}
      for value in event.summary.value:
        kind = value.WhichOneof("value")
        content = getattr(value, kind)
        content = content.string_val[0] if kind == "tensor" else content
        shown[value.tag, event.step] = content
  return shown


class Mean(NamedTuple):
  total: jax.Array
  count: jax.Array

  def value(self):
    return self.total / self.count if self.count else math.nan


def test_to_scalars_adds_and_divides_after_a_single_fetch(monkeypatch):
  calls, fetch = [], jax.device_get
  monkeypatch.setattr(
    jax, "device_get", lambda tree: calls.append(tree) or fetch(tree)
  )
  one, zero = jnp.float32(1), jnp.float32(0)
  first = {"a": Mean(one, 3 * one), "b": Mean(zero, zero)}
  layers = Mean(jnp.arange(3.0), jnp.float32(2))
  counts = Histogram(jnp.arange(len(EDGES) - 1.0))
  second = {"a": Mean(2 * one, 3 * one), "layers": layers, "counts": counts}
  got, spread = metric_writer.to_scalars(first, second)
  assert len(calls) == 1
  assert got["a"] == 0.5
  assert "b" not in got  # a mean of nothing
  assert all(type(v) is float for v in got.values())
  bins = list(range(len(EDGES) - 1))
  assert spread == {"layers": [0.0, 0.5, 1.0], "counts": bins}


def test_each_step_is_one_complete_line_at_once(tmp_path):
  values = {"reward/mean": 0.1 + 0.2, "b": np.float32(0.1), "c": jnp.int32(7)}
  with open_writer(tmp_path) as writer:
    for step in range(3):
      writer.write(step, values)
      rows = records_of(tmp_path)  # before close
      assert [row["step"] for row in rows] == list(range(step + 1))
  assert list(rows[-1]) == ["step", "reward/mean", "b", "c"]
  assert rows[-1]["reward/mean"] == 0.1 + 0.2
  assert np.float32(rows[-1]["b"]) == np.float32(0.1)
  assert rows[-1]["c"] == 7


def test_a_process_that_never_closes_loses_nothing(tmp_path):
  """Nor does training import torch, as tensorboardX would; users still can."""
  (tmp_path / "torch.py").write_text("print('imported')")
  code = (
    "import os, sys, gspo_jax.train; print('train'); import torch\n"
    "from gspo_jax.record.metric_writer import MetricWriter\n"
    "w = MetricWriter(sys.argv[1], total_steps=9, resume_step=0)"
    "\n"
    "w.write(1, {'x': 1.0}, {}, [('q', '\\u4e2d', 'r', 1.0)]); os._exit(0)"
  )
  env = {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
  env = os.environ | env | {"PYTHONPATH": str(tmp_path)}
  done = python("-c", code, tmp_path / "run", env=env, check=True)
  assert done.stdout.startswith("train\nimported\n")
  assert records_of(tmp_path / "run") == [{"step": 1, "x": 1.0}]
  assert tensorboard_values(tmp_path / "run")["x", 1] == 1.0
  # Neither is a line of stdout lost; an ASCII stdout does not end the run.
  assert "\\u4e2d" in done.stdout


def test_a_line_is_a_single_write(tmp_path, monkeypatch):
  with open_writer(tmp_path) as writer:
    size, write = [], writer._metrics._file.write
    proxy = type("File", (), {})()
    proxy.write = lambda data: size.append(len(data)) or write(data)
    proxy.flush, proxy.close = writer._metrics._file.flush, lambda: None
    file, writer._metrics._file = writer._metrics._file, proxy
    writer.write(1, {f"metric/{i}": i for i in range(1000)})
    file.close()
  assert size == [(tmp_path / "metrics.jsonl").stat().st_size]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_is_null(tmp_path, value, capsys):
  with open_writer(tmp_path) as writer:
    writer.write(1, {"reward/mean": value, "ok": 1.0})
  assert records_of(tmp_path) == [{"step": 1, "reward/mean": None, "ok": 1.0}]
  assert f"reward {value:6.3f}" in capsys.readouterr().out
  np.testing.assert_equal(tensorboard_values(tmp_path)["reward/mean", 1], value)


def test_tensorboard_has_counts_over_edges_and_a_bar_for_each_layer(tmp_path):
  counts = np.zeros(len(EDGES) - 1)
  counts[[0, 5, -1]] = 2, 3, 4
  spread = {"ratio/x": counts, "moe/x": [math.nan, 0.25, 0.5]}
  spread["moe/layer_x"] = np.full(len(EDGES) - 1, 0.5)  # as many as bins
  with open_writer(tmp_path) as writer:
    writer.write(1, {"x": 0.375}, spread)
  shown = tensorboard_values(tmp_path)
  edges = shown["moe/layer_x", 1].bucket_limit
  assert list(edges) == list(range(1, len(EDGES)))
  histogram, layers = shown["ratio/x", 1], shown["moe/x", 1]
  np.testing.assert_array_equal(histogram.bucket, counts)
  np.testing.assert_allclose(histogram.bucket_limit[:-1], EDGES[1:-1])
  assert histogram.num == 9
  # The outer edges are finite: twice the last finite one.
  assert (histogram.min, histogram.max) == (2 * EDGES[1], 2 * EDGES[-2])
  assert list(layers.bucket) == [0, 0.25, 0.5]
  assert list(layers.bucket_limit) == [1, 2, 3]
  assert (layers.min, layers.max) == (1, 3)  # the bins that are not empty


def test_a_resumed_run_writes_what_an_uninterrupted_one_does(tmp_path):
  run_steps(tmp_path / "a", range(13))
  run_steps(tmp_path / "b", range(11))
  run_steps(tmp_path / "b", range(8, 13), resume=7)
  for name in ("metrics.jsonl", "distributions.jsonl"):
    assert records_of(tmp_path / "b", name) == records_of(tmp_path / "a", name)
  a, b = map(tensorboard_values, (tmp_path / "a", tmp_path / "b"))
  assert b == a


def test_resume_drops_lines_and_samples_after_the_restored_step(tmp_path):
  run_steps(tmp_path, [1, 7, 8, 9, 1000000])
  kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines(True)[:2]
  (tmp_path / "samples" / "notes.txt").write_text("mine")
  with open_writer(tmp_path, resume=7):
    pass
  assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(kept)
  assert steps_of(tmp_path, "distributions.jsonl") == [1, 7]
  names = {p.name for p in (tmp_path / "samples").iterdir()}
  assert names == {"step_000001.jsonl", "step_000007.jsonl", "notes.txt"}
  assert {step for _, step in tensorboard_values(tmp_path)} == {1, 7}
  assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "distributions.jsonl"])
def test_a_partial_last_line_is_dropped(tmp_path, name):
  file, torn = tmp_path / name, b'{"step": 2, "x'
  run_steps(tmp_path, [1])
  whole = file.read_bytes()
  file.write_bytes(whole + torn)
  with open_writer(tmp_path, resume=2) as writer:
    assert file.read_bytes() == whole
    writer.write(3, {}, {"x": [1.0]})
  assert steps_of(tmp_path, name) == [1, 3]


@pytest.mark.parametrize(
  "line", ["garbage", "[1]", '{"x": 1}', '{"step": "1"}']
)
def test_an_invalid_line_is_an_error_and_nothing_is_lost(tmp_path, line):
  file = tmp_path / "metrics.jsonl"
  run_steps(tmp_path, [9])
  text = f'{{"step": 1}}\n{line}\n{{"step": 2}}\n'
  file.write_text(text)
  with pytest.raises(UserError, match=r"^\S+metrics\.jsonl:2: .*expected"):
    open_writer(tmp_path, resume=2)
  assert file.read_text() == text
  assert (tmp_path / "samples" / "step_000009.jsonl").exists()


@pytest.mark.parametrize("resume", [0, 2])
def test_counts_over_other_edges_are_not_mixed(tmp_path, resume):
  file = tmp_path / "distributions.jsonl"
  run_steps(tmp_path, [1, 2])
  text = '{"edges": [null, 0, null]}\n{"step": 1, "ratio/x": [1, 2]}\n'
  file.write_text(text)
  if resume:
    words = r"distributions\.jsonl, line 1: .*edges"
    with pytest.raises(UserError, match=words):
      open_writer(tmp_path, resume=resume)
    assert file.read_text() == text
    file.unlink()
  run_steps(tmp_path, [3], resume=resume)
  assert steps_of(tmp_path, "distributions.jsonl") == [3]


def test_resume_replaces_the_file_atomically(tmp_path, monkeypatch):
  # A whole last line without its newline is kept.
  (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}')
  run_steps(tmp_path, [3], resume=2)
  assert steps_of(tmp_path, "metrics.jsonl") == [1, 2, 3]
  before = (tmp_path / "metrics.jsonl").read_bytes()

  def crash(*_):
    raise OSError("power cut")

  monkeypatch.setattr(os, "replace", crash)
  with pytest.raises(OSError, match="power cut"):
    open_writer(tmp_path, resume=1)
  assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_new_run_moves_earlier_runs_aside(tmp_path):
  """Lines and samples of a run get the same number, also after one without."""
  with open_writer(tmp_path) as writer:
    writer.write(0, {})  # no samples
  for tag in "abc":
    run_steps(tmp_path, [0, 1], tag=tag)
  assert not (tmp_path / "samples.1").exists()
  for name, tag in ((".2", "a"), (".3", "b"), ("", "c")):
    rows = (tmp_path / f"metrics.jsonl{name}").read_text()
    assert [list(json.loads(r))[1] for r in rows.splitlines()] == [tag, tag]
    assert steps_of(tmp_path, f"distributions.jsonl{name}") == [0, 1]
    sample = tmp_path / f"samples{name}" / "step_000001.jsonl"
    assert f"{tag}1" in sample.read_text()
  tags = {tag for tag, _ in tensorboard_values(tmp_path)}
  assert tags == {"c", "ratio/x", "moe/x", "samples/text_summary"}


def last_line(capsys):
  return capsys.readouterr().out.splitlines()[-1]


def test_the_stdout_line_has_fixed_columns(tmp_path, capsys, monkeypatch):
  clock = iter([0.0, 0.0, 60.0, 3600.0 * 30 + 60])
  monkeypatch.setattr(metric_writer.time, "monotonic", lambda: next(clock))
  with open_writer(tmp_path, total=20000) as writer:
    writer.write(0, {"eval/pass@1": 0.25, "eval/avg@8": 0.5})
    first = last_line(capsys)
    writer.write(10000, SCALARS)
    second = last_line(capsys)
  assert first == (
    "    0/20000 reward      - avg@n  0.500 len     - ratio       -"
    " clip     - tok/s      - eta        -"
  )
  assert second == (
    "10000/20000 reward -0.531 avg@n  0.412 len 12346 ratio 2.1e-04"
    " clip  0.1% tok/s 123457 eta 30:00:00"
  )
  assert max(len(first), len(second)) < 100
  assert (first + second).isprintable()


def test_the_eta_follows_the_recent_pace(tmp_path, capsys, monkeypatch):
  now = 0.0
  monkeypatch.setattr(metric_writer.time, "monotonic", lambda: now)
  with open_writer(tmp_path, total=160) as writer:
    now = 1000.0  # the compilation
    for step in range(0, 101):
      writer.write(step, {})
      now += 500.0 if step < 10 else 2.0
  assert last_line(capsys).endswith("eta    02:00")


@pytest.mark.parametrize("resume", [0, 7])
def test_the_first_eta_comes_after_one_step_without_what_jax_compiled(
  tmp_path, capsys, monkeypatch, resume
):
  now = 0.0
  monkeypatch.setattr(metric_writer.time, "monotonic", lambda: now)
  monkeypatch.setattr(Progress, "compile_seconds", 0.0)
  with open_writer(tmp_path, resume=resume, total=resume + 4) as writer:
    if not resume:
      now, Progress.compile_seconds = 90.0, 80.0
      writer.write(0, {})  # an evaluation
      assert last_line(capsys).endswith("eta        -")
    now += 100.0
    Progress.compile_seconds += 95.0
    writer.write(resume + 1, {})
  assert last_line(capsys).endswith("eta    00:15")


def test_samples_are_readable_and_harmless(tmp_path, capsys):
  answer = "line 1\nline 2\x1b[2J\r\ud800 中文 " + "long " * 100 + "\\boxed{4}"
  rows = [("2+2?", answer, "4", 1.0)] + [("q", f"a{i}", "r", 0) for i in "123"]
  with open_writer(tmp_path) as writer:
    writer.write(10, {}, {}, rows)
  samples = run_files.read_samples(tmp_path / "samples")[10]
  assert samples == [(10, *row) for row in rows]
  _, *lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 3
  assert all(len(line) <= 120 and line.isprintable() for line in lines)
  assert "2+2?" in lines[0]
  assert "\\boxed{4} | want 4" in lines[0]
  shown = tensorboard_values(tmp_path)["samples/text_summary", 10].decode()
  assert "\n    line 2\\x1b[2J\\r" in shown


def test_a_second_process_writes_nothing(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(metric_writer.multihost, "is_primary", lambda: False)
  folder = tmp_path / "run"
  with open_writer(folder) as writer:
    writer.write(1, SCALARS, {"x": [1.0]}, [("q", "a", "r", 1.0)])
  assert not folder.exists()
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize("taken", ["run/tensorboard", "run/x/y"])
def test_an_unwritable_workdir_is_a_user_error(tmp_path, taken):
  workdir = tmp_path / "run" / ("x/y/z" if taken.endswith("y") else "")
  (tmp_path / taken).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / taken).write_text("a file is in the way")
  with pytest.raises(UserError) as error:
    open_writer(workdir)
  assert re.search(r"exists|not a directory", str(error.value), re.I)
  assert str(workdir) in str(error.value)
  assert "\n" not in str(error.value)


class Bucket(MemoryFileSystem):
  """A bucket like that of gcsfs: opening a file to append overwrites it."""

  protocol = ("gs", "gcs")
  store, pseudo_dirs = {}, [""]

  @classmethod
  def _strip_protocol(cls, path):
    path = re.sub("^gc?s:/", "", path)
    return "/" + path.strip("/") if path.strip("/") else ""

  def _open(self, path, mode="rb", **kwargs):
    return super()._open(path, mode.replace("a", "w"), **kwargs)


@pytest.fixture
def bucket(monkeypatch):
  """An empty bucket, and a clock that stands still until it is set."""
  now = [1000.0]
  Bucket.store.clear()
  monkeypatch.setattr(type(backend.fsspec_backend), "fs", lambda *_: Bucket())
  monkeypatch.setattr(run_files.time, "monotonic", lambda: now[0])
  return now


def contents(files):
  """Names and contents of the plain files, and the numbers of events."""
  plain = {k: v for k, v in files.items() if "tfevents" not in k}
  events = [len(events_of(files[k])) for k in sorted(files.keys() - plain)]
  return plain.keys(), plain, events


def test_a_bucket_holds_the_same_as_a_folder(tmp_path, bucket):
  for folder in ("gs://bucket/run", tmp_path):
    for tag in "ab":
      run_steps(folder, range(4), tag=tag)
    run_steps(folder, range(3, 6), resume=2, tag="b")
  local = {
    str(p.relative_to(tmp_path)): p.read_bytes()
    for p in tmp_path.rglob("*")
    if p.is_file()
  }
  uploaded = {
    name.removeprefix("/bucket/run/"): file.getvalue()
    for name, file in Bucket.store.items()
  }
  assert contents(uploaded) == contents(local)
  moved = {"metrics.jsonl.1", "distributions.jsonl.1"}
  assert moved | {"samples.1/step_000003.jsonl"} < contents(local)[0]


def steps_in_bucket(name):
  rows = Bucket.store[f"/bucket/run/{name}"].getvalue().splitlines()
  return [row["step"] for row in map(json.loads, rows) if "step" in row]


@pytest.mark.parametrize("name", ["metrics.jsonl", "distributions.jsonl"])
def test_a_bucket_gets_lines_at_intervals(bucket, name):
  """And the last ones at the end, also of a run that fails."""
  fails = contextlib.suppress(FloatingPointError)
  with fails, open_writer("gs://bucket/run") as writer:
    for step, (seconds, uploaded) in enumerate(
      ((0, []), (29, []), (1, [1, 2, 3]), (29, [1, 2, 3]), (40, [*range(1, 6)]))
    ):
      bucket[0] += seconds
      writer.write(step + 1, {"x": 1.0}, {"x": [1.0]})
      assert steps_in_bucket(name) == uploaded
    # Samples upload all earlier lines, too.
    writer.write(6, {"x": 1.0}, {"x": [1.0]}, [("q", "a", "r", 1.0)])
    assert steps_in_bucket(name) == [*range(1, 7)]
    writer.write(7, {"x": 1.0}, {"x": [1.0]})
    assert steps_in_bucket(name) == [*range(1, 7)]
    raise FloatingPointError
  assert steps_in_bucket(name) == [*range(1, 8)]


def test_a_step_without_its_row_is_written_again_as_a_whole(tmp_path):
  """The row comes last: the run was killed before."""
  run_steps(tmp_path, [1, 2, 3])
  with open_writer(tmp_path, resume=3) as writer:
    assert not writer.lacks(3)
  rows = (tmp_path / "metrics.jsonl").read_bytes().splitlines(True)
  (tmp_path / "metrics.jsonl").write_bytes(b"".join(rows[:2]))
  with open_writer(tmp_path, resume=3) as writer:
    assert writer.lacks(3)
    assert sorted(run_files.read_samples(tmp_path / "samples")) == [1, 2]
  run_steps(tmp_path, [3], resume=3)
  for name in ("metrics.jsonl", "distributions.jsonl"):
    assert steps_of(tmp_path, name) == [1, 2, 3]


@pytest.mark.parametrize("set_back", [0, 86400])
def test_goodput_counts_restarts_and_each_iteration_once(
  tmp_path, monkeypatch, set_back
):
  """Also where somebody sets the clock of the wall back while a run goes on."""
  now, offset = [50.0], [1e9]
  monkeypatch.setattr(metric_writer.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(metric_writer.time, "time", lambda: now[0] + offset[0])

  def iterate(resume, steps, seconds):
    with open_writer(tmp_path, resume=resume) as writer:
      if not resume:
        writer.write(0, {"eval/pass@1": 0.0})
      for step in steps:
        now[0] += 2 * seconds  # half of it in the iteration
        writer.write(step, {"time/iteration": seconds})
        offset[0] -= set_back * (step in (1, 3))
    rows = records_of(tmp_path)
    assert "time/unix" not in rows[0]
    return [row["throughput/goodput"] for row in rows[1:]]

  assert iterate(0, [1, 2, 3], 10) == [0.5] * 3
  now[0] += 40  # until the restart after step 2
  # 20 s of the 60 before, none of the 40 between, 10 of each 20 after. A clock
  # that was set back does not tell how long it was until the restart.
  expected = [0.5, 0.5, 30 / 120, 40 / 140]
  if set_back:
    expected[2:] = 30 / 60, 40 / 80
  assert iterate(2, [3, 4], 10) == pytest.approx(expected)


def test_a_bucket_without_its_package_is_a_user_error(monkeypatch):
  monkeypatch.setitem(sys.modules, "gcsfs", None)
  with pytest.raises(UserError, match=r"gs://bucket/other.*gcsfs"):
    open_writer("gs://bucket/other")
