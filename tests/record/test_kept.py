"""What a run keeps for others is equal in every bit, or is not used."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.record import kept as record_kept
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.record.kept import NEWEST, Kept
from gspo_jax.runtime.errors import UserError

STATE = {"w": jnp.float32([-0.0, 1 / 3, jnp.nan]), "step": jnp.int32(7)}
METADATA = {"greedy": 0.9}


def accept(step, metadata):
  assert (step, metadata) == (7, METADATA)


def abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def restore(kept, accept=accept):
  return kept.restore(jax.tree.map(abstract, STATE), accept)


@pytest.fixture
def kept(tmp_path):
  """A full entry."""
  kept = Kept(tmp_path / "a" / "kept", {"seed": 0})
  kept.save(7, STATE, METADATA)
  return kept


def test_a_state_is_kept_to_the_last_bit(kept):
  restored = restore(kept)
  assert (restored.step, restored.metadata) == (7, METADATA)
  for name, x in STATE.items():
    assert np.array(restored.state[name]).tobytes() == np.array(x).tobytes()
  folder = kept.entry.parent
  assert [*folder.iterdir()] == [kept.entry]
  assert folder.stat().st_mode & 0o777 == 0o700
  assert restore(Kept(folder, {"seed": 1})) is None


def damage(kept):
  for path in kept.entry.rglob("*"):
    if path.is_file() and path.parent.name == "d":  # arrays
      path.write_bytes(bytes(path.stat().st_size))


def shorten(kept):
  for path in kept.entry.rglob("*"):
    if path.is_file():
      path.write_bytes(b"")


def empty(kept):
  kept.entry.rename(kept.entry.with_name("old"))
  kept.entry.mkdir()


@pytest.mark.parametrize("spoil", [damage, shorten, empty])
def test_a_spoilt_entry_costs_a_line(kept, capsys, spoil):
  spoil(kept)
  assert restore(kept) is None
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith(f"{kept.entry} is not used: ")
  kept.save(7, STATE, METADATA)
  assert restore(kept)


def test_an_entry_of_something_else_costs_a_line(kept, capsys):
  def refuse(step, metadata):
    raise UserError("another instruction")

  assert restore(kept, refuse) is None
  out = capsys.readouterr().out
  assert out == f"{kept.entry} is not used: another instruction\n"
  assert not kept.entry.exists()


def test_the_entries_that_were_used_last_stay(kept):
  folder = kept.entry.parent
  others = [Kept(folder, {"seed": seed}) for seed in range(1, NEWEST + 1)]
  for age, each in enumerate([kept, *others[:-1]]):
    each.save(7, STATE, METADATA)
    os.utime(each.entry, (age, age))
  assert restore(kept)  # the oldest
  others[-1].save(7, STATE, METADATA)
  assert {*folder.iterdir()} == {k.entry for k in (kept, *others[1:])}


def test_a_large_state_is_not_kept(tmp_path, monkeypatch):
  kept = Kept(tmp_path, {})
  monkeypatch.setattr(record_kept, "MAX_BYTES", 15)
  kept.save(7, STATE, METADATA)
  assert not [*tmp_path.iterdir()]
  monkeypatch.setattr(record_kept, "MAX_BYTES", 16)
  kept.save(7, STATE, METADATA)
  assert restore(kept)


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path, capsys):
  (tmp_path / "file").touch()
  kept = Kept(tmp_path / "file" / "kept", {})
  kept.save(7, STATE, METADATA)
  out = capsys.readouterr().out
  assert out.startswith(f"{kept.entry} is not kept: ")
  assert out.count("\n") == 1


def test_of_two_runs_at_once_the_first_is_kept(tmp_path, monkeypatch, capsys):
  class Late(Checkpoints):
    def __exit__(self, *error):
      super().__exit__(*error)
      monkeypatch.undo()
      kept.save(7, STATE, METADATA)

  kept = Kept(tmp_path, {})
  monkeypatch.setattr(record_kept, "Checkpoints", Late)
  kept.save(8, {"w": jnp.zeros(3)}, {})
  assert [*tmp_path.iterdir()] == [kept.entry]
  assert capsys.readouterr().out == ""
  assert restore(kept).step == 7
