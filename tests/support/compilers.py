"""Marks for tests that compile for TPUs or GPUs: what they need."""

import importlib.util

import pytest


def _needs(module, reason):
  absent = importlib.util.find_spec(module) is None
  return pytest.mark.skipif(absent, reason=reason)


needs_libtpu = _needs("libtpu", "no libtpu")
needs_cuda = _needs("jax_cuda12_plugin", "needs the extra `plan-gpu`")
