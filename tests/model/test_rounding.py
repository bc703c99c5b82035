"""Activations are rounded at the same places in every compiled program."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from repository import ROOT

from gspo_jax.model.rounding import rounded

# Elementwise operations, compiled as one program and one by one.
COMPARE = """
import jax, jax.numpy as jnp, numpy as np
from gspo_jax.model import rotary, rounding, transformer
rng = np.random.default_rng(0)
q = jnp.asarray(rng.standard_normal((64, 128, 4, 16)), jnp.bfloat16)
angle = jnp.asarray(rng.standard_normal((64, 128, 8)), jnp.float32)
scale = jnp.asarray(1 + 0.1 * rng.standard_normal(16), jnp.float32)
def norm_and_rotate(q, angle):
  normed = transformer.rms_norm(q, scale, 1e-6)
  return rotary.rotate(normed, jnp.sin(angle), jnp.cos(angle))
whole = jax.jit(norm_and_rotate, compiler_options=rounding.OPTIONS)(q, angle)
apart = norm_and_rotate(q, angle)
print(float(jnp.mean(whole != apart)))
"""


def test_no_compiler_drops_a_rounding():
  """With XLA's default optimizations, some of which other tests turn off."""
  done = subprocess.run(
    [sys.executable, "-c", COMPARE],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  # 29 % without `rounded`; the rest are sums in another order.
  assert float(done.stdout) < 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rounds_to_the_nearest(dtype):
  x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
  y = rounded(x, dtype)
  assert y.dtype == dtype
  np.testing.assert_array_equal(y, x.astype(dtype))
