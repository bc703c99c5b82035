"""Eight virtual CPU devices for every test, set before JAX is imported."""

import os

import pytest
from repository import ROOT

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=8"
  # Most of the tests' time is compilation; this spares more than half of it.
  " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
  " --xla_cpu_use_fusion_emitters=false"
)
# Compiled programs are shared by both workers, the processes that they start,
# and later runs, which take a quarter of the time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


@pytest.fixture
def debug_config():
  """The tiny config with every size shrunk: seconds, and nothing is learnt."""
  from configs import tiny_cpu

  return tiny_cpu.get_config("debug")
