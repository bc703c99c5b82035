"""The TPU kernel for pages: several queries a row, two cores, compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import absent_devices, needs_libtpu
from jax.experimental.pallas import tpu as pltpu

from gspo_jax.model import paged_attention, paged_kernel
from gspo_jax.runtime import sharding

U, H, S, W = 3, 128, 8, 6
LENGTHS = 0, 33, S, 0, 7, 6 * S - 4, 1, 0


def random_inputs(T, K, window):
  """Rows share pages; those that no query reads are not numbers."""
  rng = np.random.default_rng(T)
  B, n = len(LENGTHS), 11
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  lengths = np.array(LENGTHS, np.int32)
  table = rng.integers(0, n - 1, (B, W)).astype(np.int32)
  for row, length in enumerate(lengths):
    first = max(0, length - (window or length)) // S
    table[row, :first] = n - 1
    table[row, -(-(length + (length > 0) * (T - 1)) // S) :] = n - 1
  k, v = normal(2, K, n, S, H)
  k[:, -1], v[:, -1] = np.nan, np.nan
  return normal(B, T, K, U, H), k, v, table, lengths


def by_blocks(q_BTKUH, k, v, table, lengths, **options):
  """Each query by itself; its pages are all numbers."""
  k, v = np.nan_to_num(k), np.nan_to_num(v)
  attend = jax.jit(
    functools.partial(paged_attention.by_blocks, scale=H**-0.5, **options)
  )
  rows = lambda t: np.where(lengths > 0, lengths + t, 0)
  out = [
    attend(q_BTKUH[:, t], k, v, table, rows(t)) for t in range(q_BTKUH.shape[1])
  ]
  return np.stack(out, 1)


@pytest.mark.parametrize(
  ("T", "K", "cores", "window", "has_sinks", "pages", "rows"),
  [
    (1, 2, 2, None, False, 2, 8),  # two cores share the heads
    (5, 1, 2, 11, True, 1, 2),  # the rows, in two programs each
    (2, 3, 1, 20, False, 4, 8),
  ],
)
def test_queries_attend_up_to_themselves(
  T, K, cores, window, has_sinks, pages, rows, monkeypatch
):
  """Blocks of one page, of two, and of more than most rows have."""
  monkeypatch.setattr(sharding, "cores", lambda: cores)
  monkeypatch.setattr(paged_kernel, "_TOKENS", pages * S)
  heads = K // cores if K % cores == 0 else K
  monkeypatch.setattr(paged_kernel, "_QUERY_BYTES", rows * heads * 16 * H * 4)
  sinks_N = np.random.default_rng(0).normal(size=K * U) if has_sinks else None
  options = {"window": window, "sinks_N": sinks_N}
  inputs = random_inputs(T, K, window)
  run = lambda *inputs: paged_kernel.attend(*inputs, H**-0.5, **options)
  grid = cores, len(LENGTHS) // rows // (cores if K % cores else 1)
  assert f"grid={grid}" in str(jax.make_jaxpr(run)(*inputs))
  machine = pltpu.InterpretParams(num_cores_or_threads=cores)
  with pltpu.force_tpu_interpret_mode(machine):
    out = np.asarray(jax.jit(run)(*inputs))
  filled = inputs[-1] > 0
  expected = by_blocks(*inputs, **options)
  np.testing.assert_allclose(out[filled], expected[filled], atol=2e-6)
  np.testing.assert_array_equal(out[~filled], 0)


# A layer of one device: rows, queries, heads, tokens of a page, window, sinks.
LAYERS = {
  "qwen3-30b-a3b": (128, 1, 4, 8, 128, 128, None, False),
  "qwen3-30b-a3b, drafts": (32, 5, 4, 8, 128, 128, None, False),
  "one head": (64, 1, 1, 8, 128, 128, None, False),
  "olmoe": (64, 1, 16, 1, 128, 512, None, False),
  "qwen3.6": (64, 2, 2, 8, 256, 512, None, False),
  "gpt-oss": (64, 1, 4, 16, 128, 128, 128, True),
  "odd": (37, 3, 3, 5, 128, 16, 100, True),
}


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
  "kind", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
)
def test_it_compiles_without_copies_of_pages(kind):
  mesh = sharding.make_mesh(absent_devices(kind)[:1])
  place = jax.NamedSharding(mesh, jax.P())
  shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=place)
  for name, (B, T, K, U, H, t, window, has_sinks) in LAYERS.items():
    n, W = 2**18 // t, 2**14 // t
    pages = shape(jnp.bfloat16, K, n, t, H)
    inputs = shape(jnp.bfloat16, B, T, K, U, H), pages, pages
    inputs += shape(jnp.int32, B, W), shape(jnp.int32, B)
    sinks = (shape(jnp.float32, K * U),) if has_sinks else ()

    def run(*inputs, window=window):
      sinks_N = inputs[5] if len(inputs) > 5 else None
      return paged_kernel.attend(
        *inputs[:5], 0.1, window=window, sinks_N=sinks_N
      )

    with jax.set_mesh(mesh):
      compiled = jax.jit(run).lower(*inputs, *sinks).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 2 * 2**20 * max(1, B * T * K * U * H / 2**20), name
