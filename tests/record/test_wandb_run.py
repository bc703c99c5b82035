"""What a run logs to Weights & Biases, in offline mode, and its errors."""

import json
import struct
import sys
import time
import types

import numpy as np
import pytest
from etils import epath
from processes import python

from gspo_jax.losses import EDGES
from gspo_jax.record import wandb_run
from gspo_jax.record.metric_writer import MetricWriter
from gspo_jax.runtime.errors import UserError

COUNTS = [1.0] + [0.0] * (len(EDGES) - 3) + [2.0]


def records_of(folder):
  """The records of a *.wandb file: blocks of 32 kB, as in a LevelDB log."""
  from wandb.proto import wandb_internal_pb2

  (file,) = folder.glob("*.wandb")
  data, at, whole = file.read_bytes(), 7, b""
  while at + 7 <= len(data):
    left = 2**15 - at % 2**15
    if left < 7:
      at += left
      continue
    _, size, kind = struct.unpack("<IHB", data[at : at + 7])
    if at + 7 + size > len(data):
      return  # the rest is not written so far
    whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
    if kind in (1, 4):  # the whole, or its last part
      yield wandb_internal_pb2.Record.FromString(whole)
      whole = b""


def logged(folder):
  """The run's id, name, project and config, and its rows."""
  rows, records, deadline = [], [], time.monotonic() + 30
  # wandb's own process writes the file, and has not ended.
  while not records or records[-1].WhichOneof("record_type") != "exit":
    assert time.monotonic() < deadline, "the file is not complete"
    time.sleep(0.01)
    records = list(records_of(folder))
  for record in records:
    kind = record.WhichOneof("record_type")
    if kind == "run":
      run = record.run
      config = {c.key: json.loads(c.value_json) for c in run.config.update}
      about = run.run_id, run.display_name, run.project, config
    if kind == "history":
      rows.append(
        {
          ".".join(item.nested_key) or item.key: json.loads(item.value_json)
          for item in record.history.item
        }
      )
  return about, rows


def test_a_run_and_its_resumption_are_one_run_in_wandb(tmp_path, monkeypatch):
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_CONSOLE", "off")
  monkeypatch.setenv("WANDB_SILENT", "true")
  workdir = tmp_path / "gsm8k"

  def write(steps, resume, learning_rate):
    with MetricWriter(
      workdir,
      total_steps=9,
      resume_step=resume,
      wandb="reasoning",
      config={"optim": {"learning_rate": learning_rate}},
    ) as writer:
      for step in steps:
        spread = {"ratio/x": COUNTS, "moe/layer_x": [0.5, 0.25]} if step else {}
        writer.write(step, {"reward/mean": step / 4}, spread)
    (folder,) = (workdir / "wandb").glob("offline-run-*")
    found = logged(folder)
    # The next one may begin in the same second and have the same name.
    folder.rename(tmp_path / str(resume))
    return found

  wandb_run.require_login("reasoning")
  first = write(range(4), 0, 0.5)
  resumed = write(range(3, 5), 2, 0.25)
  assert first[0][0] == resumed[0][0] == (workdir / "wandb_id").read_text()
  assert first[0][1:3] == ("gsm8k", "reasoning")
  assert first[0][3]["optim"] == {"learning_rate": 0.5}
  assert resumed[0][3]["optim"] == {"learning_rate": 0.25}
  assert [row["_step"] for row in first[1]] == [0, 1, 2, 3]
  assert [row["_step"] for row in resumed[1]] == [3, 4]
  assert [row["reward/mean"] for row in first[1]] == [0, 0.25, 0.5, 0.75]
  row = first[1][1]
  assert row["ratio/x.values"] == COUNTS
  np.testing.assert_allclose(row["ratio/x.bins"][1:-1], EDGES[1:-1])
  assert np.isfinite(row["ratio/x.bins"]).all()
  assert row["moe/layer_x.values"] == [0.5, 0.25]
  assert row["moe/layer_x.bins"] == [0, 1, 2]


def test_a_missing_package_is_an_error_with_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  words = r"^log\.wandb='p'.*pip install -e '\.\[wandb\]'"
  with pytest.raises(UserError, match=words):
    wandb_run.require_login("p")


def test_without_a_login_and_a_terminal_it_is_an_error_at_once(tmp_path):
  code = (
    "from gspo_jax.record import wandb_run\n"
    "try: wandb_run.require_login('p')\n"
    "except ValueError as error: print(error)"
  )
  env = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
  done = python("-c", code, env=env, input="", check=True)
  assert done.stdout.startswith("log.wandb='p': ")
  assert "`wandb login`" in done.stdout
  assert "WANDB_MODE=offline" in done.stdout


@pytest.fixture
def fake(monkeypatch):
  """A package whose run fails as the test says."""
  fake = types.ModuleType("wandb")
  fake.Histogram = lambda np_histogram: np_histogram
  fake.run = types.SimpleNamespace(step=0, finish=lambda exit_code: None)
  fake.init = lambda **options: fake.run
  monkeypatch.setitem(sys.modules, "wandb", fake)
  return fake


def fail(*_, **__):
  raise OSError("no such host")


def test_a_server_that_cannot_be_reached_is_an_error(fake, tmp_path):
  fake.init = fail
  with pytest.raises(UserError, match=r"^log\.wandb='p': no such host; .*off"):
    wandb_run.WandbRun("p", epath.Path(tmp_path), {}, resumes=False)


def test_a_run_that_begins_again_is_another_one_in_wandb(fake, tmp_path):
  ids = []
  fake.init = lambda **options: ids.append(options["id"])
  for resumes in (True, True, False):
    wandb_run.WandbRun("p", epath.Path(tmp_path), {}, resumes=resumes)
  assert ids[0] == ids[1] != ids[2]


def test_steps_are_logged_once_and_a_lost_one_does_not_end_the_run(
  fake, tmp_path, caplog
):
  steps = []
  fake.run.step = 4  # of the server
  fake.run.log = lambda row, step, commit: steps.append(step)
  run = wandb_run.WandbRun("p", epath.Path(tmp_path), {}, resumes=True)
  for step in range(2, 6):
    run.write(step, {"x": 1.0}, {})
  assert steps == [4, 5]
  fake.run.log, fake.run.step = fail, 3
  run.write(3, {"x": 1.0}, {})
  assert "step 3 is not in W&B: no such host" in caplog.text


def test_a_run_that_fails_has_failed_in_wandb(fake, tmp_path, caplog):
  codes = []
  fake.run.finish = lambda exit_code: codes.append(exit_code)
  writer = lambda: MetricWriter(
    tmp_path, total_steps=1, resume_step=0, wandb="p"
  )
  with writer():
    pass
  with pytest.raises(ArithmeticError), writer():
    raise ArithmeticError
  assert codes == [0, 1]
  fake.run.finish = fail
  with writer():
    pass
  assert "the end of the run is not in W&B: no such host" in caplog.text
