"""Imitation: gated, saved, reused, and never mixed up with another."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.learner import cold_start
from gspo_jax.learner.train_step import TrainState
from gspo_jax.losses import Mean
from gspo_jax.runtime.checkpoint import Checkpoints
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.preemption import Preemption


class Batches:
  """Counts itself, as a data iterator with a state."""

  def __init__(self):
    self.n = 0

  def __next__(self):
    self.n += 1
    return {
      "tokens": np.zeros((2, 3), np.int32),
      "length": np.ones(2, np.int32),
      "response": np.zeros((2, 4), np.int32),
      "response_length": np.ones(2, np.int32),
    }

  def get_state(self):
    return {"n": self.n}

  def set_state(self, state):
    self.n = state["n"]


def imitate(folder, accuracies, identity=None, gate=0.9, steps=10, stop=None):
  """Runs with made-up accuracies; returns the state and the steps looked at."""
  fresh = TrainState(jnp.int32(0), {"w": jnp.zeros(2)}, ())
  looks = []

  def update(state, batch):
    params = {"w": state.params["w"] + 1}
    loss = {"loss/imitation": Mean(np.float32(1), np.float32(1))}
    return TrainState(state.step + 1, params, ()), loss

  def accuracy(params):
    looks.append(int(params["w"][0]))
    return accuracies[len(looks) - 1]

  preemption = Preemption()
  steps_asked = itertools.count(1)
  preemption.reached = lambda: next(steps_asked) == stop
  with Checkpoints(folder, every=2, keep=1) as checkpoints:
    state = cold_start.imitate(
      init=lambda: fresh,
      abstract=fresh,
      batches=Batches(),
      update=update,
      accuracy=accuracy,
      checkpoints=checkpoints,
      preemption=preemption,
      identity=identity or {"seed": 0},
      cfg=cold_start.ColdStartConfig(steps, check_every=2, gate=gate),
    )
  return state, looks


def test_stops_at_the_gate_and_is_reused(tmp_path):
  state, looks = imitate(tmp_path, [0.1, 0.95])
  assert int(state.step) == 4
  assert looks == [2, 4]
  again, looks = imitate(tmp_path, [])
  assert looks == []  # nothing was trained, nothing looked at
  np.testing.assert_array_equal(again.params["w"], state.params["w"])


def test_a_missed_gate_is_an_error_that_says_what_to_do(tmp_path):
  with pytest.raises(UserError, match=r"gate=0\.9"):
    imitate(tmp_path, [0.1] * 5)
  state, _ = imitate(tmp_path / "none", [0.0] * 5, gate=0.0)
  assert int(state.step) == 10


def test_preemption_saves_and_the_next_run_goes_on(tmp_path):
  state, looks = imitate(tmp_path, [0.1], stop=3)
  assert state is None
  assert looks == [2]  # none at 3: an uninterrupted run would not look there
  assert (tmp_path / "3").is_dir()  # but it was saved
  state, looks = imitate(tmp_path, [0.5, 0.95])
  assert looks == [4, 6]


def test_another_cold_start_is_refused(tmp_path):
  imitate(tmp_path, [0.95])
  with pytest.raises(UserError, match="seed"):
    imitate(tmp_path, [0.95], identity={"seed": 1})


def test_cross_entropy():
  cfg = dataclasses.replace(model.variant("tiny"), dtype="float32")
  params = model.init(jax.random.key(0), cfg)
  rng = np.random.default_rng(0)
  batch = {
    "tokens": rng.integers(0, 256, (2, 3)).astype(np.int32),
    "length": np.array([3, 2], np.int32),
    "response": rng.integers(0, 256, (2, 4)).astype(np.int32),
    "response_length": np.array([4, 1], np.int32),
  }
  rows = cold_start.demonstration_batch(batch)
  found = cold_start.cross_entropy(params, rows, cfg=cfg)
  loss, metrics = found.loss, found.metrics
  logits = model.forward(
    params, cfg, rows.tokens, rows.positions, rows.mask
  ).logits
  logps = jax.nn.log_softmax(logits)
  picked = [logps[0, 2 + t, batch["response"][0, t]] for t in range(4)]
  picked += [logps[1, 2, batch["response"][1, 0]]]
  assert loss.value() == pytest.approx(-np.mean(picked), rel=1e-5)
  assert loss.count == 5
  assert metrics["loss/imitation"].value() == loss.value()
