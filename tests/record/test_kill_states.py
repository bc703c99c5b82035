"""A run that was killed at any moment goes on as if it had not been."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from metrics_of import metrics_of
from orbax.checkpoint import v1 as ocp
from repository import ROOT, xla_flags

from gspo_jax.record.checkpoint import CheckpointConfig, Checkpoints

STEPS = 6
SIZES = {
  **{"model.num_layers": 1, "model.embed_dim": 16},
  **{"model.head_dim": 8, "model.mlp_dim": 8}, "num_steps": STEPS,
  "cold_start.steps": 0, "eval.every": 0, "checkpoint.every": 1,
  # The policy moves, even if no response is right.
  **{"objective.entropy_coef": 0.1, "optim.learning_rate": 1e-2},
  "optim.warmup_steps": 0, "reward.workers": 1,
}  # fmt: skip
SLOTS = {
  "continuous_batching.slots": 16,
  "continuous_batching.page_size": 4,
  "continuous_batching.prefill_chunk": 40,
}
CONVERSATIONS = SLOTS | {
  "data.source": "gspo_jax.tasks.games.guessing_problems",
  "rollout.environment": "guessing",
  "rollout.max_turns": 3,
  "reward.names": (),
  "sampler.max_new_tokens": 32,
}
AGENTS = CONVERSATIONS | {
  "data.source": "gspo_jax.tasks.games.calculator_problems",
  "rollout.environment": "openai:gspo_jax.tasks.calculator_agent.play",
  "reward.seconds": 120.0,
}
MODES = {
  "plain": {},
  "evaluated": {"eval.every": 2, "eval.prompts": 64},
  "ahead": {"rollout.max_staleness": 1},
  "partial": SLOTS | {"rollout.max_tokens_per_iteration": 6},
  "conversations": CONVERSATIONS,
  "conversations ahead": CONVERSATIONS | {"rollout.max_staleness": 1},
  "agents": AGENTS,
  "lora": {"model.lora.rank": 2},
  "distilled": {"objective.name": "gspo_token"},
}

# Trains in one workdir after another; equal configs share a program.
CHILD = """
import ast, pathlib, sys
from gspo_jax import train
from gspo_jax.configs import tiny_cpu
from gspo_jax.program import experiment

build, programs = experiment.build_program, {}
def build_once(config, mesh, **options):
  if config not in programs:
    programs[config] = build(config, mesh, **options)
  return programs[config]
experiment.build_program = build_once
for line in sys.stdin:
  changes, workdir = ast.literal_eval(line)
  config = tiny_cpu.get_config("debug")
  config.update_from_flattened_dict(changes)
  train.train_and_evaluate(config, workdir)
  pathlib.Path(f"{workdir}.ended").touch()
"""


class Trainer:
  """A process that trains in one workdir after another."""

  def __init__(self, log: Path):
    self._log = log
    with log.open("w") as file:
      self._process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": xla_flags(devices=1)},
        stdin=subprocess.PIPE,
        stdout=file,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
      )

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self._process.kill()
    self._process.communicate()

  def train(self, changes, workdir: Path, moments=None) -> list[Path]:
    """Trains. With `moments`, random numbers, it returns copies of the workdir
    that it made from the first checkpoint on."""
    print((changes, str(workdir)), file=self._process.stdin, flush=True)
    saved, copies = workdir / "checkpoints", []
    while not workdir.with_suffix(".ended").exists():
      assert self._process.poll() is None, self._log.read_text()
      time.sleep(moments.uniform(0, 0.05) if moments else 0.02)
      if moments and saved.exists() and any(saved.iterdir()):
        copies.append(workdir.with_name(f"killed_{len(copies)}"))
        self._copy(workdir, copies[-1])
    return copies

  def _copy(self, workdir, copy):
    """Copies the workdir while the process group is stopped."""
    os.killpg(self._process.pid, signal.SIGSTOP)
    ends = os.WSTOPPED | os.WEXITED | os.WNOWAIT
    os.waitid(os.P_PID, self._process.pid, ends)
    shutil.copytree(workdir, copy)
    os.killpg(self._process.pid, signal.SIGCONT)


def written(workdir):
  """What a run wrote, without clocks."""
  files = [workdir / "distributions.jsonl", *(workdir / "samples").iterdir()]
  folder = workdir / "checkpoints"
  with Checkpoints(folder) as checkpoints:
    # A run killed at its end may leave an older one, whole or in part.
    newest = checkpoints._steps()[-CheckpointConfig().keep :]
    saved = {step: checkpoints._read(step) for step in newest}
  for step, metadata in saved.items():
    del metadata["user"]["unwritten"]  # a row with clocks
    state = ocp.load(folder / str(step), checkpointable_name="state")
    metadata["arrays"] = [
      np.asarray(x).tolist() for x in jax.tree.leaves(state)
    ]
  rows, texts = metrics_of(workdir), {f.name: f.read_bytes() for f in files}
  if "conversation/turns" in rows[-1]:  # `metrics_of` leaves the same out
    name = "distributions.jsonl"
    texts[name] = [
      {k: x for k, x in json.loads(line).items() if "mismatch/" not in k}
      for line in texts[name].splitlines()
    ]
  return rows, texts, saved


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(
  ("mode", "states"),
  [("plain", 2),
   *(pytest.param(mode, 12, marks=pytest.mark.slow) for mode in MODES)],
)  # fmt: skip
def test_a_copy_of_any_moment_goes_on_to_the_same_end(mode, states, tmp_path):
  changes, whole = SIZES | MODES[mode], tmp_path / "whole"
  moments = random.Random(0)
  with Trainer(tmp_path / "log") as trainer:
    if mode == "distilled":
      teacher = tmp_path / "teacher"
      trainer.train(SIZES | {"num_steps": 1}, teacher)
      changes["objective.distillation.teachers"] = (str(teacher),)
    copies = trainer.train(changes, whole, moments)
    copies = moments.sample(copies, min(states, len(copies)))
    for copy in copies:
      trainer.train(changes, copy)
  trained = [row for row in metrics_of(whole) if row["step"]]
  assert [row["step"] for row in trained] == [*range(1, STEPS + 1)]
  assert all(row["grad/norm"] for row in trained)
  expected = written(whole)
  for copy in copies:
    for found, of_whole in zip(written(copy), expected, strict=True):
      assert found == of_whole, copy
