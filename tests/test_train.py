"""The whole run, as users start it: resumed, stopped, killed, misused.

Each run is a process of its own on one device. A compilation cache shared by
the session keeps the later ones short.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
from repository import ROOT

from configs import tiny_cpu
from gspo_jax import train
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.checkpoint import Checkpoints

STEPS = 4  # of the debug config, which saves every 2


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  env["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
  env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  env["PYTHONUNBUFFERED"] = "1"
  return env


@pytest.fixture(scope="session")
def start(environment):
  """Starts a run in the background; keywords are overrides, __ for a dot."""

  def start(workdir, **overrides):
    flags = [
      f"--config.{k.replace('__', '.')}={v}" for k, v in overrides.items()
    ]
    return subprocess.Popen(
      [
        *(sys.executable, "-m", "gspo_jax.main"),
        *("--config=configs/tiny_cpu.py:debug", f"--workdir={workdir}", *flags),
      ],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  return start


def finish(process, code=0):
  out = process.communicate(timeout=300)[0]
  assert process.returncode == code, out
  return out


@pytest.fixture(scope="session")
def reference(start, tmp_path_factory):
  """An uninterrupted run: its workdir and output."""
  workdir = tmp_path_factory.mktemp("reference")
  return workdir, finish(start(workdir))


def rows(workdir):
  """The rows of metrics.jsonl, without what depends on the clock."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  timed = ("time/", "throughput/")
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(timed)}
    for line in lines
  ]


def final_state(workdir, kl_coef=0.0):
  """The arrays of the last checkpoint, verified as a resume would."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  config = tiny_cpu.get_config("debug")
  config.objective.kl_coef = kl_coef
  abstract = vars(build_program(parse(config), mesh).abstract)
  trained = {k: x for k, x in abstract.items() if x is not None and k != "step"}
  with Checkpoints(workdir / "checkpoints", every=1, keep=9) as checkpoints:
    restored = checkpoints.restore(trained, lambda *_: None, part=True)
  return restored.step, jax.tree.leaves(restored.state)


def assert_same_run(workdir, reference, kl_coef=0.0):
  assert rows(workdir) == rows(reference)
  (step, state), (last, expected) = (
    final_state(folder, kl_coef) for folder in (workdir, reference)
  )
  assert step == last == STEPS
  for a, b in zip(state, expected, strict=True):
    np.testing.assert_array_equal(a, b)  # bit for bit


def test_the_promised_numbers_are_written(reference):
  workdir, out = reference
  names = {
    *("reward/mean", "eval/pass@1", "eval/avg@4", "eval/pass@4", "eval/greedy"),
    *("response/length", "loss/policy", "grad/norm", "ratio/sequence_std"),
    *("ratio/token_std", "clip_frac/sequence", "clip_frac/token", "kl/old_new"),
    *("mismatch/sequence_abs_mean", "moe/expert_flip_rate", "moe/load_max"),
    *("time/generate", "time/update", "throughput/tokens_per_second"),
  }
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  written = [json.loads(line) for line in lines]
  assert [row["step"] for row in written] == [0, 1, 2, 3, 4]
  assert names <= written[-1].keys()
  assert "eval/pass@1" in written[0]  # before, during, after
  assert "eval/pass@1" in written[2]
  assert "eval/pass@1" not in written[1]
  assert "4/4" in out
  sample = (workdir / "samples" / "step_000004.jsonl").read_text()
  assert '"reward": ' in sample
  assert list((workdir / "tensorboard").iterdir())


def test_nothing_is_left_of_the_look_at_the_workdir(reference):
  workdir, _ = reference
  assert list(workdir.glob(".*")) == []


def test_learning_moves_the_policy(reference):
  """Else everything below would hold of a program that does nothing."""
  moved = [row for row in rows(reference[0])[1:] if row["grad/norm"] > 0]
  assert len(moved) >= 2
  assert any(row["ratio/sequence_std"] > 0 for row in moved)
  assert all(0 < r["mismatch/sequence_abs_mean"] < 1e-5 for r in moved)


def test_a_resumed_run_repeats_the_uninterrupted_one(
  start, reference, tmp_path
):
  process = start(tmp_path, num_steps=2)
  for line in process.stdout:
    if line.startswith("1/2 "):
      process.send_signal(signal.SIGTERM)  # in the last step: it is done
      break
  finish(process, code=0)
  out = finish(start(tmp_path))
  assert "resumed after step 2" in out
  assert "cold start" not in out
  assert_same_run(tmp_path, reference[0])


def test_all_that_can_be_added_resumes_too(start, tmp_path):
  """A synced reference, replay, weights, refill and history, in two parts."""
  flags = {
    "objective__name": "grpo",
    "objective__kl_coef": 0.1,
    "objective__reference_every": 2,
    "objective__mismatch": "tis_token",
    "objective__replay": "r3",
    "data__refill_rounds": 2,
    "data__history": True,
    "cold_start__steps": 50,
  }
  finish(start(tmp_path / "whole", **flags))
  finish(start(tmp_path / "parts", **flags | {"num_steps": 2}))
  out = finish(start(tmp_path / "parts", **flags))
  assert "resumed after step 2" in out
  assert_same_run(tmp_path / "parts", tmp_path / "whole", kl_coef=0.1)
  config = json.loads((tmp_path / "parts/run_config.json").read_text())
  assert config["num_steps"] == STEPS


def test_with_refill_it_is_the_same_run(start, reference, tmp_path):
  """The same answers; a sixth of the slots, in pages of their own."""
  finish(start(tmp_path, paging__slots=5, paging__page=4, paging__chunk=8))
  both = rows(reference[0]), rows(tmp_path)
  for without, refilled in zip(*both, strict=True):
    for key in ("reward/mean", "response/length", "eval/pass@1"):
      assert refilled.get(key) == without.get(key), (key, without["step"])
    gap, useful = "mismatch/token_abs_mean", "response/useful_steps"
    if without["step"]:
      assert refilled[gap] < 1e-5
      assert 0 < refilled[useful] <= 1


def test_answers_that_wait_resume_too(start, tmp_path):
  """Cut answers, a batch ahead and history, from the step that was saved."""
  flags = {
    **{"paging__slots": 5, "paging__page": 4, "paging__chunk": 8},
    **{"rollout__budget": 6, "rollout__spare": 2, "rollout__ahead": True},
    **{"data__history": True, "objective__mismatch": "tis_sequence"},
    "cold_start__steps": 50,
  }
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  out = finish(start(whole, **flags))
  assert "sampler and trainer differ" not in out  # stale is not inexact
  shutil.copytree(whole, parts)
  shutil.rmtree(parts / f"checkpoints/{STEPS}")
  assert "resumed after step 2" in finish(start(parts, **flags))
  assert_same_run(parts, whole)
  for row in rows(whole)[2:]:
    assert 1 <= row["rollout/staleness"] < 3
  assert any(row["rollout/continued"] for row in rows(whole)[1:])
  said = finish(start(parts, **flags | {"rollout__ahead": False}), code=2)
  assert "rollout.one_step_off_policy" in said


def test_a_refused_start_leaves_the_config_alone(start, reference, tmp_path):
  shutil.copytree(reference[0], tmp_path / "run")
  finish(start(tmp_path / "run", seed=7), code=2)
  config = json.loads((tmp_path / "run/run_config.json").read_text())
  assert config["seed"] == 0


def kill_at(process, text):
  """kill -9 as soon as a line of output contains `text`."""
  for line in process.stdout:
    if text in line:
      break
  process.kill()
  process.wait()
  process.stdout.close()


def test_kill_9_loses_only_what_was_not_saved(start, reference, tmp_path):
  kill_at(start(tmp_path), "cold start  100/100")
  kill_at(start(tmp_path), "3/4")
  assert "cold start" not in finish(start(tmp_path))  # that was saved
  assert_same_run(tmp_path, reference[0])


@pytest.mark.slow
def test_killed_at_ten_random_moments(start, reference, tmp_path):
  """The moments: uniform over what a start and four steps take."""
  seed = int.from_bytes(os.urandom(4), "big")
  print(f"{seed=}")
  moments = random.Random(seed)
  began = time.monotonic()
  finish(start(tmp_path / "timed"))
  whole = time.monotonic() - began
  for _ in range(10):
    process = start(tmp_path / "run")
    time.sleep(moments.uniform(0, whole))
    process.kill()
    process.communicate()
  finish(start(tmp_path / "run"))
  assert_same_run(tmp_path / "run", reference[0])


def test_sigterm_saves_and_exits_75(start, reference, tmp_path):
  process = start(tmp_path, checkpoint__every=100)
  for line in process.stdout:
    if line.startswith("1/4 "):
      process.send_signal(signal.SIGTERM)
      break
  assert "SIGTERM: saved after step" in finish(process, code=75)
  stopped, _ = final_state(tmp_path)
  assert stopped < STEPS
  assert f"resumed after step {stopped}" in finish(start(tmp_path))
  assert_same_run(tmp_path, reference[0])


def test_a_reward_that_fails_stops_the_run(start, reference, tmp_path):
  shutil.copytree(reference[0], tmp_path / "run")
  shutil.rmtree(tmp_path / f"run/checkpoints/{STEPS}")
  # It takes three arguments, and raises: texts take no assignment.
  names = "('operator.setitem',)"
  out = finish(start(tmp_path / "run", reward__names=names), code=2)
  assert out.strip().splitlines()[-1] == (
    "error: iteration 3: 16 of 16 responses could not be scored, expected at "
    "most 8 (reward.max_failed=0.5); the first reason: operator.setitem: "
    "TypeError: 'str' object does not support item assignment"
  )
  assert final_state(tmp_path / "run")[0] == 2


def test_a_changed_setting_is_told_and_taken(start, reference, tmp_path):
  shutil.copytree(reference[0], tmp_path / "run")
  flags = {"num_steps": 5, "optim__b2": 0.9, "model__remat": True}
  out = finish(start(tmp_path / "run", **flags))
  assert "changed since: optim.b2=0.95 is now 0.9" in out
  assert "changed since: model.remat=False is now True" in out
  assert "5/5" in out


def test_a_cold_start_is_reused(start, reference, tmp_path):
  workdir, first = reference
  assert "cold start" in first
  again = finish(
    start(
      tmp_path, num_steps=1, cold_start__dir=workdir / "cold_start"
    )
  )  # fmt: skip
  assert "cold start" not in again
  assert rows(tmp_path)[0] == rows(workdir)[0]


@pytest.mark.parametrize(
  ("overrides", "named"),
  [
    ({"model__dtype": "bfloat16"}, "has model.dtype='float32', this run"),
    ({"seed": 1}, "has seed=0, this run seed=1"),
    ({"data__chain_steps": "(2,)"}, "data.fingerprint="),
  ],
)
def test_a_workdir_of_another_run_is_refused(
  start, reference, overrides, named
):
  out = finish(start(reference[0], **overrides), code=2)
  line = out.strip().splitlines()[-1]
  assert len(line) < 200
  assert line.startswith("error: ")
  assert named in line
  assert "Traceback" not in out


def test_an_evaluation_tells_sampled_answers_from_greedy_ones(
  debug_config, monkeypatch
):
  answers = lambda generate, params, questions, **how: generate
  monkeypatch.setattr(train.reference, "answer_all", answers)
  functions = types.SimpleNamespace(
    generate_eval=np.array([[1, 0], [0, 0]]),
    generate_greedy=np.array([[1], [1]]),
    mesh=sharding.make_mesh(jax.devices()[:1]),
    tokenizer=None,
  )
  run = types.SimpleNamespace(
    program=functions,
    config=debug_config,
    keys=types.SimpleNamespace(evaluate=None),
    held_out=None,
    scorer=None,
  )
  row = train._evaluate(run, None)
  assert row["eval/pass@1"] == 0.25
  assert row["eval/greedy"] == 1


@pytest.mark.slow
def test_eight_devices_train_and_resume(environment, tmp_path):
  """The whole command on a mesh, cold start and all."""
  flags = ["data.prompts=8", "learner.micro_batch_size=8", "cold_start.steps=2"]
  flags += ["mesh.fsdp=2", "mesh.expert=2"]
  command = [sys.executable, "-m", "gspo_jax.main", f"--workdir={tmp_path}"]
  command += ["--config=configs/tiny_cpu.py:debug"]
  command += [f"--config.{flag}" for flag in flags]
  env = environment | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
  for steps, said in ((1, "1/1"), (2, "resumed after step 1")):
    done = subprocess.run(
      [*command, f"--config.num_steps={steps}"],
      cwd=ROOT,
      env=env,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.slow
def test_the_embedded_default_learns(environment, tmp_path):
  """Minutes: held-out pass@1 gains at least 0.2 over its cold start."""
  command = [sys.executable, "-m", "gspo_jax.main", f"--workdir={tmp_path}"]
  command += ["--config=configs/tiny_cpu.py"]
  subprocess.run(command, cwd=ROOT, env=environment, check=True)
  before, *_, after = rows(tmp_path)
  assert 0.3 <= before["eval/pass@1"] <= 0.55
  assert after["eval/pass@1"] >= before["eval/pass@1"] + 0.2


def test_json_lines(start, tmp_path):
  """A file of one's own, held-out questions set aside by hash."""
  questions = [
    {"question": f"{a}+{b}?", "answer": f"so #### {a + b}"}
    for a in range(10)
    for b in range(10)
  ]
  path = tmp_path / "sums.jsonl"
  path.write_text("\n".join(map(json.dumps, questions)))
  flags = {"data__source": f"jsonl:{path}", "num_steps": 1}
  out = finish(start(tmp_path / "run", **flags))
  assert "1/1" in out


def test_a_cold_start_folder_that_is_a_file(start, tmp_path):
  (tmp_path / "file").write_text("")
  out = finish(
    start(tmp_path / "run", cold_start__dir=tmp_path / "file" / "x"), code=2
  )
  assert "error: checkpoints in" in out
  assert "Traceback" not in out
