"""A mark for tests that compile for TPUs: they need libtpu."""

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no libtpu"
)
