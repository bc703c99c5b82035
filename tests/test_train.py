"""The whole run, as users start it: resumed, stopped, killed, misused.

Each run is a process of its own on one device. A compilation cache shared by
the session keeps the later ones short.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT

from configs import tiny_cpu
from gspo_jax import data, program, sharding, train
from gspo_jax.checkpoint import Checkpoints

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


def final_state(workdir):
  """The arrays of the last checkpoint, verified as a resume would."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  abstract = program.build(tiny_cpu.get_config("debug"), mesh).abstract
  with Checkpoints(workdir / "checkpoints", every=1, keep=9) as checkpoints:
    restored = checkpoints.restore(abstract, lambda *_: None)
  return restored.step, jax.tree.leaves(restored.state)


def assert_same_run(workdir, reference):
  assert rows(workdir) == rows(reference)
  (step, state), (last, expected) = map(final_state, (workdir, reference))
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
  sample = (workdir / "samples" / "step_000004.txt").read_text()
  assert "reward" in sample
  assert list((workdir / "tensorboard").iterdir())


def test_learning_moves_the_policy(reference):
  """Else everything below would hold of a program that does nothing."""
  moved = [row for row in rows(reference[0])[1:] if row["grad/norm"] > 0]
  assert len(moved) >= 2
  assert any(row["ratio/sequence_std"] > 0 for row in moved)
  assert all(0 < r["mismatch/sequence_abs_mean"] < 1e-5 for r in moved)


def test_a_resumed_run_repeats_the_uninterrupted_one(
  start, reference, tmp_path
):
  finish(start(tmp_path, num_steps=2))
  out = finish(start(tmp_path))
  assert "resumed after step 2" in out
  assert "cold start" not in out
  assert_same_run(tmp_path, reference[0])


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


def test_sigterm_saves_and_exits_0(start, reference, tmp_path):
  process = start(tmp_path, num_steps=100_000, checkpoint__every=100_000)
  for line in process.stdout:
    if "1/100000 " in line:
      process.send_signal(signal.SIGTERM)
      break
  out = finish(process)
  assert "SIGTERM: saved after step" in out
  stopped, _ = final_state(tmp_path)
  assert stopped < 100_000
  out = finish(start(tmp_path, num_steps=max(STEPS, stopped + 1)))
  assert f"resumed after step {stopped}" in out
  together = zip(rows(reference[0])[:2], rows(tmp_path)[:2], strict=True)
  assert all(a == b for a, b in together)


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
    ({"model__dtype": "bfloat16"}, "float32"),
    ({"seed": 1}, "seed=0"),
    ({"data__chain_steps": "(2,)"}, "data="),
  ],
)
def test_a_workdir_of_another_run_is_refused(
  start, reference, overrides, named
):
  out = finish(start(reference[0], **overrides), code=2)
  line = out.strip().splitlines()[-1]
  assert line.startswith("error: ")
  assert named in line
  assert "Traceback" not in out


def test_json_lines(start, tmp_path):
  """A file of one's own, held-out questions set aside by hash."""
  questions = [
    {"question": f"{a}+{b}?", "answer": f"so #### {a + b}"}
    for a in range(10)
    for b in range(10)
  ]
  path = tmp_path / "sums.jsonl"
  path.write_text("\n".join(map(json.dumps, questions)))
  with pytest.raises(ValueError, match="fewer than a batch"):
    data.prompts(data.JsonLines(str(path)), batch=101, width=8, seed=0)
  flags = {"data__source": "jsonl", "data__path": path, "num_steps": 1}
  out = finish(start(tmp_path / "run", **flags))
  assert "1/1" in out


HEALTHY = {"ratio/moved": 0.5, "mismatch/sequence_abs_mean": 1e-7}


def test_warnings_are_given_once_and_name_the_numbers(debug_config, capsys):
  watch = train._Watch(debug_config)
  watch(HEALTHY)
  assert capsys.readouterr().out == ""
  for _ in range(2):
    watch(HEALTHY | {"ratio/moved": 0.0})
    watch(HEALTHY | {"mismatch/sequence_abs_mean": 5e-4})
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2
  assert "exactly 1 over 4 updates" in lines[0]
  assert "5.0e-04" in lines[1]
  assert "clip_low=3.0e-04" in lines[1]


def test_one_update_a_rollout_may_have_a_ratio_of_one(debug_config, capsys):
  debug_config.learner.minibatches = 1
  train._Watch(debug_config)(HEALTHY | {"ratio/moved": 0.0})
  assert capsys.readouterr().out == ""


def test_the_gap_is_compared_with_the_clip_range_in_use(debug_config, capsys):
  debug_config.objective.name = "grpo"
  train._Watch(debug_config)(HEALTHY | {"mismatch/sequence_abs_mean": 0.1})
  assert capsys.readouterr().out == ""
  debug_config.objective.clip_low = 0.05
  train._Watch(debug_config)(HEALTHY | {"mismatch/sequence_abs_mean": 0.1})
  assert "clip_low=5.0e-02" in capsys.readouterr().out


def test_truncated_sampling_is_announced(debug_config, capsys):
  debug_config.sampler.top_p = 0.9
  train._Watch(debug_config)
  assert "truncated distribution" in capsys.readouterr().out


def test_a_number_that_is_not_finite_stops_the_run():
  with pytest.raises(FloatingPointError, match="grad/norm is nan at step 7"):
    train._require_finite({"reward/mean": 0.5, "grad/norm": np.nan}, 7)
