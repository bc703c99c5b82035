"""Kept executables: found by what decides them, and never trusted blindly."""

import functools
import os
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.runtime import compilation_cache, mesh_jit, sharding
from gspo_jax.runtime.mesh_jit import MeshJit

TRACED = []
# The fixture of all tests replaces it.
KEEP_EXECUTABLES = compilation_cache._keep_executables


class Pair(NamedTuple):
  x: jax.Array
  y: jax.Array


def scaled(pair, times, *, by):
  TRACED.append(by)
  return Pair(pair.x * by * times, pair.y.sum())


def function(by=3.0, devices=2, **options):
  """A new one, as another process would make it."""
  mesh = sharding.make_mesh(jax.devices()[:devices], fsdp=devices)
  split = NamedSharding(mesh, PartitionSpec("fsdp"))
  options = {"donate_argnums": 0, "in_shardings": (split,)} | options
  of = functools.partial(scaled, by=by)
  made = MeshJit(of, mesh, static_argnums=1, **options)
  place = lambda n: jax.device_put(np.arange(n, dtype=np.float32), split)
  return lambda n=4, times=2: made(Pair(place(n), place(n)), times)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Where executables are kept, without JAX's cache beside it."""
  monkeypatch.setattr(mesh_jit, "_folder", None)
  enabled = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  reset_cache()  # JAX looks at the option once
  mesh_jit.keep_executables(tmp_path / "executables")
  mesh_jit._process.cache_clear()
  TRACED.clear()
  yield tmp_path / "executables"
  jax.config.update("jax_enable_compilation_cache", enabled)
  reset_cache()
  mesh_jit._process.cache_clear()


def test_an_executable_is_found_again_without_a_trace(folder):
  first = function()()
  assert len(TRACED) == 1
  call = function()
  for _ in range(2):  # the second by the fast path
    again = call()
    np.testing.assert_array_equal(again.x, [0, 6, 12, 18])
    assert float(again.y) == 6
    assert again.x.sharding == first.x.sharding
  assert len(TRACED) == 1
  assert len([*folder.iterdir()]) == 1


def other_source(monkeypatch):
  monkeypatch.setattr(mesh_jit.Path, "read_bytes", lambda path: b"# changed")


def other_flags(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")


def other_version(monkeypatch):
  version = mesh_jit.importlib.metadata.version
  newer = lambda name: version(name) + ("1" if name == "jaxlib" else "")
  monkeypatch.setattr(mesh_jit.importlib.metadata, "version", newer)


def other_processor(monkeypatch):
  monkeypatch.setattr(mesh_jit.Path, "read_text", lambda path: "flags : avx9")


@pytest.mark.parametrize(
  "changed",
  [other_source, other_flags, other_version, other_processor],
)
def test_another_process_compiles_its_own(folder, monkeypatch, changed):
  function()()
  changed(monkeypatch)
  mesh_jit._process.cache_clear()
  function()()
  assert len(TRACED) == 2


def test_another_option_in_this_context_compiles_its_own(folder):
  function()()
  with jax.default_matmul_precision("bfloat16"):
    function()()
  assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize(
  "made",
  [lambda: function(by=4.0)(), lambda: function()(n=8),
   lambda: function()(times=3), lambda: function(devices=4)(),
   lambda: function(donate_argnums=())(),
   lambda: function(compiler_options={"xla_cpu_enable_fast_math": True})()],
  ids=["closure", "shapes", "static", "mesh", "donation", "compiler"],
)  # fmt: skip
def test_another_function_compiles_its_own(folder, made):
  function()()
  made()
  assert len(TRACED) == 2
  assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize(
  "damage", [lambda b: b[:-9], lambda b: b[:-1] + bytes([b[-1] ^ 1])]
)
def test_a_damaged_file_is_ignored_and_written_again(folder, capsys, damage):
  function()()
  (file,) = folder.iterdir()
  file.write_bytes(damage(file.read_bytes()))
  np.testing.assert_array_equal(function()().x, [0, 6, 12, 18])
  error = capsys.readouterr().err
  assert error == f"{file} is ignored: its checksum is wrong\n"
  function()()
  assert len(TRACED) == 2


def test_what_cannot_be_described_or_written_runs(folder, capsys, monkeypatch):
  mesh = sharding.make_mesh(jax.devices()[:1])
  lock = threading.Lock()
  locked = MeshJit(lambda x: x + bool(lock), mesh)
  assert locked(jnp.float32(1)) == 2
  assert "not kept: cannot pickle" in capsys.readouterr().err
  monkeypatch.setattr(mesh_jit.os, "replace", os.mkdir)  # an OSError or so
  function()()
  assert capsys.readouterr().err.startswith("an executable is not kept: ")


def test_what_jax_read_from_its_cache_is_not_written(folder, tmp_path):
  """XLA's CPU cannot write a program again that was itself read."""
  cached = tmp_path / "compiled"
  before = jax.config.jax_compilation_cache_dir
  with_cache = {"jax_enable_compilation_cache": True}
  with_cache["jax_compilation_cache_dir"] = str(cached)
  for name, value in with_cache.items():
    jax.config.update(name, value)
  jax.experimental.compilation_cache.compilation_cache.reset_cache()
  try:
    function()()
    for file in folder.iterdir():
      file.unlink()
    function()()
    assert len(TRACED) == 2
    assert not [*folder.iterdir()]
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_a_weak_number_has_a_program_of_its_own():
  mesh = sharding.make_mesh(jax.devices()[:1])
  half = MeshJit(lambda x: x + jnp.ones((), jnp.bfloat16), mesh)
  weak = jax.jit(lambda: jnp.asarray(1.0))()
  assert weak.weak_type
  assert half(weak).dtype == jnp.bfloat16
  assert half(jnp.float32(1)).dtype == jnp.float32


def test_another_static_argument_has_a_program_of_its_own():
  call = function()
  np.testing.assert_array_equal(call(times=2).x, [0, 6, 12, 18])
  np.testing.assert_array_equal(call(times=3).x, [0, 9, 18, 27])


def test_code_is_read_from_a_folder_of_this_user_alone(
  monkeypatch, tmp_path, capsys
):
  monkeypatch.setattr(mesh_jit, "_folder", None)
  folder = tmp_path / "executables"
  folder.mkdir(mode=0o755)
  KEEP_EXECUTABLES(str(tmp_path))
  assert mesh_jit._folder is None
  assert "expected it yours, mode 0700" in capsys.readouterr().err
  folder.chmod(0o700)
  (tmp_path / "link").symlink_to(folder)
  mesh_jit.keep_executables(folder)
  function()()
  monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
  TRACED.clear()
  function()()
  assert TRACED  # the file is another user's
  for user, path in (0, tmp_path / "link"), (1, folder):
    monkeypatch.setattr(os, "getuid", lambda u=user: os.geteuid() + u)
    with pytest.raises(OSError, match="holds code"):
      mesh_jit.keep_executables(path)
