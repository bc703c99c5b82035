"""A second process compiles nothing, and no folder stops a run."""

import os
import re
from pathlib import Path

import jax
import pytest
from processes import python
from repository import xla_flags

from gspo_jax.runtime import compilation_cache


@pytest.fixture
def options():
  """JAX's options of the cache, as on a machine that sets none; restored."""
  names = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
  )
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update("jax_compilation_cache_dir", None)
  jax.config.update("jax_enable_compilation_cache", True)  # `plan` does not
  yield jax.config
  for name, value in before.items():
    jax.config.update(name, value)


def test_the_users_cache_folder_unless_jax_was_given_one(
  options, monkeypatch, tmp_path
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
  options.update("jax_compilation_cache_dir", "of the user")
  compilation_cache.enable(None)
  assert options.jax_compilation_cache_dir == "of the user"
  options.update("jax_compilation_cache_dir", None)
  compilation_cache.enable(None)
  folder = tmp_path / "caches" / "gspo_jax" / "compiled"
  assert options.jax_compilation_cache_dir == str(folder)
  assert folder.stat().st_mode & 0o777 == 0o700
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", str(tmp_path))
  options.update("jax_compilation_cache_dir", None)
  compilation_cache.enable(None)
  folder = tmp_path / ".cache" / "gspo_jax" / "compiled"
  assert options.jax_compilation_cache_dir == str(folder)


def test_a_folder_may_be_named_and_none_too(options, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  compilation_cache.enable("here")
  assert options.jax_compilation_cache_dir == str(tmp_path / "here")
  assert options.jax_enable_compilation_cache
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "unused"))
  options.update("jax_compilation_cache_dir", None)
  compilation_cache.enable("")
  assert not options.jax_enable_compilation_cache
  compilation_cache.enable(None)  # as with JAX_ENABLE_COMPILATION_CACHE=false
  assert not (tmp_path / "unused").exists()


def test_there_is_a_folder_beside_the_users_own_alone(
  options, monkeypatch, tmp_path
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
  beside = lambda: compilation_cache.beside("kept")
  assert beside() is None  # nothing is enabled
  compilation_cache.enable(None)
  assert beside() == tmp_path / "caches" / "gspo_jax" / "kept"
  with monkeypatch.context() as patch:
    patch.setattr(os, "getuid", lambda: -1)
    assert beside() is None
  compilation_cache.enable(str(tmp_path / "named"))
  assert beside() is None
  options.update("jax_compilation_cache_dir", None)
  compilation_cache.enable(None)
  compilation_cache.enable("")
  assert beside() is None


def test_no_home_no_folder(options, monkeypatch):
  def fail():
    raise RuntimeError("Could not determine home directory.")

  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  monkeypatch.setattr(Path, "home", fail)
  options.update("jax_compilation_cache_dir", "of the user")
  assert compilation_cache.beside("kept") is None


def test_a_folder_that_cannot_be_written_costs_one_line(
  options, capsys, tmp_path
):
  (tmp_path / "file").touch()
  compilation_cache.enable(str(tmp_path / "file" / "cache"))
  assert options.jax_compilation_cache_dir is None
  error = capsys.readouterr().err
  assert re.fullmatch("compiled programs are not kept: .*file.*\n", error)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="not Linux")
def test_a_full_folder_costs_one_line(options, capsys, monkeypatch, tmp_path):
  full = lambda dir: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
  monkeypatch.setattr(compilation_cache.tempfile, "TemporaryFile", full)
  compilation_cache.enable(str(tmp_path))
  assert options.jax_compilation_cache_dir is None
  assert "No space left" in capsys.readouterr().err


def test_what_was_unused_the_longest_goes_first(tmp_path):
  (tmp_path / "of_a_gpu").mkdir()
  # Name: (last read, written), in days.
  for name, (read, written) in {
    "old": (1, 1),
    "of_a_gpu/tuning": (2, 2),
    "read": (9, 1),
    "new": (3, 5),
  }.items():
    (tmp_path / name).write_bytes(bytes(100))
    os.utime(tmp_path / name, (read, written))
  left = lambda: {p.name for p in tmp_path.rglob("*") if p.is_file()}
  compilation_cache._evict(tmp_path, 400)
  assert left() == {"old", "tuning", "read", "new"}
  compilation_cache._evict(tmp_path, 399)
  assert left() == {"tuning", "read", "new"}
  compilation_cache._evict(tmp_path, 200)
  assert left() == {"read", "new"}


def test_a_bucket_is_left_to_jax(options, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  compilation_cache.enable("gs://bucket/compiled")
  assert options.jax_compilation_cache_dir == "gs://bucket/compiled"
  assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 2])
def test_a_second_process_compiles_nothing(tmp_path, slots):
  """Of another hash seed; nor does it lower what it finds as an executable."""
  entries, executables = [], []
  compiled = tmp_path / "compiled"
  for seed in "12":
    python(
      *("-m", "gspo_jax.main", "--config=configs/tiny_cpu.py:debug"),
      f"--config.continuous_batching.slots={slots}",
      "--config.num_steps=1",
      f"--workdir={tmp_path / seed}",
      f"--compilation_cache={compiled}",
      env=os.environ | {"PYTHONHASHSEED": seed, "XLA_FLAGS": xla_flags(1)},
      check=True,
    )
    kept = (compiled / "executables").iterdir()
    executables.append({(path.name, path.read_bytes()) for path in kept})
    written = [*compiled.glob("*-cache")]
    entries.append({path.name for path in written})
    for path in written:
      path.unlink()
  assert len(executables[0]) > 15
  assert executables[0] <= executables[1]
  assert entries[1] < entries[0]
  assert len(executables[1]) <= len(executables[0]) + slots
