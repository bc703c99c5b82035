"""The whole run: resumed, stopped, killed, misused."""

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
from metrics_of import metrics_of, rows_of
from metrics_page import undocumented

from gspo_jax import model, train
from gspo_jax.configs import tiny_cpu
from gspo_jax.evaluate import held_out
from gspo_jax.learner.packing import RowTokens
from gspo_jax.program import experiment, load_params
from gspo_jax.program.config import parse
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.rollout import metrics as rollout_metrics
from gspo_jax.rollout.batch import RolloutCost
from gspo_jax.runtime import compilation_cache, sharding
from gspo_jax.runtime.errors import UserError

STEPS = 4  # of the debug config, which saves every 2


def share(workdir, cold_start):
  """Makes the cold start of another run that of `workdir`."""
  link = Path(workdir) / "cold_start"
  if cold_start and not link.exists():
    link.parent.mkdir(exist_ok=True)
    Path(cold_start).mkdir(exist_ok=True)
    link.symlink_to(cold_start)


def config_of(*, cold_start=None, layers=1, **overrides):
  """The debug config; __ in a keyword stands for a dot."""
  config = tiny_cpu.get_config("debug")
  config.model.num_layers = layers
  config.update_from_flattened_dict(
    {key.replace("__", "."): value for key, value in overrides.items()}
  )
  return config


def program_key(config):
  """The keys of a config that make its program."""
  keys = dataclasses.asdict(config)
  for name in ("num_steps", "seed", "checkpoint", "reward"):
    del keys[name]
  for name in ("source", "drop_solved"):
    del keys["data"][name]
  del keys["eval"]["every"]
  del keys["rollout"]["max_staleness"]
  distillation = keys["objective"]["distillation"]
  distillation["teachers"] = len(distillation["teachers"])  # one model
  return repr(keys)


@pytest.fixture(scope="module")
def build_once():
  """Runs get one device, and equal configs one program."""
  programs = {}
  make_mesh, build = sharding.make_mesh, experiment.build_program

  def build_once(config, mesh, sampler_devices=()):
    key = program_key(config)
    if key not in programs:
      programs[key] = build(config, mesh, sampler_devices=sampler_devices)
    return programs[key]

  with pytest.MonkeyPatch.context() as patch:
    one_device = lambda of, **axes: make_mesh((of or jax.devices())[:1], **axes)
    patch.setattr(sharding, "make_mesh", one_device)
    patch.setattr(experiment, "build_program", build_once)
    yield build_once


class Stdout(io.StringIO):
  """Collects what is printed; raises SIGTERM at a line that begins so."""

  sigterm_at = None

  def write(self, text):
    if self.sigterm_at and text.startswith(self.sigterm_at):
      signal.raise_signal(signal.SIGTERM)
    return super().write(text)


@pytest.fixture(scope="module")
def run(build_once):
  """Runs a config in this process: the state, None after SIGTERM; stdout."""

  def run(workdir, *, sigterm_at=None, cold_start=None, **overrides):
    share(workdir, cold_start)
    stdout = Stdout()
    stdout.sigterm_at = sigterm_at
    with contextlib.redirect_stdout(stdout):
      state = train.train_and_evaluate(config_of(**overrides), str(workdir))
    return state, stdout.getvalue()

  return run


@pytest.fixture(scope="module")
def reference(run, tmp_path_factory):
  """An uninterrupted run: its workdir and what it printed."""
  workdir = tmp_path_factory.mktemp("reference")
  return workdir, run(workdir)[1]


@pytest.fixture
def workdir(reference, tmp_path):
  """A copy of the uninterrupted run."""
  return shutil.copytree(reference[0], tmp_path / "run")


def start(workdir, *, devices=1, mode=":debug", **overrides):
  """Starts the command in the background."""
  keys = {k.replace("__", "."): v for k, v in overrides.items()}
  return processes.start(
    *("-m", "gspo_jax.main", f"--config=configs/tiny_cpu.py{mode}"),
    f"--workdir={workdir}",
    *(f"--config.{key}={value}" for key, value in keys.items()),
    devices=devices,
  )


def finish(process, code=0):
  out = process.communicate(timeout=600)[0]
  assert process.returncode == code, out
  return out


def final_state(build_once, workdir, **overrides):
  """The step and the arrays of the last checkpoint, as a resume reads them."""
  mesh = sharding.make_mesh(None)
  saved = json.loads((workdir / "run_config.json").read_text())
  # `start` runs the file, which has two layers.
  layers = saved["model"].get("num_layers", 2)
  config = config_of(layers=layers, **overrides)
  learner = build_once(parse(config), mesh).learner
  fields = vars(learner.abstract).items()
  trained = {k: x for k, x in fields if x is not None and k != "step"}
  with Checkpoints(workdir / "checkpoints", keep=9) as checkpoints:
    restored = checkpoints.restore(trained, lambda *_: None, part=True)
  return restored.step, jax.tree.leaves(restored.state)


@pytest.fixture
def assert_same_run(build_once):
  """Whether two workdirs have equal metrics, and states equal bit for bit."""

  def assert_same_run(workdir, reference, **overrides):
    assert metrics_of(workdir) == metrics_of(reference)
    (step, state), (last, expected) = (
      final_state(build_once, folder, **overrides)
      for folder in (workdir, reference)
    )
    assert step == last == STEPS
    for a, b in zip(state, expected, strict=True):
      np.testing.assert_array_equal(a, b)

  return assert_same_run


def test_the_promised_metrics_are_written(reference):
  workdir, out = reference
  names = {
    *("reward/mean", "eval/pass@1", "eval/avg@4", "eval/pass@4", "eval/greedy"),
    *("response/length", "loss/policy", "grad/norm", "ratio/sequence_std"),
    *("ratio/token_std", "clip_frac/sequence", "clip_frac/token", "kl/old_new"),
    *("mismatch/sequence_abs_mean", "moe/expert_flip_rate", "moe/load_max"),
    *("time/generate", "time/update", "throughput/tokens_per_second"),
    *("throughput/useful_fraction_update", "throughput/goodput"),
  }
  metrics = rows_of(workdir)
  assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
  assert names <= metrics[-1].keys()
  # The parts of each fraction are counted where they are computed.
  last = metrics[-1]
  useful = last["throughput/useful_fraction_decode"]
  assert useful == last["response/useful_steps"]
  assert 0 < last["throughput/useful_fraction_score"] <= 1
  assert undocumented(workdir) == []
  # Before the first step, every second step, and after the last one.
  evaluated = ["eval/pass@1" in row for row in metrics]
  assert evaluated == [True, False, True, False, True]
  assert "4/4" in out
  (samples,) = (workdir / "samples").glob("step_000004.*")
  assert "reward" in samples.read_text()
  assert list((workdir / "tensorboard").iterdir())
  # The check that the workdir is shared leaves nothing behind.
  assert list(workdir.glob(".*")) == []


def test_each_computed_token_has_the_same_weight():
  rows = {
    "update": RowTokens(3, 50, 100),
    "old_logps": RowTokens(1, 10, 20),
    "reference_and_values": RowTokens(3, 50, 100),
  }
  useful = rollout_metrics.useful_fractions
  costs = [RolloutCost(None, None, 4, 6), RolloutCost(None, None, 5, 4)]
  assert useful(rows, costs) == {
    "throughput/useful_fraction": 119 / 230,
    "throughput/useful_fraction_update": 0.5,
    "throughput/useful_fraction_score": 60 / 120,
    "throughput/useful_fraction_decode": 0.9,
  }
  without = useful({"update": rows["update"]}, costs)
  assert "throughput/useful_fraction_score" not in without


def test_memory_is_in_gib():
  stats = {"peak_bytes_in_use": 3 * 2**30, "bytes_limit": 2**32, "x": 1}
  device = lambda stats: types.SimpleNamespace(memory_stats=lambda: stats)
  assert rollout_metrics.memory_metrics(device(stats)) == {
    "memory/peak_gib": 3.0,
    "memory/limit_gib": 4.0,
  }
  assert rollout_metrics.memory_metrics(device(None)) == {}


def test_the_weights_are_printed_at_the_start(reference, build_once):
  """A row for each array; all layers share one."""
  _, out = reference
  cfg = build_once(parse(config_of()), sharding.make_mesh(None)).cfg
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))
  count = sum(x.size for x in jax.tree.leaves(shapes))
  table, total, _ = out.partition(f"Total: {count:,} -- {4 * count:,} bytes")
  assert total
  assert "random weights" not in out  # a cold start comes first
  assert "are trained" not in out
  devices, loading, *_ = table.splitlines()
  assert re.match(r"\d x cpu", devices)
  assert loading == "loading the data and the tokenizer"
  rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
  assert len(rows) == len(jax.tree.leaves(shapes))
  (row,) = [row for row in rows if "layers/moe/gate_up" in row]
  assert str(shapes["layers"]["moe"]["gate_up"].shape) in row


def test_learning_moves_the_policy(reference):
  """Else the tests below would pass with a program that does nothing."""
  moved = [row for row in metrics_of(reference[0])[1:] if row["grad/norm"] > 0]
  assert len(moved) >= 2
  assert any(row["ratio/sequence_std"] > 0 for row in moved)
  assert all(0 < row["mismatch/sequence_abs_mean"] < 1e-5 for row in moved)


def test_sigterm_saves_and_the_same_command_resumes(
  run, reference, tmp_path, assert_same_run
):
  """Also in an evaluation, and where nothing else saves that step."""
  state, out = run(tmp_path, sigterm_at="0/4 ")
  assert state is None
  assert "1/4 " not in out
  state, out = run(tmp_path, sigterm_at="2/4 ", checkpoint__every=100)
  assert state is None
  assert "stopped: saved after step 2" in out
  _, out = run(tmp_path)
  assert "resumed after step 2" in out
  assert "cold start" not in out
  assert_same_run(tmp_path, reference[0])


class Killed(BaseException):
  """Stands for SIGKILL."""


def test_a_kill_in_an_evaluation_loses_no_row(
  run, reference, tmp_path, monkeypatch, assert_same_run
):
  """The next start evaluates and writes the row, also after a SIGTERM."""
  evaluate = held_out.evaluate

  def killed_in_evaluation(number, **more):
    calls = iter(range(9))

    def killed(*args):
      if next(calls) == number:
        raise Killed
      return evaluate(*args)

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
      patch.setattr(held_out, "evaluate", killed)
      run(tmp_path, **more)
    return [row["step"] for row in metrics_of(tmp_path)]

  assert killed_in_evaluation(1) == [0, 1]  # of step 2, after that of step 0
  # That of step 2 is made up for, and SIGTERM comes in iteration 4.
  more = {"sigterm_at": "3/4 ", "checkpoint__every": 100}
  assert killed_in_evaluation(1, **more) == [0, 1, 2, 3]
  _, out = run(tmp_path)
  assert "step 4 was cut short" in out
  assert_same_run(tmp_path, reference[0])
  texts = [
    {file.name: file.read_text() for file in (folder / "samples").iterdir()}
    for folder in (tmp_path, reference[0])
  ]
  assert texts[0] == texts[1] != {}
  _, out = run(tmp_path)
  assert "nothing is left to do" in out
  assert_same_run(tmp_path, reference[0])


HOLDER = """
import os, sys, time
from gspo_jax.record.run_files import locked
with locked(sys.argv[1]):
  if os.fork() == 0:  # a child does not inherit the lock
    os.setsid()
    time.sleep(30)
    os._exit(0)
  print("held", os.getpid(), flush=True)
  sys.stdin.read()
"""


def test_a_second_run_in_a_workdir_is_refused(run, workdir):
  """A run that was killed leaves no lock behind."""
  with subprocess.Popen(
    [sys.executable, "-c", HOLDER, workdir],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as holder:
    assert holder.stdout.readline() == f"held {holder.pid}\n"
    with pytest.raises(UserError) as error:
      run(workdir)
    assert f"--workdir={str(workdir)!r}: another run" in str(error.value)
    assert f"process {holder.pid})" in str(error.value)
    holder.kill()
    holder.wait()
    assert "nothing is left to do" in run(workdir)[1]


def test_a_distilled_run_resumes_with_the_same_teachers_alone(
  run, reference, tmp_path
):
  """The teacher is a step of an earlier run; its folder may move."""

  def distil(step, num_steps, teachers=reference[0]):
    return run(
      tmp_path,
      cold_start=str(reference[0] / "cold_start"),
      objective__name="gspo_token",
      objective__distillation__teachers=(f"{teachers}/checkpoints/{step}",),
      checkpoint__every=1,
      eval__every=0,
      num_steps=num_steps,
    )

  distil(4, 1)
  (row,) = metrics_of(tmp_path)
  assert row["distill/reverse_kl"] != 0
  assert row["grad/norm"] > 0
  assert undocumented(tmp_path) == []
  with pytest.raises(UserError, match=r"has weights of objective\.dist.*work"):
    distil(2, 2)
  (tmp_path / "moved").symlink_to(reference[0])
  _, out = distil(4, 2, tmp_path / "moved")
  assert "resumed after step 1" in out


def test_adapters_resume_beside_the_weights_of_a_cold_start(
  run, reference, tmp_path, build_once
):
  """Their checkpoints hold no other weights, which the run saves once."""
  shared = {
    "model__lora__rank": 2,
    "cold_start": str(reference[0] / "cold_start"),
    "checkpoint__every": 1,
    "eval__every": 0,
    "num_steps": 2,
  }
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  state, out = run(whole, **shared)
  trained = sum(x.size for x in jax.tree.leaves(state.params))
  assert f"\n{trained:,} of them are trained: the adapters\n" in out
  run(parts, **shared | {"num_steps": 1})
  again, out = run(parts, **shared)
  assert "resumed after step 1" in out
  assert metrics_of(parts) == metrics_of(whole)
  for a, b in zip(*map(jax.tree.leaves, (again, state)), strict=True):
    np.testing.assert_array_equal(a, b)
  with Checkpoints(whole / "checkpoints") as checkpoints:
    saved = checkpoints._read(2)
  weights = [p for p in saved["specs"] if p.startswith("params/")]
  assert weights
  assert all(map(model.lora.is_adapter, weights))
  assert not any(p.startswith("base/") for p in saved["specs"])
  # A command that evaluates or exports finds the same policy.
  config = parse(config_of(**shared))
  program = build_once(config, sharding.make_mesh(None))
  loaded = load_params.load(config, program, str(whole))
  jax.tree.map(np.testing.assert_array_equal, loaded, state.policy)
  shutil.rmtree(parts / "base")
  with pytest.raises(UserError, match="expected the weights below the adapt"):
    run(parts, **shared | {"num_steps": 3})


SPLIT = {"sampler_mesh__devices": 1}


@pytest.mark.slow  # minutes
@pytest.mark.parametrize(
  ("devices", "flags"),
  [(1, {}), (2, SPLIT | {"rollout__max_staleness": 2})],
  ids=["in_turns", "split"],
)
def test_killed_at_ten_random_moments(
  tmp_path, assert_same_run, devices, flags
):
  """The moments: uniform over what a start and four steps take."""
  seed = int.from_bytes(os.urandom(4), "big")
  print(f"{seed=}")
  moments = random.Random(seed)
  began = time.monotonic()
  finish(start(tmp_path / "whole", devices=devices, **flags))
  whole = time.monotonic() - began
  for _ in range(10):
    process = start(tmp_path / "run", devices=devices, **flags)
    time.sleep(moments.uniform(0, whole))
    process.kill()
    process.communicate()
  finish(start(tmp_path / "run", devices=devices, **flags))
  assert_same_run(tmp_path / "run", tmp_path / "whole", **flags)


def resume(run, whole, parts, **overrides):
  """Runs again from step 2 of a finished run; what it prints."""
  shutil.copytree(whole, parts)
  shutil.rmtree(parts / f"checkpoints/{STEPS}")
  _, out = run(parts, **overrides)
  assert "resumed after step 2" in out
  return out


@pytest.fixture
def no_evaluation(monkeypatch):
  """Spares the programs of an evaluation."""
  monkeypatch.setattr(held_out, "evaluate", lambda *_: {})


@pytest.mark.usefixtures("no_evaluation")
def test_dynamic_sampling_resumes(run, reference, tmp_path, assert_same_run):
  """With the update of the reference run."""
  flags = {
    "rollout__dynamic_sampling_rounds": 2,
    "data__drop_solved": True,
    "cold_start": str(reference[0] / "cold_start"),
  }
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  run(whole, **flags)
  resume(run, whole, parts, **flags)
  assert_same_run(parts, whole, **flags)
  assert undocumented(whole) == []


CONTINUOUS = {
  "continuous_batching__slots": 5,
  "continuous_batching__page_size": 4,
  "continuous_batching__prefill_chunk": 8,
}


@pytest.mark.usefixtures("no_evaluation")
def test_pending_responses_resume(run, reference, tmp_path, assert_same_run):
  """Partial, off-policy, truncated, R3, weights, a synced reference."""
  flags = {
    **CONTINUOUS,
    "rollout__max_tokens_per_iteration": 6,
    "rollout__max_staleness": 2,
    "sampler__top_p": 0.9,
    "data__drop_solved": True,
    "objective__name": "grpo",
    "objective__kl_coef": 0.1,
    "objective__reference_every": 2,
    "objective__mismatch": "tis_sequence",
    "objective__replay": "r3",
    "cold_start": str(reference[0] / "cold_start"),
  }
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  _, out = run(whole, **flags)
  assert "sampler and trainer differ" not in out  # stale is no fault
  resume(run, whole, parts, **flags)
  assert_same_run(parts, whole, **flags)
  metrics = metrics_of(whole)
  assert all(1 <= row["rollout/staleness"] < 3 for row in metrics[2:])
  assert any(row["rollout/resumed_fraction"] for row in metrics[1:])
  assert undocumented(whole) == []
  with pytest.raises(UserError, match=r"rollout\.max_staleness"):
    run(parts, **flags | {"rollout__max_staleness": 0})


def test_a_sampler_on_its_own_device_is_the_same_run(
  run, build_once, reference, tmp_path, assert_same_run
):
  """With the same policies, and one device more."""
  cold = {"cold_start": str(reference[0] / "cold_start")}
  sampler = build_once(
    parse(config_of(**SPLIT)), sharding.make_mesh(None), jax.devices()[-1:]
  ).sampler
  assert sampler.mesh.devices.tolist() == [[[[[jax.devices()[-1]]]]]]
  _, out = run(tmp_path / "split", **SPLIT, **cold)
  assert out.startswith("1 x cpu; 1 more to sample\n")
  assert "cold start" not in out  # the reference run's is linked
  assert_same_run(tmp_path / "split", reference[0], **SPLIT)
  # Its checkpoint has no batches ahead: all devices can go on from there.
  resume(run, tmp_path / "split", tmp_path / "turns", **cold)
  assert_same_run(tmp_path / "turns", reference[0])
  assert undocumented(tmp_path / "split") == []


def test_a_sampler_that_runs_ahead_is_the_same_run(
  run, reference, tmp_path, assert_same_run
):
  """On its own device or not, interrupted or not."""
  flags = {
    "rollout__max_staleness": 2,
    "cold_start": str(reference[0] / "cold_start"),
  }
  run(tmp_path / "turns", **flags)
  rows = metrics_of(tmp_path / "turns")[1:]
  assert [row["rollout/staleness"] for row in rows] == [0, 1, 2, 2]
  run(tmp_path / "split", **SPLIT, **flags)
  assert_same_run(tmp_path / "split", tmp_path / "turns", **SPLIT)
  resume(run, tmp_path / "split", tmp_path / "parts", **SPLIT, **flags)
  assert_same_run(tmp_path / "parts", tmp_path / "turns", **SPLIT)


HOSTILE = """
import os, time, zlib
def final(prompt, response, reference):
  chance = zlib.crc32(response.encode()) % 8
  if chance == 0: os._exit(1)
  if chance == 1: time.sleep(60)
  time.sleep(0.02)
  return float(response.endswith(reference))
"""


@pytest.mark.slow
def test_slow_and_dying_rewards_do_not_end_a_split_run(
  run, tmp_path, monkeypatch
):
  """They cost their responses, also where the sampler runs ahead."""
  (tmp_path / "hostile_rewards.py").write_text(HOSTILE)
  monkeypatch.syspath_prepend(tmp_path)
  flags = {
    "rollout__max_staleness": 2,
    "reward__names": ("hostile_rewards.final",),
    "reward__seconds": 1.0,
    "reward__max_failed": 0.9,
  }
  run(tmp_path / "run", **SPLIT, **flags)
  _, *rows = metrics_of(tmp_path / "run")
  assert len(rows) == STEPS
  assert any(row["reward/failed"] > 0 for row in rows)


GUESSING = {
  **CONTINUOUS, "continuous_batching__slots": 16,
  "data__source": "gspo_jax.tasks.games.guessing_problems",
  "rollout__environment": "guessing", "rollout__max_turns": 3,
  "reward__names": (), "sampler__max_new_tokens": 32,
  "objective__name": "gspo_token",
}  # fmt: skip


@pytest.mark.slow  # its parts run in tests/rollout, learner and sampler
@pytest.mark.usefixtures("no_evaluation")
def test_conversations_resume(run, tmp_path, assert_same_run):
  """GSPO-token with dynamic sampling, after a cold start."""
  flags = {
    **GUESSING,
    "rollout__dynamic_sampling_rounds": 2,
    "objective__replay": "r3",
  }
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  run(whole, **flags)
  resume(run, whole, parts, **flags)
  assert_same_run(parts, whole, **flags)
  _, *rows = metrics_of(whole)
  assert any(row["conversation/turns"] > 1 for row in rows)
  assert any(row["conversation/environment_tokens"] > 0 for row in rows)
  for row in rows:
    tokens = row["conversation/policy_tokens"]
    tokens += row["conversation/environment_tokens"]
    np.testing.assert_allclose(row["response/length"], tokens, rtol=1e-6)
  assert undocumented(whole) == []


def test_a_changed_setting_is_printed_and_taken(run, workdir):
  _, out = run(workdir, num_steps=5, reward__seconds=4.0, eval__every=5)
  assert "changed since: reward.seconds=5.0 is now 4.0" in out
  assert "changed since: eval.every=2 is now 5" in out
  assert "5/5" in out
  config = json.loads((workdir / "run_config.json").read_text())
  assert config["num_steps"] == 5


@pytest.mark.parametrize(
  ("overrides", "words"),
  [({"model__dtype": "bfloat16"}, "has model.dtype='float32', this run"),
   ({"seed": 1}, "has seed=0, this run seed=1"),
   ({"data__source": "chain:steps=2,demonstrated=1"},
    "data.source, the content of what it names")],
)  # fmt: skip
def test_a_workdir_of_another_run_is_refused(run, reference, overrides, words):
  with pytest.raises(UserError) as error:
    run(reference[0], **overrides)
  assert len(str(error.value)) < 300
  assert words in str(error.value)
  assert str(error.value).endswith("; use another --workdir")
  # The config of the run stays as it was.
  config = json.loads((reference[0] / "run_config.json").read_text())
  assert config["seed"] == 0


def test_a_second_run_takes_the_cold_start_of_an_equal_one(
  run, reference, tmp_path, monkeypatch, assert_same_run
):
  """As if it had made it; its workdir needs no other folder then."""
  monkeypatch.setattr(compilation_cache, "beside", tmp_path.joinpath)
  _, out = run(tmp_path / "first", num_steps=0)
  assert "cold start  100/100" in out
  _, out = run(tmp_path / "second", sigterm_at="1/4 ", checkpoint__every=100)
  assert f"cold start of an earlier run, from {tmp_path / 'cold_start'}/" in out
  assert "100/100" not in out
  shutil.rmtree(tmp_path / "cold_start")
  shutil.rmtree(tmp_path / "second" / "checkpoints")
  _, out = run(tmp_path / "second")
  assert "cold start" not in out
  assert_same_run(tmp_path / "second", reference[0])


def test_a_cold_start_of_another_instruction_is_refused(
  run, reference, tmp_path
):
  shutil.copytree(reference[0] / "cold_start", tmp_path / "cold_start")
  with pytest.raises(UserError, match=r"it has data\.instruction='{problem}'"):
    run(tmp_path, data__instruction="{problem} ")


def test_a_cold_start_folder_that_is_a_file(run, tmp_path):
  (tmp_path / "cold_start").write_text("")
  with pytest.raises(UserError, match="checkpoints in"):
    run(tmp_path)


@pytest.mark.slow
def test_the_embedded_default_learns(tmp_path):
  """Minutes: held-out pass@1 gains at least 0.2 over its cold start."""
  # Not `start`: XLA optimises as in a user's process, which halves the time.
  processes.python(
    *("-m", "gspo_jax.main", "--config=configs/tiny_cpu.py"),
    *(f"--workdir={tmp_path}", "--config.eval.every=40"),
    timeout=1500,
    check=True,
  )
  before, *_, after = metrics_of(tmp_path)
  assert 0.3 <= before["eval/pass@1"] <= 0.55
  assert after["eval/pass@1"] >= before["eval/pass@1"] + 0.2
