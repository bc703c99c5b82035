"""Eight virtual CPU devices for every test, set before JAX is imported."""

import ctypes
import gc
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
from repository import ROOT, xla_flags
from slow_tests import pytest_addoption, pytest_configure  # noqa: F401

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags(devices=8)
# Compiled programs are shared by both workers, the processes that they start,
# and later runs.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
# Tracebacks of lowered programs took about a tenth of the time of a warm cache.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# It reads the variables above.
import jax
from jax.experimental.compilation_cache import compilation_cache

from gspo_jax.runtime import compilation_cache as compilation_cache_of_ours

jax.devices()  # and this XLA_FLAGS
# libtpu, which compiles in some tests, ends a process whose flags it lacks.
del os.environ["XLA_FLAGS"]

gc.set_threshold(50_000, 20, 50)  # the default took about another tenth
MOST_BYTES = 1.5 * 2**30  # of a worker, before compiled programs are dropped


@pytest.fixture(scope="module", autouse=True)
def keep_the_compilation_cache():
  """`plan` sets a process up for itself: without the cache, and with a variable
  that is a part of its keys and names a folder of this process. libtpu has read
  the variable by then."""
  yield
  os.environ.pop("LIBTPU_INIT_ARGS", None)
  if not jax.config.jax_enable_compilation_cache:
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session", autouse=True)
def no_executables():
  """Processes that tests start keep executables; the tests' own do not, since a
  test may replace a part of the package that an executable is not named by."""
  with mock.patch.object(compilation_cache_of_ours, "_keep_executables"):
    yield


@pytest.fixture(scope="module", autouse=True)
def bound_memory():
  """A worker would hold gigabytes of compiled programs by its last file; a
  program that a later file needs again comes from the cache on disk."""
  yield
  if sys.platform == "linux":
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if pages * os.sysconf("SC_PAGE_SIZE") > MOST_BYTES:
      jax.clear_caches()
      ctypes.CDLL(None).malloc_trim(0)  # glibc would keep what was freed


@pytest.fixture
def debug_config():
  """The tiny config with every size shrunk: seconds, and nothing is learnt."""
  from gspo_jax.configs import tiny_cpu

  return tiny_cpu.get_config("debug")


@pytest.fixture(scope="module")
def one_device():
  """Arrays of a module's tests are on one of the devices."""
  from gspo_jax.runtime import sharding

  with jax.set_mesh(sharding.make_mesh(jax.devices()[:1])):
    yield


@pytest.fixture(scope="module")
def pool():
  """One worker for rewards: the last number is the answer."""
  from gspo_jax.rewards.pool import RewardPool

  with RewardPool(("final_answer",), (1.0,), workers=1) as pool:
    yield pool


@pytest.fixture(scope="module")
def user_module(request, tmp_path_factory):
  """The folder, on the path, of a test's `MODULE` by its `MODULE_NAME`."""
  folder = tmp_path_factory.mktemp("user")
  name, text = request.module.MODULE_NAME, request.module.MODULE
  (folder / f"{name}.py").write_text(text)
  sys.path.insert(0, str(folder))
  yield folder
  sys.path.remove(str(folder))
