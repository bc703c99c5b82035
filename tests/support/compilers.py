"""What tests that compile for absent TPUs or GPUs need."""

import importlib.util

import pytest

from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile


def _needs(module, reason):
  absent = importlib.util.find_spec(module) is None
  return pytest.mark.skipif(absent, reason=reason)


needs_libtpu = _needs("libtpu", "no libtpu")
needs_cuda = _needs("jax_cuda12_plugin", "needs the extra `plan-gpu`")


def absent_devices(topology: str, slices: int = 1) -> list:
  """The devices of slices, or of a host with GPUs, to compile for."""
  where = chips.parse(topology)
  plan_compile.prepare(where.platform)
  return plan_compile.devices(where, slices)
