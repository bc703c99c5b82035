"""Activations are rounded where the code says so, whatever a compiler does."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from repository import ROOT

from gspo_jax.model.rounding import rounded

# Elementwise operations in a row, compiled as one and one by one.
COMPARE = """
import jax, jax.numpy as jnp, numpy as np
from gspo_jax.model import rounding, transformer
rng = np.random.default_rng(0)
q = jnp.asarray(rng.standard_normal((64, 128, 4, 16)), jnp.bfloat16)
angle = jnp.asarray(rng.standard_normal((64, 128, 8)), jnp.float32)
scale = jnp.asarray(1 + 0.1 * rng.standard_normal(16), jnp.float32)
def turned(q, angle):
  normed = transformer.rms_norm(q, scale, 1e-6)
  return transformer.rotate(normed, jnp.sin(angle), jnp.cos(angle))
whole = jax.jit(turned, compiler_options=rounding.OPTIONS)(q, angle)
apart = turned(q, angle)
print(float(jnp.mean(whole != apart)))
"""


def test_no_compiler_drops_a_rounding():
  """With XLA's usual optimizations, of which the other tests leave out some."""
  done = subprocess.run(
    [sys.executable, "-c", COMPARE],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": ""},
    check=True,
    capture_output=True,
    text=True,
  )
  # 29 % without `rounded`; sums in another order are left.
  assert float(done.stdout) < 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rounds_to_the_nearest(dtype):
  x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
  found = rounded(x, dtype)
  assert found.dtype == dtype
  np.testing.assert_array_equal(found, x.astype(dtype))
