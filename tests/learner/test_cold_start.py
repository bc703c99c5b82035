"""Cold start: gated, saved, reused, and never mixed up with another."""

import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.data.prompt_batch import DemonstrationBatch
from gspo_jax.learner import cold_start
from gspo_jax.learner.cold_start import ColdStartConfig, ColdStartFunctions
from gspo_jax.learner.packing import PackingConfig, pack, pack_responses
from gspo_jax.learner.train_step import TrainState
from gspo_jax.losses import Mean
from gspo_jax.record import progress
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.record.kept import Kept
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.preemption import Preemption
from gspo_jax.sampler.samples import Prompts


class Batches:
  """Batches with a state: how many were taken."""

  def __init__(self):
    self.count = 0

  def __next__(self):
    self.count += 1
    return DemonstrationBatch(
      problems=[],
      tokens=np.zeros((2, 3), np.int32),
      lengths=np.ones(2, np.int32),
      positions=np.zeros((2, 3), np.int32),
      steps=np.zeros(2, np.int32),
      responses=np.full((2, 4), self.count, np.int32),
      response_lengths=np.ones(2, np.int32),
      turns=None,
    )

  def get_state(self):
    return {"count": self.count}

  def set_state(self, state):
    self.count = state["count"]


class Functions:
  """Updates add 1 to the weight; the accuracies are given."""

  def __init__(self, accuracies):
    self.accuracies = accuracies
    self.checked = []  # the weight at each measurement of the accuracy
    self.batches, self.packings = [], []  # of each update

  def update(self, state, prompts, responses, lengths, turns, packing):
    self.batches.append(int(responses[0, 0]))
    self.packings.append(packing)
    params = {"w": state.params["w"] + 1}
    loss = {"loss/imitation": Mean(np.float32(1), np.float32(1))}
    return TrainState(state.step + 1, params, ()), loss

  def accuracy(self, params):
    self.checked.append(int(params["w"][0]))
    return self.accuracies[len(self.checked) - 1]


def run(folder, accuracies, *, seed=0, gate=0.9, stop=None, kept=None):
  """At most 10 steps, stopped by a signal in step `stop`."""
  first = TrainState(jnp.int32(0), {"w": jnp.zeros(2)}, ())
  functions, steps = Functions(accuracies), itertools.count(1)
  preemption = Preemption()
  preemption.reached = lambda: next(steps) == stop
  with Checkpoints(folder, keep=1) as checkpoints:
    made = ColdStartFunctions(
      abstract=first, update=functions.update,
      init_state=lambda params: TrainState(jnp.int32(0), params, ()),
      packing=PackingConfig(width=7, minibatches=1, micro_batch_size=1),
    )  # fmt: skip
    mesh = sharding.make_mesh(jax.devices()[:1])
    state = cold_start.run(
      made, lambda: first.params, batches=Batches(), kept=kept,
      batch_sharding=sharding.batch_sharding(mesh),
      accuracy=functions.accuracy, checkpoints=checkpoints,
      identity={"seed": seed}, preemption=preemption,
      cfg=ColdStartConfig(steps=10, check_every=2, gate=gate),
    )  # fmt: skip
  return state, functions


def test_it_stops_at_the_gate_and_is_reused(tmp_path):
  state, functions = run(tmp_path, [0.1, 0.95])
  assert int(state.step) == 4
  assert functions.checked == [2, 4]
  # Two demonstrations of a prompt and a response token share a row.
  for packing in functions.packings:
    assert packing.row.tolist() == [0, 0]
    assert packing.offset.tolist() == [0, 2]
  again, functions = run(tmp_path, [])
  assert functions.checked == functions.batches == []
  np.testing.assert_array_equal(again.params["w"], state.params["w"])


def test_a_missed_gate_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r"gate=0\.9: RL does not climb"):
    run(tmp_path, [0.1] * 5)
  state, _ = run(tmp_path / "none", [-0.1] * 5, gate=0.0)
  assert int(state.step) == 10


def test_a_preempted_cold_start_is_saved_and_resumed(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(progress, "SECONDS", 0.0)
  state, functions = run(tmp_path, [0.1], stop=3)
  assert state is None
  # Not after step 3, where an uninterrupted run does not measure it either.
  assert functions.checked == [2]
  assert (tmp_path / "3").is_dir()
  state, functions = run(tmp_path, [0.5, 0.95])
  assert functions.checked == [4, 6]
  assert functions.batches == [4, 5, 6]
  out = capsys.readouterr().out
  assert "\nloading checkpoint 3 (0.0 GB): " in out
  assert "\ncold start: 6 steps in " in out


def test_another_cold_start_is_refused(tmp_path):
  run(tmp_path, [0.95])
  with pytest.raises(UserError, match="seed"):
    run(tmp_path, [0.95], seed=1)


def test_an_equal_run_takes_what_one_kept(tmp_path, capsys):
  """Its folder then has its own copy."""
  kept = Kept(tmp_path / "kept", {})
  state, _ = run(tmp_path / "a", [0.95], kept=kept)
  assert "earlier run" not in capsys.readouterr().out
  taken, functions = run(tmp_path / "b", [], kept=kept)
  assert capsys.readouterr().out == (
    f"cold start of an earlier run, from {kept.entry}\n"
  )
  assert functions.batches == []
  np.testing.assert_array_equal(taken.params["w"], state.params["w"])
  shutil.rmtree(tmp_path / "kept")
  run(tmp_path / "b", [], kept=kept)
  # Its bits may be those of two machines.
  assert not kept.entry.exists()


@pytest.mark.parametrize("ends", ["missed", "stopped", "resumed"])
def test_one_that_was_not_made_at_one_go_is_not_kept(tmp_path, ends):
  kept = Kept(tmp_path / "kept", {})
  if ends == "missed":
    with pytest.raises(UserError, match="gate"):
      run(tmp_path / "a", [0.1] * 5, kept=kept)
  else:
    run(tmp_path / "a", [0.1], stop=3, kept=kept)
  if ends == "resumed":
    state, _ = run(tmp_path / "a", [0.95], kept=kept)
    assert int(state.step) == 4
  assert not kept.entry.exists()


def test_one_of_another_identity_is_not_taken(tmp_path, capsys):
  kept = Kept(tmp_path / "kept", {})
  run(tmp_path / "a", [0.95], kept=kept)
  state, _ = run(tmp_path / "b", [0.1, 0.95], seed=1, kept=kept)
  assert int(state.step) == 4
  assert f"{kept.entry} is not used: the cold" in capsys.readouterr().out


def test_cross_entropy():
  cfg = model.variant(
    "tiny", dtype="float32", num_layers=1, num_experts=0, experts_per_token=0
  )
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), cfg)
  rng = np.random.default_rng(0)
  ids = lambda width: rng.integers(0, 256, (2, width)).astype(np.int32)
  prompts = Prompts(ids(3), np.array([3, 2], np.int32))
  responses, lengths = ids(4), np.array([4, 1], np.int32)
  rows = PackingConfig(width=9, minibatches=1, micro_batch_size=2)
  packing = pack(np.array([7, 3]), np.arange(2), rows)
  packed = pack_responses(prompts, responses, lengths, packing, rows)
  batch = jax.tree.map(lambda x: x[0, 0], packed.rows)

  @jax.jit
  def both(params):
    logits = model.forward(
      params, cfg, batch.tokens, batch.positions, batch.segment_ids
    ).logits
    return cold_start.cross_entropy(params, batch, cfg=cfg), logits

  out, logits = both(params)
  logps = jax.nn.log_softmax(logits)
  response = [logps[0, 2 + t, responses[0, t]] for t in range(4)]
  response += [logps[1, 1, responses[1, 0]]]  # behind its prompt
  assert out.loss.value() == pytest.approx(-np.mean(response), rel=1e-5)
  assert out.loss.count == 5
  assert out.metrics["loss/imitation"].value() == out.loss.value()
