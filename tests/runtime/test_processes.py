"""Several processes do what one does, and end together.

Real ones, each with virtual CPU devices of its own. XLA optimises little here:
compiling is most of the time, and process 1 always compiles, since only process
0 writes JAX's cache and on CPUs the two look for different entries.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from repository import ROOT

from configs import tiny_cpu
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.checkpoint import Checkpoints

STEPS = 4
MAIN = (*("-u", "-m", "gspo_jax.main"), "--config=configs/tiny_cpu.py:debug")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
  return os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  }


class Job:
  """Processes, each with its log; `commands` holds the arguments of each."""

  def __init__(self, commands, logs, environment, devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    logs.mkdir(parents=True)
    self.logs = [logs / str(i) for i in range(len(commands))]
    self.processes = []
    for command, log in zip(commands, self.logs, strict=True):
      with log.open("w") as file:
        self.processes.append(
          subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env=environment | {"XLA_FLAGS": flags},
            stdout=file,
            stderr=subprocess.STDOUT,
          )
        )

  def texts(self):
    return [log.read_text() for log in self.logs]

  def wait_for(self, text, seconds=120):
    """Until process 0 has printed `text`."""
    end = time.monotonic() + seconds
    while text not in self.logs[0].read_text():
      assert time.monotonic() < end, self.texts()
      assert self.processes[0].poll() is None, self.texts()
      time.sleep(0.05)

  def finish(self, code=0, seconds=240):
    codes = [process.wait(seconds) for process in self.processes]
    assert codes == [code] * len(codes), "\n".join(self.texts())
    return self.texts()


def free_port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


@pytest.fixture(scope="module")
def launch(environment, tmp_path_factory):
  """Starts the command as `count` processes; all are dead at the end.

  `only` holds flags for one process; keywords are overrides, __ for a dot.
  """
  with contextlib.ExitStack() as stack:

    def launch(count, workdir, *, devices=1, only=None, **overrides):
      port, commands = free_port(), []
      shared = [
        f"--config.{k.replace('__', '.')}={v}" for k, v in overrides.items()
      ]
      for i in range(count):
        flags = [f"--workdir={workdir}", *shared, *(only or {}).get(i, ())]
        if count > 1:
          flags += [f"--coordinator=127.0.0.1:{port}", f"--process_id={i}"]
          flags += [f"--num_processes={count}"]
        commands.append([*MAIN, *flags])
      logs = tmp_path_factory.mktemp("logs") / "job"
      job = Job(commands, logs, environment, devices)
      for process in job.processes:
        stack.callback(process.kill)
      return job

    yield launch


@pytest.fixture(scope="module")
def reference(launch, tmp_path_factory):
  """The workdir of an uninterrupted run of one process on one device."""
  workdir = tmp_path_factory.mktemp("reference")
  launch(1, workdir).finish()
  return workdir


def rows(workdir):
  """The rows of metrics.jsonl, without what depends on the clock."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  timed = ("time/", "throughput/")
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(timed)}
    for line in lines
  ]


def final_params(workdir):
  mesh = sharding.make_mesh(jax.devices()[:1])
  abstract = build_program(parse(tiny_cpu.get_config("debug")), mesh).abstract
  with Checkpoints(workdir / "checkpoints", every=1, keep=9) as checkpoints:
    restored = checkpoints.restore(
      {"params": abstract.params}, lambda *_: None, part=True
    )
  assert restored.step == STEPS
  return jax.tree.leaves(restored.state)


def assert_same_run(workdir, reference, atol=1e-5):
  """The same tokens, hence the same answers; else equal up to rounding.

  Parameters were seen to differ by up to 4e-6 after RL alone.
  """
  found, expected = rows(workdir), rows(reference)
  assert [row["step"] for row in found] == list(range(STEPS + 1))
  assert any(row.get("grad/norm", 0) > 0 for row in expected)
  for row, should in zip(found, expected, strict=True):
    row.pop("ratio/moved", None)  # counts ratios that are not exactly 1
    should.pop("ratio/moved", None)
    assert row == pytest.approx(should, rel=0, abs=5e-6)
    for name in should:
      if name.startswith(("eval/", "reward/", "response/")):
        assert row[name] == should[name], name
  for a, b in zip(final_params(workdir), final_params(reference), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def assert_same_samples(workdir, reference):
  """Of process 0's rows: as many as it is to show, or all it holds."""
  for step in (2, STEPS):
    name = f"samples/step_{step:06d}.txt"
    assert (workdir / name).read_text() == (reference / name).read_text()


@pytest.mark.parametrize(
  ("count", "devices", "mesh"),
  [
    (2, 1, {}),
    pytest.param(2, 2, {"mesh__fsdp": 2}, marks=pytest.mark.slow),
    pytest.param(2, 2, {"mesh__expert": 4}, marks=pytest.mark.slow),
    # Both processes hold all the rows.
    pytest.param(2, 1, {"mesh__tensor": 2}, marks=pytest.mark.slow),
  ],
)
def test_processes_do_what_one_does(
  launch, reference, tmp_path, count, devices, mesh
):
  cold = {"cold_start__dir": reference / "cold_start"}
  first, second = launch(
    count, tmp_path, devices=devices, **cold, **mesh
  ).finish()
  assert "4/4" in first
  assert "/4 " not in second
  assert_same_run(tmp_path, reference)
  if devices == 1:
    assert_same_samples(tmp_path, reference)


@pytest.mark.slow
def test_all_that_can_be_added_on_two_processes(launch, reference, tmp_path):
  added = {
    "cold_start__dir": reference / "cold_start",
    "objective__kl_coef": 0.1,
    "objective__reference_every": 2,
    "objective__replay": "r3",
    "data__refill_rounds": 3,
    "data__history": True,
  }
  launch(1, tmp_path / "one", **added).finish()
  launch(2, tmp_path / "two", **added).finish()
  assert rows(tmp_path / "one")[1]["refill/rounds"] > 1
  assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"mesh__tensor": 2}])
def test_answers_that_wait_on_two_processes(launch, reference, tmp_path, mesh):
  """Refill, verification while others decode, cut answers, a batch ahead."""
  added = {
    "cold_start__dir": reference / "cold_start",
    **{"paging__slots": 16, "paging__page": 4, "paging__chunk": 8},
    **{"rollout__budget": 6, "rollout__spare": 2, "rollout__ahead": True},
  }
  launch(1, tmp_path / "one", devices=2, **added, **mesh).finish()
  launch(2, tmp_path / "two", **added, **mesh).finish()
  assert any(row["rollout/continued"] for row in rows(tmp_path / "one")[1:])
  assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_refill_on_two_processes(launch, reference, tmp_path):
  added = {
    "cold_start__dir": reference / "cold_start",
    **{"paging__slots": 16, "paging__page": 4, "paging__chunk": 8},
    "data__refill_rounds": 2,
  }
  launch(1, tmp_path / "one", devices=2, **added).finish()
  launch(2, tmp_path / "two", **added).finish()
  assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_the_cold_start_of_two_processes(launch, reference, tmp_path):
  """Stopped in the middle by a SIGTERM, which must not wait for RL."""
  job = launch(2, tmp_path)
  job.wait_for("cold start   50/100")
  job.processes[1].send_signal(signal.SIGTERM)
  first, _ = job.finish(code=75)
  assert "SIGTERM: cold start saved" in first
  launch(2, tmp_path).finish()
  assert_same_run(tmp_path, reference, atol=1e-4)  # a hundred steps more: 3e-5


@pytest.fixture(scope="module")
def stopped(launch, reference, tmp_path_factory):
  """The workdir of two processes, one of which was sent a SIGTERM."""
  workdir = tmp_path_factory.mktemp("stopped")
  cold = {"cold_start__dir": reference / "cold_start"}
  job = launch(2, workdir, checkpoint__every=100, **cold)
  job.wait_for("0/4")
  job.processes[1].send_signal(signal.SIGTERM)
  first, _ = job.finish(code=75)
  assert "SIGTERM: saved after step" in first
  return workdir


@pytest.mark.parametrize(
  "count", [1, 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_sigterm_to_one_stops_all_and_any_number_resume(
  launch, reference, stopped, tmp_path, count
):
  shutil.copytree(stopped, tmp_path / "run")
  cold = {"cold_start__dir": reference / "cold_start"}
  out = launch(count, tmp_path / "run", **cold).finish()[0]
  assert "resumed after step" in out
  assert_same_run(tmp_path / "run", reference)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_death_of_one_ends_the_others(launch, tmp_path, victim):
  job = launch(2, tmp_path)
  job.wait_for("Gloo")  # then they have met
  job.processes[victim].kill()
  began = time.monotonic()
  assert job.processes[1 - victim].wait(120) != 0
  assert time.monotonic() - began < 60


@pytest.mark.parametrize(
  ("only", "words"),
  [
    (["--config.seed=1"],
     "config.seed is not the same everywhere: process 1 has another than "
     "process 0"),
    (["--config.data.source=jsonl:no.jsonl"],
     "process 1: data file 'no.jsonl': No such file or directory"),
    (["--workdir={tmp}/other"], "is not one folder for all hosts"),
  ],
  ids=["seed", "data", "workdir"],
)  # fmt: skip
def test_a_mistake_on_one_is_told_once(launch, tmp_path, only, words):
  flags = [flag.format(tmp=tmp_path) for flag in only]
  first, second = launch(2, tmp_path / "run", only={1: flags}).finish(code=2)
  line = first.strip().splitlines()[-1]
  assert line.startswith("error: ")
  assert words in line
  assert "error" not in second


@pytest.mark.slow
def test_a_reward_that_fails_stops_all(launch, reference, tmp_path):
  flags = {"cold_start__dir": reference / "cold_start"}
  flags["reward__names"] = "('operator.setitem',)"  # texts do not take it
  first, second = launch(2, tmp_path, **flags).finish(code=2)
  line = first.strip().splitlines()[-1]
  assert line.startswith("error: the held-out questions: 32 of 32 answers")
  assert "TypeError: 'str' object" in line
  assert "error:" not in second


DAMAGE = """
import pathlib, sys, time, jax, numpy as np
from gspo_jax import hosts
from gspo_jax.runtime.checkpoint import Checkpoints
from jax.sharding import NamedSharding, PartitionSpec as P
hosts.start(sys.argv[1], 2, int(sys.argv[2]))
mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, P("x"))
make = lambda step: hosts.lay(
  {"w": np.arange(2 ** 16, dtype=np.float32).reshape(2, -1) + step}, rows)
like = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), make(0))
with Checkpoints(sys.argv[3], every=1, keep=9) as checkpoints:
  for step in (1, 2):
    checkpoints.save(step, make(step), {})
hosts.meet()
folder = pathlib.Path(sys.argv[3]) / "2/state/ocdbt.process_1/d"
if hosts.first():
  for file in folder.iterdir():
    file.write_bytes(file.read_bytes()[:100])
hosts.meet()
with Checkpoints(sys.argv[3], every=1, keep=9) as checkpoints:
  began = time.monotonic()
  found = checkpoints.restore(like, lambda *_: None)
  print("restored", found.step, time.monotonic() - began < 30)
  assert (hosts.fetch(found.state["w"]) == hosts.fetch(make(1)["w"])).all()
  checkpoints.save(2, make(20), {})
  found = checkpoints.restore(like, lambda *_: None)
  print("again", found.step, hosts.fetch(found.state["w"])[0, 0])
"""


def test_what_one_cannot_read_is_skipped_by_all(environment, tmp_path):
  at = f"127.0.0.1:{free_port()}"
  commands = [["-c", DAMAGE, at, i, tmp_path / "saved"] for i in (0, 1)]
  job = Job(commands, tmp_path / "logs", environment, devices=1)
  try:
    texts = job.finish(seconds=120)
  finally:
    for process in job.processes:
      process.kill()
  for text in texts:
    assert "restored 1 True" in text
    assert "again 2 20.0" in text
  assert texts[0].count("checkpoint 2 skipped") == 1
  assert "skipped" not in texts[1]


@pytest.mark.slow  # a run of its own
def test_an_unmoved_policy_has_ratio_one_on_two(launch, tmp_path):
  """In bfloat16, between real responses; see test_ratio_one."""
  overrides = {
    "model__dtype": "bfloat16",
    "mesh__data": 1,
    "mesh__fsdp": 2,
    "optim__learning_rate": 0.0,
    "cold_start__steps": 0,
    "num_steps": 1,
  }
  launch(2, tmp_path, **overrides).finish()
  row = rows(tmp_path)[-1]
  for name in ("ratio/token_std", "ratio/sequence_std", "clip_frac/token"):
    assert row[name] == 0
  assert row["ratio/first_minibatch_std"] == row["ratio/moved"] == 0
  assert row["mismatch/token_abs_mean"] > 0
